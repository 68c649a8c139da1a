"""The language of models.yaml: values, conditions, patterns, words, parts; and a located error for every slip in it."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from attnreg.errors import RegistryError
from attnreg.models.families import Families
from attnreg.models.reader import ConfigError, bundled_families, requests_from_model

GENERAL = """\
sources:
  here: {url: "https://example.org", version: "1"}
general:
  layers: layers
  heads: [heads, 8]
  kv_heads: [kv, {note: KV heads were assumed., value: heads}, 8]
  head_size: [size, {quotient: [width, heads]}, 64]
  window: window
  chunk: chunk
  words:
    full: {kind: full}
    sliding: {kind: sliding}
    chunked: {kind: chunked}
    linear: {kind: linear}
    none: {kind: none}
  pattern: full
families:
"""


def families(text: str) -> Families:
    return Families(GENERAL + textwrap.indent(textwrap.dedent(text), "  "), "models.yaml")


def read(data: str, **config: Any) -> Any:
    """The layers of a config of the first family in ``data``."""
    known = families(data)
    name = data.partition(":")[0].strip()
    return requests_from_model({"model_type": name, **config}, families=known)


def letters(data: str, **config: Any) -> str:
    kinds = {"full": "f", "sliding": "s", "chunked": "c", "linear": "l", "encoder": "e", "cross": "x"}
    return "".join(kinds[layer.kind] for layer in read(data, **config).layers)


@pytest.mark.parametrize(
    ("pattern", "config", "kinds"),
    [
        ("full", {}, "ffffff"),
        ("{list: types}", {"types": ["sliding", "full"] * 3, "window": 4}, "sfsfsf"),
        ("{list: types, means: {A: full, L: linear}}", {"types": "ALLALL"}, "fllfll"),
        ('{list: flags, means: {"0": full, "1": linear}}', {"flags": [0, 1, 1, 0, True, False]}, "fllflf"),
        ("{list: types, means: {others: linear, A: full}}", {"types": "ABCABC"}, "fllfll"),
        ("{list: types, means: {A: full, M: none}, decides_count: true}", {"types": "AMA"}, "ff"),
        ("{list: types, longer_is_cut: true}", {"types": ["linear"] * 9}, "llllll"),
        ("[{list: types}, linear]", {}, "llllll"),
        ("[{list: types}, linear]", {"types": None}, "llllll"),
        ("[{list: types}, linear]", {"types": []}, "llllll"),
        ("{runs: runs, means: {g: full, l: linear}}", {"runs": [[["g", "l"], 2], [["l"], 2]]}, "flflll"),
        ("{repeat: [linear, linear, full]}", {}, "llfllf"),
        ("{repeat: cycle}", {"cycle": ["linear", "full"]}, "lflflf"),
        ("{every: 3, is: full, others: linear}", {}, "llfllf"),
        ("{every: 3, at: 0, is: full, others: linear}", {}, "fllfll"),
        ("{every: [period, 2], at: offset, is: full, others: linear}", {"offset": 1}, "lflflf"),
        ("{every: period, is: full, others: linear}", {"period": 2}, "lflflf"),
        ("[{every: period, is: full, others: linear}, linear]", {}, "llllll"),
        ("{layers: [0, -1], is: full, others: linear}", {}, "fllllf"),
        ("{layers: [0, 40], is: full, others: linear}", {}, "flllll"),
        ("{layers: which, is: full, others: linear}", {"which": [1, 2]}, "lfflll"),
        ("{layers: which, from: 1, is: full, others: linear}", {"which": [1, 6]}, "fllllf"),
        ("{below: 2, is: full, others: linear}", {}, "ffllll"),
        ("{below: n, is: full, others: {every: 2, is: full, others: linear}}", {"n": 1}, "fflflf"),
        ("[{when: {on: true}, repeat: [linear]}, full]", {"on": True}, "llllll"),
        ("[{when: {on: true}, repeat: [linear]}, full]", {"on": False}, "ffffff"),
        ("[{when: {on: false}, repeat: [linear]}, full]", {}, "llllll"),
        ("[{when: {n: {min: 4}}, repeat: [linear]}, full]", {"n": 4}, "llllll"),
        ("[{when: {n: {below: 4}}, repeat: [linear]}, full]", {"n": 4}, "ffffff"),
        ("[{when: {n: {max: 0.5}}, repeat: [linear]}, full]", {"n": 0.5}, "llllll"),
        ("[{when: {n: {min: 4}}, repeat: [linear]}, full]", {}, "ffffff"),
        ("[{when: {w: {not: null}}, repeat: [linear]}, full]", {"w": 1}, "llllll"),
        ("[{when: {w: {not: null}}, repeat: [linear]}, full]", {"w": None}, "ffffff"),
        ("[{when: {w: [null, a]}, repeat: [linear]}, full]", {"w": "a"}, "llllll"),
        ("[{when: {w: all}, repeat: [linear]}, full]", {"w": "all"}, "llllll"),
        # a word is no flag that is on, nor one that is off by name
        ("[{when: {w: true}, repeat: [linear]}, full]", {"w": "all"}, "ffffff"),
    ],
)
def test_patterns(pattern: str, config: dict[str, Any], kinds: str) -> None:
    assert letters(f"m:\n  pattern: {pattern}\n", layers=6, **config) == kinds


@pytest.mark.parametrize(
    ("value", "config", "size"),
    [
        ("48", {}, 48),
        ("size", {"size": 80}, 80),
        ("a.b", {"a": {"b": 80}}, 80),
        ("[a.b, 96]", {"a": {}}, 96),
        ("[size, other]", {"size": None, "other": 96}, 96),
        ("{quotient: [width, heads]}", {"width": 640, "heads": 8}, 80),
        ("{floor_quotient: [width, heads]}", {"width": 650, "heads": 8}, 81),
        ("{sum: [size, 1]}", {"size": 79}, 80),
        ("{difference: [size, 1]}", {"size": 81}, 80),
        ("{product: [size, 2, 2]}", {"size": 20}, 80),
        ("{least: [size, width]}", {"size": 20, "width": 80}, 20),
        ("[{sum: [absent, 1]}, 96]", {}, 96),
        ("{when: {on: true}, value: 32, otherwise: 16}", {"on": True}, 32),
        ("{when: {on: true}, value: 32, otherwise: 16}", {}, 16),
        ("[{when: {on: true}, value: 32}, 24]", {}, 24),
        ("{item: sizes}", {"sizes": [40]}, 40),
        ("{item: sizes}", {"sizes": 40}, 40),
        ("{index: 33}", {}, 33),
    ],
)
def test_values(value: str, config: dict[str, Any], size: int) -> None:
    (layer,) = read(f"m:\n  head_size: {value}\n", layers=1, **config).layers
    assert layer.head_size == size


def test_layers_may_differ_by_their_entry_of_a_list() -> None:
    model = read("m:\n  heads: {item: heads}\n  kv_heads: 1\n", layers=3, size=64, heads=[4, 8, 4])
    assert [layer.num_heads for layer in model.layers] == [4, 8, 4]
    assert [group.layers for group in model.groups] == [(0, 2), (1,)]


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


def test_further_patterns_add_to_the_first() -> None:
    text = """\
    m:
      pattern: {repeat: [full, sliding]}
      also:
        wide: {pattern: {list: wide, means: {"1": wide, others: narrow}}, words: {wide: {head_size: 128}, narrow: {}}}
    """
    model = read(text, layers=4, window=3, wide=[0, 1, 1, 0])
    assert [(x.kind, x.head_size) for x in model.layers] == [
        ("full", 64),
        ("sliding", 128),
        ("full", 128),
        ("sliding", 64),
    ]


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


def test_like_lays_an_entry_over_another() -> None:
    text = """\
    m:
      like: base
      defaults: {layers: 3}
      words: {full: {sinks: true}}
    base:
      defaults: {layers: 2, heads: 4, kv: 4}
      words: {full: {softcap: 30}}
    """
    model = read(text)
    assert [(x.num_heads, x.sinks, x.softcap) for x in model.layers] == [(4, True, 30)] * 3
    assert "Not in the config, so the defaults of m hold: layers 3, heads 4, kv 4." in model.assumptions


def test_a_refusal_is_the_datas_own_sentence() -> None:
    text = "m:\n  refuse: [{when: {cross: true, decoder: false}, because: only a decoder has cross-attention}]\n"
    assert letters(text, layers=1, cross=True, decoder=True) == "f"
    with pytest.raises(ConfigError, match=r"^cross is True; only a decoder has cross-attention$"):
        read(text, layers=1, cross=True)


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
        ({"on": "yes", "n": True}, "n is True; expected a number of at most 2147483647"),
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


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("m:\n  haeds: 3\n", "19:12", "m.haeds: unknown key; did you mean `heads`?"),
        ("m:\n  like: lama\n", "19:11", "m: no family `lama`"),
        ("m:\n  like: n\nn:\n  like: m\n", "21:11", "families are like each other: m -> n -> m"),
        ("m: 3\n", "18:6", "m: expected a mapping"),
        ("m:\n  words: [full]\n", "19:12", "m.words: expected a mapping"),
        ("m:\n  words: {full: {kind: ful}}\n", "19:26", "m.words.full.kind: `ful` is not known; did you mean `full`?"),
        ("m:\n  words: {full: {seize: 3}}\n", "19:27", "m.words.full.seize: unknown fact"),
        ("m:\n  pattern: half\n", "19:14", "m.pattern: `half` is none of the family's words"),
        ("m:\n  pattern: {evry: 2}\n", "19:14", "m.pattern: expected a word, a list of patterns, or a mapping with"),
        ("m:\n  pattern: {every: 2, is: full}\n", "19:14", "m.pattern: `every` needs `others`"),
        ("m:\n  pattern: {list: a, mean: {}}\n", "19:30", "m.pattern.mean: unknown key `mean` beside `list`"),
        ("m:\n  pattern: {list: [a]}\n", "19:21", "m.pattern.list: expected the name of a field"),
        ("m:\n  heads: {plus: [1, 2]}\n", "19:12", "m.heads: expected one of when, note, index, item, word, not, sum"),
        ("m:\n  heads: {sum: 3}\n", "19:18", "m.heads.sum: expected a list of two values"),
        ("m:\n  heads: {quotient: [1, 2, 3]}\n", "19:23", "m.heads.quotient: expected a list of two values"),
        ("m:\n  heads: {when: 3, value: 4}\n", "19:19", "m.heads.when: expected a mapping from the names of fields"),
        ("m:\n  heads: {when: {a: {moer: 3}}, value: 4}\n", "19:23", "m.heads.when.a: expected one of the operators"),
        ("m:\n  heads: []\n", "19:12", "m.heads: expected at least one value"),
        ("m:\n  also: {x: {pattern: full}}\n", "19:15", "m.also.x: expected a mapping with `pattern` and `words`"),
        ("m:\n  refuse: [{when: {a: 1}}]\n", "19:14", "m.refuse.0: expected a mapping with `when` and `because`"),
        ("m:\n  kv_shared: {first: 3}\n", "19:16", "m.kv_shared: expected a mapping with `last` or `list`"),
        ("m:\n  parts: [{like: lama}]\n", "19:20", "m.parts.0.like: no family `lama`"),
        ("m:\n  attn_type: decode\n", "19:16", "m.attn_type: `decode` is not known; did you mean `decoder`?"),
        ("m:\n  source: here\n", "19:13", "m: `here` is no source; write <name>:<path>#<symbol>"),
        ("m:\n  source: there:a#b\n", "19:13", "m: `there:a#b` is no source"),
    ],
)
def test_slips_in_the_data_are_located(text: str, place: str, message: str) -> None:
    try:
        problems = families(text).check()
    except RegistryError as error:
        problems = list(error.problems)
    assert [str(p.where) for p in problems][:1] == [f"models.yaml:{place}"]
    assert problems[0].message.startswith(message)


def test_a_fault_is_told_where_it_stands() -> None:
    known = families("m:\n  like: base\nbase:\n  heads: {sum: 3}\n")
    with pytest.raises(RegistryError) as caught:
        known.get("m")
    assert [str(p.where) for p in caught.value.problems] == ["models.yaml:21:18"]


def test_an_unknown_part_of_the_file() -> None:
    with pytest.raises(RegistryError, match=r"models\.yaml:1:1: unknown part `family:`"):
        Families("family:\n  m: {}\n", "models.yaml")


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("families:\n  a: {}\ngeneral: {}\n", "1:1", "the part `sources` is missing"),
        ("sources: {}\nfamilies:\n  a: {}\n  b: {}\n", "1:1", "the part `general` is missing"),
        ("sources:\ngeneral: {}\n", "1:9", "sources: expected a mapping"),
    ],
)
def test_a_part_of_the_file_that_is_missing(text: str, place: str, message: str) -> None:
    problems = Families(text, "models.yaml").check()
    assert [(str(p.where), p.message) for p in problems] == [(f"models.yaml:{place}", message)]


@pytest.mark.parametrize(("ratio", "size"), [(0.5, 1), (2.0, 1), (0.75, 64)])
def test_a_condition_lists_numbers_with_a_point(ratio: float, size: int) -> None:
    data = "m:\n  head_size: {when: {ratio: [0.5, 2.0]}, value: 1, otherwise: 64}\n"
    assert [layer.head_size for layer in read(data, ratio=ratio, layers=1).layers] == [size]


def test_entries_are_read_when_they_are_asked_for() -> None:
    known = families('m:\n  heads: 2\n"n-1":\n  heads: {sum: 3}\n# a comment\nlast:\n  heads: 3\n')
    assert list(known) == ["last", "m", "n-1"]
    assert (known.get("m").name, known.text("last")) == ("m", "last:\n  heads: 3")
    assert str(known.where("n-1")) == "models.yaml:20:3"
    with pytest.raises(RegistryError):
        known.get("n-1")


def test_the_shipped_families_are_right() -> None:
    assert bundled_families().check() == []


def test_every_shipped_family_names_its_source() -> None:
    known = bundled_families()
    assert [name for name in known if not known.source(name)] == []
