"""Boxes: covers a region of the space with a few large boxes, and describes each box facet by facet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.analysis.value_classes import Variable, every_clause
from attnreg.language.facets import MAIN_FACETS
from attnreg.language.matchers import Requirement

_MOST_PIECES = 6

if TYPE_CHECKING:
    from attnreg.analysis.diagram import Box, Node
    from attnreg.analysis.space import Space
    from attnreg.platforms import Platform
    from attnreg.request import AttentionRequest


@dataclass(frozen=True, slots=True)
class Region:
    """A box of configurations with the same change, in words: the facets in which it is narrower than the frame.

    The frame is the smallest box around all configurations of the change. ``count`` is the number of configurations
    that the box adds to the earlier boxes; ``example`` is one of them.
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
    """At most ``limit`` large boxes that together cover a region, and the number of points outside the boxes."""
    d, out, left = space.diagrams, list[Region](), region
    # a box may include points without a request
    spread = d.ite(space.possible, region, d.true)
    tested = sorted(d.tested(spread))
    while left != d.false and len(out) < limit:
        point = space.cheapest(left)
        assert point is not None
        box = _widened(space, spread, {level: point[level] for level in tested})
        inside = d.box(box)
        facets = tuple(described(space, _narrowed(box, frame), frame))
        out.append(Region(facets, d.count(d.conjoin([left, inside])), space.example(point)))
        left = d.ite(inside, d.false, left)
    return out, d.count(left)


def _narrowed(box: Box, frame: Box) -> Box:
    """The facets in which a box is narrower than its frame."""
    inside = {level: classes & frame[level] for level, classes in box.items()}
    return {level: classes for level, classes in inside.items() if classes != frame[level]}


def _widened(space: Space, region: Node, point: Mapping[int, int]) -> Box:
    """A large box inside a region, around a point, made by widening one facet after the other.

    point: variable -> its class, for the variables that the region depends on.
    """
    d = space.diagrams
    box = {level: frozenset({c}) for level, c in point.items()}
    # the facets that matter most to a reader are widened last
    order = sorted(
        box, key=lambda level: MAIN_FACETS.index(v) if (v := space.variables[level].facet) in MAIN_FACETS else -1
    )
    for level in order:
        if len(d.allowed(region, box, level)) == d.sizes[level]:
            del box[level]
    for level in [level for level in order if level in box]:
        box[level] = d.allowed(region, box, level)
    return box


def described(space: Space, box: Box, frame: Box | None = None) -> Iterator[tuple[str, str]]:
    """The facets that a box restricts, and their values in words. frame: the box around all boxes of the change."""
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
        # the list of allowed features is shorter than the list of forbidden ones
        yield "features", _at_most(on.pop("features"), free)
    for facet in on:
        if on[facet]:
            yield facet, ", ".join(on[facet])
        if off[facet]:
            yield facet, "without " + ", ".join(off[facet])


def _open_features(space: Space, frame: Box | None) -> list[str]:
    """The features that may be on or off in a frame."""
    features = [(level, v.name) for level, v in enumerate(space.variables) if v.facet == "features"]
    return [name for level, name in features if frame is None or len(frame[level]) == 2]


def _at_most(asked: list[str], free: list[str]) -> str:
    if not asked:
        return f"at most {', '.join(free)}" if free else "none"
    return f"{', '.join(asked)}, and at most {', '.join(free)}" if free else f"{', '.join(asked)} alone"


def _package_text(space: Space, variable: Variable, classes: frozenset[int]) -> tuple[bool, str]:
    """Whether a package is installed in these classes, and the package with its versions as text."""
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
    """Some classes of a facet in words: their values, or "not" and the other values, if that is shorter."""
    values = [v for c in sorted(classes) for v in variable.classes[c]]
    others = [v for i, c in enumerate(variable.classes) if i not in classes for v in c]
    if others == [None]:
        return "given"
    if variable.facet == "arch":
        return _arch_text(values, others)
    if variable.top is not None:
        return _integers_text(values, others, variable.top)
    names, rest = ([_word(v) for v in group] for group in (values, others))
    if len(rest) >= len(names):
        return ", ".join(names)
    # avoids the text "not not given"
    return " and ".join(["given"] * (None in others) + [f"not {', '.join(w for w in rest if w != _word(None))}"])


