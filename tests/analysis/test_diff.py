"""What changes between two registries: counts against brute force, boxes that cover them once, and how they read."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.registries import tiny
from support.registries.tiny import row
from support.suite.examples import examples

from attnreg import Registry, load_registry
from attnreg.analysis.boxes import Region, facets_text
from attnreg.analysis.diff import Diff, SelectionChange, diff
from attnreg.analysis.space import Space
from attnreg.selection.selector import evaluate

EVERYTHING = 10_000

# exactness -----------------------------------------------------------------------------------------------------------


def title(registry: Registry, request: Any, platform: Any) -> str | None:
    chosen = evaluate(request, platform, registry).chosen
    if chosen is None:
        return None
    return chosen.title + (f" (emulates {', '.join(chosen.emulates)})" if chosen.emulates else "")


def by_force(before: Registry, after: Registry, **only: Any) -> tuple[int, Counter[tuple[str | None, str | None]]]:
    """How many configurations the two tell apart, and how many of them go from each backend to each other."""
    space = Space([before, after])
    found: Counter[tuple[str | None, str | None]] = Counter()
    size = 0
    for point in product(*map(range, space.diagrams.sizes)):
        if not space.diagrams.evaluate(space.possible, point):
            continue
        request, platform = space.example(point)
        facts = {**request.facts(), **platform.facts()}
        if all(facts[facet] == value for facet, value in only.items()):
            size += 1
            pair = title(before, request, platform), title(after, request, platform)
            found[pair] += pair[0] != pair[1]
    return size, +found


def counts(difference: Diff) -> Counter[tuple[str | None, str | None]]:
    return Counter({(c.before, c.after): c.count for c in difference.changes})


few = st.sampled_from(
    [
        {"head_size": {"min": 4}},
        {"head_size": [2, 3]},
        {"head_size_v": {"not": None}},
        {"head_size_v": 3},
        {"arch": "g1"},
        {"features": ["sinks"]},
        {"without": ["sinks"]},
        {"flags": ["fast"]},
        {"packages": ["lib>=2"]},
        {"quantized": True},
        {"num_heads": 6},
        {"num_kv_heads": [4, None]},
    ]
)
# the first variant is narrower than the row, or serves more
narrow = st.builds(
    lambda when, changes: [{"name": "narrow", "when": when, **changes}, {"name": "wide"}],
    few,
    st.sampled_from([{}, {"capabilities": {"add": {"features": ["alibi"]}}}, {"requires": {"flags": ["fast"]}}]),
)
small_rows = st.builds(
    lambda features, requires, rules, emulated, variants: row(
        capabilities={"features": features},
        requires=requires,
        rules=[{"when": when, "reject": "r"} for when in rules],
        emulated={} if "sinks" in features else emulated,
        **({"variants": variants} if variants else {}),
    ),
    st.sampled_from([[], ["sinks"]]),
    st.none() | few,
    st.lists(few, max_size=1),
    st.sampled_from([{}, {"sinks": "slow"}]),
    st.just([]) | narrow,
)


@st.composite
def small_registries(draw: st.DrawFn) -> Registry:
    order = draw(st.permutations(["A", "B"]))
    entries = [draw(st.just(n) | st.builds(lambda c, n=n: {"backend": n, "if": c}, few)) for n in order]
    backends = {"A": draw(small_rows), "B": draw(small_rows)}
    return tiny.load(backends, {"gpu": [{"name": "only", "order": entries}]})


@given(small_registries(), small_registries())
@examples(25)
def test_counts_are_exact_and_boxes_cover_each_change_once(before: Registry, after: Registry) -> None:
    difference = diff(before, after, any_packages=True, limit=EVERYTHING)
    assume(difference.size <= 4000)
    size, expected = by_force(before, after)
    assert difference.size == size
    assert counts(difference) == expected
    assert difference.count == sum(expected.values())
    for change in difference.changes:
        assert change.rest == 0
        assert sum(r.count for r in change.regions) == change.count
        for region in change.regions:
            assert region.count > 0
            assert title(before, *region.example) == change.before
            assert title(after, *region.example) == change.after
    within = diff(before, after, within={"arch": "g1"}, any_packages=True)
    assert (within.size, counts(within)) == by_force(before, after, arch="g1")


@given(small_registries(), small_registries(), st.integers(0, 3))
@examples(20)
def test_a_limit_leaves_boxes_out_and_says_how_much_is_in_them(before: Registry, after: Registry, limit: int) -> None:
    whole, part = diff(before, after, limit=EVERYTHING), diff(before, after, limit=limit)
    assert counts(part) == counts(whole)
    for all_of_them, some in zip(whole.changes, part.changes, strict=True):
        assert some.regions == all_of_them.regions[:limit]
        assert some.rest == sum(r.count for r in all_of_them.regions[limit:])


@given(small_registries())
@examples(10)
def test_a_registry_does_not_differ_from_itself(registry: Registry) -> None:
    assert diff(registry, registry, any_packages=True).changes == ()


def test_the_default_registry_loaded_twice_does_not_differ(default: Registry) -> None:
    difference = diff(default, load_registry("default"))
    assert (difference.changes, difference.count) == ((), 0)
    assert difference.size > 10**12


def test_every_box_of_a_real_change_really_changes(default: Registry) -> None:
    other = load_registry("default", [{"choices": [{"deny": ["FLASH_ATTN"], "when": {"role": "draft"}}]}])
    difference = diff(default, other, limit=4)
    assert {str(c.before).partition("/")[0] for c in difference.changes} == {"FLASH_ATTN"}
    regions = [(c, r) for c in difference.changes for r in c.regions]
    assert len(regions) > 8
    for change, region in regions:
        request, _ = region.example
        assert request.role == "draft"
        assert title(default, *region.example) == change.before
        assert title(other, *region.example) == change.after


# within --------------------------------------------------------------------------------------------------------------

# of 3 architectures, 3 KV dtypes, 2 classes of head sizes, 4 sets of features, and a flag
WITHIN: list[tuple[dict[str, Any], int]] = [
    ({}, 144),
    ({"arch": "g1"}, 48),
    ({"arch": ["g1", "g2"]}, 96),
    ({"platform": "npu"}, 48),
    ({"features": ["sinks"]}, 72),
    ({"features": ["sinks", "alibi"]}, 36),
    ({"flags": "fast"}, 72),
    ({"head_size": 9}, 72),
    ({"head_size": [1, 9]}, 144),
    ({"kv_dtype": ["fp8", "auto"]}, 96),
    ({"kv_dtype": None}, 48),
    # of no known effect, but a word all the same
    ({"packages": "lib"}, 144),
]


@pytest.mark.parametrize(("within", "size"), WITHIN, ids=str)
def test_within_narrows_the_question(within: dict[str, Any], size: int) -> None:
    capabilities = {"features": ["sinks"], "head_sizes": {"max": 8}}
    registry = tiny.load({"A": row(requires={"flags": ["fast"], "arch": "g1"}), "B": row(capabilities=capabilities)})
    assert diff(registry, registry, within=within).size == size


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"arch": "g3"}, "unknown arch 'g3'; known: g1, g2, n1"),
    ({"platform": "gqu"}, "unknown platform 'gqu'; did you mean `gpu`? (also: npu)"),
    ({"features": ["sink"]}, "unknown features 'sink'; did you mean `sinks`? (also: alibi)"),
    ({"flags": ["fst"]}, "unknown flags 'fst'; did you mean `fast`?"),
    ({"packages": ["libb"]}, "unknown packages 'libb'; did you mean `lib`?"),
    ({"kv_dtype": "fp9"}, "unknown kv_dtype 'fp9'; did you mean `fp8`? (also: auto)"),
    ({"head_size": "8"}, "head_size is '8'; expected an integer"),
    ({"head_size": None}, "no request has head_size None"),
    ({"rank": 2}, "no request has a facet 'rank'; did you mean `ranks`? (also: %s)"),
    ({"quantized": True}, "no request has a facet 'quantized'; known: %s"),
    ({"platform": "gpu", "arch": "n1"}, "no configuration has all of this: platform gpu, arch n1"),
]


@pytest.mark.parametrize(("within", "message"), REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_what_cannot_be_asked(within: dict[str, Any], message: str) -> None:
    registry = tiny.load({"A": row(capabilities={"head_sizes": {"max": 8}})})
    with pytest.raises(ValueError, match=r".") as caught:
        diff(registry, registry, within=within)
    facets = sorted(name for name, f in registry.vocabulary.facets.items() if f.of in ("request", "platform"))
    assert str(caught.value) == message.replace("%s", ", ".join(f for f in facets if f"`{f}`" not in message))


def test_a_facet_that_no_line_reads_excludes_nothing() -> None:
    registry = tiny.load({"A": row(capabilities={"head_sizes": {"max": 8}})})
    assert diff(registry, registry, within={"eager": True}).size == diff(registry, registry).size


# words ---------------------------------------------------------------------------------------------------------------

HEADS = "arch every gpu architecture · {} · without alibi, sinks"
TEXTS: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("a bound", {"capabilities": {"head_sizes": {"max": 64}}}, HEADS.format("head_size 65 or more"), ["all of them"]),
    (
        "multiples",
        {"capabilities": {"head_sizes": {"multiple_of": 16}}},
        HEADS.format("head_size not multiples of 16"),
        ["all of them"],
    ),
    (
        "multiples up to a bound",
        {"capabilities": {"head_sizes": {"multiple_of": 16, "max": 128}}},
        HEADS.format("head_size not 16, 32, … 128 (every 16)"),
        ["all of them"],
    ),
    (
        "a few",
        {"capabilities": {"head_sizes": [64, 128, 256]}},
        HEADS.format("head_size not 64, 128, 256"),
        ["all of them"],
    ),
    (
        "a range",
        {"rules": [{"when": {"head_size": {"min": 8, "max": 9}}, "reject": "r"}]},
        HEADS.format("head_size 8 to 9"),
        ["all of them"],
    ),
    ("not given", {"requires": {"block_size": {"not": None}}}, HEADS.format("block_size not given"), ["all of them"]),
    ("given", {"requires": {"block_size": None}}, HEADS.format("block_size given"), ["all of them"]),
    ("an architecture", {"requires": {"arch": "g2"}}, "arch g1 · without alibi, sinks", ["all of them"]),
    (
        "a flag",
        {"requires": {"flags": ["fast"]}},
        "arch every gpu architecture · without alibi, sinks · flags without fast",
        ["all of them"],
    ),
    (
        "two features",
        {"capabilities": {"features": ["alibi", "sinks"]}},
        "arch every gpu architecture",
        ["sinks", "alibi"],
    ),
    (
        "two reasons",
        {"requires": {"eager": True, "kv_dtype": "fp8"}},
        "arch every gpu architecture · without alibi, sinks",
        ["kv_dtype not fp8", "eager not true"],
    ),
    (
        "a version",
        {"requires": {"packages": ["lib>=2"]}},
        "arch every gpu architecture · without alibi, sinks · without lib>=2",
        ["all of them"],
    ),
    (
        "an old version",
        {"rules": [{"when": {"packages": ["lib"], "not": {"packages": ["lib>=2"]}}, "reject": "r"}]},
        "arch every gpu architecture · without alibi, sinks · lib (not >=2)",
        ["all of them"],
    ),
]


@pytest.mark.parametrize(("changes", "frame", "regions"), [t[1:] for t in TEXTS], ids=[t[0] for t in TEXTS])
def test_how_boxes_read(changes: dict[str, Any], frame: str, regions: list[str]) -> None:
    difference = diff(tiny.load({"A": row()}), tiny.load({"A": row(**changes)}), any_packages=True)
    (change,) = difference.changes
    assert facets_text(change.frame) == frame
    assert [r.text for r in change.regions] == regions


def test_what_has_no_restriction_says_so() -> None:
    before, after = (
        tiny.load({"A": row(platforms=["gpu", "npu"], capabilities={"features": ["alibi", "sinks"]})}),
        tiny.load({"A": row()}),
    )
    assert Region((), 1, ()).text == "all of them"
    assert SelectionChange("A", None, (), (), 1, (), 0).kind == "loses its backend"
    assert {c.kind for c in diff(before, after).changes} == {"loses its backend"}
    assert {c.kind for c in diff(after, before).changes} == {"gains a backend"}


def test_words_that_only_one_registry_knows_are_listed_and_left_out() -> None:
    words = {**tiny.VOCABULARY["words"], "kv_dtypes": {"auto": "l", "fp8": "l", "fp4": "l"}}
    old, new = tiny.load({"A": row()}), tiny.load({"A": row()}, vocabulary={"words": words})
    for difference in (diff(old, new), diff(new, old)):
        assert difference.changes == ()
    assert (diff(old, new).gone, diff(old, new).new) == ({}, {"kv_dtype": ("fp4",)})
    assert diff(new, old).gone == {"kv_dtype": ("fp4",)}


def test_packages_are_installed_unless_they_may_be_missing() -> None:
    before, after = tiny.load({"A": row()}), tiny.load({"A": row(requires={"packages": ["lib"]})})
    assert diff(before, after).count == 0
    assert diff(before, after, within={"packages": ["lib"]}, any_packages=True).count == 0
    assert diff(before, after, any_packages=True).count > 0


def test_the_json_form(default: Registry) -> None:
    other = load_registry("default", [{"choices": [{"deny": ["FLASHINFER"], "when": {"arch": "sm120"}}]}])
    difference = diff(default, other, limit=2)
    data = difference.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert (data["changed"], data["configurations"]) == (difference.count, difference.size)
    for change in data["changes"]:
        assert change["before"].startswith("FLASHINFER")
        assert {"facet": "arch", "values": "sm120"} in change["frame"]
        assert change["count"] == change["rest"] + sum(r["count"] for r in change["regions"])
        assert all(r["example"]["platform"]["arch"] == "sm120" for r in change["regions"])
