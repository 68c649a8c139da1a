"""Models of several stacks."""

from __future__ import annotations

from support.registries.small_families import read

PARTS = """\
m:
  names: {layers: depth}
  parts:
    - {at: vision, like: tower, optional: true}
    - {at: [text_config, .], heads: 4, kv_heads: 4}
tower:
  defaults: {layers: 1}
  words: {full: {kind: vision}}
other:
  heads: 2
  kv_heads: 2
"""


def test_parts() -> None:
    assert [(x.kind, x.num_heads, x.part) for x in read(PARTS, text_config={"layers": 1}).layers] == [("full", 4, "")]
    both = read(PARTS, vision={}, text_config={"layers": 1})
    assert [(x.kind, x.num_heads, x.part) for x in both.layers] == [("vision", 8, "vision"), ("full", 4, "")]
    # the fields of older files stand at the top, under the whole's names; a nested model_type that is known decides
    assert len(read(PARTS, depth=3).layers) == 3
    named = read(PARTS.replace(", heads: 4, kv_heads: 4", ""), text_config={"layers": 1, "model_type": "other"})
    assert [x.num_heads for x in named.layers] == [2]


def test_a_part_that_is_absent_has_a_config_of_its_own() -> None:
    text = PARTS.replace("optional: true", "absent: {layers: 2, heads: 16}")
    model = read(text, text_config={"layers": 1})
    assert [x.num_heads for x in model.layers] == [16, 16, 4]
    assert "vision is not in the config, so it is that of its class, with every default." in model.assumptions
    # one that is there, but empty, has the defaults of its family
    assert [x.num_heads for x in read(text, text_config={"layers": 1}, vision={}).layers] == [8, 4]


def test_a_part_may_read_the_whole() -> None:
    text = "m:\n  parts: [{at: inner, pattern: sliding, window: ..window}]\n"
    assert [x.sliding_window for x in read(text, window=7, inner={"layers": 1}).layers] == [7]
