"""The condition grammar: what each matcher accepts, how it is said in words, and what is refused with which message."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny

from attnreg.compile.yaml_source import Document
from attnreg.errors import Problem
from attnreg.language.conditions import Condition, Parser
from attnreg.language.matchers import Requirement, integer_range
from attnreg.language.vocabulary import Vocabulary

WORDS = {
    "words": {
        **tiny.VOCABULARY["words"],
        "kv_dtypes": dict.fromkeys(["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"], "l"),
    },
    "flags": {"fast": "l", "slow": "l"},
    "packages": {"lib": "l", "flash-attn": "l"},
    "architectures": {
        "gpu": {
            "g9": {"family": "f"},
            "g10": {"family": "f"},
            "g100": {"family": "f"},
            "r1": {"family": "f", "series": "r"},
        },
        "npu": {"n1": {"family": "f"}},
    },
    "derived": {
        "quantized": {
            "legend": "l",
            "cases": [{"when": {"kv_dtype": [None, "auto"]}, "value": False}, {"value": True}],
        },
        "version": {
            "legend": "l",
            "cases": [{"when": {"arch": "g100"}, "value": 4}, {"when": {"arch": "g10"}, "value": 3}],
        },
        "kind": {"legend": "l", "cases": [{"when": {"arch": "g9"}, "value": "old"}, {"value": "new"}]},
    },
}


@functools.cache
def words() -> Vocabulary:
    return tiny.load({"A": tiny.row()}, vocabulary=WORDS).vocabulary


def parse(text: str) -> tuple[Condition, list[Problem]]:
    document, problems = Document(text, "c.yaml"), list[Problem]()
    return Parser(words(), document, problems).condition(document.data, ()), problems


def condition(raw: Any) -> Condition:
    parsed, problems = parse(json.dumps(raw))
    assert problems == []
    return parsed


# what matches --------------------------------------------------------------------------------------------------------

PACKAGES = {
    "none": (),
    "any": None,
    "lib": (("lib", "1.0"),),
    "lib 2": (("lib", "2.1"),),
    "lib ?": (("lib", ""),),
    "lib x": (("lib", "nightly"),),
    "both": (("flash-attn", "2.7.4"), ("lib", "2.1")),
    "flash": (("flash-attn", "2.6"),),
}

# facet, matcher, the clause in words, values that it accepts and some that it does not
MATCHERS: list[tuple[str, str, str, list[Any], list[Any]]] = [
    ("kv_dtype", "fp8", "fp8", ["fp8"], ["fp8_e4m3", "auto", None]),
    ("kv_dtype", "'fp8*'", "fp8*", ["fp8", "fp8_e4m3", "fp8_e5m2"], ["nvfp4", None]),
    ("kv_dtype", "fp8_e?m?", "fp8_e?m?", ["fp8_e4m3", "fp8_e5m2"], ["fp8", None]),
    ("kv_dtype", "[auto, 'fp8_*']", "auto, fp8_*", ["auto", "fp8_e4m3"], ["fp8", None]),
    ("kv_dtype", "[auto, {not: 'fp8*'}]", "auto, not fp8*", ["auto", "nvfp4", None], ["fp8"]),
    ("kv_dtype", "null", "not given", [None], ["auto"]),
    ("kv_dtype", "[null, auto]", "not given, auto", [None, "auto"], ["fp8"]),
    ("kv_dtype", "{not: fp8}", "not fp8", ["auto", None], ["fp8"]),
    ("kv_dtype", "{not: [fp8, auto]}", "not fp8, auto", ["nvfp4", None], ["fp8", "auto"]),
    ("kv_dtype", "{not: null}", "given", ["auto", "fp8"], [None]),
    ("kv_dtype", "{not: [null, 'fp8*']}", "given and not fp8*", ["auto", "nvfp4"], [None, "fp8", "fp8_e5m2"]),
    ("kv_dtype", "{not: {not: fp8}}", "not not fp8", ["fp8"], ["auto", None]),
    ("role", "draft", "draft", ["draft"], ["target"]),
    # architectures compare as the vocabulary orders them, not as text, and only within their series
    ("arch", "g10", "g10", ["g10"], ["g100", "g9"]),
    ("arch", "'g10*'", "g10, g100", ["g10", "g100"], ["g9"]),
    ("arch", "{min: g10}", "g10 or later", ["g10", "g100"], ["g9", "r1", "n1", None]),
    ("arch", "{max: g10}", "up to g10", ["g9", "g10"], ["g100", "r1", "n1", None]),
    ("arch", "{below: g10}", "before g10", ["g9"], ["g10", "g100", "r1", "n1"]),
    ("arch", "{min: g9, below: g100}", "g9 or later, before g100", ["g9", "g10"], ["g100", "r1"]),
    ("arch", "{min: g9, not: g10}", "g9 or later, not g10", ["g9", "g100"], ["g10", "n1"]),
    ("arch", "{not: {min: g10}}", "not g10 or later", ["g9", "r1", "n1"], ["g10", "g100"]),
    ("arch", "[n1, {min: g100}]", "n1, g100 or later", ["n1", "g100"], ["g10"]),
    # integers
    ("head_size", "64", "64", [64], [65, None]),
    ("head_size", "[64, {min: 128, max: 256}]", "64, 128 to 256", [64, 128, 200, 256], [63, 127, 257, None]),
    ("head_size", "{min: 64}", "64 or more", [64, 65], [63, None]),
    ("head_size", "{max: 64}", "up to 64", [1, 64], [65, None]),
    ("head_size", "{below: 64}", "up to 63", [63], [64, None]),
    ("head_size", "{below: 64, max: 32}", "up to 32", [32], [33, None]),
    ("head_size", "{below: 32, max: 64}", "up to 31", [31], [32, None]),
    ("head_size", "{multiple_of: 8}", "multiples of 8", [8, 16], [12, None]),
    ("head_size", "{multiple_of: 8, max: 256}", "multiples of 8 up to 256", [8, 256], [264, 12, None]),
    ("head_size", "{multiple_of: 8, min: 16}", "multiples of 8 from 16", [16, 24], [8, 17, None]),
    ("head_size", "{multiple_of: 8, min: 16, max: 32}", "multiples of 8 from 16 to 32", [16, 32], [8, 40, None]),
    ("head_size", "{multiple_of: 1}", "given", [1, 7], [None]),
    ("head_size", "{multiple_of: 8, not: 64}", "multiples of 8, not 64", [8, 128], [64, 12, None]),
    ("head_size", "{not: 64}", "not 64", [63, None], [64]),
    ("head_size", "{not: {min: 64}}", "not 64 or more", [63, None], [64]),
    ("head_size", "[null, {multiple_of: 16}]", "not given, multiples of 16", [None, 16], [8]),
    ("head_size", "0", "0", [0], [1, None]),
    ("ranks", "{min: 2}", "2 or more", [2], [1, None]),
    # text
    ("model", "deepseek_v3", "deepseek_v3", ["deepseek_v3"], ["deepseek", None]),
    ("model", "'deepseek*'", "deepseek*", ["deepseek", "deepseek_v3"], ["llama", None]),
    ("model", "{not: 'deepseek*'}", "not deepseek*", ["llama", None], ["deepseek_v3"]),
    ("model", "null", "not given", [None], ["llama"]),
    ("model", "'9.10'", "9.10", ["9.10"], ["9.1", None]),
    # booleans and derived facets
    ("eager", "true", "true", [True], [False, None]),
    ("eager", "{not: true}", "not true", [False, None], [True]),
    ("quantized", "false", "false", [False], [True]),
    ("version", "3", "3", [3], [4, None]),
    ("version", "[null, 3]", "not given, 3", [3, None], [4]),
    ("version", "{min: 4}", "4 or more", [4], [3, None]),
    ("version", "{not: {min: 4}}", "not 4 or more", [3, None], [4]),
    ("kind", "old", "old", ["old"], ["new"]),
    ("kind", "'*'", "*", ["old", "new"], [None]),
]


@pytest.mark.parametrize(("facet", "matcher", "text", "accepted", "refused"), MATCHERS)
def test_matchers_of_one_value(facet: str, matcher: str, text: str, accepted: list[Any], refused: list[Any]) -> None:
    parsed, problems = parse(f"{{{facet}: {matcher}}}")
    assert problems == []
    assert parsed.describe() == f"{facet} {text}"
    assert [v for v in (*accepted, *refused) if parsed.holds({facet: v})] == accepted


@pytest.mark.parametrize(
    ("facet", "matcher", "text"),
    [
        ("head_size", "64", "64"),
        ("head_size", "[64, 128]", "64 or 128"),
        ("head_size", "[64, {min: 128, max: 256}, {multiple_of: 512}]", "64, 128 to 256 or multiples of 512"),
        ("head_size", "{multiple_of: 8, not: 64}", "multiples of 8, not 64"),
        ("arch", "[g9, 'g10*']", "g9, g10 or g100"),
        ("kv_dtype", "[null, auto]", "not given or auto"),
        ("kv_dtype", "{not: [fp8, auto]}", "not fp8, auto"),
        ("kv_dtype", "{not: [null, auto, fp8]}", "given and not auto, fp8"),
    ],
)
def test_at_the_end_of_a_sentence_the_last_of_several_follows_an_or(facet: str, matcher: str, text: str) -> None:
    parsed, problems = parse(f"{{{facet}: {matcher}}}")
    assert problems == []
    assert parsed.clauses[0].matcher.in_words == text


SET_MATCHERS: list[tuple[str, str, str, list[set[str]], list[set[str]]]] = [
    ("features", "[sinks]", "sinks", [{"sinks"}, {"sinks", "alibi"}], [set(), {"alibi"}]),
    ("features", "sinks", "sinks", [{"sinks"}], [set()]),
    ("features", "[sinks, alibi]", "alibi and sinks", [{"sinks", "alibi"}], [{"sinks"}]),
    ("features", "{only: [sinks]}", "features no other than sinks", [set(), {"sinks"}], [{"sinks", "alibi"}]),
    ("features", "{only: sinks}", "features no other than sinks", [{"sinks"}], [{"alibi"}]),
    ("features", "{only: []}", "features none", [set()], [{"sinks"}]),
    ("flags", "[fast, slow]", "flag fast and flag slow", [{"fast", "slow"}], [{"fast"}]),
]


@pytest.mark.parametrize(("facet", "matcher", "text", "accepted", "refused"), SET_MATCHERS)
def test_matchers_of_sets(
    facet: str, matcher: str, text: str, accepted: list[set[str]], refused: list[set[str]]
) -> None:
    parsed, problems = parse(f"{{{facet}: {matcher}}}")
    assert problems == []
    assert parsed.describe() == text
    assert [v for v in (*accepted, *refused) if parsed.holds({facet: frozenset(v)})] == accepted


@pytest.mark.parametrize(
    ("matcher", "text", "accepted"),
    [
        ("[lib]", "package lib", "any; lib; lib 2; lib ?; lib x; both"),
        ("lib", "package lib", "any; lib; lib 2; lib ?; lib x; both"),
        # a package without a version is taken at its word, a version that is none is not
        ("['lib>=2']", "package lib>=2", "any; lib 2; lib ?; both"),
        ("[lib >= 2 , flash-attn]", "package flash-attn and package lib>= 2", "any; both"),
        ("['flash-attn>=2.6,<2.7']", "package flash-attn>=2.6,<2.7", "any; flash"),
        ("['flash-attn==2.7.*']", "package flash-attn==2.7.*", "any; both"),
        ("['flash-attn~=2.5']", "package flash-attn~=2.5", "any; both; flash"),
    ],
)
def test_matchers_of_packages(matcher: str, text: str, accepted: str) -> None:
    parsed, problems = parse(f"{{packages: {matcher}}}")
    assert problems == []
    assert parsed.describe() == text
    assert "; ".join(name for name, installed in PACKAGES.items() if parsed.holds({"packages": installed})) == accepted


def test_a_pre_release_counts_as_a_version() -> None:
    assert Requirement("lib", ">=2").met_by((("lib", "2.1.dev3"),))
    assert not Requirement("lib", ">=2").met_by((("lib", "2.0.dev3"),))


def test_without_covers_features_and_flags() -> None:
    parsed, problems = parse("{without: [sinks, fast]}")
    assert problems == []
    assert parsed.describe() == "without fast and without sinks"
    assert parsed.facets == ("flags", "features")
    points = [(f, g) for f in (set(), {"sinks"}, {"alibi"}) for g in (set(), {"fast"}, {"slow"})]
    held = [(f, g) for f, g in points if parsed.holds({"features": frozenset(f), "flags": frozenset(g)})]
    assert held == [(set(), set()), (set(), {"slow"}), ({"alibi"}, set()), ({"alibi"}, {"slow"})]


@pytest.mark.parametrize(
    ("text", "words", "facets"),
    [
        ("{}", "always", ()),
        ("{arch: g9, role: draft}", "arch g9 and role draft", ("arch", "role")),
        (
            "{any: [{arch: g9}, {role: draft, eager: true}]}",
            "(arch g9 or role draft and eager true)",
            "arch role eager",
        ),
        (
            "{role: draft, not: {arch: g9, eager: true}}",
            "role draft and not (arch g9 and eager true)",
            "role arch eager",
        ),
        ("{not: {any: [{arch: g9}, {arch: g10}]}}", "not ((arch g9 or arch g10))", ("arch",)),
    ],
)
def test_conditions_in_words(text: str, words: str, facets: Any) -> None:
    parsed, problems = parse(text)
    assert problems == []
    assert parsed.describe() == words
    assert parsed.facets == (tuple(facets.split()) if isinstance(facets, str) else facets)


def test_every_clause_knows_its_place() -> None:
    parsed, _ = parse("arch: g9\nany:\n  - {role: draft}\n  - {without: [sinks]}\n")
    assert [str(clause.where) for clause in parsed.walk()] == ["c.yaml:1:1", "c.yaml:3:6", "c.yaml:4:6"]


# what is refused -----------------------------------------------------------------------------------------------------

MEND = "mend its bounds, or remove it"
NUMBER = "write it without quotes or a point"
FACETS = (
    "known: any, arch, attention, attn_type, block_size, dtype, eager, features, flags, head_size, head_size_v, "
    "index_topk, …"
)
ARCH = FACETS.replace("known: any, arch,", "did you mean `arch`? (also: any,").replace(", …", ", kind, …)")
KV_DTYPES = "known: auto, fp8, fp8_e4m3, fp8_e5m2, nvfp4"
ARCHS = "architectures are written as the vocabulary names them, as in sm90: as a number 9.10 would be 9.1"

# a condition, the part of it over the caret, the message and the cure
REFUSALS: list[tuple[str, str, str, str]] = [
    (
        "{archh: g9}",
        "archh",
        "archh: unknown facet `archh`",
        ARCH,
    ),
    (
        "{zzz: g9}",
        "zzz",
        "zzz: unknown facet `zzz`",
        FACETS,
    ),
    (
        "{kv_dtype: fp8_e4m4}",
        "fp8_e4m4",
        "kv_dtype: unknown kv dtype 'fp8_e4m4'",
        "did you mean `fp8_e4m3`? (also: auto, fp8, fp8_e5m2, nvfp4)",
    ),
    ("{kv_dtype: [auto, fp16]}", "fp16", "kv_dtype: unknown kv dtype 'fp16'", KV_DTYPES),
    ("{kv_dtype: 'int*'}", "'int*'", "kv_dtype: `int*` matches no kv dtype", KV_DTYPES),
    ("{kv_dtype: 8}", "8", "kv_dtype: expected a word, got `8`", KV_DTYPES),
    ("{kv_dtype: []}", "[", "kv_dtype: the list is empty", "name at least one value"),
    ("{kv_dtype: {}}", "{", "kv_dtype: the matcher is empty", "give at least one of not"),
    ("{kv_dtype: {nott: fp8}}", "nott", "kv_dtype.nott: unknown operator `nott`", "did you mean `not`?"),
    ("{kv_dtype: {min: fp8}}", "min", "kv_dtype.min: unknown operator `min`", "known: not"),
    (
        "{kv_dtype: {not: [fp9, null]}}",
        "fp9",
        "kv_dtype.not: unknown kv dtype 'fp9'",
        "did you mean `fp8`? (also: auto, fp8_e4m3, fp8_e5m2, nvfp4)",
    ),
    ("{kv_dtype: {not: ['*', null]}}", "{", "kv_dtype: nothing is given and not *: the range is empty", MEND),
    ("{arch: g11}", "g11", "arch: unknown architecture 'g11'", "did you mean `g10`? (also: g100, g9, n1, r1)"),
    ("{arch: 9.10}", "9.10", "arch: unknown architecture '9.10'", ARCHS),
    ("{arch: {min: 9.0}}", "9.0", "arch.min: unknown architecture '9.0'", ARCHS),
    ("{arch: {min: [g9]}}", "[", "arch.min: expected a word, got a list", "known: g10, g100, g9, n1, r1"),
    (
        "{arch: {multiple_of: 2}}",
        "multiple_of",
        "arch.multiple_of: unknown operator `multiple_of`",
        "known: below, max, min, not",
    ),
    ("{arch: {min: g100, below: g9}}", "{", "arch: nothing is g100 or later, before g9: the range is empty", MEND),
    ("{arch: {min: g9, max: n1}}", "{", "arch: nothing is g9 or later, up to n1: the range is empty", MEND),
    ("{arch: {min: r1, below: g100}}", "{", "arch: nothing is r1 or later, before g100: the range is empty", MEND),
    ("{head_size: 9.10}", "9.10", "head_size: expected an integer, got the number 9.10", NUMBER),
    ("{head_size: '64'}", "'64'", "head_size: expected an integer, got `64`", NUMBER),
    ("{head_size: true}", "true", "head_size: expected an integer, got `true`", NUMBER),
    ("{head_size: {max: 9.10}}", "9.10", "head_size.max: expected an integer, got the number 9.10", NUMBER),
    ("{head_size: {min: g9}}", "g9", "head_size.min: expected an integer, got `g9`", NUMBER),
    (
        "{head_size: {multiple: 8}}",
        "multiple",
        "head_size.multiple: unknown operator `multiple`",
        "did you mean `multiple_of`? (also: below, max, min, not)",
    ),
    ("{head_size: {multiple_of: 0}}", "0", "head_size.multiple_of: expected an integer of at least 1, got `0`", ""),
    ("{head_size: {min: 65, max: 64}}", "{", "head_size: nothing is 65 to 64: the range is empty", MEND),
    ("{head_size: {min: 64, below: 64}}", "{", "head_size: nothing is 64 to 63: the range is empty", MEND),
    (
        "{head_size: {multiple_of: 16, min: 17, max: 31}}",
        "{",
        "head_size: nothing is multiples of 16 from 17 to 31: the range is empty",
        MEND,
    ),
    ("{head_size: [64, {min: 10, max: 5}]}", "{", "head_size: nothing is 10 to 5: the range is empty", MEND),
    (
        "{head_size: {not: [null, {min: 0}]}}",
        "{",
        "head_size: nothing is given and not 0 or more: the range is empty",
        MEND,
    ),
    ("{head_size: -1}", "-1", "head_size: nothing is -1: the range is empty", MEND),
    (
        "{head_size: {max: 1000000000}}",
        "{",
        "head_size: the numbers are too large: every integer up to 1,000,000,003 would have to be looked at",
        "smaller numbers will do",
    ),
    (
        "{head_size: {multiple_of: 1021, not: {multiple_of: 1031}}}",
        "{",
        "head_size: the numbers are too large: every integer up to 1,052,653 would have to be looked at",
        "smaller numbers will do",
    ),
    ("{eager: yes}", "yes", "eager: unknown eager 'yes'", "known: false, true"),
    ("{eager: 1}", "1", "eager: expected a word, got `1`", "known: false, true"),
    ("{quantized: 1}", "1", "quantized: expected a word, got `1`", "known: false, true"),
    (
        "{quantized: {not: [true, false, null]}}",
        "{",
        "quantized: nothing is given and not true, false: the range is empty",
        MEND,
    ),
    ("{version: 9}", "9", "version: unknown version '9'", "known: 3, 4"),
    ("{version: true}", "true", "version: expected a word, got `true`", "known: 3, 4"),
    ("{version: '3'}", "'3'", "version: unknown version '3'", "did you mean `3`? (also: 4)"),
    ("{version: 3.0}", "3.0", "version: unknown version '3.0'", "known: 3, 4"),
    ("{version: {min: 5}}", "{", "version: nothing is 5 or more: the range is empty", MEND),
    ("{kind: odl}", "odl", "kind: unknown kind 'odl'", "did you mean `old`? (also: new)"),
    ("{model: 5}", "5", "model: expected text, got `5`", "quote it"),
    ("{model: 9.10}", "9.10", "model: expected text, got the number 9.10", "quote it"),
    ("{model: {min: a}}", "min", "model.min: unknown operator `min`", "known: not"),
    ("{features: [sink]}", "sink", "features: unknown feature 'sink'", "did you mean `sinks`? (also: alibi)"),
    ("{features: []}", "[", "features: the list is empty", "name at least one feature; `{only: []}` asks for none"),
    ("{features: }", "}", "features: expected a list of features, got `null`", ""),
    (
        "{features: {not: [sinks]}}",
        "{",
        "features: a set is matched by a list (all of these) or by `only`",
        "write [...] or {only: [...]}; `without` says which features must be absent",
    ),
    ("{features: {only: 5}}", "5", "features.only: expected a list of features, got `5`", ""),
    (
        "{features: {only: [sink]}}",
        "sink",
        "features.only: unknown feature 'sink'",
        "did you mean `sinks`? (also: alibi)",
    ),
    ("{flags: [fst]}", "fst", "flags: unknown flag 'fst'", "did you mean `fast`? (also: slow)"),
    (
        "{without: [snks, fast]}",
        "snks",
        "without: unknown feature or flag `snks`",
        "did you mean `sinks`? (also: alibi, fast, slow)",
    ),
    ("{without: []}", "[", "without: `without` takes a list of features or flags, got an empty list", ""),
    ("{without: {a: b}}", "{", "without: `without` takes a list of features or flags, got a mapping", ""),
    ("{without: [{a: b}]}", "{", "without: expected a word, got a mapping", "known: alibi, fast, sinks, slow"),
    ("{packages: [libb]}", "libb", "packages: unknown package 'libb'", "did you mean `lib`? (also: flash-attn)"),
    ("{packages: []}", "[", "packages: the list is empty", "name at least one package"),
    ("{packages: {not: lib}}", "{", "packages: expected a package, as in `flash-attn>=2.7`, got a mapping", ""),
    ("{any: []}", "[", "any: `any` takes a list of conditions, got an empty list", "one of them must hold"),
    ("{any: {arch: g9}}", "{", "any: `any` takes a list of conditions, got a mapping", "one of them must hold"),
    ("{any: [{arch: g9}, g10]}", "g10", "any: expected a condition (facet: matcher), got `g10`", ""),
    ("{not: {}}", "{", "not: an empty condition always holds, so this never does", "say what must not hold"),
    ("{not: [arch]}", "[", "not: expected a condition (facet: matcher), got a list", ""),
    ("g9", "g9", "expected a condition (facet: matcher), got `g9`", ""),
]


@pytest.mark.parametrize(("text", "under", "message", "cure"), REFUSALS)
def test_refusals(text: str, under: str, message: str, cure: str) -> None:
    _, problems = parse(text)
    (problem,) = dict.fromkeys(problems)
    begin = problem.where.column - 1
    assert (problem.message, problem.help) == (message, cure)
    assert text[begin : begin + problem.width] == under


def test_everything_wrong_with_a_condition_is_said_at_once() -> None:
    _, problems = parse("arch: g11\nfeatures: [alibi, 5, [sinks]]\nany:\n  - role: drft\nnot: {head_size: x}\n")
    assert [f"{p.where.line}:{p.where.column} {p.message}" for p in problems] == [
        "1:7 arch: unknown architecture 'g11'",
        "2:19 features: expected a word, got `5`",
        "2:22 features: expected a word, got a list",
        "4:11 any.role: unknown role 'drft'",
        "5:18 not.head_size: expected an integer, got `x`",
    ]


@pytest.mark.parametrize(
    "versions", [">=x", ">=2.*", "~=2", ">=", "=2", "==", ">=2 <3", ">=2,", "==2.*.1", "<>2", "===2"]
)
def test_versions_that_no_installer_would_take(versions: str) -> None:
    _, problems = parse(f"{{packages: ['lib{versions}']}}")
    assert [(p.message, p.help) for p in problems] == [
        (f"packages: `{versions}` names no versions", "as in >=2.7, ==2.* or >=2.7,<3")
    ]


@pytest.mark.parametrize("item", ["lib 2", "5", "''", "lib>=2;x", "[lib]"])
def test_requirements_that_are_none(item: str) -> None:
    _, problems = parse(f"{{packages: [{item}]}}")
    (problem,) = problems
    assert problem.message.startswith("packages: ")
    assert str(problem.where) == "c.yaml:1:13"


def test_numbers_that_are_too_large_together_are_refused_by_the_proofs_too() -> None:
    tests = [condition({"head_size": {"multiple_of": m}}).clauses[0].matcher for m in (1019, 1021, 1031)]
    with pytest.raises(ValueError, match="every integer up to 1,072,651,371 would have to be looked at"):
        integer_range(tests)


# properties ----------------------------------------------------------------------------------------------------------

LEAVES = [{facet: Document(matcher, "").data} for facet, matcher, *_ in MATCHERS]
LEAVES += [{facet: Document(matcher, "").data} for facet, matcher, *_ in SET_MATCHERS]
LEAVES += [{"without": ["sinks"]}, {"without": ["fast", "alibi"]}, {"packages": ["lib>=2"]}]
CONDITIONS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda cs: {"any": cs})
        | inner.map(lambda c: {"not": c})
        | st.lists(inner, min_size=1, max_size=3).map(lambda cs: {k: v for c in cs for k, v in c.items()})
    ),
    max_leaves=6,
)
POINTS = st.fixed_dictionaries(
    {
        "kv_dtype": st.sampled_from([None, "auto", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"]),
        "role": st.sampled_from(["target", "draft"]),
        "arch": st.sampled_from(["g9", "g10", "g100", "r1", "n1"]),
        "head_size": st.none() | st.integers(0, 300),
        "ranks": st.none() | st.integers(0, 4),
        "model": st.sampled_from([None, "deepseek_v3", "llama"]),
        "eager": st.sampled_from([None, True, False]),
        "quantized": st.booleans(),
        "version": st.sampled_from([None, 3, 4]),
        "kind": st.sampled_from(["old", "new"]),
        "features": st.frozensets(st.sampled_from(["sinks", "alibi"])),
        "flags": st.frozensets(st.sampled_from(["fast", "slow"])),
        "packages": st.sampled_from(list(PACKAGES.values())),
    }
)


@given(CONDITIONS, POINTS)
def test_not_negates(raw: Any, point: Any) -> None:
    assert condition({"not": raw}).holds(point) is not condition(raw).holds(point)


@given(CONDITIONS, POINTS)
def test_the_entries_of_a_condition_must_all_hold(raw: Any, point: Any) -> None:
    parts = [condition({key: value}).holds(point) for key, value in raw.items()]
    assert condition(raw).holds(point) is all(parts)


@given(st.lists(CONDITIONS, min_size=1, max_size=4), POINTS)
def test_of_any_one_must_hold(raws: list[Any], point: Any) -> None:
    assert condition({"any": raws}).holds(point) is any(condition(raw).holds(point) for raw in raws)


@given(st.sampled_from([row[:2] for row in MATCHERS]), st.sampled_from([row[:2] for row in MATCHERS]), POINTS)
def test_a_list_accepts_what_one_of_its_matchers_does(one: Any, other: Any, point: Any) -> None:
    facet, matchers = one[0], [Document(m, "").data for f, m in (one, other) if f == one[0]]
    flat = [m for matcher in matchers for m in (matcher if isinstance(matcher, list) else [matcher])]
    expected = any(condition({facet: m}).holds(point) for m in flat)
    assert condition({facet: flat}).holds(point) is expected


SIZES = st.recursive(
    st.none()
    | st.integers(0, 40)
    | st.dictionaries(st.sampled_from(["min", "max", "below"]), st.integers(0, 40), min_size=1, max_size=2)
    | st.builds(
        lambda m, bounds: {"multiple_of": m, **bounds},
        st.integers(1, 9),
        st.dictionaries(st.sampled_from(["min", "max"]), st.integers(0, 40), max_size=2),
    ),
    lambda inner: inner.map(lambda m: {"not": m}) | st.lists(inner, min_size=1, max_size=3),
    max_leaves=4,
)


@given(st.lists(SIZES, min_size=1, max_size=3))
def test_integer_range_shows_every_answer(raws: list[Any]) -> None:
    parsed = [parse(json.dumps({"head_size": raw})) for raw in raws]
    # what is refused (an empty range) has no matcher to look at
    tests = [c.clauses[0].matcher for c, problems in parsed if not problems]
    seen = {tuple(t.matches(v) for t in tests) for v in integer_range(tests)}
    far = range(max(integer_range(tests)), max(integer_range(tests)) + 3000)
    assert {tuple(t.matches(v) for t in tests) for v in far} <= seen
