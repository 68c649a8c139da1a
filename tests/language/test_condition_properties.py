"""Properties of every condition: negation, conjunction, disjunction, and ranges that show every answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.registries.conditions import MATCHERS, PACKAGES, SET_MATCHERS, condition, parse

from attnreg.compile.source.yaml_source import Document
from attnreg.language.matchers import integer_range

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


KNOWN = st.sets(
    st.sampled_from(["kv_dtype", "arch", "head_size", "eager", "quantized", "features", "flags", "packages"])
)


@given(CONDITIONS, POINTS, KNOWN)
def test_what_known_facets_decide_holds_whatever_the_others_are(raw: Any, point: Any, names: set[str]) -> None:
    whole, known = condition(raw), {name: point[name] for name in names}
    assert whole.decided(known) in (None, whole.holds(point))
    assert whole.decided(point) is whole.holds(point)


@given(CONDITIONS, POINTS, KNOWN)
def test_a_remainder_asks_the_same_of_the_other_facets(raw: Any, point: Any, names: set[str]) -> None:
    whole, known = condition(raw), {name: point[name] for name in names}
    rest = whole.remainder(known)
    assert not names & set(rest.facets)
    assert rest.where == whole.where
    if whole.decided(known) is not False:
        assert rest.holds(point) is whole.holds(point)


@given(CONDITIONS, POINTS, KNOWN)
def test_a_condition_is_refuted_by_the_parts_that_are(raw: Any, point: Any, names: set[str]) -> None:
    whole, known = condition(raw), {name: point[name] for name in names}
    refuted = whole.refuted(known)
    assert (refuted.describe() != "always") is (whole.decided(known) is False)
    assert set(refuted.clauses) <= set(whole.clauses)
    assert not any(clause.holds(point) for clause in refuted.clauses)
    assert not any(part.holds(point) for group in refuted.any_of for part in group)
    assert all(part.holds(point) for part in refuted.none_of)
