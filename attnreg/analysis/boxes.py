"""Boxes: the cover of a region of the space by a few large boxes, and the text of each, facet by facet."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.analysis.value_classes import Variable, every_clause
from attnreg.language.facets import TOLD_FIRST
from attnreg.language.matchers import Requirement

if TYPE_CHECKING:
    from attnreg.analysis.diagram import Box, Node
    from attnreg.analysis.space import Space
    from attnreg.platforms import Platform
    from attnreg.request import AttentionRequest


@dataclass(frozen=True, slots=True)
class Region:
    """A box of configurations that all change alike, in words: the facets in which it is narrower than the frame.

    The frame is the smallest box around all configurations of the change. ``count`` is how many configurations the box
    adds to those before it; ``example`` is one of them.
    """

    facets: tuple[tuple[str, str], ...]
    count: int
    example: tuple[AttentionRequest, Platform]

    @property
    def text(self) -> str:
        return facets_text(self.facets) or "all of them"


def facets_text(facets: Iterable[tuple[str, str]]) -> str:
    """``arch sm90 · kv_dtype fp8 · sinks``."""
    bare = ("features", "packages")
    return " · ".join(v if n in bare and not v.startswith("at most") else f"{n} {v}" for n, v in facets)


def cover(space: Space, region: Node, frame: Box, limit: int) -> tuple[list[Region], int]:
    """At most ``limit`` large boxes that together cover a region, and the number of its points that they leave out."""
    d, out, left = space.diagrams, list[Region](), region
    # a box may also hold points at which no request exists
    spread = d.ite(space.possible, region, d.true)
    while left != d.false and len(out) < limit:
        point = space.cheapest(left)
        assert point is not None
        box = _widened(space, spread, point)
        inside = d.box(box)
        facets = tuple(described(space, _narrowed(box, frame), frame))
        out.append(Region(facets, d.count(d.conjoin([left, inside])), space.example(point)))
        left = d.ite(inside, d.false, left)
    return out, d.count(left)


def _narrowed(box: Box, frame: Box) -> Box:
    """The facets in which a box is narrower than its frame."""
    inside = {level: classes & frame[level] for level, classes in box.items()}
    return {level: classes for level, classes in inside.items() if classes != frame[level]}


def _widened(space: Space, region: Node, point: list[int]) -> Box:
    """A large box inside a region, around a point, made by widening one facet after the other."""
    d = space.diagrams
    box: Box = {level: frozenset({c}) for level, c in enumerate(point)}
    # the facets that matter most to a reader are widened last
    order = sorted(
        box, key=lambda level: TOLD_FIRST.index(v) if (v := space.variables[level].facet) in TOLD_FIRST else -1
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


def described(space: Space, box: Box, frame: Box | None = None) -> Iterator[tuple[str, str]]:
    """The facets that a box restricts, and their values in words. frame: a box that leaves some features open."""
    on: dict[str, list[str]] = {"features": [], "flags": [], "packages": []}
    off: dict[str, list[str]] = {"features": [], "flags": [], "packages": []}
    for level in sorted(box):
        variable = space.variables[level]
        if variable.facet == "packages":
            installed, text = _package_text(space, variable, box[level])
            (on if installed else off)["packages"].append(text)
        elif variable.word is not None:
            (on if box[level] == {1} else off)[variable.facet].append(variable.name)
        else:
            yield variable.name, _values_text(variable, box[level])
    free = [w for w in _open_features(space, frame) if w not in (*on["features"], *off["features"])]
    if len(off["features"]) > max(len(free), 2):
        # the features it may have are fewer than those it must not have
        yield "features", _at_most(on.pop("features"), free)
    for facet in on:
        if on[facet]:
            yield facet, ", ".join(on[facet])
        if off[facet]:
            yield facet, "without " + ", ".join(off[facet])


def _open_features(space: Space, frame: Box | None) -> list[str]:
    """The features that a frame leaves open."""
    features = [(level, v.name) for level, v in enumerate(space.variables) if v.facet == "features"]
    return [name for level, name in features if frame is None or len(frame[level]) == 2]


def _at_most(asked: list[str], free: list[str]) -> str:
    if not asked:
        return f"at most {', '.join(free)}" if free else "none"
    return f"{', '.join(asked)}, and at most {', '.join(free)}" if free else f"{', '.join(asked)} alone"


def _package_text(space: Space, variable: Variable, classes: frozenset[int]) -> tuple[bool, str]:
    """Whether a package is installed in some classes, and the package with its versions as text."""
    clauses = (c for r in space.registries for c in every_clause(r) if c.facet == "packages")
    requirements = {requirement for c in clauses for requirement in c.matcher.mentions}
    some = frozenset(i for i, c in enumerate(variable.classes) if c[0] is not None)
    every = frozenset(range(len(variable.classes)))
    for requirement in [Requirement(variable.name), *sorted(requirements, key=str)]:
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
    """Some classes of a facet in words: the values that they hold, or "not" those that they leave out, if shorter."""
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
    """Integers in words, as runs or as the first few with their step; what reaches ``top`` has no end."""
    none = ["not given"] if None in values else []
    numbers = sorted(v for v in values if v is not None and v <= top)
    return ", ".join([*none, *(_steps_text(numbers, top) or _runs_text(numbers, top))])


def _steps_text(numbers: list[int], top: int) -> list[str]:
    """Integers with one step between them, if they are many or have no end; else an empty list."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    step = steps.pop() if len(steps) == 1 else 1
    endless = bool(numbers) and numbers[-1] > top - step
    if step == 1 or not (endless or len(numbers) > 4):
        return []
    if endless and numbers[0] == step:
        return [f"multiples of {step}"]
    last = "" if endless else f" {numbers[-1]}"
    return [f"{numbers[0]}, {numbers[1]}, …{last} (every {step})"]


def _runs_text(numbers: list[int], top: int) -> list[str]:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts = [_run_text(run[0], run[-1], top) for run in runs]
    return texts if len(texts) <= 8 else [*texts[:3], f"… ({len(numbers):,} up to {top:,})"]


def _run_text(first: int, last: int, top: int) -> str:
    return f"{first} or more" if last == top else str(first) if first == last else f"{first} to {last}"


def _word(value: Any) -> str:
    return "not given" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
