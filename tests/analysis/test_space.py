"""Diagrams against brute force; the space of configurations and selection over it against `select` itself."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations, product
from math import prod
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.registries import asking, tiny
from support.suite.examples import examples

from attnreg import AttentionRequest, Platform, Registry, RequestError, load_registry
from attnreg.analysis import diagram
from attnreg.analysis.diagram import Diagrams, Node
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.analysis.value_classes import variables
from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.selection.selector import evaluate

# diagrams ------------------------------------------------------------------------------------------------------------

Sizes = tuple[int, ...]


def points(sizes: Iterable[int]) -> list[tuple[int, ...]]:
    return list(product(*map(range, sizes)))


def build(d: Diagrams, table: dict[tuple[int, ...], Any], start: tuple[int, ...] = ()) -> Node:
    """The function that a table lists."""
    level = len(start)
    if level == len(d.sizes):
        return d.terminal(table[start])
    return d.node(level, [build(d, table, (*start, c)) for c in range(d.sizes[level])])


def listed(d: Diagrams, node: Node) -> dict[tuple[int, ...], Any]:
    return {p: d.evaluate(node, p) for p in points(d.sizes)}


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def functions(draw: st.DrawFn, number: int, values: st.SearchStrategy[Any]) -> tuple[Sizes, list[dict[Any, Any]]]:
    sizes = draw(shapes)
    tables = st.lists(values, min_size=prod(sizes), max_size=prod(sizes))
    return sizes, [dict(zip(points(sizes), draw(tables), strict=True)) for _ in range(number)]


@pytest.mark.parametrize("name", bundled_registries(releases=False))
def test_few_integers_tell_every_size_apart(name: str) -> None:
    """All up to the least common multiple of a facet's moduli are listed: one of 144, 112 and 176 had 355,075."""
    sizes = {v.name: v.top for v in variables((load_registry(name),)) if v.top is not None}
    assert {facet: top for facet, top in sizes.items() if top > 8192} == {}


@given(functions(3, st.booleans()))
def test_operations_are_those_of_functions(drawn: tuple[Sizes, list[dict[Any, bool]]]) -> None:
    sizes, (f, g, h) = drawn
    d = Diagrams(sizes)
    a, b, c = (build(d, table) for table in (f, g, h))
    assert listed(d, a) == f
    assert listed(d, d.ite(a, b, c)) == {p: g[p] if f[p] else h[p] for p in f}
    assert listed(d, d.negate(a)) == {p: not f[p] for p in f}
    assert listed(d, d.conjoin([a, b, c])) == {p: f[p] and g[p] and h[p] for p in f}
    assert listed(d, d.unite([a, b, c])) == {p: f[p] or g[p] or h[p] for p in f}
    assert listed(d, d.apply(lambda x, y, z: (x, y, z), a, b, c)) == {p: (f[p], g[p], h[p]) for p in f}
    assert d.count(a) == sum(f.values())


@given(functions(3, st.sampled_from([None, 0, False, 1, True, "x"])))
def test_a_choice_between_any_functions_and_its_own_test(drawn: tuple[Sizes, list[dict[Any, Any]]]) -> None:
    sizes, (drawn_test, g, h) = drawn
    f = {p: bool(value) for p, value in drawn_test.items()}
    d = Diagrams(sizes)
    a, b, c = (build(d, table) for table in (f, g, h))
    every = [(a, f), (b, g), (c, h), *((d.terminal(v), dict.fromkeys(f, v)) for v in (True, False, 1, "x"))]
    for (x, then), (y, other) in product(every, every):
        expected = {p: then[p] if f[p] else other[p] for p in f}
        assert d.ite(a, x, y) == build(d, expected)


