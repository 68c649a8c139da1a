"""What changes between two registries: exactly which configurations get another backend, as few readable boxes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.analysis.space import Space
from attnreg.analysis.symbolic import Model
from attnreg.analysis.value_classes import Variable, every_clause
from attnreg.errors import did_you_mean
from attnreg.language.matchers import Requirement

if TYPE_CHECKING:
    from attnreg.analysis.diagram import Box, Node
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest

# what a reader wants to know first is widened last
_WIDEN_LAST = ("arch", "attention", "role", "phase", "kv_dtype")


@dataclass(frozen=True, slots=True)
class Region:
    """A box of configurations that all change alike: what it narrows of its change's frame, facet by facet, in words.

    ``count`` is how many configurations it adds to the boxes before it; ``example`` is one of them.
    """

    facets: tuple[tuple[str, str], ...]
    count: int
    example: tuple[AttentionRequest, Platform]

    @property
    def text(self) -> str:
        return facets_text(self.facets) or "all of them"


@dataclass(frozen=True, slots=True)
class Change:
    """All configurations that go from one backend (None: none) to another; ``rest`` are outside the regions listed.

    ``frame`` is what all of them have in common, facet by facet, in words.
    """

    before: str | None
    after: str | None
    frame: tuple[tuple[str, str], ...]
    count: int
    regions: tuple[Region, ...]
    rest: int

    @property
    def kind(self) -> str:
        return "gains a backend" if self.before is None else "loses its backend" if self.after is None else "changes"


@dataclass(frozen=True, slots=True)
class Diff:
    """The difference between two registries over ``size`` configurations that both know and either can tell apart.

    ``gone`` and ``new`` are the words that only one of them knows, by facet: they are no part of the comparison.
    """

    before: Registry
    after: Registry
    size: int
    changes: tuple[Change, ...]
    gone: Mapping[str, tuple[str, ...]]
    new: Mapping[str, tuple[str, ...]]

    @property
    def count(self) -> int:
        """How many configurations change."""
        return sum(c.count for c in self.changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "before": self.before.title,
            "after": self.after.title,
            "configurations": self.size,
            "changed": self.count,
            "only_before": {facet: list(words) for facet, words in self.gone.items()},
            "only_after": {facet: list(words) for facet, words in self.new.items()},
            "changes": [
                {
                    "before": c.before,
                    "after": c.after,
                    "frame": [{"facet": name, "values": values} for name, values in c.frame],
                    "count": c.count,
                    "rest": c.rest,
                    "regions": [
                        {
                            "facets": [{"facet": name, "values": values} for name, values in r.facets],
                            "count": r.count,
                            "example": {"request": r.example[0].to_dict(), "platform": r.example[1].to_dict()},
                        }
                        for r in c.regions
                    ],
                }
                for c in self.changes
            ],
        }


def facets_text(facets: Iterable[tuple[str, str]]) -> str:
    """``arch sm90 · kv_dtype fp8 · sinks``."""
    bare = ("features", "packages")
    return " · ".join(v if n in bare and not v.startswith("at most") else f"{n} {v}" for n, v in facets)


def diff(
    before: Registry,
    after: Registry,
    *,
    within: Mapping[str, Any] | None = None,
    requests: Collection[AttentionRequest] = (),
    any_packages: bool = False,
    limit: int = 8,
) -> Diff:
    """Every configuration whose backend differs, grouped by what it had and what it gets.

    ``within`` narrows the question: facet -> value, or a collection of values (of features, flags and packages: all of
    them); ``requests`` narrow it to what some layers ask for, wherever they run. Every package is taken as installed,
    unless ``any_packages`` lets each be there or not. At most ``limit`` boxes are listed for each pair of backends, the
    one nearest to an ordinary request first; the counts are exact all the same.

    Raises ValueError for a facet in ``within`` that neither registry distinguishes, or a value that neither knows.
    """
    space = Space([before, after])
    d = space.diagrams
    inside = d.conjoin(
        [
            space.possible,
            _common(space, before, after),
            *([d.unite(_asked(space, request) for request in requests)] if requests else []),
            *(_within(space, facet, wanted) for facet, wanted in (within or {}).items()),
            *(
                d.among(k, [v.ordinary])
                for k, v in enumerate(space.variables)
                if v.facet == "packages" and not any_packages
            ),
        ]
    )
    old, new = Model(space, before).chosen(), Model(space, after).chosen()
    pairs = d.apply(lambda a, b: None if a == b else (a, b), old, new)
    pairs = d.ite(inside, pairs, d.terminal(None))
    asked = d.bounds(inside)
    changes = []
    for pair in d.terminals(pairs) - {None}:
        region = d.apply(lambda value, p=pair: value == p, pairs)
        frame = d.bounds(region)
        boxes, rest = _cover(space, region, frame, limit)
        shown = {level: classes for level, classes in frame.items() if classes != asked[level]}
        changes.append(Change(pair[0], pair[1], tuple(_describe(space, shown)), d.count(region), tuple(boxes), rest))
    changes.sort(key=lambda c: (-c.count, c.before or "", c.after or ""))
    return Diff(before, after, d.count(inside), tuple(changes), _words(before, after), _words(after, before))


def _words(these: Registry, those: Registry) -> dict[str, tuple[str, ...]]:
    """The words that one registry knows and another does not, by facet."""
    out = {}
    for name, facet in these.vocabulary.facets.items():
        other = those.vocabulary.facets.get(name)
        words = sorted(facet.words - other.words) if other and facet.kind in ("word", "arch", "words") else []
        if words:
            out[name] = tuple(words)
    return out


def _common(space: Space, before: Registry, after: Registry) -> Node:
    """Where a configuration uses only words that both registries know."""
    d, parts = space.diagrams, []
    foreign = [
        (facet, word)
        for a, b in ((before, after), (after, before))
        for facet, ws in _words(a, b).items()
        for word in ws
    ]
    for level, variable in enumerate(space.variables):
        words = {word for facet, word in foreign if facet == variable.facet}
        if variable.word is not None:
            parts += [d.among(level, [0])] if variable.word in words else []
        elif words:
            part = [c if variable.facet != "arch" else tuple(a for _, a in c) for c in variable.classes]
            parts.append(d.among(level, [i for i, c in enumerate(part) if not set(c) <= words]))
    return d.conjoin(parts)


def _asked(space: Space, request: AttentionRequest) -> Node:
    """Where a request is made, on any platform."""
    # a facet that a registry declares and the request leaves out is not given
    declared = (f for r in space.registries for f in r.vocabulary.facets.values() if f.of == "request")
    facts, d = {**{f.name: None for f in declared}, **request.facts()}, space.diagrams
    asked = [(level, v) for level, v in enumerate(space.variables) if v.facet in facts]
    return d.conjoin(d.among(level, [v.class_of(v.value_in(facts))]) for level, v in asked)


def _within(space: Space, facet: str, wanted: Any) -> Node:
    values = [wanted] if isinstance(wanted, str | int) or wanted is None else list(wanted)
    known = {w for r in space.registries if (f := r.vocabulary.facets.get(facet)) for w in f.words}
    if facet == "packages":
        known = {w for r in space.registries for w in r.vocabulary.packages}
    for value in values:
        if known and value is not None and value not in known:
            raise ValueError(f"unknown {facet} {value!r}; {did_you_mean(value, map(str, known))}")
    d = space.diagrams
    if facet in ("features", "flags", "packages"):
        levels = [level for value in values if (level := space.level.get((facet, str(value)))) is not None]
        there = [[i for i, c in enumerate(space.variables[k].classes) if c[0] not in (None, False)] for k in levels]
        return d.conjoin(d.among(*pair) for pair in zip(levels, there, strict=True))
    if facet in ("platform", "arch"):
        part = 0 if facet == "platform" else 1
        return d.among(0, [i for i, c in enumerate(space.variables[0].classes) if any(v[part] in values for v in c)])
    level = space.level.get((facet, None))
    if level is None:
        others = ", ".join(dict.fromkeys(v.facet for v in space.variables if len(v.classes) > 1))
        raise ValueError(f"the facet {facet} makes no difference in either registry; these do: {others}")
    variable = space.variables[level]
    for value in values:
        if variable.top is not None and value is not None and not isinstance(value, int):
            raise ValueError(f"{facet} is {value!r}; expected an integer")
    try:
        return d.among(level, [variable.class_of(value) for value in values])
    except KeyError as e:
        raise ValueError(f"no request has {e.args[0]}") from None


def _cover(space: Space, region: Node, frame: Box, limit: int) -> tuple[list[Region], int]:
    """Boxes inside a region that cover it, each as large as it can be, and how many points the limit left out."""
    d, out, left = space.diagrams, list[Region](), region
    # a box may hold what no request can be
    spread = d.ite(space.possible, region, d.true)
    while left != d.false and len(out) < limit:
        point = space.cheapest(left)
        assert point is not None
        box = _widened(space, spread, point)
        inside = d.box(box)
        facets = tuple(_describe(space, _narrowed(box, frame), frame))
        out.append(Region(facets, d.count(d.conjoin([left, inside])), space.example(point)))
        left = d.ite(inside, d.false, left)
    return out, d.count(left)


def _narrowed(box: Box, frame: Box) -> Box:
    """What a box says beyond its frame."""
    inside = {level: classes & frame[level] for level, classes in box.items()}
    return {level: classes for level, classes in inside.items() if classes != frame[level]}


def _widened(space: Space, region: Node, point: list[int]) -> Box:
    """The largest box around a point inside a region that widening one facet after the other finds."""
    d = space.diagrams
    box: Box = {level: frozenset({c}) for level, c in enumerate(point)}
    order = sorted(
        box, key=lambda level: _WIDEN_LAST.index(v) if (v := space.variables[level].facet) in _WIDEN_LAST else -1
    )
    for level in order:
        free = {k: v for k, v in box.items() if k != level}
        if d.contains(region, free):
            box = free
    for level in [level for level in order if level in box]:
        for c in range(d.sizes[level]):
            wider = {**box, level: box[level] | {c}}
            if d.contains(region, wider):
                box = wider
    return box


def _describe(space: Space, box: Box, frame: Box | None = None) -> Iterator[tuple[str, str]]:
    """The facets that a box restricts, and to what, in words; inside a frame, if one is given."""
    on: dict[str, list[str]] = {"features": [], "flags": [], "packages": []}
    off: dict[str, list[str]] = {"features": [], "flags": [], "packages": []}
    for level in sorted(box):
        variable = space.variables[level]
        if variable.facet == "packages":
            there, text = _package_text(space, variable, box[level])
            (on if there else off)["packages"].append(text)
        elif variable.word is not None:
            (on if box[level] == {1} else off)[variable.facet].append(variable.name)
        else:
            yield variable.name, _values_text(variable, box[level])
    features = [
        v.name
        for level, v in enumerate(space.variables)
        if v.facet == "features" and (frame is None or len(frame[level]) == 2)
    ]
    free = [w for w in features if w not in on["features"] and w not in off["features"]]
    if len(off["features"]) > max(len(free), 2):
        # what it may have says it shorter than what it must not have
        yield "features", _at_most(on.pop("features"), free)
    for facet in on:
        if on[facet]:
            yield facet, ", ".join(on[facet])
        if off[facet]:
            yield facet, "without " + ", ".join(off[facet])


def _at_most(asked: list[str], free: list[str]) -> str:
    if not asked:
        return f"at most {', '.join(free)}" if free else "none"
    return f"{', '.join(asked)}, and at most {', '.join(free)}" if free else f"{', '.join(asked)} alone"


def _package_text(space: Space, variable: Variable, classes: frozenset[int]) -> tuple[bool, str]:
    """Whether a package is there, and in which versions."""
    asked = {m for r in space.registries for c in every_clause(r) if c.facet == "packages" for m in c.matcher.mentions}
    some = frozenset(i for i, c in enumerate(variable.classes) if c[0] is not None)
    every = frozenset(range(len(variable.classes)))
    for requirement in [Requirement(variable.name), *sorted(asked, key=str)]:
        if requirement.package == variable.name:
            met = frozenset(i for i, c in enumerate(variable.classes) if requirement.met_by(_one(variable.name, c[0])))
            if classes in (met, every - met):
                return classes == met, str(requirement)
            if classes == some - met:
                return True, f"{variable.name} (not {requirement.versions})"
    versions = [str(variable.classes[c][0] or "none") for c in sorted(classes)]
    return True, f"{variable.name} ({', '.join(versions)})"


def _one(package: str, version: str | None) -> tuple[tuple[str, str], ...]:
    return () if version is None else ((package, version),)


def _values_text(variable: Variable, classes: frozenset[int]) -> str:
    """Some classes of a facet in words: what they hold, or what they leave out, whichever is shorter."""
    values = [v for c in sorted(classes) for v in variable.classes[c]]
    others = [v for i, c in enumerate(variable.classes) if i not in classes for v in c]
    if others == [None]:
        return "given"
    if variable.facet == "arch":
        return _arch_text(values, others)
    if variable.top is not None:
        texts = [_integers_text(group, variable.top) for group in (values, others)]
        return texts[0] if len(texts[0]) <= len(f"not {texts[1]}") else f"not {texts[1]}"
    names, rest = ([_word(v) for v in group] for group in (values, others))
    return f"not {', '.join(rest)}" if len(rest) < len(names) else ", ".join(names)


def _arch_text(values: list[Any], others: list[Any]) -> str:
    platforms = dict.fromkeys(p for p, _ in values)
    whole = [p for p in platforms if not any(o[0] == p for o in others)]
    parts = [f"every {p} architecture" for p in whole]
    parts += [a for p, a in values if p not in whole]
    return ", ".join(parts)


def _integers_text(values: list[Any], top: int) -> str:
    """Integers in words: runs of them, or a first few and the step; those that pass ``top`` go on for ever."""
    none = ["not given"] if None in values else []
    numbers = sorted(v for v in values if v is not None and v <= top)
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(steps) == 1 and (step := steps.pop()) > 1 and (len(numbers) > 4 or numbers[-1] > top - step):
        last = "" if numbers[-1] > top - step else f" {numbers[-1]}"
        start = f"{numbers[0]}, {numbers[1]}, …{last} (every {step})"
        return ", ".join([*none, f"multiples of {step}" if numbers[0] == step and not last else start])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts = [_run_text(run[0], run[-1], top) for run in runs]
    if len(texts) > 8:
        texts = [*texts[:3], f"… ({len(numbers):,} up to {top:,})"]
    return ", ".join([*none, *texts])


def _run_text(first: int, last: int, top: int) -> str:
    return f"{first} or more" if last == top else str(first) if first == last else f"{first} to {last}"


def _word(value: Any) -> str:
    return "not given" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
