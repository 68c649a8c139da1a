"""What would have to change for a candidate to win: found by changing it and asking the selector again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.conditions import Condition
from attnreg.errors import NoBackendError
from attnreg.request import RequestError
from attnreg.selector import Candidate, Reason, Selection, select

if TYPE_CHECKING:
    from attnreg.matchers import Matcher
    from attnreg.platforms import Platform
    from attnreg.registry import Rule, Variant
    from attnreg.request import AttentionRequest

_TRIES = 24
_MODEL_FACTS = ("head_size", "head_size_v", "num_heads", "num_kv_heads", "attention", "attn_type", "role", "phase")


@dataclass(frozen=True, slots=True)
class Change:
    """One facet with another value; for a set facet ``value`` is the word that joins (or, with ``drop``, leaves)."""

    facet: str
    value: Any
    drop: bool = False

    def apply(self, request: AttentionRequest, platform: Platform) -> tuple[AttentionRequest, Platform]:
        if self.facet in ("platform", "arch"):
            return request, dataclasses.replace(platform, **{self.facet: self.value})
        if self.facet == "flags":
            flags = platform.flags - {self.value} if self.drop else platform.flags | {self.value}
            return request, dataclasses.replace(platform, flags=flags)
        if self.facet == "packages":
            packages = {**dict(platform.packages or ()), self.value: "99999"}
            return request, dataclasses.replace(platform, packages=packages)  # type: ignore[arg-type]
        if self.facet == "features":
            features = request.features - {self.value} if self.drop else request.features | {self.value}
            return dataclasses.replace(request, features=features), platform
        if self.facet in request.__dataclass_fields__:
            return dataclasses.replace(request, **{self.facet: self.value}), platform
        return dataclasses.replace(request, extra={**dict(request.extra), self.facet: self.value}), platform  # type: ignore[arg-type]

    def phrase(self) -> tuple[str, str]:
        """A preposition and what follows it: how a person would ask for the change."""
        if self.facet == "features":
            return ("without", self.value) if self.drop else ("with", f"--feature {self.value}")
        if self.facet == "flags":
            return ("without", f"flag {self.value}") if self.drop else ("with", f"--flag {self.value}")
        if self.facet == "packages":
            return "with", f"package {self.value}"
        if self.facet == "arch":
            return "on", str(self.value)
        if self.facet in _MODEL_FACTS:
            return "for", f"{self.facet} {self.value}"
        return "with", f"--{self.facet.replace('_', '-')} {'none' if self.value is None else self.value}"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Changes after which a candidate is chosen; with ``by_name`` it must also be asked for: others rank higher."""

    changes: tuple[Change, ...]
    by_name: str | None = None

    @property
    def text(self) -> str:
        """``with --flag aiter --flag aiter_mha``."""
        phrases = [c.phrase() for c in self.changes]
        if self.by_name:
            phrases.append(("with", f"--backend {self.by_name}"))
        out = []
        for word in ("without", "for", "on", "with"):
            parts = [what for preposition, what in phrases if preposition == word]
            if parts:
                out.append(f"{word} " + (" " if word == "with" else ", ").join(parts))
        return ", ".join(out)

    def to_dict(self) -> dict[str, Any]:
        changes = [{"facet": c.facet, "value": c.value, "drop": c.drop} for c in self.changes]
        return {"text": self.text, "changes": changes, "by_name": self.by_name}


def remedy(selection: Selection, candidate: Candidate) -> Remedy | None:
    """The smallest change after which ``candidate`` wins, or None where no single change of each reason's facet does.

    Fewest changes first; a change is only reported after the selector has confirmed it.
    """
    options = [list(_changes(selection, candidate, reason)) for reason in candidate.reasons]
    if not all(options):
        return None
    valid: Remedy | None = None
    for combination in sorted(itertools.islice(itertools.product(*options), _TRIES), key=lambda c: len(set(c))):
        changes = tuple(dict.fromkeys(combination))
        try:
            request, platform = selection.request, selection.platform
            for change in changes:
                request, platform = change.apply(request, platform)
            if _winner(request, platform, selection, None) == candidate.name:
                return Remedy(changes)
            if valid is None and _winner(request, platform, selection, candidate.name) == candidate.name:
                valid = Remedy(changes, candidate.name)
        except RequestError:
            continue
    return valid


