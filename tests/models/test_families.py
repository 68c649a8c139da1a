"""The files of model families: what each says by itself and inherits, and a located error for every slip in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.registries.small_families import GENERAL, LABEL, SOURCES, UNKNOWN, families, of_files, read

from attnreg.errors import RegistryError
from attnreg.models.facts import CHECKS
from attnreg.models.families import Families
from attnreg.models.fields import ConfigError
from attnreg.models.reader import bundled_families, requests_from_model
from attnreg.models.schema import CallData, StateData


def problems(known: Families) -> list[str]:
    return [f"{p.where}: {p.message}" + (f"; {p.help}" if p.help else "") for p in known.check()]


# laying files over each other ----------------------------------------------------------------------------------------


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


def test_a_word_of_several_calls_replaces_what_is_below() -> None:
    text = """\
    m:
      like: base
      words: {full: [{kind: full}, {kind: linear}]}
    n:
      like: m
      words: {full: {sinks: true}}
    base:
      words: {full: {softcap: 30}}
    """
    known = families(text)
    calls = {name: known.get(name).words["full"] for name in ("m", "n", "base")}
    assert [call.kind for call in calls["m"]] == ["full", "linear"]
    assert [sorted(call.facts) for call in calls["m"]] == [[], []]
    assert [sorted(call.facts) for call in calls["n"]] == [["sinks"]]
    assert [sorted(call.facts) for call in calls["base"]] == [["softcap"]]


def test_statements_know_their_files() -> None:
    known = families("m:\n  like: _plain\n  window: span\n_plain:\n  defaults: {heads: 4}\n  note: Not for others.\n")
    said = known.statements("m")
    where = {path: str(said[path].at()) for path in (("window",), ("defaults", "heads"), ("words", "full", "kind"))}
    assert where == {
        ("window",): "models/m.yaml:3:9",
        ("defaults", "heads"): "models/_plain.yaml:2:19",
        ("words", "full", "kind"): "models/_general.yaml:9:16",
    }
    assert ("note",) not in said
    assert known.lineage("m") == ("m", "_plain", "_general")


def test_templates_are_no_families() -> None:
    known = families("m:\n  like: _plain\n_plain:\n  kv_heads: 2\n")
    assert (list(known), len(known), "_plain" in known, "_general" in known) == (["m"], 1, False, False)
    assert (known.like("m"), known.like("_plain"), known.text("_plain")) == (
        "_plain",
        "",
        "summary: A template.\nkv_heads: 2",
    )
    model = requests_from_model({"model_type": "_plain", "layers": 1, "heads": 4}, families=known)
    assert model.assumptions[0].startswith("model_type '_plain' is not a known family")


def test_files_are_read_when_they_are_asked_for() -> None:
    known = families("m:\n  heads: 2\nbroken:\n  heads: {sum: 3}\n")
    assert list(known) == ["broken", "m"]
    assert (known.get("m").name, known.source("m"), known.note("m")) == ("m", "here:file.py#Name", "")
    assert str(known.where("broken")) == "models/broken.yaml:1:1"
    with pytest.raises(RegistryError):
        known.get("broken")


# a directory ---------------------------------------------------------------------------------------------------------

FAMILY = "model_type: m\nheads: 2\nsource: here:file.py#Name\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, text in {"_general": GENERAL, "_unknown": UNKNOWN, "_sources": SOURCES, "m": FAMILY}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_a_directory_of_families(directory: Path) -> None:
    known = Families.load(directory, LABEL)
    assert (list(known), problems(known)) == (["m"], [])
    (layer,) = requests_from_model({"model_type": "m", "layers": 1, "kv": 2}, families=known).layers
    assert layer.num_heads == 2


@pytest.mark.parametrize("name", ["m.yml", "notes.txt", "more"])
def test_files_that_are_none_of_a_family(name: str, directory: Path) -> None:
    (directory / name).write_text(FAMILY)
    (directory / ".hidden").write_text("")
    help_ = "rename it, or take it away"
    assert problems(Families.load(directory, LABEL)) == [
        f"models/{name}:1:1: no file of a family: their names end in .yaml; {help_}"
    ]


@pytest.mark.parametrize("name", ["_general", "_sources", "_unknown"])
def test_a_file_that_every_directory_has(name: str, directory: Path) -> None:
    (directory / f"{name}.yaml").unlink()
    assert problems(Families.load(directory, LABEL))[0] == f"models/{name}.yaml:1:1: the file is missing"


def test_directories_and_files_that_cannot_be_read(directory: Path) -> None:
    with pytest.raises(RegistryError, match=r"nowhere:1:1: cannot be read: No such file or directory"):
        Families.load(directory / "nowhere", "nowhere")
    (directory / "folder.yaml").mkdir()
    (directory / "latin.yaml").write_bytes(b"model_type: latin\nnote: caf\xe9\n")
    assert problems(Families.load(directory, LABEL)) == [
        "models/folder.yaml:1:1: cannot be read: Is a directory",
        "models/latin.yaml:2:10: not UTF-8 text: invalid continuation byte at byte 27",
    ]


# what a file says of itself ------------------------------------------------------------------------------------------

ORPHAN = "model_type: m\nsource: here:f.py#N\n"
A_FAMILY, A_TEMPLATE = "the file of a family must have it", "the file of a template must have it"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {"m": "model_type: n\nsource: here:f.py#N\n"},
            "models/m.yaml:1:13: model_type: `n` stands in the file of `m`; give the file and the family one name",
        ),
        ({"m": "source: here:f.py#N\n"}, f"models/m.yaml:1:1: `model_type` is missing; {A_FAMILY}"),
        ({"m": "model_type: m\n"}, f"models/m.yaml:1:1: `source` is missing; {A_FAMILY}"),
        ({"m": ""}, f"models/m.yaml:1:1: `model_type` is missing; {A_FAMILY}"),
        ({"m": "- model_type: m\n"}, "models/m.yaml:1:1: the file: expected a mapping, got a list"),
        (
            {"m": ORPHAN + "model_type: m\n"},
            "models/m.yaml:3:1: `model_type` is given twice (first on line 1); keep one of the two",
        ),
        (
            {"m": ORPHAN + "heads: 2\nheads: 3\n"},
            "models/m.yaml:4:1: `heads` is given twice (first on line 3); keep one of the two",
        ),
        (
            {"m": ORPHAN + "summary: A plain decoder.\n"},
            "models/m.yaml:3:1: a family has no `summary`; the names of templates begin with `_`",
        ),
        ({"_m": "heads: 2\n"}, f"models/_m.yaml:1:1: `summary` is missing; {A_TEMPLATE}"),
        (
            {"_m": "summary: A plain decoder.\nmodel_type: m\n"},
            "models/_m.yaml:2:1: a template has no `model_type`; the names of templates begin with `_`",
        ),
        (
            {"m": ORPHAN + "at: text_config\n"},
            "models/m.yaml:3:1: a family has no `at`; it says where a part stands",
        ),
        (
            {"m": ORPHAN + "parts: [{at: a, source: here:f.py#N}]\n"},
            "models/m.yaml:3:17: parts.source: a part has no `source`; it is the file that says it",
        ),
        (
            {"m": "model_type: m\nsource: here\n"},
            "models/m.yaml:2:9: source: `here` is no source; write <name>:<path>#<symbol>; did you mean `here`?",
        ),
        (
            {"m": "model_type: m\nsource: there:f.py#N\n"},
            "models/m.yaml:2:9: source: `there:f.py#N` is no source; write <name>:<path>#<symbol>; did you mean `here`",
        ),
        ({"_sources": "sources: {here: {url: x}}\n"}, "models/_sources.yaml:1:11: sources.here: `version` is missing"),
        ({"_sources": "- here\n"}, "models/_sources.yaml:1:1: the file: expected a mapping, got a list"),
        (
            {"m": ORPHAN + "like: lama\n", "llama": ORPHAN.replace("m\n", "llama\n", 1)},
            "models/m.yaml:3:7: like: there is no file lama.yaml; did you mean `llama`? (also: _general, _unknown, m)",
        ),
        ({"m": ORPHAN + "like: m\n"}, "models/m.yaml:3:7: like: families are like each other: m -> m"),
        (
            {"m": ORPHAN + "like: _n\n", "_n": "summary: N.\nlike: m\n"},
            "models/_n.yaml:2:7: like: families are like each other: m -> _n -> m",
        ),
    ],
)  # fmt: skip
def test_what_a_file_says_of_itself(files: dict[str, str], problem: str) -> None:
    assert [p for p in problems(of_files(**files)) if p.startswith(problem)]


def test_a_part_may_be_like_its_whole() -> None:
    known = families("m:\n  parts: [{at: inner, like: m, parts: []}]\n")
    assert problems(known) == []
    assert len(requests_from_model({"model_type": "m", "inner": {"layers": 2}}, families=known).layers) == 2


# what a file says of layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("haeds: 3", "2:1: unknown key `haeds`; did you mean `heads`?"),
        ("words: [full]", "2:8: words: expected a mapping, got a list"),
        ("words: {full: 3}", "2:15: words.full: expected a mapping of facts, or a list of them, got `3`"),
        ("words: {full: {kind: ful}}", "2:22: words.full.kind: expected `full`, `sliding`, `chunked`, `cross`"),
        ("words: {full: {seize: 3}}", "2:16: words.full: unknown key `seize`"),
        ("words: {full: [{kind: full}, {seize: 3}]}", "2:31: words.full: unknown key `seize`"),
        ("words: {full: [{kind: full}, {heads: {sum: 3}}]}", "2:44: words.full.heads.sum: expected a list of two"),
        ("attn_type: decode", "2:12: attn_type: expected `decoder`, `encoder` or `encoder_only`, got `decode`"),
        ("mla: 3", "2:6: mla: expected true, false or a mapping, got `3`"),
        ("mla: {rank: kv_rank}", "2:7: mla: unknown key `rank`"),
        ("mla: {kv_lora_rank: {sum: 3}}", "2:27: mla.kv_lora_rank.sum: expected a list of two values or more"),
        ("names: {layers: 3}", "2:17: names.layers: expected a word, or a list of words, got `3`"),
        ("fields: {size: {sum: 3}}", "2:22: fields.size.sum: expected a list of two values or more"),
        ("also: {x: {pattern: full}}", "2:8: also.x: `words` is missing; `words`: word -> the facts that it adds"),
        ("also: {x: {pattern: half, words: {full: {}}}}", "2:21: also.x.pattern: `half` is none of the family's words"),
        ("refuse: [{when: {a: 1}}]", "2:10: refuse: `because` is missing; `because`: the sentence that a user reads"),
        ("refuse: [{when: {}, because: no}]", "2:17: refuse.when: names no field; say which configs are refused"),
        ("kv_shared: {first: 3}", "2:13: kv_shared: unknown key `first`"),
        ("parts: [{like: lama}]", "2:16: parts.like: there is no file lama.yaml"),
        ("parts: [{only: 1}]", "2:16: parts.only: expected 0 or -1, got `1`"),
        ("parts: [{heads: {sum: 3}}]", "2:23: parts.heads.sum: expected a list of two values or more"),
        ("note: [a]", "2:7: note: expected text, got a list"),
        ("sinks: no", "2:8: sinks: `no` is the name of a field here, and no boolean; write false"),
        # patterns
        ("pattern: half", "2:10: pattern: `half` is none of the family's words"),
        ("pattern: []", "2:10: pattern: expected a word, a list of patterns, or a mapping with one of list, runs"),
        ("pattern: {evry: 2}", "2:10: pattern: expected a word, a list of patterns, or a mapping with one of"),
        ("pattern: {every: 2, is: full}", "2:10: pattern: `every` needs `others`, the word of the other layers"),
        ("pattern: {below: 2, others: full}", "2:10: pattern: `below` needs `is`, the word of those layers"),
        (
            "pattern: {list: a, mean: {}}",
            "2:20: pattern.mean: unknown key `mean` beside `list`; known: means, decides_count, longer_is_cut, when",
        ),
        ("pattern: {list: [a]}", "2:17: pattern.list: expected the name of a field"),
        ("pattern: {list: a, means: [b]}", "2:27: pattern.means: expected a mapping from entries to words"),
        ("pattern: {list: a, decides_count: 3}", "2:35: pattern.decides_count: expected true or false"),
        ("pattern: {repeat: [full, 3]}", "2:19: pattern.repeat: expected a list of words, or the name of a field"),
        ("pattern: {layers: [a], is: full, others: full}", "2:19: pattern.layers: expected a list of the indices of"),
        ("pattern: {every: 0, is: full, others: full}", "2:18: pattern.every: 0; expected at least 1"),
        ("pattern: {repeat: [full], note: 3}", "2:33: pattern.note: expected text"),
        # values
        ("heads: {plus: [1, 2]}", "2:8: heads: expected one of when, note, index, item, word, not, sum, difference"),
        ("heads: {sum: [1, 2], least: [1, 2]}", "2:8: heads: expected one of when, note, index, item, word, not"),
        ("heads: {when: {a: 1}}", "2:8: heads: expected one of when, note, index, item, word, not, sum, difference"),
        ("heads: {sum: 3}", "2:14: heads.sum: expected a list of two values or more"),
        ("heads: {quotient: [1, 2, 3]}", "2:19: heads.quotient: expected a list of two values"),
        ("heads: {item: 3}", "2:15: heads.item: expected the name of a field"),
        ("heads: {index: a}", "2:16: heads.index: expected an integer"),
        ("heads: {note: 3, value: 1}", "2:15: heads.note: expected text"),
        ("heads: []", "2:8: heads: expected at least one value"),
        # a literal is checked where it is written
        ("heads: true", "2:8: heads: True; expected an integer of at least 1"),
        ("heads: [a, 0]", "2:12: heads: 0; expected at least 1"),
        ("heads: {word: many}", "2:15: heads.word: 'many'; expected an integer of at least 1"),
        ("heads: {product: [a, true]}", "2:22: heads.product: True; expected a number of at most 2147483647"),
        ("sinks: {not: 3}", "2:14: sinks.not: 3; expected true or false"),
        ("softcap: -1.5", "2:10: softcap: -1.5; expected a number above 0 and at most 2147483647"),
        # conditions are the registry's
        ("heads: {when: 3, value: 4}", "2:15: heads.when: expected a condition (facet: matcher), got `3`"),
        (
            "heads: {when: {a: {moer: 3}}, value: 4}",
            "2:20: heads.when.a.moer: unknown operator `moer`; known: below, max, min, multiple_of, not",
        ),
        (
            "heads: {when: {a: {min: 2, max: 1}}, value: 4}",
            "2:19: heads.when.a: nothing is 2 to 1: the range is empty; mend its bounds, or remove it",
        ),
        ("heads: {when: {a: []}, value: 4}", "2:19: heads.when.a: the list is empty; name at least one value"),
    ],
)
def test_slips_in_what_is_said_of_layers(text: str, problem: str) -> None:
    found = problems(families(f"m:\n  {text}\n"))
    assert [p for p in found if p.startswith(f"models/m.yaml:{problem}")] == found[:1]


def test_a_fault_is_told_where_it_stands() -> None:
    known = families("m:\n  like: base\nbase:\n  heads: {sum: 3}\n")
    with pytest.raises(RegistryError) as caught:
        known.get("m")
    assert [str(p.where) for p in caught.value.problems] == ["models/base.yaml:2:14"]
    # and once, however many inherit it
    assert len(known.check()) == 1


def test_a_refusal_is_the_datas_own_sentence() -> None:
    text = "m:\n  refuse: [{when: {cross: true, decoder: {not: true}}, because: only a decoder has it}]\n"
    assert len(read(text, layers=1, cross=True, decoder=True).layers) == 1
    with pytest.raises(ConfigError, match=r"^cross is True; only a decoder has it$"):
        read(text, layers=1, cross=True)


# YAML in any style ---------------------------------------------------------------------------------------------------

PLAIN = """\
model_type: m
defaults: {layers: 3, heads: 4, kv: 2}
words:
  full: {sinks: true}
