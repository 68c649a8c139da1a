"""Judge: the verdict on one backend at one point, with every reason against it and its line of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnreg.errors import Location
from attnreg.language.conditions import Clause, Condition
from attnreg.request import AttentionRequest
from attnreg.selection.consequences import failure_words, following
from attnreg.selection.trace import Candidate, Kind, Reason
from attnreg.selection.wording import engine_of, engine_words

if TYPE_CHECKING:
    from attnreg.language.matchers import Requirement
    from attnreg.platforms import Packages
    from attnreg.registry import Backend, Choice, Claim, Registry, Variant, Waiver
    from attnreg.selection.point import Point
    from attnreg.selection.trace import Unloadable


class Judge:
    """Judges backends at one point: each accepts, or has every reason against it listed."""

    __slots__ = ("denied", "features", "point", "registry", "unloadable", "waived")

    def __init__(
        self, registry: Registry, point: Point, denied: Mapping[str, Choice], unloadable: Unloadable | None
    ) -> None:
        self.registry = registry
        self.point = point
        self.denied = denied
        self.unloadable = unloadable
        self.features: frozenset[str] = point["features"]
        # facet -> the waiver that exempts it from claims
        self.waived: dict[str, Waiver] = {}
        for waiver in registry.waivers:
            if waiver.when.holds(point):
                self.waived |= dict.fromkeys(waiver.facets, waiver)

    def candidate(self, rank: int, row: Backend, where: Location, condition: Condition | None = None) -> Candidate:
        """The verdict on a row; ``condition`` is that of its entry in the order, None if a user named the backend."""
        name = row.name
        reasons: list[Reason] = []
        if name in self.denied:
            reasons.append(denial(self.denied[name]))
        if condition is not None:
            if not condition.holds(self.point):
                reasons += _unmet(condition, self.point, "order")
            if row.status == "experimental":
                reasons.append(Reason("status", (), row.where, sentence="experimental: never chosen automatically"))
        variant, against = self._best_variant(row, self.unloadable is not None and condition is not None)
        reasons += against
        emulates = () if variant is None else tuple(sorted(self.features & variant.emulated.keys()))
        # a variant that a user names is the only one of its row
        if variant is None and row is not self.registry.backends[name]:
            variant = row.variants[0]
        return Candidate(rank, name, variant.name if variant else None, tuple(reasons), where, emulates)

    def _best_variant(self, row: Backend, automatic: bool) -> tuple[Variant | None, list[Reason]]:
        """The variant by which a row is judged, and the reasons against it.

        automatic: an order tries the row, in a selection whose backend will run. The variant is the first that serves
        natively, else the first that accepts. If none accepts, it is the one with the fewest reasons among those whose
        `when` holds. If no `when` holds, it is None. The reasons are then those against the nearest variant for this
        platform, its `when` included.
        """
        emulating: Variant | None = None
        nearest: tuple[Variant | None, list[Reason]] | None = None
        for variant in row.variants:
            if not variant.when.holds(self.point):
                continue
            reasons = self._reasons(variant)
            if self.denied and f"{row.name}/{variant.name}" in self.denied:
                reasons.insert(0, denial(self.denied[f"{row.name}/{variant.name}"]))
            # an entry that names the variant gets a row with this variant alone
            if automatic and variant.run_on_request and len(row.variants) > 1:
                sentence = f"{row.name}/{variant.name} runs where it is named: {variant.run_on_request}"
                reasons.append(Reason("status", (), variant.where, sentence=sentence))
            elif self.unloadable is not None:
                title = f"{row.name}/{variant.name}" if variant.name else row.name
                if why := self.unloadable(self.registry, title):
                    reasons.append(Reason("module", (), variant.module_at or variant.where, sentence=why))
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
        excluded = [(self.reasons_against(v), self._architecture_count(v)) for v in row.variants]
        return None, min(excluded, key=lambda e: (e[1] == 0, len(e[0]), -e[1]))[0]

    def reasons_against(self, variant: Variant) -> list[Reason]:
        """Every reason against a variant, its `when` included. A part of both `when` and `requires` is listed once."""
        reasons = self._reasons(variant)
        required = {(r.facets, r.asked) for r in reasons if r.kind == "requires"}
        unmet = _unmet(variant.when, self.point, "variant")
        return [r for r in unmet if (r.facets, r.asked) not in required] + reasons

    def _architecture_count(self, variant: Variant) -> int:
        """The number of this platform's architectures that a variant supports."""
        architectures = self.registry.vocabulary.architectures_of(self.point["platform"])
        facts = [{"platform": a.platform, "arch": a.name} for a in architectures]
        return sum(variant.when.decided(f) is not False for f in facts)

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

    def passed_over(self, candidate: Candidate, winner: Candidate) -> Candidate:
        """A candidate with a reason against it: it would emulate what the winner serves natively."""
        emulated = self._variant(candidate).emulated
        words = ", ".join(candidate.emulates)
        pronoun = "them" if len(candidate.emulates) > 1 or words.endswith("s") else "it"
        sentence = f"emulates {words} (slow); {winner.title} serves {pronoun} natively"
        where = emulated[candidate.emulates[0]][1]
        reason = Reason("emulated", ("features", *candidate.emulates), where, words, sentence=sentence)
        return replace(candidate, reasons=(reason,))

    def warnings(self, candidate: Candidate) -> list[str]:
        """Sentences on claims that a waiver suspends, unchecked words, emulated features and known failures."""
        variant, out = self._variant(candidate), list[str]()
        for claim in variant.claims if self.waived else ():
            waiver, value = self.waived.get(claim.facet), self.point[claim.facet]
            if waiver is not None and value is not None and not claim.matcher.matches(value):
                is_for = f"{claim.facet} is {value}, and {candidate.title} is for {claim.matcher.text}"
                out.append(f"{is_for}: {waiver.because} ({waiver.where.short})")
        words = unchecked_words(variant, self.point)
        if words:
            places = ", ".join(dict.fromkeys(variant.unchecked[w].short for w in words))
            engine = engine_words(engine_of(self.registry))
            untested = f"{candidate.title} supports {', '.join(words)}"
            out.append(f"{engine} does not test whether {untested} before it chooses it ({places})")
        if candidate.emulates:
            why = "; ".join(variant.emulated[feature][0] for feature in candidate.emulates)
            out.append(f"{candidate.title} emulates {', '.join(candidate.emulates)} (slow): {why}")
        for follows in following(variant, self.point) if variant.consequences else ():
            if follows.kind in ("fails", "drops"):
                out.append(failure_words(candidate.title, follows))
        return out

    def _variant(self, candidate: Candidate) -> Variant:
        return next(v for v in self.registry.backends[candidate.name].variants if v.name == candidate.variant)