def _winner(request: AttentionRequest, platform: Platform, selection: Selection, backend: str | None) -> str | None:
    try:
        chosen = select(request, platform, selection.registry, backend).backend
    except NoBackendError:
        return None
    return chosen.name if chosen else None


def _changes(selection: Selection, candidate: Candidate, reason: Reason) -> Iterator[Change]:
    """Single changes that remove a reason."""
    if reason.kind in ("denied", "status", "module"):
        return
    if reason.kind in ("feature", "emulated"):
        words = reason.facets[1:]
        if len(words) == 1:
            yield Change("features", words[0], drop=True)
        return
    if reason.kind == "rule":
        yield from _out_of_rule(selection, candidate, reason)
        return
    facet = reason.facets[0] if reason.facets else ""
    if facet in ("flags", "packages") and isinstance(reason.asked, str):
        yield Change(facet, reason.asked)
        return
    for matcher in _matchers(selection, candidate, reason):
        yield from (Change(facet, value) for value in _values(selection, facet, [matcher.matches]))


def _matchers(selection: Selection, candidate: Candidate, reason: Reason) -> Iterator[Matcher]:
    """The matchers of the candidate that stand at the reason's place."""
    row = selection.registry.backends[candidate.name]
    for variant in row.variants:
        for claim in variant.claims:
            if claim.where == reason.where and claim.facet == reason.facets[0]:
                yield claim.matcher
                return
    for condition in _conditions(selection, row.variants, candidate):
        for clause in condition.clauses:
            if clause.where == reason.where and clause.facet == reason.facets[0]:
                yield clause.matcher
                return


def _conditions(selection: Selection, variants: Iterable[Variant], candidate: Candidate) -> Iterator[Condition]:
    for variant in variants:
        yield variant.when
        yield variant.requires
    for entry in selection.order.entries if selection.order else ():
        if entry.backend == candidate.name:
            yield entry.condition


def _out_of_rule(selection: Selection, candidate: Candidate, reason: Reason) -> Iterator[Change]:
    rules = [r for v in selection.registry.backends[candidate.name].variants for r in v.rules]
    rule: Rule | None = next((r for r in rules if r.where == reason.where), None)
    if rule is None:
        return
    request, platform = selection.request, selection.platform
    for facet in rule.when.facets:
        kind = selection.registry.vocabulary.facets[facet].kind
        if kind == "words":
            held: frozenset[str] = request.features if facet == "features" else platform.flags
            named = {w for c in rule.when.walk() if c.facet == facet for w in c.matcher.mentions}
            yield from (Change(facet, word, drop=True) for word in sorted(held & named))
        elif kind not in ("packages", "derived", "text"):
            tests = [c.matcher.matches for c in rule.when.clauses if c.facet == facet]
            yield from (
                Change(facet, value) for value in _values(selection, facet, [lambda v, t=t: not t(v) for t in tests])
            )


def _values(selection: Selection, facet: str, tests: list[Any]) -> Iterator[Any]:
    """Values of a facet that pass every test, the likeliest first; only one of each kind of answer is worth a try."""
    vocabulary = selection.registry.vocabulary
    known = vocabulary.facets.get(facet)
    if known is None or not tests:
        return
    if known.kind == "arch":
        platform = selection.platform.platform
        near = [a.name for a in vocabulary.architectures_of(platform) if all(t(a.name) for t in tests)]
        yield from near[:2]
    elif known.kind == "word" and facet != "platform":
        words = next((g for g in vocabulary.words.values() if frozenset(g) == known.words), {})
        yield from [w for w in words if all(t(w) for t in tests)][:2]
    elif known.kind == "integer":
        asked = dict(selection.request.facts()).get(facet) or 0
        found = [v for v in range(1, 2049) if all(t(v) for t in tests)]
        yield from sorted(found, key=lambda v: (v < asked, abs(v - asked)))[:1]
