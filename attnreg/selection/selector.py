"""The selector: a request, a platform and a registry -> a `Selection`, with the reasons for every verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from attnreg.errors import Location, RequestError, did_you_mean, few_of_many, shown
from attnreg.language.conditions import Condition
from attnreg.language.vocabulary import NAMED
from attnreg.selection.judge import Judge
from attnreg.selection.point import Point, placed, point_of
from attnreg.selection.steps import Start, start_of
from attnreg.selection.trace import Candidate, Selected, Selection

if TYPE_CHECKING:
    from attnreg.language.backend_options import Fallback
    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Choice, Order, Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Unloadable

    Arguments = tuple[AttentionRequest, Platform, str | None, Unloadable | None]

LIMIT = 8192
_ATTRIBUTE = "_answers"


def evaluate(
    request: AttentionRequest,
    platform: Platform,
    registry: Registry,
    backend: str | None = None,
    *,
    unloadable: Unloadable | None = None,
) -> Selection:
    """The selection for a request, cached. If no backend is valid, its ``backend`` is None; no error is raised.

    unloadable: a function that says why a kernel module cannot run; its answer is a reason against the backend.
    `loader.unloadable` imports the module, `without_module` reads the data alone. None: no module has to load.
    """
    try:
        platform = placed(platform, registry)
        arguments = (request, platform, backend, unloadable)
        answers = answers_of(registry)
        selection = answers.get(arguments)
    # an argument without a hash, such as a list in place of a name
    except Exception:
        _validate_arguments(request, platform, registry, backend)
        raise
    if selection is None:
        _validate_arguments(request, platform, registry, backend)
        selection = evaluate_anew(request, platform, registry, backend, unloadable)
        if unloadable is None or not _may_load_later(selection):
            remember(answers, arguments, selection)
    # a product decides nothing, so platforms that differ in it share an answer, but not its words
    return selection if selection.platform.product == platform.product else replace(selection, platform=platform)


def answers_of(registry: Registry) -> dict[Arguments, Selection]:
    """The cached selections of one registry, by the arguments of each.

    The cache is an attribute of the registry, not a field, so copies, comparisons and pickles leave it out. A table of
    all registries would keep each registry alive for ever, because every selection holds its registry.
    """
    attributes = registry.__dict__
    answers: dict[Arguments, Selection] | None = attributes.get(_ATTRIBUTE)
    # setdefault is atomic, so all threads use one cache
    return attributes.setdefault(_ATTRIBUTE, {}) if answers is None else answers


def remember(answers: dict[Arguments, Selection], arguments: Arguments, selection: Selection) -> None:
    """Cache a selection; a cache that is full is emptied first."""
    if len(answers) >= LIMIT:
        answers.clear()
    answers[arguments] = selection


def without_module(registry: Registry, backend: str) -> str:
    """Why a backend cannot run, from the data alone; "" if its row names a kernel module. Nothing is imported."""
    row = registry.row(backend)
    named = registry.imports and row is not None and row.variants[0].module is not None
    return "" if named else f"{backend} has no kernel module that attnreg can run"


def _validate_arguments(request: object, platform: object, registry: object, backend: object) -> None:
    """Raise `RequestError` for an argument of a wrong type."""
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest

    expected: list[tuple[str, object, type, str]] = [
        ("request", request, AttentionRequest, "an AttentionRequest"),
        ("platform", platform, Platform, "a Platform"),
        ("registry", registry, Registry, "a Registry, as load_registry returns it"),
    ]
    for name, value, kind, what in expected:
        if not isinstance(value, kind):
            raise RequestError(f"{name} is {shown(value)}; expected {what}")
    if backend is not None and type(backend) is not str:
        raise RequestError(f"backend is {shown(backend)}; expected the name of a backend")


def _may_load_later(selection: Selection) -> bool:
    """Whether a candidate before the chosen one was refused only because its module failed to import."""
    registry, chosen = selection.registry, selection.chosen
    tried = selection.candidates[: chosen.rank if chosen else None]
    loadable = {name for name, row in registry.backends.items() if registry.imports and row.modules}
    return any({r.kind for r in c.reasons} == {"module"} and c.name in loadable for c in tried)


def evaluate_anew(
    request: AttentionRequest,
    platform: Platform,
    registry: Registry,
    backend: str | None,
    unloadable: Unloadable | None = None,
) -> Selection:
    """The selection for a request, computed without the cache."""
    if platform.arch in registry.vocabulary.unread:
        # no table holds anything of this architecture, so no verdict would be true
        return Selection(request=request, platform=platform, registry=registry, order=None, candidates=())
    return _evaluated(_plan(request, platform, registry, backend), request, platform, unloadable)


def _evaluated(
    plan: _Decision, request: AttentionRequest, platform: Platform, unloadable: Unloadable | None
) -> Selection:
    registry, refused = plan.registry, plan.start is not None and plan.start.refusal is not None
    judge = Judge(registry, plan.point, plan.denied, unloadable)
    # a backend that a user named is the first candidate and has a point of its own
    first = judge if plan.first is plan.point else Judge(registry, plan.first, plan.denied, unloadable)
    candidates, winner = _decide([] if refused else _judge(plan, first, judge), judge)
    fallback = _fallback(plan, candidates)
    if fallback is not None:
        instead = plan.automatic()._replace(instead=fallback.takes)
        return _give_way(_evaluated(instead, request, platform, unloadable), candidates[0], fallback)
    warnings = [*_not_preferred(plan, candidates), *_replaced(plan, winner)]
    if winner is not None:
        warnings += (first if winner.rank == 1 else judge).warnings(winner)
    return Selection(
        request=request,
        platform=platform,
        registry=registry,
        order=None if refused else plan.order,
        candidates=tuple(candidates),
        backend=Selected(winner.name, winner.variant, registry.backends[winner.name], registry) if winner else None,
        requested=plan.requested or plan.held,
        choice=plan.choice,
        warnings=tuple(warnings),
        unloadable=unloadable,
        start=plan.start,
    )


class _Decision(NamedTuple):
    """What decides a selection: the points, the order, and the choices that apply.

    ``first`` is the point of the first candidate, ``point`` that of all others. ``requested`` is the backend that a
    user names, ``named`` the one that a step of the engine's start names: no other backend is then tried. ``choice`` is
    the user's choice that requires or prefers one, ``denied`` maps backends to the choices that deny them. Each may
    name one variant: ``FLASH_ATTN/FA3``. ``held`` is the name that a user gives and a facet holds, which steps read.
    ``instead`` is the backend that a fallback takes.
    """

    registry: Registry
    first: Point
    point: Point
    order: Order | None
    choice: Choice | None
    requested: str | None
    named: str | None
    denied: Mapping[str, Choice]
    start: Start | None
    held: str | None = None
    instead: str | None = None

    def automatic(self) -> _Decision:
        """The plan in which the order decides, after the same steps."""
        point = self.point.automatic()
        start = self.start and replace(self.start, named=None, facts=point.facts())
        choice = self.choice if self.choice and self.choice.strength == "prefer" else None
        first = point.by_name(choice.backends[0]) if choice else point
        return _Decision(self.registry, first, point, _order(point), choice, None, None, self.denied, start)


def _plan(request: AttentionRequest, platform: Platform, registry: Registry, backend: str | None) -> _Decision:
    point = point_of(request, platform, registry)
    choices = [c for c in registry.choices if c.when.holds(point)]
    # a later overlay overrides an earlier one, and an argument overrides both
    choice = next((c for c in reversed(choices) if c.strength != "deny"), None) if backend is None else None
    denied = {name: c for c in choices if c.strength == "deny" for name in c.backends}
    requested = choice.backends[0] if choice and choice.strength == "require" else backend
    if requested is not None and registry.row(requested) is None:
        raise _unknown(requested, registry)
    held = None
    if requested is not None and (facet := _holds_names(point)) is not None:
        held, point, requested = requested, _holding(point, facet, requested), None
    start = None
    if registry.steps:
        start, point = start_of(point if requested is None else point.by_name(requested))
        # a step read the name, and left the choice to the order
        if requested is not None and choice is None and start.named is None and start.decided_by(NAMED) is not None:
            requested = None
    named = point[NAMED] if start is not None and start.named is not None else None
    preferred = requested or (choice.backends[0] if choice is not None else None)
    first = point.by_name(preferred) if preferred is not None and named is None else point
    requested = None if named is not None else requested
    return _Decision(registry, first, point, _order(point), choice, requested, named, denied, start, held)


def _holds_names(point: Point) -> str | None:
    """The facet that holds the name of a backend that a user gives, where the engine's steps read it from one."""
    options = (option for option in point.registry.options if option.name == "backend")
    return next((option.facet for option in options if option.reaches.holds(point)), None)