def _arch_text(values: list[Any], others: list[Any]) -> str:
    platforms = dict.fromkeys(p for p, _ in values)
    whole = [p for p in platforms if not any(o[0] == p for o in others)]
    parts = [f"every {p} architecture" for p in whole]
    parts += [a for p, a in values if p not in whole]
    return ", ".join(parts)


def _integers_text(values: list[Any], others: list[Any], top: int) -> str:
    """Integers in words: the values, or "not" and the other values, whichever is shorter."""
    groups = [sorted(v for v in group if v is not None and v <= top) for group in (values, others)]
    pieces = [_pieces(numbers, top) for numbers in groups]
    texts = [", ".join(p) for p in pieces]
    longer = len(pieces[0]) > _MOST_PIECES or len(texts[0]) > len(texts[1]) + 4
    negative = bool(texts[1]) and longer and len(pieces[1]) <= _MOST_PIECES
    text = f"not {texts[1]}" if negative else texts[0]
    if not negative and len(pieces[0]) > _MOST_PIECES:
        some = groups[0]
        last = f"from {some[0]} on" if some[-1] == top else f"from {some[0]} to {some[-1]}"
        text = f"{len(some):,} values {last}, such as {', '.join(map(str, some[:3]))}"
    if None in others:
        return f"given, {text}" if negative else text
    if None in values:
        return ", ".join(filter(None, ("not given", f"or {text}" if negative else text)))
    return text


def _pieces(numbers: list[int], top: int) -> list[str]:
    """Sorted integers as runs, multiples, and runs without multiples; a piece that reaches ``top`` is unbounded.

    The list stops after one piece more than the most that are printed.
    """
    texts: list[str] = []
    rest = numbers
    while rest and len(texts) <= _MOST_PIECES:
        # the longest piece that begins with the first number; if several are equally long, the simplest form
        count, text = max((_run(rest, top), _steps(rest, top), _gaps(rest, top)), key=lambda piece: piece[0])
        texts.append(text)
        rest = rest[count:]
    return texts


def _run(numbers: list[int], top: int) -> tuple[int, str]:
    """The first numbers that follow each other without a gap: their count, and their words."""
    count = _longest(n == numbers[0] + i for i, n in enumerate(numbers))
    return count, _run_text(numbers[0], numbers[count - 1], top)


def _steps(numbers: list[int], top: int) -> tuple[int, str]:
    """The first numbers with one constant step: their count, and their words; 0 if they are few."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    count = _longest(n == numbers[0] + i * step for i, n in enumerate(numbers))
    endless = numbers[count - 1] > top - step
    if step == 1 or not (endless or count > 4):
        return 0, ""
    if endless and numbers[0] == step:
        return count, f"multiples of {step}"
    last = "" if endless else f" {numbers[count - 1]}"
    return count, f"{numbers[0]}, {numbers[1]}, …{last} (every {step})"


def _gaps(numbers: list[int], top: int) -> tuple[int, str]:
    """The first numbers that lack only multiples of one step: their count, and their words; 0 if they are few."""
    missing = next((a + 1 for a, b in itertools.pairwise(numbers) if b != a + 1), 0)
    best = (0, "")
    small = [k for k in range(1, math.isqrt(missing) + 1) if missing % k == 0]
    for step in sorted({*small, *(missing // k for k in small)} - {1}):
        expected = (n for n in range(numbers[0], top + 1) if n % step)
        count = _longest(n == e for n, e in zip(numbers, expected, strict=False))
        last = numbers[count - 1]
        if count > best[0] and count and (last - numbers[0]) // step > 1:
            best = count, f"{_run_text(numbers[0], last, top if last < top - 1 else last)} but no multiple of {step}"
    return best


def _longest(holds: Iterable[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, holds))


def _run_text(first: int, last: int, top: int) -> str:
    return f"{first} or more" if last == top else str(first) if first == last else f"{first} to {last}"


def _word(value: Any) -> str:
    return "not given" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
