"""evaluate(request, platform, registry) -> Selection: pure, complete, and with the reason for every verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from attnreg.errors import Location, RequestError, did_you_mean
from attnreg.language.conditions import Condition
from attnreg.selection.judge import Judge
from attnreg.selection.memory import answers_of, remember
from attnreg.selection.point import Point, point_of
from attnreg.selection.trace import Candidate, Selected, Selection

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Choice, Fallback, Order, Registry
    from attnreg.request import AttentionRequest


def evaluate(
    request: AttentionRequest,
    platform: Platform,
    registry: Registry,
    backend: str | None = None,
    *,
    to_run: bool = False,
) -> Selection:
    """What `attnreg.select` answers, where nothing is valid too: the selection's ``backend`` is None then."""
    asked, answers = (request, platform, backend, to_run), answers_of(registry)
    selection = answers.get(asked)
    if selection is None:
        selection = evaluate_anew(request, platform, registry, backend, to_run)
        remember(answers, asked, selection)
    return selection


def evaluate_anew(
    request: AttentionRequest, platform: Platform, registry: Registry, backend: str | None, to_run: bool
) -> Selection:
    """What `evaluate` answers, worked out: nothing is looked up, and nothing is remembered."""
    asked = _what_is_asked(request, platform, registry, backend)
    judge = Judge(registry, asked.point, asked.denied, to_run)
    # judges the first candidate, where somebody named it
    first = Judge(registry, asked.point.by_name(), asked.denied, to_run) if asked.names_one else judge
    candidates, winner = _decide(_judge(asked, first, judge), judge)
    fallback = _fallback(asked, first.point, candidates)
    if fallback is not None:
        return _give_way(evaluate_anew(request, platform, registry, None, to_run), candidates[0], fallback)
    warnings = _not_preferred(asked, candidates)
    if winner is not None:
        warnings += (first if winner.rank == 1 else judge).warnings(winner)
    return Selection(
        request=request,
        platform=platform,
        registry=registry,
        order=asked.order,
        candidates=tuple(candidates),
        backend=Selected(winner.name, winner.variant, registry.backends[winner.name], registry) if winner else None,
        requested=asked.requested,
        choice=asked.choice,
        warnings=tuple(warnings),
        to_run=to_run,
    )


class _Asked(NamedTuple):
    """What is asked of a registry: at which point, by which order, and what users decided for it.

    ``requested`` is the one backend that is tried, if any; ``choice`` says who requires or prefers it.
    """

    registry: Registry
    point: Point
    order: Order | None
    choice: Choice | None
    requested: str | None
    denied: Mapping[str, Choice]

    @property
    def names_one(self) -> bool:
        """Whether somebody named a backend: it is the first candidate then."""
        return self.requested is not None or self.choice is not None


def _what_is_asked(request: AttentionRequest, platform: Platform, registry: Registry, backend: str | None) -> _Asked:
    point = point_of(request, platform, registry)
    order = next((o for o in registry.orders.get(platform.platform, ()) if o.when.holds(point)), None)
    choices = [c for c in registry.choices if c.when.holds(point)]
    # a later overlay speaks after an earlier one; an argument speaks last
    choice = next((c for c in reversed(choices) if c.strength != "deny"), None) if backend is None else None
    denied = {name: c for c in choices if c.strength == "deny" for name in c.backends}
    requested = choice.backends[0] if choice and choice.strength == "require" else backend
    if requested is not None and requested not in registry.backends:
        raise RequestError(f"unknown backend {requested!r}; {did_you_mean(requested, registry.backends)}")
    return _Asked(registry, point, order, choice, requested, denied)


def _judge(asked: _Asked, first: Judge, others: Judge) -> list[Candidate]:
    """The verdict on everything that is tried, in this order."""
    return [
        (first if rank == 1 else others).candidate(rank, name, where, condition)
        for rank, (name, where, condition) in enumerate(_entries(asked), 1)
    ]


def _entries(asked: _Asked) -> Iterator[tuple[str, Location, Condition | None]]:
    """Name, place and automatic condition of what is tried, in this order."""
    choice, order = asked.choice, asked.order
    if asked.requested is not None:
        yield asked.requested, choice.where if choice else asked.registry.backends[asked.requested].where, None
        return
    preferred = choice.backends[0] if choice is not None else None
    if preferred is not None and choice is not None:
        yield preferred, choice.where, None
    for entry in order.entries if order else ():
        if entry.backend != preferred:
            yield entry.backend, entry.where, entry.condition


def _decide(candidates: list[Candidate], judge: Judge) -> tuple[list[Candidate], Candidate | None]:
    """The candidates and the winner: the first that serves natively, else the first that accepts.

    A native winner is a reason against those before it that would emulate.
    """
    accepted = [c for c in candidates if c.accepted]
    native = next((c for c in accepted if not c.emulates), None)
    if native is None:
        return candidates, next(iter(accepted), None)
    if len(accepted) > 1:
        candidates = [judge.passed_over(c, native) if c.emulates and c.accepted else c for c in candidates]
    return candidates, native


def _fallback(asked: _Asked, point: Point, candidates: list[Candidate]) -> Fallback | None:
    """What the data says of giving way to the order, where the backend that an argument names is refused."""
    fallbacks = asked.registry.fallbacks
    if asked.requested is None or asked.choice is not None or not fallbacks or not candidates[0].reasons:
        return None
    about = {facet for reason in candidates[0].reasons for facet in reason.facets}
    return next((f for f in fallbacks if about <= f.only and f.when.holds(point)), None)


def _give_way(automatic: Selection, refused: Candidate, fallback: Fallback) -> Selection:
    """The order's answer, with a warning that it is not what was asked for."""
    why = f"{refused.title} was asked for ({refused.reasons[0].text}), but {fallback.because}"
    return replace(automatic, warnings=(f"{why} ({fallback.where.short})", *automatic.warnings))


def _not_preferred(asked: _Asked, candidates: list[Candidate]) -> list[str]:
    """A warning where the backend that a user prefers is not valid."""
    choice = asked.choice
    if choice is None or choice.strength != "prefer" or not candidates[0].reasons:
        return []
    why = "; ".join(r.text for r in candidates[0].reasons)
    return [f"{choice.backends[0]} is preferred ({choice.where.short}) but not chosen: {why}"]
