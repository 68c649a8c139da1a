"""Conditions over a model's config: the registry's grammar, where every name is a field and a field holds anything."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnreg.compile.conditions import Parser
from attnreg.compile.source.yaml_source import Document
from attnreg.errors import Problem
from attnreg.language.conditions import Condition
from attnreg.language.vocabulary import OpenFacets


def parse(text: str) -> tuple[Condition, list[Problem]]:
    document, problems = Document(text, "m.yaml"), list[Problem]()
    return Parser(OpenFacets(), document, problems).condition(document.data, ()), problems


EVERY: list[Any] = [
    None, True, False, 0, 1, 16, 64, 100, 128, 0.5, 16.0, 63.5, 128.5, float("nan"), float("inf"), "", "gelu",
    "gelu_new", "relu", "64", "true", "null", [], [64], ["gelu"], {}, {"gelu": 1},
]  # fmt: skip

# matcher, the clause in words, all of EVERY that it accepts
MATCHERS: list[tuple[str, str, list[Any]]] = [
    ("null", "not given", [None]),
    ("{not: null}", "given", EVERY[1:]),
    ("true", "true", [True]),
    ("false", "false", [False]),
    ("[null, false]", "not given, false", [None, False]),
    ("{not: true}", "not true", [v for v in EVERY if v is not True]),
    ("1", "1", [1]),
    ("16", "16", [16, 16.0]),
    ("16.0", "16.0", [16, 16.0]),
    ("0.5", "0.5", [0.5]),
    (".inf", ".inf", [float("inf")]),
    ("gelu", "gelu", ["gelu"]),
    ("'64'", "64", ["64"]),
    ("'true'", "true", ["true"]),
    ("'gelu*'", "gelu*", ["gelu", "gelu_new"]),
    ("'?elu'", "?elu", ["gelu", "relu"]),
    ("'*'", "*", ["", "gelu", "gelu_new", "relu", "64", "true", "null"]),
    ("['gelu*', 64, null]", "gelu*, 64, not given", [None, 64, "gelu", "gelu_new"]),
    ("{not: ['gelu*', null]}", "given and not gelu*", [v for v in EVERY[1:] if v not in ("gelu", "gelu_new")]),
    ("{min: 64, max: 128}", "64 to 128", [64, 100, 128]),
    ("{min: 64}", "64 or more", [64, 100, 128, 128.5, float("inf")]),
    ("{max: 1}", "up to 1", [0, 1, 0.5]),
    ("{below: 64}", "below 64", [0, 1, 16, 0.5, 16.0, 63.5]),
    ("{min: 0.5, below: 63.5}", "0.5 or more, below 63.5", [1, 16, 0.5, 16.0]),
    ("{multiple_of: 16}", "multiples of 16", [0, 16, 64, 128, 16.0]),
    ("{multiple_of: 1}", "a number", [0, 1, 16, 64, 100, 128, 0.5, 16.0, 63.5, 128.5, float("nan"), float("inf")]),
    ("{multiple_of: 16, min: 1, max: 64}", "multiples of 16, 1 to 64", [16, 64, 16.0]),
    ("{multiple_of: 16, not: 64}", "multiples of 16, not 64", [0, 16, 128, 16.0]),
    ("[{max: 0}, {min: 128}]", "up to 0, 128 or more", [0, 128, 128.5, float("inf")]),
]


@pytest.mark.parametrize(("matcher", "text", "accepted"), MATCHERS)
def test_a_field_holds_anything(matcher: str, text: str, accepted: list[Any]) -> None:
    parsed, problems = parse(f"{{d: {matcher}}}")
    assert problems == []
    assert parsed.describe() == f"d {text}"
    # the same in both orders: no answer is remembered for a value that is equal to another (True, 1, 1.0)
    for values in (EVERY, EVERY[::-1]):
        answers = [value for value in values if parsed.holds({"d": value})]
        assert list(map(repr, answers)) == [repr(v) for v in values if repr(v) in set(map(repr, accepted))]


def test_names_are_fields_and_conditions_nest() -> None:
    parsed, problems = parse("{..text.window: {not: null}, any: [{a.b: 1}, {model_type: 'llama*'}], not: {tp: true}}")
    assert problems == []
    assert parsed.facets == ("..text.window", "a.b", "model_type", "tp")
    assert parsed.describe() == "..text.window given and (a.b 1 or model_type llama*) and not (tp true)"
    point = {"..text.window": 4, "a.b": 2, "model_type": "llama4", "tp": None}
    assert parsed.holds(point)
    assert not parsed.holds(point | {"tp": True})
    assert not parsed.holds(point | {"model_type": "mistral"})


PROBLEMS = [
    (
        "{d: [on, 'on', 1]}",
        "m.yaml:1:6: d: `on` is text here, and no boolean; write true, or quote it for the text",
    ),
    ("[a]", "m.yaml:1:1: expected a condition (facet: matcher), got a list"),
    ("{d: []}", "m.yaml:1:5: d: the list is empty; name at least one value"),
    ("{d: {}}", "m.yaml:1:5: d: the matcher is empty; give at least one of min, max, below, multiple_of, not"),
    (
        "{d: {mim: 1}}",
        "m.yaml:1:6: d.mim: unknown operator `mim`; did you mean `min`? (also: below, max, multiple_of, not)",
    ),
    ("{d: {min: '64'}}", "m.yaml:1:11: d.min: expected a number, got `64`; write it without quotes"),
    ("{d: {max: true}}", "m.yaml:1:11: d.max: expected a number, got `true`"),
    ("{d: {max: .nan}}", "m.yaml:1:11: d.max: expected a number, got the number .nan"),
    (
        "{d: {multiple_of: 1.5}}",
        "m.yaml:1:19: d.multiple_of: expected an integer, got the number 1.5; write it without quotes or a point",
    ),
    ("{d: {multiple_of: 0}}", "m.yaml:1:19: d.multiple_of: expected an integer of at least 1, got `0`"),
    (
        "{d: {min: 2, max: 1.5}}",
        "m.yaml:1:5: d: nothing is 2 to 1.5: the range is empty; mend its bounds, or remove it",
    ),
    (
        "{d: {min: 1, max: 8, multiple_of: 9}}",
        "m.yaml:1:5: d: nothing is multiples of 9, 1 to 8: the range is empty; mend its bounds, or remove it",
    ),
    ("{without: [alibi]}", "m.yaml:1:12: without: unknown feature or flag `alibi`; none is known"),
    ("{any: {a: 1}}", "m.yaml:1:7: any: `any` takes a list of conditions, got a mapping; one of them must hold"),
]


@pytest.mark.parametrize(("text", "problem"), PROBLEMS)
def test_what_is_wrong_has_its_place(text: str, problem: str) -> None:
    _, problems = parse(text)
    (found,) = problems
    assert f"{found.where}: {found.message}" + (f"; {found.help}" if found.help else "") == problem


@given(
    low=st.integers(-8, 8) | st.floats(-8, 8),
    high=st.integers(-8, 8) | st.floats(-8, 8),
    below=st.booleans(),
    step=st.sampled_from([1, 3, 4]),
)
@example(low=5e-324, high=0, below=False, step=3)
@example(low=3.0000000000000004, high=5, below=False, step=3)
def test_a_range_is_empty_only_where_no_number_is_in_it(low: float, high: float, below: bool, step: int) -> None:
    bounds = {"min": low, "below" if below else "max": high, "multiple_of": step}
    parsed, problems = parse(json.dumps({"d": bounds}))
    inside = [low, *(n for n in range(-24, 25) if n % step == 0)]
    assert (not problems) == any(parsed.holds({"d": value}) for value in inside)


def test_open_conditions_travel_to_another_process() -> None:
    parsed, _ = parse("{d: [{min: 1, max: 4}, 'a*', true, {not: null}]}")
    again = pickle.loads(pickle.dumps(parsed))
    assert [again.holds({"d": v}) for v in EVERY] == [parsed.holds({"d": v}) for v in EVERY]
