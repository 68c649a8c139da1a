"""What a family says of its layers, applied to configs."""

from __future__ import annotations

from typing import Any

import pytest
from support.registries.small_families import families, letters, read

from attnreg.models.reader import ConfigError, requests_from_model


def test_a_word_adds_facts_and_may_be_several_calls() -> None:
    text = """\
    m:
      pattern: {repeat: [both, full]}
      words: {both: [{kind: linear}, {kind: full, sinks: true}], full: {head_size: 128}}
    """
    model = read(text, layers=2)
    assert [(x.layer_idx, x.kind, x.sinks, x.head_size) for x in model.layers] == [
        (0, "linear", False, None),
        (0, "full", True, 64),
        (1, "full", False, 128),
    ]


def test_a_call_may_depend_on_the_config() -> None:
    text = "m:\n  words: {full: [{kind: full}, {kind: cross, when: {cross: true}}]}\n"
    assert (letters(text, layers=2), letters(text, layers=2, cross=True)) == ("ff", "fxfx")


def test_what_a_layer_has_to_itself() -> None:
    text = "m:\n  words: {sliding: {fields: {size: [own_size, 32]}}}\n  pattern: {repeat: [full, sliding]}\n"
    assert [x.head_size for x in read(text, layers=2, window=3).layers] == [64, 32]
    assert [x.head_size for x in read(text, layers=2, window=3, own_size=96).layers] == [64, 96]
    saved = read(text, layers=3, window=3, per_layer_config={"00": {"size": 16}, "2": {"size": 128}})
    assert [x.head_size for x in saved.layers] == [16, 64, 128]


@pytest.mark.parametrize(
    ("rule", "config", "shared"),
    [
        ("{last: n}", {"n": 2}, [None, None, None, None, 2, 3]),
        ("{last: n}", {"n": 0}, [None] * 6),
        ("{last: n}", {}, [None] * 6),
        ("{list: from}", {"from": [0, 1, 0, 1, 2, 5]}, [None, None, 0, 1, 2, None]),
        ("{list: from}", {}, [None] * 6),
    ],
)
def test_shared_keys_and_values(rule: str, config: dict[str, Any], shared: list[int | None]) -> None:
    text = f"m:\n  pattern: {{repeat: [full, sliding]}}\n  kv_shared: {rule}\n"
    assert [x.kv_shared_from for x in read(text, layers=6, window=3, **config).layers] == shared


def test_notes_are_assumptions_of_strangers_only() -> None:
    known = families("m:\n  note: M is odd.\n")
    stranger = requests_from_model({"model_type": "x", "layers": 1, "heads": 4}, families=known)
    assert "KV heads were assumed." in stranger.assumptions
    assert stranger.layers[0].num_kv_heads == 4
    familiar = requests_from_model({"model_type": "m", "layers": 1, "heads": 4}, families=known)
    assert familiar.assumptions[0] == "M is odd."
    assert "KV heads were assumed." not in familiar.assumptions


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"types": ["full"]}, "types has 1 entries and the model has 2 layers; give one entry for each layer"),
        ({"types": [3, "full"]}, "types[0] is 3; expected a word"),
        ({"types": [None, "full"]}, "types[0] is None; expected a word"),
        ({"types": ["half", "full"]}, "types[0] is 'half'; known: chunked, full, linear, none, sliding"),
        ({"types": {}}, "types is {}; expected a list with one entry for each layer"),
        (
            {"types": ["chunked"] * 2, "chunk": "8"},
            "chunk is '8'; expected an integer of at least 1 (write 8, without quotes)",
        ),
        ({"runs": [["full"]]}, "runs is [['full']]; expected a list of [words, times]"),
        ({"runs": [[["full"], 9]]}, "runs is [[['full'], 9]]; expected each run at most 2 times, the number of layers"),
        ({"which": [5]}, "which names layer 5, and there are 2 (counted from 0); give indices of layers"),
        ({"which": ["0"]}, "which is ['0']; expected a list of the indices of layers"),
        ({"width": 100, "heads": 8}, "width is 100 and heads is 8; the second must divide the first"),
        ({"sizes": [64]}, "sizes has 1 entries; layer 1 has none: give one entry for each layer"),
        ({"kv": 3, "heads": 8}, "heads is 8 and kv is 3; the second must divide the first"),
        ({"share": 2}, "share is 2; expected less than the number of layers, 2"),
        ({"per_layer_config": {"7": {}}}, "per_layer_config is {'7': {}}; '7' is no index of one of the 2 layers"),
        ({"per_layer_config": {"1": 3}}, "per_layer_config.1 is 3; expected an object"),
        ({"per_layer_config": {"1": {"size": -1}}}, "size (of layer 1) is -1; expected at least 1"),
    ],
)
def test_configs_that_contradict_themselves(config: dict[str, Any], message: str) -> None:
    text = """\
    m:
      head_size: [{item: sizes}, size, {quotient: [width, heads]}, 64]
      kv_shared: {last: share}
      pattern:
        - {list: types}
        - {runs: runs}
        - {layers: which, is: full, others: linear}
        - {when: {n: {min: 3}}, repeat: [linear]}
        - full
    """
    with pytest.raises(ConfigError) as caught:
        read(text, layers=2, **config)
    assert str(caught.value) == message
