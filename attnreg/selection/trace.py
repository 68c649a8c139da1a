"""Selection: the answer to one request, with the verdict on every candidate and the line of data behind it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from attnreg.errors import Location
from attnreg.language.facets import undeclared
from attnreg.language.frozen import FrozenDict
from attnreg.selection.consequences import Following, following, run_facts
from attnreg.selection.point import Point, point_of
from attnreg.selection.steps import Start
from attnreg.selection.wording import layer_words, platform_words, request_words

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Choice, Order, Registry, Variant
    from attnreg.request import AttentionRequest

    # a registry and the name of a backend -> why its kernel module cannot be run; "" where it can
    Unloadable = Callable[[Registry, str], str]

Kind = Literal[
    "claim", "feature", "requires", "rule", "variant", "emulated", "order", "denied", "status", "module", "fails"
]


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason against a candidate: the facets, the requested value, the supported values, and the line of data.

    ``sentence``, if given, replaces the text made from these. ``case`` is the line that gave a derived facet its value.
    """

    kind: Kind
    facets: tuple[str, ...]
    where: Location
    asked: Any = None
    supported: str = ""
    sentence: str = ""
    case: Location | None = None

    @property
    def text(self) -> str:
        """The reason as a sentence."""
        if self.sentence:
            return self.sentence
        facet = self.facets[0]
        if self.kind == "feature":
            return f"{self.asked} is not supported"
        if facet == "flags":
            return f"flag {self.asked} is off"
        if facet == "packages":
            return f"package {self.asked} is not installed" + (f"; needs {self.supported}" if self.supported else "")
        verb = "supported:" if self.kind == "claim" else "needs"
        because = f" ({self.case.short})" if self.case else ""
        return f"{facet} is {_shown(self.asked)}{because}; {verb} {self.supported}"

    def to_dict(self) -> dict[str, Any]:
        """The reason as JSON-ready values."""
        return {
            "kind": self.kind,
            "facets": list(self.facets),
            "asked": self.asked,
            "supported": self.supported,
            "text": self.text,
            "where": str(self.where),
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """The verdict on one backend: ``accepted``, or every reason against it.

    ``emulates`` lists the features that it would serve correctly but slowly. ``rank`` is its place in the order, from
    1.
    """

    rank: int
    name: str
    variant: str | None
    reasons: tuple[Reason, ...]
    where: Location
    emulates: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether there is no reason against it."""
        return not self.reasons

    @property
    def title(self) -> str:
        """``FLASH_ATTN/FA3``."""
        return f"{self.name}/{self.variant}" if self.variant else self.name

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON-ready values."""
        return {
            "rank": self.rank,
            "name": self.name,
            "variant": self.variant,
            "accepted": self.accepted,
            "emulates": list(self.emulates),
            "reasons": [r.to_dict() for r in self.reasons],
            "where": str(self.where),
        }


@dataclass(frozen=True)
class Selected:
    """The backend that was chosen."""

    name: str
    variant: str | None
    row: Backend = field(repr=False)
    registry: Registry = field(repr=False)

    @property
    def title(self) -> str:
        """``FLASH_ATTN/FA3``."""
        return f"{self.name}/{self.variant}" if self.variant else self.name


@dataclass(frozen=True, repr=False)
class Selection:
    """The answer to one request, immutable, with the whole trace.

    ``backend`` is None if no backend is valid; `select` then raises `NoBackendError`, which has the selection.
    ``choice`` is the user's ``require`` or ``prefer`` that applies, or None. ``requested`` is the backend that a user
    named, by argument or by ``require``. ``unloadable`` is the function that found modules which cannot run, or None.
    ``start`` has the engine's steps before the choice, or None if the registry has no steps. ``gave_way`` is the
    candidate that a user named, if a fallback of the registry let its order decide instead. It is not among
    ``candidates``.
    """

    request: AttentionRequest
    platform: Platform
    registry: Registry
    order: Order | None
    candidates: tuple[Candidate, ...]
    backend: Selected | None = None
    requested: str | None = None
    choice: Choice | None = None
    warnings: tuple[str, ...] = ()
    unloadable: Unloadable | None = None
    start: Start | None = None
    gave_way: Candidate | None = None

    def __str__(self) -> str:
        """The answer in one line, then a line for each change, warning and fact. ``candidates`` has the rest."""
        words = self.registry.vocabulary
        asked = request_words(self.request, without=undeclared(words.facets))
        subject = f"{', '.join(asked)} on {', '.join(platform_words([self.platform], words))}"
        lines = [f"  → {change}" for change in self.started]
        lines += [*(f"  ! {warning}" for warning in self.warnings), *(f"  · {line}" for line in self.facts)]
        return "\n".join([answer_sentence(self, subject), *lines])

    def __repr__(self) -> str:
        return f"<Selection {str(self).splitlines()[0]}>"

    @property
    def chosen(self) -> Candidate | None:
        """The winning candidate."""
        return next((c for c in self.candidates if self.backend and c.name == self.backend.name and c.accepted), None)

    @property
    def nearest(self) -> Candidate | None:
        """The first candidate with the fewest reasons against it, or None if there is no candidate."""
        return min(self.candidates, key=lambda c: len(c.reasons), default=None)

    def against(self, name: str) -> tuple[str, ...]:
        """Why a backend, or a variant of one, is not chosen, in words; empty if it is chosen.

        The backend that a user named is not always the first candidate. The registry's order may decide instead, or the
        engine's start may name another backend or refuse the run.
        """
        chosen = self.chosen
        if chosen is not None and name in (chosen.title, chosen.name):
            return ()
        if self.start is not None and self.start.refusal is not None:
            return (self.start.refusal.text,)
        candidates = (*([self.gave_way] if self.gave_way else []), *self.candidates)
        found = next((c for c in candidates if name in (c.title, c.name)), None)
        if found is not None and found.reasons:
            return tuple(reason.text for reason in found.reasons)
        return (
            f"{chosen.title} is chosen in its place, {how_chosen(self)}"
            if chosen
            else self.silence or "no backend is chosen",
        )

    @cached_property
    def derived(self) -> Mapping[str, tuple[Any, Location]]:
        """Derived facet -> its value for this request, and the line of the case that gives it."""
        derived = {} if self.platform.arch in self.registry.vocabulary.unread else self.registry.derived
        point = self.point() if derived else {}
        return FrozenDict({name: (point[name], d.case(point)) for name, d in derived.items()})

    @cached_property
    def consequences(self) -> tuple[Following, ...]:
        """The consequences of the choice that the data knows: failures, workspaces, the kernel's block."""
        return self._following(self.chosen) if self.chosen is not None else ()

    @cached_property
    def run_facts(self) -> tuple[Following, ...]:
        """What the choice means for the whole run: the layouts of the cache, and the level of graphs."""
        return tuple(run_facts(self.variant, self.point())) if self.variant is not None else ()

    @cached_property
    def failures(self) -> Mapping[int, tuple[Following, ...]]:
        """Rank of an accepted candidate -> the known failures of the engine after it is chosen."""
        found = {c.rank: [f for f in self._following(c) if f.kind == "fails"] for c in self.candidates if c.accepted}
        return FrozenDict({rank: tuple(fails) for rank, fails in found.items() if fails})

    def _following(self, candidate: Candidate) -> tuple[Following, ...]:
        variant = _variant_of(candidate, self.registry)
        return tuple(following(variant, self.point(candidate))) if variant.consequences else ()

    @property
    def variant(self) -> Variant | None:
        """The chosen backend's variant, with its claims and consequences."""
        return None if self.chosen is None else _variant_of(self.chosen, self.registry)

    @property
    def fails(self) -> bool:
        """Whether the engine is known to stop with the chosen backend; ``warnings`` say why."""
        return any(follows.kind == "fails" for follows in self.consequences)

    @property
    def unknown(self) -> bool:
        """Whether the engine gives an answer that the registry does not know."""
        refusal = self.start.refusal if self.start is not None else None
        return refusal.effect.unknown if refusal is not None else bool(self.silence)

    @property
    def silence(self) -> str:
        """A message if no order and no step is about this platform, or no data about its architecture, else ""."""
        start = self.start
        decided = self.backend or self.requested or (start is not None and (start.refusal or start.named))
        return "" if decided else self.registry.silence(self.platform.platform, self.platform.arch)

    @property
    def title(self) -> str:
        """The chosen backend with its variant, ``no backend``, or ``not known``."""
        return self.chosen.title if self.chosen else "not known" if self.unknown else "no backend"

    @property
    def started(self) -> tuple[str, ...]:
        """A sentence for each change that the engine's start made to the request, and one if it refuses the run."""
        start = self.start
        if start is None:
            return ()
        taken = (*start.changes, *([start.refusal] if start.refusal else []))
        return tuple(f"{t.text} ({t.where.short})" for t in taken)

    @property
    def facts(self) -> tuple[str, ...]:
        """A sentence for each consequence of the choice, without those in the warnings, and one for the measurement."""
        following = tuple(f"{f.text} ({f.where.short})" for f in self.consequences if f.kind not in ("fails", "drops"))
        return (*following, self.evidence) if self.evidence else following

    @property
    def evidence(self) -> str:
        """The measurement behind the choice: how much faster it is than the next backend; "" for a judgement."""
        order, chosen = self.order, self.chosen
        if order is None or order.measured is None or chosen is None or chosen.title != order.measured.of:
            return ""
        return f"{order.measured.text} ({order.measured.where.short})"

    def point(self, candidate: Candidate | None = None) -> Point:
        """The point at which a candidate was judged; by default the chosen candidate."""
        told, start = candidate or self.chosen, self.start
        point = point_of(self.request, self.platform, self.registry)
        if start is not None:
            point = Point(start.facts, self.registry)
            if start.named is not None:
                return point
        named = self.requested or (self.choice.backends[0] if self.choice and told and told.rank == 1 else None)
        return point if named is None else point.by_name(named)

    def to_dict(self) -> dict[str, Any]:
        """The selection as JSON-ready values."""
        return {
            "registry": self.registry.title,
            "platform": self.platform.to_dict(),
            "request": self.request.to_dict(),
            "backend": {"name": self.backend.name, "variant": self.backend.variant} if self.backend else None,
            "requested": self.requested,
            "order": {"name": self.order.title, "where": str(self.order.where)} if self.order else None,
            **({"evidence": self.evidence} if self.evidence else {}),
            "choice": {"strength": self.choice.strength, "where": str(self.choice.where)} if self.choice else None,
            "derived": {name: {"value": v, "where": str(where)} for name, (v, where) in self.derived.items()},
            **({} if self.start is None else {"start": self.start.to_dict()}),
            **({"silence": self.silence} if self.silence else {}),
            "warnings": list(self.warnings),
            "consequences": [follows.to_dict() for follows in self.consequences],
            **({"run": [fact.to_dict() for fact in self.run_facts]} if self.run_facts else {}),
            "candidates": [
                {**c.to_dict(), "fails": [f.to_dict() for f in self.failures.get(c.rank, ())]} for c in self.candidates
            ],
        }


def how_chosen(selection: Selection) -> str:
    """How a backend was chosen: ``4th choice of 5 (order rocm/mha, priorities.yaml:31)``.

    Other forms: ``requested``, ``required by mine.yaml:3``, ``preferred by mine.yaml:3 (order …)``. If no backend was
    chosen it is the order, or the requested name, or ``vllm-0.32.0 says nothing of cpu``.
    """
    chosen, choice, order, start = selection.chosen, selection.choice, selection.order, selection.start
    if start is not None and start.refusal is not None:
        return f"{'said' if selection.unknown else 'refused'} by {start.refusal.name}, {start.refusal.where.short}"
    if start is not None and start.named is not None:
        return f"named by {start.named.name}, {start.named.where.short}"
    if selection.requested:
        name = "" if chosen else f"{selection.requested} "
        return f"{name}required by {choice.where.short}" if choice else f"{name}requested"
    place = f"(order {order.title}, {order.where.short})" if order else "(no order for this request)"
    if chosen is None:
        return selection.silence or place
    if choice is not None and chosen.rank == 1:
        return f"preferred by {choice.where.short} {place}"
    return f"{_ordinal(chosen.rank)} choice of {len(selection.candidates)} {place}"


def answer_sentence(selection: Selection, subject: str = "") -> str:
    """A selection in one line: the backend, the layers, how it was chosen, and the registry.

    subject: the layers in words; by default those of the request.
    """
    what = subject or layer_words(selection.request)
    return f"{selection.title} for {what}: {how_chosen(selection)}; {selection.registry.title}"


def verdict_words(
    selection: Selection, candidate: Candidate, reasons: Iterable[Reason] | None = None
) -> list[tuple[str, Location]]:
    """The reasons against a candidate that was not chosen, or a note that it ranks lower, each with the line of data.

    For an accepted candidate with which the engine would fail, the failures replace the note. Several missing features
    of one line become one text, and so do several flags. reasons: reasons in place of the candidate's own, for
    platforms that share a verdict but differ in values.
    """
    printed = candidate.reasons if reasons is None else reasons
    words = []
    for _, same in itertools.groupby(printed, key=_list_key):
        first, *more = same
        text = first.text
        if more:
            names = ", ".join(str(r.asked) for r in (first, *more))
            text = f"{names} are not supported" if first.kind == "feature" else f"flags {names} are off"
        words.append((text, first.where))
    fails = selection.failures.get(candidate.rank, ()) if candidate.accepted else ()
    words += [(f"accepted, and would then fail: {follows.text}", follows.where) for follows in fails]
    return words or [("valid too, ranked lower", candidate.where)]


def _variant_of(candidate: Candidate, registry: Registry) -> Variant:
    return next(v for v in registry.backends[candidate.name].variants if v.name == candidate.variant)


def _list_key(reason: Reason) -> object:
    """A key that is equal for reasons which share one text."""
    if not reason.sentence and (reason.kind == "feature" or reason.facets[:1] == ("flags",)):
        return reason.kind, reason.where
    return reason


def trace_lines(selection: Selection, names: Collection[str | None] | None = None) -> list[str]:
    """The trace in plain text: a line for each reason against a candidate, and how the chosen one was chosen.

    names: the backends to print; all of them, if None.
    """
    chosen = selection.chosen
    # the winner is listed once, though it may have further places in the order
    candidates = [c for c in selection.candidates if chosen is None or c is chosen or c.title != chosen.title]
    shown = [c for c in candidates if names is None or c.name in names]
    width = max((len(c.title) for c in shown), default=0)
    lines = []
    for candidate in shown:
        if candidate is chosen:
            texts = [how_chosen(selection)]
        else:
            texts = [f"{text}  [{where.short}]" for text, where in verdict_words(selection, candidate)]
        heads = (candidate.title, *[""] * (len(texts) - 1))
        lines += [f"{head:<{width}}  {text}" for head, text in zip(heads, texts, strict=True)]
    return lines


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _ordinal(rank: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(rank if rank < 20 else rank % 10, "th")
    return f"{rank}{suffix}"