def denial(choice: Choice) -> Reason:
    """The reason against a backend, or a variant, that a user's overlay denies."""
    sentence = f"denied{': ' + choice.because if choice.because else ' by the overlay'}"
    return Reason("denied", (), choice.where, sentence=sentence)


def unchecked_words(variant: Variant, facts: Mapping[str, Any]) -> list[str]:
    """The words that a request asks for and that a variant accepts unchecked. ``facts`` has the request's facets."""
    fields = AttentionRequest.__dataclass_fields__
    return [w for w in variant.unchecked if w in facts["features"] or (w in fields and facts[w] != fields[w].default)]


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
    # the text of a claim lists the supported values, so it has no "or"
    wanted = test.matcher.text if kind == "claim" else test.matcher.in_words
    return Reason(kind, (test.facet,), test.where, point[test.facet], wanted, case=case)


def _wrong_words(clause: Clause, value: frozenset[str], kind: Kind) -> Iterator[Reason]:
    """A reason for each word that a set lacks or must not hold; one reason if any one of several words would do."""
    words, form = clause.matcher.mentions, clause.matcher.form
    if form == "any":
        needs = "needs" if clause.facet == "flags" else "only for requests with"
        yield Reason(kind, (clause.facet,), clause.where, sentence=f"{needs} {' or '.join(clause.nouns)}")
    for word in sorted(words - value) if form == "all" else ():
        # `Reason` has a text of its own for a flag that is off
        sentence = "" if clause.facet == "flags" else f"only for requests with {word}"
        yield Reason(kind, (clause.facet,), clause.where, word, sentence=sentence)
    for word in sorted(value & words if form == "none" else value - words if form == "only" else ()):
        sentence = f"flag {word} is on; needs it off" if clause.facet == "flags" else f"not for requests with {word}"
        yield Reason(kind, (clause.facet,), clause.where, word, sentence=sentence)


def _missing_package(requirement: Requirement, installed: Packages, where: Location, kind: Kind) -> Reason:
    version = dict(installed).get(requirement.package)
    sentence = ""
    if version is not None:
        sentence = f"package {requirement.package} is version {version}; needs {requirement.versions}"
    return Reason(kind, ("packages",), where, requirement.package, requirement.versions, sentence)
