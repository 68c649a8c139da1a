"""Conditions that are refused: the part over the caret, the message and the cure."""

from __future__ import annotations

import pytest
from support.registries.conditions import condition, parse
from support.suite.sentences import Sentences

from attnreg.language.matchers import integer_range

# a condition, and the part of it over the caret
REFUSALS: list[tuple[str, str]] = [
    ("{archh: g9}", "archh"),
    ("{zzz: g9}", "zzz"),
    ("{kv_dtype: fp8_e4m4}", "fp8_e4m4"),
    ("{kv_dtype: [auto, fp16]}", "fp16"),
    ("{kv_dtype: 'int*'}", "'int*'"),
    ("{kv_dtype: 8}", "8"),
    ("{kv_dtype: []}", "["),
    ("{kv_dtype: {}}", "{"),
    ("{kv_dtype: {nott: fp8}}", "nott"),
    ("{kv_dtype: {min: fp8}}", "min"),
    ("{kv_dtype: {not: [fp9, null]}}", "fp9"),
    ("{kv_dtype: {not: ['*', null]}}", "{"),
    ("{arch: g11}", "g11"),
    ("{arch: 9.10}", "9.10"),
    ("{arch: {min: 9.0}}", "9.0"),
    ("{arch: {min: [g9]}}", "["),
    ("{arch: {multiple_of: 2}}", "multiple_of"),
    ("{arch: {min: g100, below: g9}}", "{"),
    ("{arch: {min: g9, max: n1}}", "{"),
    ("{arch: {min: r1, below: g100}}", "{"),
    ("{head_size: 9.10}", "9.10"),
    ("{head_size: '64'}", "'64'"),
    ("{head_size: true}", "true"),
    ("{head_size: {max: 9.10}}", "9.10"),
    ("{head_size: {min: g9}}", "g9"),
    ("{head_size: {multiple: 8}}", "multiple"),
    ("{head_size: {multiple_of: 0}}", "0"),
    ("{head_size: {min: 65, max: 64}}", "{"),
    ("{head_size: {min: 64, below: 64}}", "{"),
    ("{head_size: {multiple_of: 16, min: 17, max: 31}}", "{"),
    ("{head_size: [64, {min: 10, max: 5}]}", "{"),
    ("{head_size: {not: [null, {min: 0}]}}", "{"),
    ("{head_size: -1}", "-1"),
    ("{head_size: 0}", "0"),
    ("{head_size: [64, 0]}", "0"),
    ("{head_size: {below: 1}}", "{"),
    ("{head_size: {multiple_of: 8, max: 7}}", "{"),
    ("{head_size: {max: 1000000000}}", "{"),
    ("{head_size: {multiple_of: 1021, not: {multiple_of: 1031}}}", "{"),
    ("{eager: yes}", "yes"),
    ("{eager: 1}", "1"),
    ("{quantized: 1}", "1"),
    ("{quantized: {not: [true, false, null]}}", "{"),
    ("{version: 9}", "9"),
    ("{version: true}", "true"),
    ("{version: '3'}", "'3'"),
    ("{version: 3.0}", "3.0"),
    ("{version: {min: 5}}", "{"),
    ("{kind: odl}", "odl"),
    ("{model: 5}", "5"),
    ("{model: 9.10}", "9.10"),
    ("{model: 'deepseek*'}", "'deepseek*'"),
    ("{model: [a, {not: 'b?'}]}", "'b?'"),
    ("{model: {min: a}}", "min"),
    ("{features: [sink]}", "sink"),
    ("{features: []}", "["),
    ("{features: }", "}"),
    ("{features: {not: [sinks]}}", "{"),
    ("{features: {any: []}}", "["),
    ("{features: {any: [sinks, 5]}}", "5"),
    ("{features: {only: 5}}", "5"),
    ("{features: {only: [sink]}}", "sink"),
    ("{flags: [fst]}", "fst"),
    ("{without: [snks, fast]}", "snks"),
    ("{without: []}", "["),
    ("{without: {a: b}}", "{"),
    ("{without: [{a: b}]}", "{"),
    ("{packages: [libb]}", "libb"),
    ("{packages: []}", "["),
    ("{packages: {not: lib}}", "{"),
    ("{any: []}", "["),
    ("{any: {arch: g9}}", "{"),
    ("{any: [{arch: g9}, g10]}", "g10"),
    ("{not: {}}", "{"),
    ("{not: [arch]}", "["),
    ("g9", "g9"),
]


@pytest.mark.parametrize(("text", "under"), REFUSALS, ids=[text for text, _ in REFUSALS])
def test_refusals(text: str, under: str, sentences: Sentences) -> None:
    _, problems = parse(text)
    (problem,) = dict.fromkeys(problems)
    begin = problem.where.column - 1
    sentences.check(problem.message + (f"\n  help: {problem.help}" if problem.help else ""))
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
