"""Conditions that are refused: the part over the caret, the message and the cure."""

from __future__ import annotations

import pytest
from support.conditions import condition, parse

from attnreg.language.matchers import integer_range

MEND = "mend its bounds, or remove it"
FROM_ONE = f"head_size is 1 or more; {MEND}"
TEXT = "text has no list of words for a pattern to choose from; name each, as in [llama, llama4]"
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
    ("{head_size: true}", "true", "head_size: expected an integer, got `true`", ""),
    ("{head_size: {max: 9.10}}", "9.10", "head_size.max: expected an integer, got the number 9.10", NUMBER),
    ("{head_size: {min: g9}}", "g9", "head_size.min: expected an integer, got `g9`", ""),
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
        FROM_ONE,
    ),
    ("{head_size: -1}", "-1", "head_size: nothing is -1: the range is empty", FROM_ONE),
    ("{head_size: 0}", "0", "head_size: nothing is 0: the range is empty", FROM_ONE),
    ("{head_size: [64, 0]}", "0", "head_size: nothing is 0: the range is empty", FROM_ONE),
    (
        "{head_size: {below: 1}}",
        "{",
        "head_size: nothing is up to 0: the range is empty",
        FROM_ONE,
    ),
    (
        "{head_size: {multiple_of: 8, max: 7}}",
        "{",
        "head_size: nothing is multiples of 8 up to 7: the range is empty",
        FROM_ONE,
    ),
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
    ("{model: 'deepseek*'}", "'deepseek*'", "model: `deepseek*` is a pattern, and text is compared as a whole", TEXT),
    ("{model: [a, {not: 'b?'}]}", "'b?'", "model.not: `b?` is a pattern, and text is compared as a whole", TEXT),
    ("{model: {min: a}}", "min", "model.min: unknown operator `min`", "known: not"),
    ("{features: [sink]}", "sink", "features: unknown feature 'sink'", "did you mean `sinks`? (also: alibi)"),
    ("{features: []}", "[", "features: the list is empty", "name at least one feature; `{only: []}` asks for none"),
    ("{features: }", "}", "features: expected a list of features, got `null`", ""),
    (
        "{features: {not: [sinks]}}",
        "{",
        "features: a set is matched by a list (all of these), by `any` or by `only`",
        "write [...], {any: [...]} or {only: [...]}; `without` says which features must be absent",
    ),
    ("{features: {any: []}}", "[", "features.any: the list is empty", "name at least one feature"),
    ("{features: {any: [sinks, 5]}}", "5", "features.any: expected a word, got `5`", "known: alibi, sinks"),
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
    "versions",
    [
        ">=x",
        ">=2.*",
        "~=2",
        ">=",
        "=2",
        "==",
        ">=2 <3",
        ">=2,",
        "==2.*.1",
        "<>2",
        "===2",
        ">=2+cu12",
        "==2!",
        "~=1!2",
        ">=2,,<3",
        ">=٢",
    ],
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
