"""evaluate(request, platform, registry) -> Selection: pure, complete, and with the reason for every verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from attnreg.errors import Location, RequestError, did_you_mean
from attnreg.language.conditions import Clause, Condition
from attnreg.request import AttentionRequest
from attnreg.selection.memory import answers_of, remember
from attnreg.selection.point import Point, point_of
from attnreg.selection.trace import Candidate, Kind, Reason, Selected, Selection

if TYPE_CHECKING:
    from attnreg.language.matchers import Requirement
    from attnreg.platforms import Packages, Platform
    from attnreg.registry import Backend, Choice, Claim, Fallback, Order, Registry, Variant, Waiver


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
        selection = _select(request, platform, registry, backend, to_run)
        remember(answers, asked, selection)
    return selection


def _select(
    request: AttentionRequest, platform: Platform, registry: Registry, backend: str | None, to_run: bool
) -> Selection:
    point = point_of(request, platform, registry)
    order = next((o for o in registry.orders.get(platform.platform, ()) if o.when.holds(point)), None)
    choices = [c for c in registry.choices if c.when.holds(point)]
    # a later overlay speaks after an earlier one; an argument speaks last
    choice = next((c for c in reversed(choices) if c.strength != "deny"), None) if backend is None else None
    denied = {name: c for c in choices if c.strength == "deny" for name in c.backends}
    requested = choice.backends[0] if choice and choice.strength == "require" else backend
    if requested is not None and requested not in registry.backends:
        raise RequestError(f"unknown backend {requested!r}; {did_you_mean(requested, registry.backends)}")
    judge = _Judge(registry, point, denied, to_run)
    # judges the first, where somebody named it
    by_name = judge if requested is None and choice is None else _Judge(registry, point.by_name(), denied, to_run)
    entries = _entries(registry, order, requested, choice)
    candidates = [
        (by_name if i == 1 else judge).candidate(i, name, where, condition)
        for i, (name, where, condition) in enumerate(entries, 1)
    ]
    accepted = [c for c in candidates if c.accepted]
    winner = next((c for c in accepted if not c.emulates), None)
    if winner is not None and len(accepted) > 1:
        candidates = [judge.passed_over(c, winner) if c.emulates and c.accepted else c for c in candidates]
    winner = winner or next(iter(accepted), None)
    fallback = _fallback(registry, by_name.point, candidates, requested) if choice is None else None
    if fallback is not None:
        automatic = _select(request, platform, registry, None, to_run)
        why = f"{candidates[0].title} was asked for ({candidates[0].reasons[0].text}), but {fallback.because}"
        return replace(automatic, warnings=(f"{why} ({fallback.where.short})", *automatic.warnings))
    warnings = []
    if choice and choice.strength == "prefer" and candidates[0].reasons:
        why = "; ".join(r.text for r in candidates[0].reasons)
        warnings.append(f"{choice.backends[0]} is preferred ({choice.where.short}) but not chosen: {why}")
    if winner is not None:
        warnings += (by_name if winner.rank == 1 else judge).warnings(winner)
    return Selection(
        request=request,
        platform=platform,
        registry=registry,
        order=order,
        candidates=tuple(candidates),
        backend=Selected(winner.name, winner.variant, registry.backends[winner.name], registry) if winner else None,
        requested=requested,
        choice=choice,
        warnings=tuple(warnings),
        to_run=to_run,
    )


def _fallback(registry: Registry, point: Point, candidates: list[Candidate], requested: str | None) -> Fallback | None:
    """What the data says of giving way to the order, where the backend asked for is refused."""
    if requested is None or not registry.fallbacks or not candidates[0].reasons:
        return None
    about = {facet for reason in candidates[0].reasons for facet in reason.facets}
    return next((f for f in registry.fallbacks if about <= f.only and f.when.holds(point)), None)


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

    __slots__ = ("denied", "features", "point", "registry", "to_run", "waived")

    def __init__(self, registry: Registry, point: Point, denied: dict[str, Choice], to_run: bool) -> None:
        self.registry = registry
        self.point = point
        self.denied = denied
        self.to_run = to_run
        self.features: frozenset[str] = point["features"]
        # facet -> what says that no claim on it is looked at
        self.waived: dict[str, Waiver] = {}
        for waiver in registry.waivers:
            if waiver.when.holds(point):
                self.waived |= dict.fromkeys(waiver.facets, waiver)

    def candidate(self, rank: int, name: str, where: Location, condition: Condition | None = None) -> Candidate:
        """The verdict on a backend; ``condition`` is the order's, None where the backend was asked for by name."""
        row = self.registry.backends[name]
        reasons: list[Reason] = []
        if name in self.denied:
            choice = self.denied[name]
            sentence = f"denied{': ' + choice.because if choice.because else ' by the overlay'}"
            reasons.append(Reason("denied", (), choice.where, sentence=sentence))
        if condition is not None:
            if not condition.holds(self.point):
                reasons += _unmet(condition, self.point, "order")
            if row.status == "experimental":
                reasons.append(Reason("status", (), row.where, sentence="experimental: never chosen automatically"))
        variant, against = self._best_variant(row)
        reasons += against
        if self.to_run:
            reasons += self._unloadable(row)
        emulates = () if variant is None else tuple(sorted(self.features & variant.emulated.keys()))
        return Candidate(rank, name, variant.name if variant else None, tuple(reasons), where, emulates)

    def _best_variant(self, row: Backend) -> tuple[Variant | None, list[Reason]]:
        """The first variant that serves natively, else the first that accepts, else the one with least against it.

        Where the `when` of no variant holds, it is among the reasons: of the nearest that is made for this platform.
        """
        emulating: Variant | None = None
        nearest: tuple[Variant | None, list[Reason]] | None = None
        for variant in row.variants:
            if not variant.when.holds(self.point):
                continue
            reasons = self._reasons(variant)
            if not reasons:
                if not variant.emulated or not self.features & variant.emulated.keys():
                    return variant, reasons
                emulating = emulating or variant
            elif nearest is None or len(reasons) < len(nearest[1]):
                nearest = variant, reasons
        if emulating is not None:
            return emulating, []
        if nearest is not None:
            return nearest
        excluded = [(self._excluded(v), self._reach(v)) for v in row.variants]
        return None, min(excluded, key=lambda e: (e[1] == 0, len(e[0]), -e[1]))[0]

    def _excluded(self, variant: Variant) -> list[Reason]:
        """All that speaks against a variant whose `when` does not hold; what it requires anyway is said once."""
        reasons = self._reasons(variant)
        said = {(r.facets, r.asked) for r in reasons if r.kind == "requires"}
        return [r for r in _unmet(variant.when, self.point, "variant") if (r.facets, r.asked) not in said] + reasons

    def _reach(self, variant: Variant) -> int:
        """For how many architectures of this platform a variant is made."""
        here = self.registry.vocabulary.architectures_of(self.point["platform"])
        facts = [{"platform": a.platform, "arch": a.name} for a in here]
        clauses = [c for c in variant.when.clauses if c.facet in ("platform", "arch")]
        return sum(all(c.holds(f) for c in clauses) for f in facts)

    def _reasons(self, variant: Variant) -> list[Reason]:
        point = self.point
        out: list[Reason] = []
        if not variant.requires.holds(point):
            out += _unmet(variant.requires, point, "requires")
        for claim in variant.claims:
            value = point[claim.facet]
            if value is not None and not claim.matcher.matches(value) and claim.facet not in self.waived:
                out.append(_mismatch("claim", claim, point))
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
        from attnreg.loader import load_kernel

        try:
            load_kernel(self.registry, row.name)
        # a kernel module may fail to import in any way; each is a reason, with its text
        except Exception as e:
            sentence = f"cannot be run: {type(e).__name__}: {e}"
            return [Reason("module", (), row.module_at or row.where, sentence=sentence)]
        return []

    def passed_over(self, candidate: Candidate, winner: Candidate) -> Candidate:
        """A candidate that accepts but would emulate what the winner serves natively."""
        emulated = self._variant(candidate).emulated
        words = ", ".join(candidate.emulates)
        them = "them" if len(candidate.emulates) > 1 or words.endswith("s") else "it"
        sentence = f"emulates {words} (slow); {winner.title} serves {them} natively"
        where = emulated[candidate.emulates[0]][1]
        reason = Reason("emulated", ("features", *candidate.emulates), where, words, sentence=sentence)
        return replace(candidate, reasons=(reason,))

    def warnings(self, candidate: Candidate) -> list[str]:
        """What was let through without a look, and what is slow, in sentences."""
        variant, out = self._variant(candidate), list[str]()
        for claim in variant.claims if self.waived else ():
            waiver, value = self.waived.get(claim.facet), self.point[claim.facet]
            if waiver is not None and value is not None and not claim.matcher.matches(value):
                is_for = f"{claim.facet} is {value}, and {candidate.title} is for {claim.matcher.text}"
                out.append(f"{is_for}: {waiver.because} ({waiver.where.short})")
        unchecked = variant.unchecked
        usual = AttentionRequest.__dataclass_fields__
        asked = [w for w in unchecked if w in self.features or (w in usual and self.point[w] != usual[w].default)]
        if asked:
            places = ", ".join(dict.fromkeys(unchecked[w].short for w in asked))
            out.append(f"{candidate.title} does not check {', '.join(asked)} here ({places})")
        if candidate.emulates:
            why = "; ".join(variant.emulated[feature][0] for feature in candidate.emulates)
            out.append(f"{candidate.title} emulates {', '.join(candidate.emulates)} (slow): {why}")
        return out

    def _variant(self, candidate: Candidate) -> Variant:
        return next(v for v in self.registry.backends[candidate.name].variants if v.name == candidate.variant)