def _holding(point: Point, facet: str, name: str) -> Point:
    """The point with a name in the facet that holds it, in place of what the request has there."""
    if name not in point.registry.vocabulary.facets[facet].known:
        raise RequestError(f"{facet} cannot be {shown(name)}", f"name the backend alone: {name.partition('/')[0]}")
    return point.changed({facet: name})


def _order(point: Point) -> Order | None:
    return next((o for o in point.registry.orders.get(point["platform"], ()) if o.when.holds(point)), None)


def _judge(plan: _Decision, first: Judge, others: Judge) -> list[Candidate]:
    """The verdicts on all candidates, in the order in which they are tried."""
    return [
        (first if rank == 1 else others).candidate(rank, row, where, condition)
        for rank, (row, where, condition) in enumerate(_entries(plan), 1)
    ]


def _entries(plan: _Decision) -> Iterator[tuple[Backend, Location, Condition | None]]:
    """Row, line and condition of each candidate, in the order of trying; the condition of a named row is None."""
    choice, order, rows, start = plan.choice, plan.order, plan.registry.backends, plan.start
    if plan.instead is not None:
        yield rows[plan.instead], rows[plan.instead].where, None
        return
    if plan.named is not None and start is not None and start.named is not None:
        yield rows[plan.named], start.named.where, None
        return
    named = plan.requested or (choice.backends[0] if choice is not None else None)
    row = plan.registry.row(named) if named is not None else None
    if row is not None:
        yield row, choice.where if choice else row.where, None
    if plan.requested is None:
        for entry in order.entries if order else ():
            if entry.backend != named:
                row = rows.get(entry.backend) or plan.registry.row(entry.backend)
                assert row is not None, entry
                yield row, entry.where, entry.condition


