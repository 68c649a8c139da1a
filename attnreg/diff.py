"""What changes between two registries: exactly which configurations get another backend, as few readable boxes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.errors import NoBackendError
from attnreg.selector import Selection, select
from attnreg.space import Model, Space, Variable

if TYPE_CHECKING:
    from attnreg.diagram import Box, Node
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest

# what a reader wants to know first is widened last
_WIDEN_LAST = ("arch", "attention", "role", "phase", "kv_dtype")


@dataclass(frozen=True, slots=True)
class Region:
    """A box of configurations that all change alike: for each facet that matters, its values in words.

    ``count`` is how many configurations it adds to the boxes before it; ``example`` is one of them.
    """

    facets: tuple[tuple[str, str], ...]
    count: int
    example: tuple[AttentionRequest, Platform]

    @property
    def text(self) -> str:
        return (
            " · ".join(f"{name} {values}" if name else values for name, values in self.facets) or "every configuration"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """All configurations that go from one backend (None: none) to another; ``rest`` are outside the regions listed."""

    before: str | None
    after: str | None
    count: int
    regions: tuple[Region, ...]
    rest: int

    @property
    def kind(self) -> str:
        return "gains a backend" if self.before is None else "loses its backend" if self.after is None else "changes"


@dataclass(frozen=True, slots=True)
class Diff:
    """The difference between two registries over ``size`` configurations that either can tell apart."""

    before: Registry
    after: Registry
    size: int
    changes: tuple[Change, ...]

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
            "changes": [
                {
                    "before": c.before,
                    "after": c.after,
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


def diff(before: Registry, after: Registry, *, within: Mapping[str, Any] | None = None, limit: int = 8) -> Diff:
    """Every configuration whose backend differs, grouped by what it had and what it gets.

    ``within`` narrows the question: facet -> value, or a collection of values. At most ``limit`` boxes are listed for
    each pair of backends, the one nearest to an ordinary request first; the counts are exact all the same.

    Raises ValueError for a facet in ``within`` that neither registry distinguishes.
    """
    space = Space([before, after])
    d = space.diagrams
    inside = d.conjoin(_within(space, facet, wanted) for facet, wanted in (within or {}).items())
    old, new = Model(space, before).chosen(), Model(space, after).chosen()
    pairs = d.apply(lambda a, b: None if a == b else (a, b), old, new)
    pairs = d.ite(inside, pairs, d.terminal(None))
    changes = []
    for pair in d.terminals(pairs) - {None}:
        region = d.apply(lambda value, p=pair: value == p, pairs)
        boxes, rest = _cover(space, region, limit)
        changes.append(Change(pair[0], pair[1], d.count(region), tuple(boxes), rest))
    changes.sort(key=lambda c: (-c.count, c.before or "", c.after or ""))
    return Diff(before, after, d.count(inside), tuple(changes))


def both(change: Region, difference: Diff) -> tuple[Selection, Selection]:
    """The selections of a region's example, before and after."""
    out = []
    for registry in (difference.before, difference.after):
        try:
            out.append(select(*change.example, registry))
        except NoBackendError as e:
            out.append(e.selection)
    return out[0], out[1]


def _within(space: Space, facet: str, wanted: Any) -> Node:
    values = {wanted} if isinstance(wanted, str | int | bool) or wanted is None else set(wanted)
    d = space.diagrams
    if facet in ("platform", "arch"):
        part = 0 if facet == "platform" else 1
        classes = [i for i, c in enumerate(space.variables[0].classes) if any(v[part] in values for v in c)]
        return d.among(0, classes)
    if facet in ("features", "flags"):
        levels = [space.level.get((facet, str(word))) for word in values]
        return d.conjoin(d.among(level, [1]) for level in levels if level is not None)
    level = space.level.get((facet, None))
    if level is None:
        known = ", ".join(dict.fromkeys(v.facet for v in space.variables))
        raise ValueError(f"the facet {facet} makes no difference in either registry; these do: {known}")
    classes = [i for i, c in enumerate(space.variables[level].classes) if values & set(c)]
    return d.among(level, classes)


def _cover(space: Space, region: Node, limit: int) -> tuple[list[Region], int]:
    """Boxes inside a region that cover it, each as large as it can be, and how many points the limit left out."""
    d, out, left = space.diagrams, list[Region](), region
    while left != d.false and len(out) < limit:
        point = space.cheapest(left)
        assert point is not None
        box = _widened(space, region, point)
        inside = d.box(box)
        facets = tuple(_describe(space, box))
        out.append(Region(facets, d.count(d.conjoin([left, inside])), space.example(point)))
        left = d.ite(inside, d.false, left)
    return out, d.count(left)


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


def _describe(space: Space, box: Box) -> Iterator[tuple[str, str]]:
    """The facets that a box restricts, and to what, in words."""
    on: dict[str, list[str]] = {}
    off: dict[str, list[str]] = {}
    for level in sorted(box):
        variable = space.variables[level]
        if variable.facet == "packages":
            there = all(variable.classes[c][0] is not None for c in box[level])
            (on if there else off).setdefault("packages", []).append(variable.name)
        elif variable.word is not None:
            (on if box[level] == {1} else off).setdefault(variable.facet, []).append(variable.name)
        else:
            yield variable.name, values_text(space, variable, box[level])
    for facet in ("features", "flags", "packages"):
        if facet in on:
            yield facet, ", ".join(on[facet])
        if facet in off:
            yield facet, "without " + ", ".join(off[facet])


def values_text(space: Space, variable: Variable, classes: frozenset[int]) -> str:
    """Some classes of a facet in words: what they hold, or what they leave out, whichever is shorter."""
    values = [v for c in sorted(classes) for v in variable.classes[c]]
    others = [v for i, c in enumerate(variable.classes) if i not in classes for v in c]
    if variable.facet == "arch":
        return _arch_text(values, others)
    if all(isinstance(v, int) or v is None for v in (*values, *others)):
        return _integer_text(values)
    names, rest = ([_word(v) for v in group] for group in (values, others))
    return f"not {', '.join(rest)}" if len(rest) < len(names) else ", ".join(names)


def _arch_text(values: list[Any], others: list[Any]) -> str:
    platforms = dict.fromkeys(p for p, _ in values)
    whole = [p for p in platforms if not any(o[0] == p for o in others)]
    parts = [f"every {p} architecture" for p in whole]
    parts += [a for p, a in values if p not in whole]
    return ", ".join(parts)


def _integer_text(values: list[Any]) -> str:
    numbers = sorted(v for v in values if v is not None)
    none = ["not given"] if None in values else []
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts = [str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs]
    if len(texts) > 8:
        step = {b - a for a, b in itertools.pairwise(numbers)}
        first = ", ".join(map(str, numbers[:4]))
        texts = [f"{first}, … (every {step.pop()})"] if len(step) == 1 else [f"{first}, … ({len(numbers)} values)"]
    return ", ".join(none + texts)


def _word(value: Any) -> str:
    return "not given" if value is None else str(value)