pattern: [{list: types}, full]
source: here:file.py#Name
"""
STYLES = {
    "four spaces": """\
model_type: m
defaults:
    layers: 3
    heads: 4
    kv: 2
words:
    full:
        sinks: true
pattern:
    - list: types
    - full
source: here:file.py#Name
""",
    "flow": "{model_type: m, defaults: {layers: 3, heads: 4, kv: 2}, words: {full: {sinks: true}},\n"
    " pattern: [{list: types}, full], source: 'here:file.py#Name'}\n",
    "json": '{"model_type": "m", "defaults": {"layers": 3, "heads": 4, "kv": 2}, "words": {"full": {"sinks": true}},'
    '"pattern": [{"list": "types"}, "full"], "source": "here:file.py#Name"}',
    "a space before the colon": PLAIN.replace(":", " :").replace("here :file", "here:file"),
    "single quotes": PLAIN.replace("model_type", "'model_type'").replace("full:", "'full':"),
    "double quotes": PLAIN.replace("words", '"words"').replace("full:", '"full":'),
    "a quoted value": PLAIN.replace("m\n", "'m'\n", 1),
    "an explicit key": PLAIN.replace("model_type: m", "? model_type\n: m"),
    "a document's start": "---\n" + PLAIN,
    "a byte order mark": "\ufeff" + PLAIN,
    "Windows' line ends": PLAIN.replace("\n", "\r\n"),
    "comments": "# what it is\n\n" + PLAIN.replace("\n", "  # so\n"),
    "an anchor": PLAIN.replace("{sinks: true}", "&plain {sinks: true}\n  other: *plain"),
    "the other way round": "source: here:file.py#Name\npattern: [{list: types}, full]\nwords: {full: {sinks: true}}\n"
    "defaults: {kv: 2, heads: 4, layers: 3}\nmodel_type: m\n",
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_yaml_of_any_style_says_the_same(style: str) -> None:
    expected, known = of_files(m=PLAIN), of_files(m=STYLES[style])
    assert problems(known) == []
    assert list(known) == ["m"]
    config: dict[str, Any] = {"model_type": "m"}
    assert requests_from_model(config, families=known) == requests_from_model(config, families=expected)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            PLAIN.replace("{sinks: true}", "*plain"),
            "models/m.yaml:4:9: `*plain` names no anchor; write `&plain` before its first use",
        ),
        (PLAIN + "<<: {heads: 2}\n", "models/m.yaml:7:1: merge keys (`<<`) are not understood"),
        (PLAIN + "---\n" + PLAIN, "models/m.yaml:7:1: a second document in one file"),
        (PLAIN + "\theads: 2\n", "models/m.yaml:7:1: not valid YAML: "),
        (PLAIN + "heads: !!int 2\n", "models/m.yaml:7:8: the tag `!!int` is not understood"),
    ],
)
def test_other_yaml_is_a_located_error(text: str, problem: str) -> None:
    # an anchor of another family's file is none of this one's
    known = of_files(m=text, other=PLAIN.replace("m\n", "other\n", 1).replace("{sinks", "&plain {sinks"))
    assert [p for p in problems(known) if p.startswith(problem)] == problems(known)[:1]


# what is shipped -----------------------------------------------------------------------------------------------------


def test_the_shipped_families_are_right() -> None:
    assert problems(bundled_families()) == []


def test_no_line_is_too_long_to_read() -> None:
    known = bundled_families()
    lines = [line for name in known.files for line in (known.text(name) if name != "_sources" else "").splitlines()]
    assert [line for line in lines if len(line) > 120 and not line.startswith("source:")] == []
    assert max(map(len, lines)) <= 160


def test_every_fact_has_its_check() -> None:
    read_apart = {"kind", "attn_type", "when", "fields", "mla", "indexer", "state"}
    dimensions = {f"{key}.{name}" for key in ("mla", "indexer") for name in _dimensions(key)}
    dimensions |= {f"state.{name}" for name in (*StateData.model_fields, "used")}
    assert set(CHECKS) == (set(CallData.model_fields) - read_apart) | dimensions | {"layers"}


def _dimensions(key: str) -> list[str]:
    return list(type(getattr(CallData.model_validate({key: True}), key)).model_fields)