@given(functions(2, st.booleans()), st.sampled_from([True, False]))
def test_where_is_a_conjunction(drawn: tuple[Sizes, list[dict[Any, bool]]], wanted: bool) -> None:
    sizes, (f, g) = drawn
    d = Diagrams(sizes)
    where = d.where(build(d, f), lambda value: value is wanted, build(d, g))
    assert listed(d, where) == {p: f[p] and g[p] is wanted for p in f}


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "the registry tells configurations apart by 301 words and facets; all of them are decided for at most 300"
    with pytest.raises(RequestError, match=message):
        Diagrams([2] * 301)
    monkeypatch.setattr(diagram, "MAX_NODES", 1000)
    d = Diagrams([2] * 40)
    with pytest.raises(RequestError, match="the conditions are too entangled: over 1,000 parts of the space"):
        d.unite(d.conjoin([d.among(i, [1]), d.among(i + 20, [1])]) for i in range(20))


def test_nodes_do_not_depend_on_the_order_of_a_hash_table() -> None:
    """Neither their number, by which a comparison is refused, nor the order of what is found."""
    lines = [
        "from attnreg.analysis.space import Space",
        "from attnreg.analysis.symbolic.model import Model",
        "from attnreg.loader import registry_of",
        "registry = registry_of('vllm-0.20.0')",
        "space = Space([registry])",
        "titles = Model(space, registry).titles()",
        "print(len(space.diagrams), space.diagrams.terminals(titles))",
    ]
    found = {
        subprocess.run(
            [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


@given(functions(2, st.sampled_from([None, 0, False, 1, True, "x"])))
def test_equal_functions_are_one_node(drawn: tuple[Sizes, list[dict[Any, Any]]]) -> None:
    sizes, (f, g) = drawn
    d = Diagrams(sizes)
    a, b = build(d, f), build(d, g)
    # 1 and True are different answers
    same = all(type(f[p]) is type(g[p]) and f[p] == g[p] for p in f)
    assert (a == b) == same
    assert build(d, f) == a
    assert set(d.terminals(a)) == set(f.values()) - {None}


def test_what_is_equal_in_python_may_be_two_answers() -> None:
    d = Diagrams([2])
    assert len({d.terminal(value) for value in (None, 0, False, 1, True)}) == 5


@given(functions(1, st.booleans()), st.randoms(use_true_random=True))
def test_the_cheapest_point_is_the_cheapest(drawn: tuple[Sizes, list[dict[Any, bool]]], random: Random) -> None:
    sizes, (f,) = drawn
    d = Diagrams(sizes)
    costs = {(level, c): random.randrange(5) for level, size in enumerate(sizes) for c in range(size)}
    free = [min(range(size), key=lambda c, level=level: costs[level, c]) for level, size in enumerate(sizes)]
    found = d.cheapest(build(d, f), lambda level, c: costs[level, c] - costs[level, free[level]], free, {})
    paid = {p: sum(costs[level, c] for level, c in enumerate(p)) for p in f if f[p]}
    if found is None:
        assert not paid
    else:
        assert f[tuple(found)]
        assert paid[tuple(found)] == min(paid.values())


@given(functions(1, st.booleans()), st.randoms(use_true_random=True))
def test_boxes(drawn: tuple[Sizes, list[dict[Any, bool]]], random: Random) -> None:
    sizes, (f,) = drawn
    d = Diagrams(sizes)
    levels = [level for level in range(len(sizes)) if random.random() < 0.6]
    box = {k: frozenset(c for c in range(sizes[k]) if random.random() < 0.7) for k in levels}
    inside = {p: all(p[k] in classes for k, classes in box.items()) for p in f}
    assert listed(d, d.box(box)) == inside


def _each(points: Iterable[Any], times: int) -> list[Any]:
    return [p for p in points for _ in range(times)]


@given(functions(1, st.booleans()), st.randoms(use_true_random=True))
def test_the_classes_by_which_a_box_may_grow(drawn: tuple[Sizes, list[dict[Any, bool]]], random: Random) -> None:
    sizes, (f,) = drawn
    d = Diagrams(sizes)
    node = build(d, f)
    others = {level: [(*p[:level], c, *p[level + 1 :]) for p in f for c in range(n)] for level, n in enumerate(sizes)}
    assert d.tested(node) == {
        level
        for level, n in enumerate(sizes)
        if any(f[p] != f[q] for p, q in zip(_each(f, n), others[level], strict=True))
    }
    held = [p for p in f if f[p]]
    if not held:
        return
    # as a cover grows its boxes: from a point on, one variable after the other
    box = {level: frozenset({c}) for level, c in enumerate(random.choice(held))}
    for level in random.sample(range(len(sizes)), len(sizes)):
        rest = [p for p in f if all(p[k] in classes for k, classes in box.items() if k != level)]
        expected = {c for c in range(sizes[level]) if all(f[p] for p in rest if p[level] == c)}
        assert d.allowed(node, box, level) == expected
        if len(expected) == sizes[level] and random.random() < 0.5:
            del box[level]
        else:
            box[level] = frozenset(expected)


# selection over the space ---------------------------------------------------------------------------------------------


class Exact:
    """A registry's model, held against what the selector answers."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.space = Space([registry])
        self.model = Model(self.space, registry)
        # rows by name and native candidates do not depend on what is required or preferred
        self.plain = dataclasses.replace(registry, choices=())
        self.denying = dataclasses.replace(registry, choices=tuple(c for c in registry.choices if c.strength == "deny"))

    def holds(self, node: Node, point: Sequence[int]) -> Any:
        return self.space.diagrams.evaluate(node, point)

    def compare(self, request: AttentionRequest, platform: Platform) -> None:
        """Everything that the model says of a configuration is what the selector answers."""
        point = self.space.point(request, platform)
        assert self.holds(self.space.possible, point) is True
        selection = evaluate(request, platform, self.registry)
        assert self.holds(self.model.chosen(), point) == (selection.backend.name if selection.backend else None)
        chosen = selection.chosen
        emulated = f" (emulates {', '.join(chosen.emulates)})" if chosen and chosen.emulates else ""
        assert self.holds(self.model.titles(), point) == (chosen and chosen.title + emulated)
        automatic = evaluate(request, platform, self.denying)
        native = any(c.accepted and not c.emulates for c in automatic.candidates)
        assert self.holds(self.model.native(), point) == native
        for name in self.registry.backends:
            candidate = evaluate(request, platform, self.plain, name).candidates[0]
            answers = (candidate.accepted, candidate.accepted and not candidate.emulates)
            assert tuple(self.holds(node, point) for node in self.model.naming(name).row(name)) == answers

    def round_trip(self, point: Sequence[int]) -> None:
        """The example of a point falls in its classes, and is answered as the model says."""
        request, platform = self.space.example(point)
        assert self.space.point(request, platform) == list(point)
        self.compare(request, platform)


@pytest.fixture(scope="module")
def exact(default: Registry) -> Exact:
    return Exact(default)


OVERLAY = {
    "choices": [
        {"prefer": "TRITON_ATTN", "when": {"features": ["sinks"], "platform": "cuda"}},
        {"require": "FLASHMLA", "when": {"attention": "mla", "arch": "sm90"}},
        {"deny": ["ROCM_AITER_FA", "FLASH_ATTN"], "when": {"kv_quantized": True}},
    ]
}


@pytest.fixture(scope="module")
def chosen(default: Registry) -> Exact:
    return Exact(load_registry("default", [OVERLAY]))


@given(data=st.data())
@examples(200)
def test_the_default_registry_at_random(exact: Exact, chosen: Exact, data: st.DataObject) -> None:
    request, platform = data.draw(asking.requests(exact.registry)), data.draw(asking.platforms(exact.registry))
    exact.compare(request, platform)
    chosen.compare(request, platform)


@given(data=st.data())
@examples(100)
def test_every_point_of_the_default_registry_has_an_example(exact: Exact, data: st.DataObject) -> None:
    point = [data.draw(st.integers(0, size - 1)) for size in exact.space.diagrams.sizes]
    if exact.holds(exact.space.possible, point):
        exact.round_trip(point)


@given(tiny.registries(), st.randoms(use_true_random=True))
@examples(60)
def test_registries_at_random(registry: Registry, random: Random) -> None:
    exact = Exact(registry)
    for request, platform in tiny.questions(random, registry, 40):
        exact.compare(request, platform)
    for _ in range(20):
        point = [random.randrange(size) for size in exact.space.diagrams.sizes]
        if exact.holds(exact.space.possible, point):
            exact.round_trip(point)


@given(tiny.registries(by_name=True), st.randoms(use_true_random=True))
@examples(60)
def test_registries_that_tell_requests_by_name_from_others(registry: Registry, random: Random) -> None:
    exact = Exact(registry)
    assert all(v.facet != "asked" for v in exact.space.variables)
    for request, platform in tiny.questions(random, registry, 40):
        exact.compare(request, platform)


SMALL: list[tuple[str, dict[str, Any]]] = [
    ("widths of values", {"head_sizes": [1, 2, {"min": 5}], "head_sizes_v": [2, 3]}),
    ("one width of values and keys", {"head_sizes": 4, "head_sizes_v": 4}),
    ("widths of values alone", {"head_sizes_v": 4}),
    ("heads", {"num_heads": [1, 6, {"min": 20}], "num_kv_heads": [1, {"multiple_of": 7}]}),
    ("few heads", {"num_heads": {"below": 4}, "num_kv_heads": {"multiple_of": 2}}),
]


@pytest.mark.parametrize("capabilities", [c[1] for c in SMALL], ids=[c[0] for c in SMALL])
def test_exactly_the_points_that_a_request_can_be_are_possible(capabilities: dict[str, Any]) -> None:
    exact = Exact(tiny.load({"A": tiny.row(capabilities=capabilities)}))
    seen = {tuple(exact.space.point(request, platform)) for request, platform in _grid(exact.registry)}
    possible = {p for p in points(exact.space.diagrams.sizes) if exact.holds(exact.space.possible, p)}
    assert seen == possible
    assert exact.space.size == len(possible)
    for point in possible:
        exact.round_trip(point)


def _grid(registry: Registry) -> Iterator[tuple[AttentionRequest, Platform]]:
    """Every request of small sizes, on every platform."""
    sizes, heads = (None, *range(1, 12)), (None, *range(1, 43))
    pairs = [{"head_size": a, "head_size_v": b} for a in sizes[1:] for b in sizes if a != b]
    pairs += [
        {"head_size": 1, "num_heads": a, "num_kv_heads": b} for a in heads for b in heads if not (a and b and a % b)
    ]
    every = [frozenset(w) for n in range(3) for w in combinations(registry.vocabulary.features, n)]
    for fields, kv_dtype in product(pairs, (None, "auto", "fp8")):
        for words, arch in product(every, registry.vocabulary.architectures.values()):
            request = AttentionRequest(**fields, kv_dtype=kv_dtype, features=words)
            yield request, Platform(platform=arch.platform, arch=arch.name)


@pytest.mark.parametrize("another", ["(another)", "(another)'", "x"])
def test_texts_are_those_that_are_named_and_one_that_is_not(another: str) -> None:
    named = ["gpt", "(another)"]
    rows = {f"R{i}": tiny.row(requires={"model": text}) for i, text in enumerate(named)}
    exact = Exact(tiny.load(rows | {"R2": tiny.row(requires={"model": {"not": None}})}))
    for text in (*named, another, None):
        request, platform = AttentionRequest(head_size=1, model=text), Platform(platform="gpu", arch="g1")
        point = exact.space.point(request, platform)
        answers = tuple(exact.holds(exact.model.row(name)[0], point) for name in ("R0", "R1", "R2"))
        assert answers == (text == "gpt", text == "(another)", text is not None)
        exact.round_trip(point)


def test_a_feature_that_no_row_serves_makes_every_row_refuse() -> None:
    exact = Exact(tiny.load({"A": tiny.row()}))
    request, platform = AttentionRequest(head_size=1, features={"sinks"}), Platform(platform="gpu", arch="g1")
    exact.compare(request, platform)
    assert exact.holds(exact.model.chosen(), exact.space.point(request, platform)) is None


def test_a_word_that_is_not_given_passes_claims_that_no_other_word_passes() -> None:
    exact = Exact(tiny.load({"A": tiny.row(capabilities={"kv_dtypes": "auto"})}, vocabulary={"derived": {}}))
    for kv_dtype in (None, "auto", "fp8"):
        exact.compare(AttentionRequest(head_size=1, kv_dtype=kv_dtype), Platform(platform="gpu", arch="g1"))


CHOICES = [{"require": "A"}, {"prefer": "B"}, {"require": "B"}, {"deny": "B"}, {"prefer": "A", "when": {"arch": "g1"}}]


@pytest.mark.parametrize(
    ("first", "second"), list(permutations(CHOICES, 2)), ids=lambda c: " ".join(map(str, c.values()))
)
def test_of_two_choices_the_later_speaks(first: dict[str, Any], second: dict[str, Any]) -> None:
    rows = {"A": tiny.row(capabilities={"head_sizes": {"max": 4}}), "B": tiny.row(), "C": tiny.row()}
    exact = Exact(tiny.load(rows, overlays=[{"choices": [first]}, {"choices": [second]}]))
    for size, arch in product((1, 9), ("g1", "g2")):
        exact.compare(AttentionRequest(head_size=size), Platform(platform="gpu", arch=arch))


def test_everything_installed_meets_even_what_no_version_meets() -> None:
    rows = {"OLD": tiny.row(requires={"packages": ["lib<2"]}), "NEW": tiny.row(requires={"packages": ["lib>=3"]})}
    exact = Exact(tiny.load(rows))
    for packages in (None, {}, {"lib": ""}, {"lib": "1"}, {"lib": "2.5"}, {"lib": "3"}, {"lib": "unknown"}):
        exact.compare(AttentionRequest(head_size=1), Platform(platform="gpu", arch="g1", packages=packages))


def test_local_versions_and_epochs_fall_in_classes() -> None:
    wanted = ["lib==2.8.3+cu12", "lib==2.8.3", "lib>=1!2.0", "lib<1!2.0,>2.8.3", "lib!=2.8.*"]
    exact = Exact(tiny.load({f"R{i}": tiny.row(requires={"packages": [one]}) for i, one in enumerate(wanted)}))
    for version in ("2.8", "2.8.3", "2.8.3+cu12", "2.8.3+cu13", "2.8.4", "2.9", "9", "1!1.9", "1!2.0", "1!3"):
        exact.compare(AttentionRequest(head_size=1), Platform(platform="gpu", arch="g1", packages={"lib": version}))


def test_two_registries_in_one_space_and_words_that_only_one_knows() -> None:
    old = tiny.load({"A": tiny.row()})
    words = {**tiny.VOCABULARY["words"], "kv_dtypes": {"auto": "l", "fp8": "l", "fp4": "l"}}
    new = tiny.load({"A": tiny.row(), "B": tiny.row(requires={"kv_dtype": "fp4"})}, vocabulary={"words": words})
    space = Space([old, new])
    request, platform = AttentionRequest(head_size=1, kv_dtype="fp4"), Platform(platform="gpu", arch="g1")
    point = space.point(request, platform)
    answers = [space.diagrams.evaluate(Model(space, r).chosen(), point) for r in (old, new)]
    # the old one refuses the word altogether
    assert answers == [None, "A"]
    ordinary = space.point(AttentionRequest(head_size=1), platform)
    assert [space.diagrams.evaluate(Model(space, r).chosen(), ordinary) for r in (old, new)] == ["A", "A"]
