"""`attnreg diff`: the exact set of configurations that get another backend from another registry, as a few boxes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.analysis.boxes import Region, cover, described
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.errors import did_you_mean

if TYPE_CHECKING:
    from attnreg.analysis.diagram import Node
    from attnreg.platforms import Packages
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest


class EmptyQuestionError(ValueError):
    """Raised for a question that no configuration satisfies."""


@dataclass(frozen=True, slots=True)
class SelectionChange:
    """All configurations that go from one backend (None: none) to another.

    Both titles have the variant and the emulated features: ``FLASH_ATTN/FA3``. ``frame`` has the common facets of the
    configurations in words, ``archs`` their architectures. ``rest`` is the number of configurations outside the listed
    regions.
    """

    before: str | None
    after: str | None
    frame: tuple[tuple[str, str], ...]
    archs: tuple[str, ...]
    count: int
    regions: tuple[Region, ...]
    rest: int

    @property
    def kind(self) -> str:
        return "gains a backend" if self.before is None else "loses its backend" if self.after is None else "changes"


@dataclass(frozen=True, slots=True)
class Diff:
    """The difference between two registries over ``size`` configurations with words that both know.

    ``gone`` and ``new`` are the words that only ``before`` or only ``after`` knows, by facet; the comparison leaves
    them out.
    """

    before: Registry
    after: Registry
    size: int
    changes: tuple[SelectionChange, ...]
    gone: Mapping[str, tuple[str, ...]]
    new: Mapping[str, tuple[str, ...]]

    @property
    def count(self) -> int:
        """The number of configurations that change."""
        return sum(c.count for c in self.changes)

    def to_dict(self) -> dict[str, Any]:
        """The difference as JSON-ready values."""
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
                    "archs": list(c.archs),
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


def diff(
    before: Registry,
    after: Registry,
    *,
    within: Mapping[str, Any] | None = None,
    requests: Collection[AttentionRequest] = (),
    packages: Packages | None = None,
    any_packages: bool = False,
    limit: int = 8,
) -> Diff:
    """Every configuration whose backend differs, grouped by the backends before and after.

    within: facet -> the value, or the values, of the configurations to compare; for features, flags and packages all of
    the words. requests: compare only these requests, on every platform. packages: the installed packages; None means
    every package. any_packages: compare each package both installed and missing. limit: the most boxes for each pair of
    backends, the box nearest to an ordinary request first; the counts stay exact.

    Raises ValueError for a facet in ``within`` that neither registry has, and for a value that neither knows. Raises
    `EmptyQuestionError` if no configuration satisfies the question; its text has the contradiction.
    """
    space = Space([before, after])
    d = space.diagrams
    archs = (within or {}).get("arch", ())
    archs = [archs] if isinstance(archs, str) else archs
    asked = {facet: _within(space, facet, wanted) for facet, wanted in (within or {}).items()}
    parts = {
        "known to both": _common(space, before, after),
        "the requests": d.unite(_points_of(space, request) for request in requests) if requests else d.true,
        **{f"{facet} {_shown(wanted)}": asked[facet] for facet, wanted in (within or {}).items()},
    }
    installed = [
        d.among(level, [variable.class_of(variable.value_in({"packages": packages}))])
        for level, variable in enumerate(space.variables)
        if variable.facet == "packages" and not any_packages
    ]
    inside = d.conjoin([space.possible, *parts.values(), *installed])
    if inside == d.false:
        raise EmptyQuestionError(_contrary(space, parts))
    old, new = (d.ite(inside, Model(space, registry).titles(), d.terminal(None)) for registry in (before, after))
    pairs = d.apply(lambda a, b: None if a == b else (a, b), old, new)
    compared = d.bounds(inside)
    changes = []
    for pair in d.terminals(pairs):
        region = d.equals(pairs, pair)
        frame = d.bounds(region)
        boxes, rest = cover(space, region, frame, limit)
        shown = {level: classes for level, classes in frame.items() if classes != compared[level]}
        devices = tuple(
            arch for c in sorted(frame[0]) for _, arch in space.variables[0].classes[c] if arch in (archs or (arch,))
        )
        text = tuple(described(space, shown))
        changes.append(SelectionChange(pair[0], pair[1], text, devices, d.count(region), tuple(boxes), rest))
    changes.sort(key=lambda c: (-c.count, c.before or "", c.after or ""))
    return Diff(before, after, d.count(inside), tuple(changes), words_of(before, after), words_of(after, before))


def _contrary(space: Space, parts: Mapping[str, Node]) -> str:
    """Why no configuration satisfies all parts: the first parts that exclude each other."""
    d = space.diagrams
    known, *stated = parts
    for text in stated:
        if d.conjoin([space.possible, parts[text]]) == d.false:
            return f"no request has {text}"
        if d.conjoin([space.possible, parts[known], parts[text]]) == d.false:
            return f"{text}: only one of the registries knows it, so there is nothing to compare"
    return f"no configuration has all of this: {', '.join(t for t in stated if parts[t] != d.true)}"


def _shown(wanted: Any) -> str:
    values = [wanted] if isinstance(wanted, str | int) or wanted is None else list(wanted)
    return " or ".join("not given" if value is None else str(value) for value in values)


def words_of(these: Registry, those: Registry) -> dict[str, tuple[str, ...]]:
    """The words that one registry knows and another does not, by facet."""
    out = {}
    for name, facet in these.vocabulary.facets.items():
        other = those.vocabulary.facets.get(name)
        words = sorted(facet.known - other.known) if other and facet.kind in ("word", "arch", "words") else []
        if words:
            out[name] = tuple(words)
    return out


def _common(space: Space, before: Registry, after: Registry) -> Node:
    """The configurations with words that both registries know, on platforms for which both have data, or neither."""
    d, parts = space.diagrams, []
    both = before.orders.keys() | after.orders.keys()
    silent = {platform for platform in both if _silent(before, platform) != _silent(after, platform)}
    foreign = [
        (facet, word)
        for a, b in ((before, after), (after, before))
        for facet, ws in words_of(a, b).items()
        for word in ws
    ]
    for level, variable in enumerate(space.variables):
        words = {word for facet, word in foreign if facet == variable.facet}
        if variable.word is not None:
            parts += [d.among(level, [0])] if variable.word in words else []
        elif words:
            part = [c if variable.facet != "arch" else tuple(a for _, a in c) for c in variable.classes]
            parts.append(d.among(level, [i for i, c in enumerate(part) if not set(c) <= words]))
    devices = space.variables[0].classes
    parts.append(d.among(0, [i for i, c in enumerate(devices) if not {platform for platform, _ in c} <= silent]))
    return d.conjoin(parts)


def _silent(registry: Registry, platform: str) -> bool:
    """Whether a registry with orders lacks one for a platform, so that its choice there is unknown."""
    return bool(registry.orders) and not registry.orders.get(platform)


def _points_of(space: Space, request: AttentionRequest) -> Node:
    """The configurations of one request, on every platform."""
    # facets that a registry declares and the request lacks are None
    declared = (f for r in space.registries for f in r.vocabulary.facets.values() if f.of == "request")
    facts, d = {**{f.name: None for f in declared}, **request.facts()}, space.diagrams
    variables = [(level, v) for level, v in enumerate(space.variables) if v.facet in facts]
    return d.conjoin(d.among(level, [v.class_of(v.value_in(facts))]) for level, v in variables)


def _within(space: Space, facet: str, wanted: Any) -> Node:
    """The configurations in which a facet has one of these values; a set facet must hold all of them."""
    values = [wanted] if isinstance(wanted, str | int) or wanted is None else list(wanted)
    _validate_words(space, facet, values)
    if facet in ("features", "flags", "packages"):
        return _holding(space, facet, values)
    if facet in ("platform", "arch"):
        part = 0 if facet == "platform" else 1
        devices = space.variables[0].classes
        return space.diagrams.among(0, [i for i, c in enumerate(devices) if any(v[part] in values for v in c)])
    return _having(space, facet, values)


def _validate_words(space: Space, facet: str, values: Collection[Any]) -> None:
    """Raises ValueError for a word that neither registry knows."""
    known = {w for r in space.registries if (f := r.vocabulary.facets.get(facet)) for w in f.words}
    if facet == "packages":
        known = {w for r in space.registries for w in r.vocabulary.packages}
    for value in values:
        if known and value is not None and value not in known:
            raise ValueError(f"unknown {facet} {value!r}; {did_you_mean(value, map(str, known))}")


def _holding(space: Space, facet: str, words: Collection[Any]) -> Node:
    """The configurations in which a set holds all of these words. A word without effect excludes no configuration."""
    d = space.diagrams
    levels = [level for word in words if (level := space.level.get((facet, str(word)))) is not None]
    present = [[i for i, c in enumerate(space.variables[k].classes) if c[0] not in (None, False)] for k in levels]
    return d.conjoin(d.among(*pair) for pair in zip(levels, present, strict=True))


def _having(space: Space, facet: str, values: Collection[Any]) -> Node:
    """The configurations in which a single-valued facet has one of ``values``."""
    level = space.level.get((facet, None))
    if level is None:
        facets = {
            name for r in space.registries for name, f in r.vocabulary.facets.items() if f.of in ("request", "platform")
        }
        if facet not in facets:
            raise ValueError(f"no request has a facet {facet!r}; {did_you_mean(facet, facets, 40)}")
        # no condition of the registries reads the facet
        return space.diagrams.true
    variable = space.variables[level]
    for value in values:
        if variable.top is not None and value is not None and not isinstance(value, int):
            raise ValueError(f"{facet} is {value!r}; expected an integer")
    try:
        return space.diagrams.among(level, [variable.class_of(value) for value in values])
    except KeyError as e:
        raise ValueError(f"no request has {e.args[0]}") from None