def _unknown(name: str, registry: Registry) -> RequestError:
    """The error for an unknown backend or variant, with the known name that is nearest."""
    backend, slash, variant = name.partition("/")
    if slash and backend in registry.backends:
        variants = registry.backends[backend].variant_names
        help_ = did_you_mean(variant, variants) if variants else "it has no variants; name the backend alone"
        return RequestError(f"unknown variant {variant!r} of {backend}", help_)
    titles = [f"{row.name}/{v}" for row in registry.backends.values() for v in row.variant_names]
    owners = [title for title in titles if title.partition("/")[2].casefold() == name.casefold()]
    if owners:
        return RequestError(f"unknown backend {name!r}", f"it is a variant: {', '.join(owners)}")
    listed = "attnreg list" if registry.base == "default" else f"attnreg list --registry {registry.base}"
    nearest = few_of_many(name, titles if slash else registry.backends, listed)
    return RequestError(f"unknown backend {name!r}", nearest + registry.missed)


def _decide(candidates: list[Candidate], judge: Judge) -> tuple[list[Candidate], Candidate | None]:
    """The candidates and the winner: the first that serves natively, else the first that accepts.

    A native winner adds a reason to each candidate before it that would emulate.
    """
    accepted = [c for c in candidates if c.accepted]
    native = next((c for c in accepted if not c.emulates), None)
    if native is None:
        return candidates, next(iter(accepted), None)
    if len(accepted) > 1:
        candidates = [judge.passed_over(c, native) if c.emulates and c.accepted else c for c in candidates]
    return candidates, native


def _fallback(plan: _Decision, candidates: list[Candidate]) -> Fallback | None:
    """The registry's fallback that replaces the named backend, if one does.

    A backend that a choice requires is not replaced; only a backend named by an argument or by a step of the start is.
    """
    by_argument = plan.requested is not None and plan.choice is None
    if not (by_argument or plan.named) or not candidates:
        return None
    told, facets = candidates[0], plan.registry.vocabulary.facets
    # a reason about a feature names the feature too
    about = {facet for reason in told.reasons for facet in reason.facets if facet in facets}

    for fallback in plan.registry.fallbacks:
        if not fallback.when.holds(plan.first):
            continue
        if told.name == fallback.takes or told.name in fallback.unless:
            return None
        if fallback.only is None or (told.reasons and about <= fallback.only):
            return fallback
    return None


def _give_way(automatic: Selection, refused: Candidate, fallback: Fallback) -> Selection:
    """The selection in place of a named backend, with a warning that it replaces that backend."""
    reason = f" ({refused.reasons[0].text})" if refused.reasons else ""
    why = f"{refused.title} was asked for{reason}, but {fallback.because}"
    return replace(automatic, gave_way=refused, warnings=(f"{why} ({fallback.where.short})", *automatic.warnings))


def _replaced(plan: _Decision, winner: Candidate | None) -> list[str]:
    """A warning if the engine's steps take another backend than the user named."""
    if plan.held is None or winner is None or winner.name == plan.held or plan.start is None:
        return []
    facet = _holds_names(plan.point)
    by = plan.start.decided_by(facet) if facet is not None else None
    what = f"{by.name} takes {winner.name} in its place ({by.where.short})" if by else f"{winner.name} is named too"
    return [f"{plan.held} was asked for, but {what}"]


def _not_preferred(plan: _Decision, candidates: list[Candidate]) -> list[str]:
    """A warning if the backend that a user prefers is not valid."""
    choice = plan.choice
    if choice is None or choice.strength != "prefer" or not candidates:
        return []
    if plan.named is not None and plan.named != choice.backends[0].partition("/")[0]:
        return [f"{choice.backends[0]} is preferred ({choice.where.short}) but not chosen: {plan.named} is named"]
    if not candidates[0].reasons:
        return []
    why = "; ".join(r.text for r in candidates[0].reasons)
    return [f"{choice.backends[0]} is preferred ({choice.where.short}) but not chosen: {why}"]
