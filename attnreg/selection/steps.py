"""The start of an engine: its steps, run at the point of a request, and the changes that each step made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.language.computed import value_at
from attnreg.language.engine.architectures import NATIVE
from attnreg.language.frozen import FrozenDict
from attnreg.language.vocabulary import ASKED, AUTOMATIC, BY_MODEL, NAMED
from attnreg.registry import Switched
from attnreg.request import with_extra

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.registry import Effect, Registry, Step
    from attnreg.request import AttentionRequest
    from attnreg.selection.point import Point


# a place in a sentence that is filled in
_PLACE = re.compile(r"\{(version|architecture|about)\}")


class Taken(NamedTuple):
    """A step that wrote facets, or refused the run: ``sets`` maps each facet to its value before and after the step.

    A facet that gets its old value again counts as written.
    """

    step: Step
    effect: Effect
    sets: Mapping[str, tuple[Any, Any]]

    @property
    def name(self) -> str:
        """The step's name."""
        return self.step.name

    @property
    def where(self) -> Location:
        """The line of the data that had the effect."""
        return self.effect.where

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The facets that have another value after the step."""
        return {facet: (before, after) for facet, (before, after) in self.sets.items() if before != after}

    @property
    def text(self) -> str:
        """``dtype float32 → bfloat16 (float32-config)``; for a refusal its sentence."""
        if self.effect.refuses:
            return self.effect.refuses
        parts = [f"{facet} {_shown(before)} → {_shown(after)}" for facet, (before, after) in self.changes.items()]
        because = f": {self.effect.because}" if self.effect.because else ""
        return f"{', '.join(parts)} ({self.name}){because}"

    def to_dict(self) -> dict[str, Any]:
        """The step as JSON-ready values."""
        sets = {facet: {"before": _plain(b), "after": _plain(a)} for facet, (b, a) in self.sets.items()}
        return {"step": self.name, "sets": sets, "because": self.effect.because, "where": str(self.where)}


@dataclass(frozen=True)
class Start:
    """What an engine does with a request before it chooses a backend.

    ``taken`` are the steps that wrote facets, in order. ``refusal`` is the step that refuses the run, or whose answer
    the registry does not know, if any. ``named`` is the step that names the backend, if one does. ``facts`` has every
    facet after the steps.
    """

    taken: tuple[Taken, ...]
    facts: Mapping[str, Any] = field(repr=False)
    refusal: Taken | None = None
    named: Taken | None = None

    @property
    def changes(self) -> tuple[Taken, ...]:
        """The steps that changed something."""
        return tuple(t for t in self.taken if t.changes)

    def decided_by(self, facet: str) -> Taken | None:
        """The last step that wrote a facet, or None if no step wrote it."""
        return next((taken for taken in reversed(self.taken) if facet in taken.sets), None)

    def request(self, asked: AttentionRequest, registry: Registry) -> AttentionRequest:
        """The request after the steps, in place of the user's request ``asked``."""
        known = registry.vocabulary.facets
        now = {f: self.facts[f] for t in self.taken for f in t.changes if known[f].of == "request"}
        if not now:
            return asked
        fields = with_extra(now)
        extra = {**dict(asked.extra), **dict(fields.pop("extra", ()))}
        return replace(asked, **fields, extra=tuple(extra.items()))

    def to_dict(self) -> dict[str, Any]:
        """The start as JSON-ready values."""
        refusal = self.refusal
        refused = refusal and {
            "step": refusal.name,
            "text": refusal.effect.refuses,
            "unknown": refusal.effect.unknown,
            "where": str(refusal.where),
        }
        return {"steps": [taken.to_dict() for taken in self.taken], "refused": refused or None}


def start_of(point: Point) -> tuple[Start, Point]:
    """The start of the engine at a point, and the point at which it then chooses."""
    taken: list[Taken] = []
    named = None
    for step in point.registry.steps:
        if not step.when.holds(point):
            continue
        effect = next((e for e in step.effects if e.when.holds(point)), None)
        if effect is None:
            continue
        if effect.refuses:
            refusal = Taken(step, _filled(effect, step, point), FrozenDict())
            return Start(tuple(taken), point.facts(), refusal, named), point
        if not effect.sets:
            if effect.ends:
                break
            continue
        after = {facet: _value(value, facet, point) for facet, value in effect.sets.items()}
        done = Taken(step, effect, FrozenDict({facet: (point[facet], value) for facet, value in after.items()}))
        taken.append(done)
        if NAMED in after:
            named = done if after[NAMED] is not None else None
            after[ASKED] = BY_MODEL if named else AUTOMATIC
        point = point.changed(after)
        if effect.ends:
            break
    return Start(tuple(taken), point.facts(), None, named), point


def _filled(effect: Effect, step: Step, point: Point) -> Effect:
    """A refusal whose sentence has values in place of ``{version}``, ``{architecture}`` and ``{about}``.

    They are the version of the step's source, the architecture of the model, and what the registry's table says of it.
    The table's line is then that of the refusal, unless the release has a class of its own for the architecture.
    """
    if "{" not in effect.refuses:
        return effect
    registry, name = point.registry, point.get("architecture")
    served = registry.architectures.of([name]) if registry.architectures is not None and name else None
    source = registry.sources.get((step.source or "").partition(":")[0])
    values = {
        "version": source.version if source else "",
        "architecture": name or "this architecture",
        "about": served.about if served else "",
    }
    where = effect.where
    if served is not None and served.where is not None and served.how != NATIVE:
        where = served.where
    return replace(effect, refuses=_PLACE.sub(lambda found: values[found[1]], effect.refuses), where=where)


def _value(value: Any, facet: str, point: Point) -> Any:
    return (point[facet] | value.on) - value.off if type(value) is Switched else value_at(value, point)


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "not given" if value is None else str(value)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value