def _unmet(condition: Condition, point: Point, kind: Kind) -> list[Reason]:
    """A reason for each part of a condition that does not hold."""
    out: list[Reason] = []
    for clause in condition.clauses:
        if clause.holds(point):
            continue
        if clause.facet == "packages":
            wanted = sorted(clause.matcher.mentions, key=str)
            installed = point["packages"]
            out += [_missing_package(r, installed, clause.where, kind) for r in wanted if not r.met_by(installed)]
        elif clause.matcher.form:
            out += _wrong_words(clause, point[clause.facet], kind)
        else:
            out.append(_mismatch(kind, clause, point))
    for group in condition.any_of:
        if not any(c.holds(point) for c in group):
            facets = tuple(dict.fromkeys(f for c in group for f in c.facets))
            text = "needs " + " or ".join(c.describe() for c in group)
            out.append(Reason(kind, facets, group[0].where, sentence=text))
    for part in condition.none_of:
        if part.holds(point):
            out.append(Reason(kind, part.facets, part.where, sentence=f"not for {part.describe()}"))
    return out


def _mismatch(kind: Kind, test: Clause | Claim, point: Point) -> Reason:
    derived = point.registry.derived.get(test.facet)
    case = None if derived is None else derived.case(point)
    # a claim is a list of what is supported
    wanted = test.matcher.text if kind == "claim" else test.matcher.in_words
    return Reason(kind, (test.facet,), test.where, point[test.facet], wanted, case=case)


def _wrong_words(clause: Clause, held: frozenset[str], kind: Kind) -> Iterator[Reason]:
    """A reason for each word that a set lacks, or has too much."""
    words, form = clause.matcher.mentions, clause.matcher.form
    for word in sorted(words - held) if form == "all" else ():
        # a flag that is off is so common that `Reason` has words for it
        sentence = "" if clause.facet == "flags" else f"only for requests with {word}"
        yield Reason(kind, (clause.facet,), clause.where, word, sentence=sentence)
    for word in sorted(held & words if form == "none" else held - words if form == "only" else ()):
        sentence = f"flag {word} is on; needs it off" if clause.facet == "flags" else f"not for requests with {word}"
        yield Reason(kind, (clause.facet,), clause.where, word, sentence=sentence)


def _missing_package(requirement: Requirement, installed: Packages, where: Location, kind: Kind) -> Reason:
    version = dict(installed).get(requirement.package)
    sentence = ""
    if version is not None:
        sentence = f"package {requirement.package} is version {version}; needs {requirement.versions}"
    return Reason(kind, ("packages",), where, requirement.package, requirement.versions, sentence)
