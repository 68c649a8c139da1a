"""A wrong vocabulary, and words in places where they mean nothing: each is said with its place and the cure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo
from support.registries import tiny
from support.registries.files import brief, refusal, write
from support.suite.sentences import Sentences

import attnreg
from attnreg.compile import validation
from attnreg.compile.schema import values

WRONG_WORDS = {
    "a feature without its sentence": ("features: {new: 5}", "2:19"),
    "a feature that is a flag": ("features: {fast: l}", "2:14"),
    "a flag that is a feature": ("flags: {sinks: l}", "2:11"),
    "a set that nothing uses": ("words: {kv_dtype: {int8: l}}", "2:11"),
    "a platform without an architecture": ("words: {platforms: {tpu: l}}", "2:23"),
    "architectures of an unknown platform": ("architectures: {npus: {n2: {family: f}}}", "2:19"),
    "an architecture of two platforms": ("architectures: {npu: {g1: {family: f}}}", "2:25"),
    "a facet without words": ("facets: {mode: {of: request, kind: word, legend: l}}", "2:18"),
    "a facet of unknown words": ("facets: {mode: {of: request, kind: word, words: dtype, legend: l}}", "2:51"),
    "a facet that changes its kind": ("facets: {head_size: {of: platform, kind: text, legend: l}}", "2:12"),
    "a set beside features and flags": (
        "facets: {modes: {of: request, kind: words, words: dtypes, legend: l}}",
        "2:12",
    ),
    "a facet of a stranger": ("facets: {mode: {of: engine, kind: text, legend: l}}", "2:23"),
    "a second facet of the selection": (
        "facets: {mode: {of: selection, kind: word, words: dtypes, legend: l}}",
        "2:12",
    ),
    "a facet of the request that has the name of the selection's": (
        "facets: {asked: {of: request, kind: word, words: dtypes, legend: l}}",
        "2:12",
    ),
    "a facet of the selection of another kind": ("facets: {asked: {of: selection, kind: boolean, legend: l}}", "2:12"),
    "a facet of the selection with other words": (
        "facets: {asked: {of: selection, kind: word, words: dtypes, legend: l}}",
        "2:12",
    ),
    "a facet of the selection with a claim": (
        (
            "{words: {asked: {automatic: l, by_name: l}}, "
            "facets: {asked: {of: selection, kind: word, words: asked, legend: l, claim: asked}}}"
        ),
        "2:57",
    ),
    "a facet of the request that is to be the selection's": (
        "facets: {role: {of: selection, kind: word, words: roles, legend: l}}",
        "2:12",
    ),
    "a derived facet that is one already": ("derived: {arch: {legend: l, cases: [{value: 1}]}}", "2:13"),
    "a case that is never reached": (
        "derived: {d: {legend: l, cases: [{value: 1}, {when: {arch: g1}, value: 2}]}}",
        "2:48",
    ),
    "a derived facet of itself": ("derived: {d: {legend: l, cases: [{when: {d: 1}, value: 1}]}}", "2:44"),
    "a case without a value": ("derived: {d: {legend: l, cases: [{value: [1]}]}}", "2:44"),
    "a derived facet of an unknown source": ("derived: {d: {legend: l, cases: [{value: 1}], source: 't:p#q'}}", "2:57"),
    "an equality of numbers": ("derived: {d: {legend: l, cases: [{value: {equal: [dtype, ranks]}}]}}", "2:52"),
    "an equality of words of two kinds": (
        "derived: {d: {legend: l, cases: [{value: {equal: [dtype, platform]}}]}}",
        "2:52",
    ),
    "an equality of a facet and itself": (
        "derived: {d: {legend: l, cases: [{value: {equal: [dtype, dtype]}}]}}",
        "2:52",
    ),
    "an equality of a number and a switch": (
        (
            "derived: {n: {legend: l, cases: [{when: {dtype: float16}, value: 1}, {value: 0}]}, "
            "s: {legend: l, cases: [{when: {dtype: float16}, value: true}, {value: false}]}, "
            "d: {legend: l, cases: [{value: {equal: [n, s]}}]}}"
        ),
        "2:205",
    ),
    "an equality of an unknown facet": ("derived: {d: {legend: l, cases: [{value: {equal: [dtype, typ]}}]}}", "2:52"),
    "an equality of a derived facet and itself": (
        "derived: {d: {legend: l, cases: [{value: {equal: [dtype, d]}}]}}",
        "2:52",
    ),
    "a copy of a facet that is derived below": (
        "derived: {d: {legend: l, cases: [{value: {from: e}}]}, e: {legend: l, cases: [{value: true}]}}",
        "2:51",
    ),
    "a quotient of a facet that is derived below": (
        "derived: {d: {legend: l, cases: [{value: {quotient: [ranks, e]}}]}, e: {legend: l, cases: [{value: 1}]}}",
        "2:44",
    ),
    "a remainder of a derived facet and itself": (
        "derived: {d: {legend: l, cases: [{value: {remainder: [ranks, d]}}]}}",
        "2:44",
    ),
    "a condition on a facet that is derived below": (
        "derived: {d: {legend: l, cases: [{when: {e: true}, value: 1}]}, e: {legend: l, cases: [{value: true}]}}",
        "2:44",
    ),
    "a condition of a derived facet on itself": (
        "derived: {d: {legend: l, cases: [{when: {d: 1}, value: 1}]}}",
        "2:44",
    ),
    "an equality of sets": ("derived: {d: {legend: l, cases: [{value: {equal: [dtype, features]}}]}}", "2:52"),
    "an equality beside a quotient": (
        (
            "derived: {d: {legend: l, cases: [{when: {arch: g1}, value: {equal: [dtype, arch]}}, "
            "{value: {quotient: [num_heads, ranks]}}]}}"
        ),
        "2:62",
    ),
    "a quotient of one facet": ("derived: {d: {legend: l, cases: [{value: {quotient: [ranks]}}]}}", "2:44"),
    "a quotient of an unknown facet": (
        "derived: {d: {legend: l, cases: [{value: {quotient: [num_heads, rank]}}]}}",
        "2:44",
    ),
    "a quotient of words": ("derived: {d: {legend: l, cases: [{value: {quotient: [dtype, ranks]}}]}}", "2:44"),
    "a word beside a quotient": (
        "derived: {d: {legend: l, cases: [{when: {arch: g1}, value: few}, {value: {quotient: [num_heads, ranks]}}]}}",
        "2:62",
    ),
    "a copied word beside a quotient": (
        (
            "derived: {d: {legend: l, cases: [{when: {arch: g1}, value: {from: dtype}}, "
            "{value: {quotient: [num_heads, ranks]}}]}}"
        ),
        "2:62",
    ),
    "a claim on a quotient": (
        ("{derived: {d: {legend: l, claim: ds, rows_below: any, cases: [{value: {quotient: [num_heads, ranks]}}]}}}"),
        "2:36",
    ),
    "a derived facet of a quotient": (
        (
            "derived: {d: {legend: l, cases: [{value: {quotient: [num_heads, ranks]}}]}, "
            "e: {legend: l, cases: [{when: {d: 1}, value: 1}]}}"
        ),
        "2:110",
    ),
    "a copy of a quotient": (
        (
            "derived: {d: {legend: l, cases: [{value: {quotient: [num_heads, ranks]}}]}, "
            "e: {legend: l, cases: [{value: {from: d}}]}}"
        ),
        "2:117",
    ),
    "a quotient of a quotient": (
        (
            "derived: {d: {legend: l, cases: [{value: {quotient: [num_heads, ranks]}}]}, "
            "e: {legend: l, cases: [{value: {quotient: [d, ranks]}}]}}"
        ),
        "2:110",
    ),
    "an alias of two words": ("words: {dtypes: {float32: {legend: l, aliases: [Float-16]}}}", "2:20"),
    "words of another registry": ("extends: default", "2:3"),
}


@pytest.mark.parametrize(("text", "places"), WRONG_WORDS.values(), ids=WRONG_WORDS)
def test_wrong_words(
    text: str, places: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentences: Sentences
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"vocabulary:\n  {text}\n")
    sentences.check(brief(refusal(write(tmp_path / "tiny"), ["mine.yaml"])), places)


NO_MATTER = (
    "`asked` cannot be used here: its value differs from backend to backend\n"
    "  help: rows, waivers and derived facets may ask for it"
)
MISUSED: dict[str, tuple[str, str]] = {
    "an unknown word": (
        "backends: {A: {requires: {asked: named}}}",
        "backends.A.requires.asked: unknown asked 'named'\n  help: did you mean `by_name`? (also: automatic)",
    ),
    "an order": (
        "orders: {gpu: [{name: mine, when: {not: {asked: by_name}}, order: [A]}]}",
        f"orders.gpu.when.not.asked: {NO_MATTER}",
    ),
    "an entry": (
        "orders: {gpu: [{name: mine, when: {arch: g1}, order: [{backend: A, if: {asked: automatic}}]}]}",
        f"orders.gpu.order.if.asked: {NO_MATTER}",
    ),
    "a place": ("place: [{backend: B, after: A, if: {asked: by_name}}]", f"place.if.asked: {NO_MATTER}"),
    "a choice": ("choices: [{when: {asked: by_name}, require: A}]", f"choices.when.asked: {NO_MATTER}"),
    "an invariant": (
        "invariants: [{name: i, says: s, when: {asked: by_name}, chosen: [A]}]",
        f"invariants.when.asked: {NO_MATTER}",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISUSED.values(), ids=MISUSED)
def test_who_asks_is_a_matter_of_backends(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "words: {asked: {automatic: l, by_name: l}}"
    facet = "facets: {asked: {of: selection, kind: word, words: asked, legend: l}}"
    Path("mine.yaml").write_text(f"vocabulary: {{{words}, {facet}}}\n{text}\n")
    where, _, said = brief(refusal(write(tmp_path / "tiny"), ["mine.yaml"])).partition(": ")
    assert where.startswith("mine.yaml:2:")
    assert text[int(where.split(":")[2]) - 1 :].startswith("named" if "unknown" in message else "asked")
    assert said == message


def test_a_registry_that_does_not_declare_it_knows_no_asked(tmp_path: Path) -> None:
    message = brief(refusal(write(tmp_path), [{"backends": {"A": {"requires": {"asked": "by_name"}}}}]))
    assert message.startswith("<overlay>:5:9: backends.A.requires.asked: unknown facet `asked`\n  help: did you mean ")


def test_a_registry_needs_every_facet(tmp_path: Path) -> None:
    words = copy.deepcopy(tiny.VOCABULARY)
    del words["facets"]["phase"], words["words"]["phases"], words["facets"]["flags"]
    message = brief(refusal(write(tmp_path, vocabulary=json.dumps(words))))
    assert message == (
        "vocabulary.yaml:1:2: the facet `flags` is missing: every platform has it\n  help: add it, or use `extends`\n"
        "vocabulary.yaml:1:2: the facet `phase` is missing: every request has it\n  help: add it, or use `extends`"
    )


@pytest.mark.parametrize("key", ["{word}: 1", "vocabulary: {{features: {{{word}: 5}}}}"], ids=["unknown", "invalid"])
def test_of_many_problems_the_first_are_shown_and_all_are_kept(key: str, tmp_path: Path) -> None:
    words = [f"unknown_{i}" for i in range(20_000)]
    head = "vocabulary:\n  features:\n" if key.startswith("voc") else "choices: []\n"
    lines = [f"    {word}: 5\n" if key.startswith("voc") else f"{word}: 1\n" for word in words]
    (tmp_path / "mine.yaml").write_text(head + "".join(lines))
    with pytest.raises(attnreg.RegistryError) as e:
        attnreg.load_registry("default", tmp_path / "mine.yaml")
    assert len(e.value.problems) == 20_000
    message = str(e.value).splitlines()
    assert message[0] == "the registry has 20,000 problems:"
    assert message[-1] == "… and 19,950 more"


def test_every_pattern_of_a_text_has_words() -> None:
    """A text that a pattern refuses is told what was expected."""
    patterns = {
        part.pattern
        for kind in vars(values).values()
        for part in getattr(kind, "__metadata__", ())
        if isinstance(part, FieldInfo)
        for part in part.metadata
        if getattr(part, "pattern", None)
    }
    assert len(patterns) >= 4
    assert patterns <= set(validation._PATTERNS)


GROUP = {"legend": "l", "cases": [{"value": {"quotient": ["num_heads", "num_kv_heads"]}}]}
DIVIDED: dict[str, dict[str, Any]] = {
    "a rule": {"backends": {"A": {"rules": [{"when": {"group": 1}, "reject": "r"}]}}},
    "an order": {"orders": {"gpu": [{"name": "mine", "when": {"any": [{"group": 1}]}, "order": ["A"]}]}},
    "a variant": {"backends": {"A": {"variants": [{"name": "v", "when": {"not": {"group": 1}}}]}}},
    "an invariant": {"invariants": [{"name": "i", "says": "s", "when": {"group": 1}, "chosen": ["A"]}]},
}


@pytest.mark.parametrize("overlay", DIVIDED.values(), ids=DIVIDED)
def test_no_analysis_reads_a_quotient(overlay: dict[str, Any], tmp_path: Path) -> None:
    """Two unknown sizes have no finite classes, so that `attnreg check` could prove nothing of it."""
    vocabulary = {"vocabulary": {"derived": {"group": GROUP}}}
    with pytest.raises(attnreg.RegistryError) as caught:
        attnreg.load_registry(write(tmp_path / "tiny"), [vocabulary | overlay])
    assert [p.message.partition(":")[0] for p in caught.value.problems] == ["`group` cannot be used here"]


def test_the_block_of_a_kernel_may_depend_on_a_quotient(tmp_path: Path) -> None:
    stated = [{"when": {"group": 1}, "kernel_blocks": 8}, {"when": {"group": None}, "kernel_blocks": [8, 16]}]
    overlay = {"vocabulary": {"derived": {"group": GROUP}}, "backends": {"A": {"consequences": stated}}}
    registry = attnreg.load_registry(write(tmp_path / "tiny"), [overlay])
    for heads, kv_heads, blocks in ((4, 4, [8]), (4, 2, []), (4, None, [16])):
        request = attnreg.AttentionRequest(
            head_size=64, dtype="float16", block_size=16, num_heads=heads, num_kv_heads=kv_heads
        )
        known = attnreg.select(request, attnreg.Platform(platform="gpu", arch="g1"), registry).consequences
        assert [c.value for c in known if c.kind == "kernel_block"] == blocks
