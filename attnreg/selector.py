"""select(request, platform, registry) -> Selection: pure, complete, and with the reason for every verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from attnreg.conditions import Condition
from attnreg.errors import Location, NoBackendError, did_you_mean
from attnreg.request import RequestError

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Choice, Order, Registry, Variant
    from attnreg.request import AttentionRequest

Kind = Literal["claim", "feature", "requires", "rule", "variant", "emulated", "order", "denied", "status", "module"]
_CACHE_LIMIT = 8192


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate was not chosen: the facets, what was asked, what is supported, and the line that says so."""

    kind: Kind
    facets: tuple[str, ...]
    where: Location
    asked: Any = None
    supported: str = ""
    sentence: str = ""

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
        verb = "needs" if self.kind in ("requires", "order", "variant") else "supported:"
        return f"{facet} is {_shown(self.asked)}; {verb} {self.supported}"

    def to_dict(self) -> dict[str, Any]:
        asked = sorted(self.asked) if isinstance(self.asked, frozenset) else self.asked
        return {
            "kind": self.kind,
            "facets": list(self.facets),
            "asked": asked,
            "supported": self.supported,
            "text": self.text,
            "where": str(self.where),
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """The verdict on one backend: ``accepted`` where nothing speaks against it, else every reason.

    ``emulates`` lists the features that it would serve correctly but slowly. ``rank`` counts from 1 in the order.
    """

    rank: int
    name: str
    variant: str | None
    reasons: tuple[Reason, ...]
    where: Location
    emulates: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        return not self.reasons

    @property
    def title(self) -> str:
        """``FLASH_ATTN/FA3``."""
        return f"{self.name}/{self.variant}" if self.variant else self.name

    def to_dict(self) -> dict[str, Any]:
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
    row: Backend
    registry: Registry

    def load(self) -> ModuleType:
        """Import its kernel module. Raises ImportError with the reason where the row has none that may be imported."""
        return self.registry.load(self.name)


@dataclass(frozen=True)
class Selection:
    """The answer to one request, immutable, with the whole trace.

    ``backend`` is None where nothing is valid (then `select` raises `NoBackendError`, which carries the selection).
    ``choice`` is what decided instead of the order: a user's ``require`` or ``prefer``, or None. ``requested`` is the
    backend that was asked for, by argument or by ``require``.
    """

    request: AttentionRequest
    platform: Platform
    registry: Registry = field(repr=False)
    order: Order | None
    candidates: tuple[Candidate, ...]
    backend: Selected | None = None
    requested: str | None = None
    choice: Choice | None = None
    warnings: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The winning candidate."""
        return next((c for c in self.candidates if self.backend and c.name == self.backend.name and c.accepted), None)

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """The other backends of the order that accept the request, the preferred first."""
        if self.requested is None:
            return tuple(c.name for c in self.candidates if c.accepted and c is not self.chosen)
        try:
            automatic = select(self.request, self.platform, self.registry)
        except NoBackendError as e:
            automatic = e.selection
        return tuple(c.name for c in automatic.candidates if c.accepted and c.name != self.requested)

    @cached_property
    def derived(self) -> dict[str, tuple[Any, Location]]:
        """Each derived facet's value here, with the line of the case that spoke."""
        point = _point(self.request, self.platform, self.registry)
        return {name: (point[name], d.case(point)) for name, d in self.registry.derived.items()}

    def refusal(self) -> str:
        """Why nothing was chosen, as the text of `NoBackendError`."""
        where = f"{self.platform.platform} {self.platform.arch}"
        if self.requested:
            first = f"{self.requested} does not accept this request on {where}:"
        elif self.order:
            first = (
                f"No backend accepts this request on {where} (order `{self.order.title}`, {self.order.where.short}):"
            )
        else:
            first = f"{self.registry.title} has no order for {where}."
        lines = [first]
        width = max((len(c.title) for c in self.candidates), default=0)
        for c in self.candidates:
            for i, reason in enumerate(c.reasons):
                lines.append(f"  {c.title if i == 0 else '':<{width}}  {reason.text}  [{reason.where.short}]")
        if self.requested:
            others = ", ".join(self.alternatives) or "no backend of the order would"
            lines.append(f"  help: would accept it: {others}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The selection as JSON-ready values."""
        return {
            "registry": self.registry.title,
            "platform": self.platform.to_dict(),
            "request": self.request.to_dict(),
            "backend": {"name": self.backend.name, "variant": self.backend.variant} if self.backend else None,
            "requested": self.requested,
            "order": {"name": self.order.title, "where": str(self.order.where)} if self.order else None,
            "choice": {"strength": self.choice.strength, "where": str(self.choice.where)} if self.choice else None,
            "warnings": list(self.warnings),
            "candidates": [c.to_dict() for c in self.candidates],
        }


class _Point(dict[str, Any]):
    """Facet -> value; derived facets are computed when a condition first asks for them."""

    __slots__ = ("registry",)

    def __init__(self, facts: Mapping[str, Any], registry: Registry) -> None:
        super().__init__(facts)
        self.registry = registry

    def __missing__(self, facet: str) -> Any:
        derived = self.registry.derived.get(facet)
        value = self[facet] = derived.value(self) if derived is not None else None
        return value


def select(
    request: AttentionRequest,
    platform: Platform,
    registry: Registry | None = None,
    backend: str | None = None,
    *,
    to_run: bool = False,
) -> Selection:
    """The backend for one layer on one platform, with the verdict on every candidate.

    The candidates of the first order that applies are all evaluated completely, and the first without a reason against
    it is chosen; one that would only emulate a requested feature waits until no later one serves it natively.
    ``backend`` asks for one by name: it goes through the same evaluation, and is never replaced by another. ``to_run``
    adds the requirement that its kernel module loads here.

    Deterministic, thread-safe and without side effects; answers are remembered in the registry.

    Raises `NoBackendError` (the trace as ``.selection``) where nothing is valid, `RequestError` for a word that the
    registry does not know.
    """
    if registry is None:
        from attnreg.loader import default_registry

        registry = default_registry()
    key = (request, platform, backend, to_run)
    selection: Selection | None = registry.cache.get(key)
    if selection is None:
        selection = _select(request, platform, registry, backend, to_run)
        if len(registry.cache) >= _CACHE_LIMIT:
            registry.cache.clear()
        registry.cache[key] = selection
    if selection.backend is None:
        raise NoBackendError(selection)
    return selection


def _select(
    request: AttentionRequest, platform: Platform, registry: Registry, backend: str | None, to_run: bool
) -> Selection:
    point = _point(request, platform, registry)
    order = next((o for o in registry.orders.get(platform.platform, ()) if o.when.holds(point)), None)
    choices = [c for c in registry.choices if c.when.holds(point)]
    # a later overlay speaks after an earlier one; an argument speaks last
    choice = next((c for c in reversed(choices) if c.strength != "deny"), None) if backend is None else None
    denied = {name: c for c in choices if c.strength == "deny" for name in c.backends}
    requested = backend or (choice.backends[0] if choice and choice.strength == "require" else None)
    if requested is not None and requested not in registry.backends:
        raise RequestError(f"unknown backend {requested!r}; {did_you_mean(requested, registry.backends)}")
    entries = _entries(registry, order, requested, choice)
    judge = _Judge(registry, point, denied, to_run, automatic=requested is None)
    candidates = [judge.candidate(i, name, where, condition) for i, (name, where, condition) in enumerate(entries, 1)]
    warnings: list[str] = []
    if choice and choice.strength == "prefer" and candidates and candidates[0].reasons:
        why = "; ".join(r.text for r in candidates[0].reasons)
        warnings.append(f"{choice.backends[0]} is preferred ({choice.where.short}) but not valid: {why}")
    winner = next((c for c in candidates if c.accepted and not c.emulates), None)
    if winner is not None:
        candidates = [_passed_over(c, winner, registry) if c.emulates and c.accepted else c for c in candidates]
    else:
        winner = next((c for c in candidates if c.accepted), None)
        if winner is not None:
            notes = _emulation(registry, winner)
            warnings.append(f"{winner.title} emulates {', '.join(winner.emulates)} (slow): {'; '.join(notes)}")
    chosen = Selected(winner.name, winner.variant, registry.backends[winner.name], registry) if winner else None
    return Selection(
        request=request,
        platform=platform,
        registry=registry,
        order=order,
        candidates=tuple(candidates),
        backend=chosen,
        requested=requested,
        choice=choice,
        warnings=tuple(warnings),
    )


def _point(request: AttentionRequest, platform: Platform, registry: Registry) -> _Point:
    facts = request.facts()
    facts.update(platform.facts())
    facets = registry.vocabulary.facets
    for name, value in facts.items():
        facet = facets.get(name)
        if facet is None:
            raise RequestError(f"{name} is no facet of {registry.title}; {did_you_mean(name, facets)}")
        if value is None or facet.kind in ("integer", "text", "packages"):
            continue
        if facet.kind == "words":
            if not value <= facet.words:
                _unknown(sorted(value - facet.words)[0], facet.name, facet.words, registry)
        elif value not in facet.words:
            _unknown(value, name, facet.words, registry)
    arch = registry.vocabulary.architectures[platform.arch]
    if arch.platform != platform.platform:
        raise RequestError(
            f"arch is {platform.arch}, which belongs to platform {arch.platform}, not {platform.platform}"
        )
    return _Point(facts, registry)


def _unknown(word: Any, facet: str, known: frozenset[Any], registry: Registry) -> None:
    raise RequestError(
        f"{facet} names {word!r}, which {registry.title} does not know; {did_you_mean(word, map(str, known))}"
    )


def _entries(
    registry: Registry, order: Order | None, requested: str | None, choice: Choice | None
) -> Iterator[tuple[str, Location, Condition | None]]:
    """Name, place and automatic condition of what is tried, in this order."""
    if requested is not None:
        yield requested, choice.where if choice else registry.backends[requested].where, None
        return
    preferred = choice.backends[0] if choice is not None else None
    if preferred is not None and choice is not None:
        yield preferred, choice.where, None
    for entry in order.entries if order else ():
        if entry.backend != preferred:
            yield entry.backend, entry.where, entry.condition


class _Judge:
    """Evaluates candidates at one point."""

    __slots__ = ("automatic", "denied", "features", "point", "registry", "to_run")

    def __init__(
        self, registry: Registry, point: _Point, denied: dict[str, Choice], to_run: bool, automatic: bool
    ) -> None:
        self.registry = registry
        self.point = point
        self.denied = denied
        self.to_run = to_run
        self.automatic = automatic
        self.features: frozenset[str] = point["features"]

    def candidate(self, rank: int, name: str, where: Location, condition: Condition | None) -> Candidate:
        row = self.registry.backends[name]
        before: list[Reason] = []
        if name in self.denied:
            denial = self.denied[name]
            sentence = f"denied{': ' + denial.because if denial.because else ' by the overlay'}"
            before.append(Reason("denied", (), denial.where, sentence=sentence))
        # a condition of the order, and a status, concern the automatic choice only
        if condition is not None and not condition.holds(self.point):
            before += _unmet(condition, self.point, "order")
        if condition is not None and row.status == "experimental":
            before.append(Reason("status", (), row.where, sentence="experimental: never chosen automatically"))
        variant, reasons = self._best_variant(row)
        if self.to_run:
            reasons = [*reasons, *self._unloadable(row)]
        emulates = () if variant is None else tuple(sorted(self.features & variant.emulated.keys()))
        return Candidate(rank, name, variant.name if variant else None, (*before, *reasons), where, emulates)

    def _best_variant(self, row: Backend) -> tuple[Variant | None, list[Reason]]:
        """The first variant that serves natively, else the first that accepts, else the one with least against it.

        Where the `when` of no variant holds, the nearest one's condition is among the reasons.
        """
        emulating: Variant | None = None
        nearest: tuple[Variant | None, list[Reason]] | None = None
        for variant in row.variants:
            if not variant.when.holds(self.point):
                continue
            reasons = self._reasons(variant)
            if not reasons:
                if not self.features & variant.emulated.keys():
                    return variant, []
                emulating = emulating or variant
            elif nearest is None or len(reasons) < len(nearest[1]):
                nearest = variant, reasons
        if emulating is not None:
            return emulating, []
        if nearest is not None:
            return nearest
        excluded = [(_unmet(v.when, self.point, "variant") + self._reasons(v), self._foreign(v)) for v in row.variants]
        return None, min(excluded, key=lambda e: (len(e[0]), e[1]))[0]

    def _foreign(self, variant: Variant) -> bool:
        """Whether a variant is for other platforms: its architectures are none of this one's."""
        here = [a.name for a in self.registry.vocabulary.architectures_of(self.point["platform"])]
        archs = [c.matcher for c in variant.when.clauses if c.facet == "arch"]
        return any(not any(m.matches(a) for a in here) for m in archs)

    def _reasons(self, variant: Variant) -> list[Reason]:
        point = self.point
        out: list[Reason] = []
        for claim in variant.claims:
            value = point[claim.facet]
            if value is not None and not claim.matcher.matches(value):
                out.append(Reason("claim", (claim.facet,), claim.where, value, claim.matcher.text))
        if not variant.requires.holds(point):
            out[:0] = _unmet(variant.requires, point, "requires")
        if not self.features <= variant.served:
            out += [
                Reason("feature", ("features", feature), variant.features_at, feature)
                for feature in sorted(self.features - variant.served)
            ]
        for rule in variant.rules:
            if rule.when.holds(point):
                out.append(Reason("rule", rule.facets, rule.where, sentence=rule.reject))
        return out

    def _unloadable(self, row: Backend) -> list[Reason]:
        try:
            self.registry.load(row.name)
        except Exception as e:
            return [
                Reason("module", (), row.module_at or row.where, sentence=f"cannot be run: {type(e).__name__}: {e}")
            ]
        return []


def _unmet(condition: Condition, point: Mapping[str, Any], kind: Kind) -> list[Reason]:
    """A reason for each part of a condition that does not hold."""
    out: list[Reason] = []
    for clause in condition.clauses:
        value = point[clause.facet]
        if clause.matcher.matches(value):
            continue
        if clause.facet == "flags" and clause.matcher.form == "all":
            missing = sorted(clause.matcher.mentions - value)
            out += [Reason(kind, ("flags",), clause.where, flag) for flag in missing]
        elif clause.facet == "packages":
            missing = [r for r in sorted(clause.matcher.mentions, key=str) if not r.met_by(value)]
            out += [_missing_package(r, value, clause.where, kind) for r in missing]
        else:
            out.append(Reason(kind, (clause.facet,), clause.where, value, clause.matcher.text))
    for group in condition.any_of:
        if not any(c.holds(point) for c in group):
            facets = tuple(dict.fromkeys(f for c in group for f in c.facets))
            text = "needs " + " or ".join(c.describe() for c in group)
            out.append(Reason(kind, facets, group[0].where, sentence=text))
    for part in condition.none_of:
        if part.holds(point):
            out.append(Reason(kind, part.facets, part.where, sentence=f"not for {part.describe()}"))
    return out


def _missing_package(requirement: Any, value: Any, where: Location, kind: Kind) -> Reason:
    version = dict(value or ()).get(requirement.package)
    if version is None:
        return Reason(kind, ("packages",), where, requirement.package, requirement.versions)
    sentence = f"package {requirement.package} is version {version}; needs {requirement.versions}"
    return Reason(kind, ("packages",), where, requirement.package, requirement.versions, sentence)


def _emulation(registry: Registry, candidate: Candidate) -> list[str]:
    row = registry.backends[candidate.name]
    variant = next(v for v in row.variants if v.name == candidate.variant)
    return [variant.emulated[feature][0] for feature in candidate.emulates]


def _passed_over(candidate: Candidate, winner: Candidate, registry: Registry) -> Candidate:
    if candidate is winner:
        return candidate
    row = registry.backends[candidate.name]
    variant = next(v for v in row.variants if v.name == candidate.variant)
    words = ", ".join(candidate.emulates)
    them = "them" if len(candidate.emulates) > 1 or words.endswith("s") else "it"
    sentence = f"emulates {words} (slow); {winner.title} serves {them} natively"
    where = variant.emulated[candidate.emulates[0]][1]
    reason = Reason("emulated", ("features", *candidate.emulates), where, words, sentence=sentence)
    return replace(candidate, reasons=(reason,))


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value))) or "none"
    return (
        "not given"
        if value is None
        else {True: "true", False: "false"}.get(value, str(value))
        if isinstance(value, bool)
        else str(value)
    )
