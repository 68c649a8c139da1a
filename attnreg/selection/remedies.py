"""What would have to change for a candidate to win: found by changing it and asking the selector again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.errors import RequestError
from attnreg.language.facets import CORE
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate_anew
from attnreg.selection.trace import Candidate, Reason, Selection

if TYPE_CHECKING:
    from attnreg.language.conditions import Clause
    from attnreg.platforms import Packages, Platform
    from attnreg.registry import Claim, Registry

_MOST_CHANGES = 5
_SETS = frozenset(f.name for f in CORE.values() if f.is_set)


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
            # "" is a version that meets every requirement
            packages = {**dict(platform.packages or ()), re.split("[<>=!~]", self.value)[0]: ""}
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
        if self.facet in CORE:
            if CORE[self.facet].decided_by == "model":
                return "for", f"{self.facet} {self.value}"
            return "with", f"--{self.facet.replace('_', '-')} {self.value}"
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return "with", f"--set {self.facet}={value}"


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
    """The fewest changes after which ``candidate`` is chosen, confirmed by the selector; None where few do not do it.

    By the order where that is possible, else for who asks for it by name.
    """
    name, requested = candidate.name, selection.requested
    for backend in (requested,) if requested else (None, name):
        start = _Try(name, backend, selection.registry, {}, selection.request, selection.platform)
        for most in range(_MOST_CHANGES + 1):
            changes = _reach(start, most)
            if changes is not None:
                enough = backend == requested or _chosen(dataclasses.replace(start, backend=requested), changes)
                return Remedy(changes, None if enough else name)
    return None


def _chosen(here: _Try, changes: Iterable[Change]) -> bool:
    """Whether the order leads to the backend too, after changes that were found for requests by name."""
    for change in changes:
        after = here.after(change)
        if after is None:
            return False
        here = after
    candidate = here.candidate()
    return candidate is not None and candidate.accepted


@dataclass(frozen=True, slots=True)
class _Try:
    """A configuration that the search has come to, and the backend that it wants to see chosen there.

    ``steps`` remembers how it went on from each configuration: a deeper search repeats the shallower.
    """

    name: str
    backend: str | None
    registry: Registry
    steps: dict[Any, list[tuple[Change, _Try]]]
    request: AttentionRequest
    platform: Platform
    changed: frozenset[str] = frozenset()

    def candidate(self) -> Candidate | None:
        """Its verdict here; None where it is not even tried."""
        try:
            selection = evaluate_anew(self.request, self.platform, self.registry, self.backend, to_run=False)
        except RequestError:
            return None
        if selection.chosen and selection.chosen.name == self.name:
            return selection.chosen
        return next((c for c in selection.candidates if c.name == self.name and not c.accepted), None)

    def after(self, change: Change) -> _Try | None:
        """One change further; None where that is no request."""
        try:
            request, platform = change.apply(self.request, self.platform)
        except RequestError:
            return None
        changed = self.changed if change.facet in _SETS else self.changed | {change.facet}
        return dataclasses.replace(self, request=request, platform=platform, changed=changed)


def _reach(here: _Try, most: int) -> tuple[Change, ...] | None:
    """At most some changes after which the backend is chosen: each removes the first reason against it."""
    candidate = here.candidate()
    if candidate is None:
        return None
    if candidate.accepted:
        return ()
    key = here.request, here.platform, here.changed
    if most and key not in here.steps:
        here.steps[key] = list(_steps(here, candidate))
    for change, there in here.steps[key] if most else ():
        rest = _reach(there, most - 1)
        if rest is not None:
            return (change, *rest)
    return None


def _steps(here: _Try, candidate: Candidate) -> Iterator[tuple[Change, _Try]]:
    """Changes that remove the first reason: of each facet the two that leave the least against the candidate."""
    reason = candidate.reasons[0]
    if reason.kind in ("denied", "status", "module", "emulated"):
        return
    for facet in _plain_facets(reason.facets, here.registry):
        found: list[tuple[int, Change, _Try]] = []
        for change in _changes(here, facet, reason) if facet not in here.changed else ():
            there = here.after(change)
            following = there.candidate() if there else None
            if there and following and _same(reason) not in map(_same, following.reasons):
                found.append((len(following.reasons), change, there))
        yield from (step[1:] for step in sorted(found, key=lambda step: step[0])[:2])


def _same(reason: Reason) -> Any:
    """What makes a reason the same after a change: for a set its word, not for a value what was asked."""
    word = reason.asked if set(reason.facets[:1]) & _SETS else None
    return reason.kind, reason.where, reason.facets, word


def _plain_facets(facets: Iterable[str], registry: Registry) -> tuple[str, ...]:
    """Facets that a person can change: a derived one stands for those that it is made of."""
    out: dict[str, None] = {}
    for facet in facets:
        derived = registry.derived.get(facet)
        if derived is None:
            out |= dict.fromkeys(f for f in (facet,) if f in registry.vocabulary.facets)
        else:
            out |= dict.fromkeys(_plain_facets((f for when, _, _ in derived.cases for f in when.facets), registry))
    return tuple(out)


def _changes(here: _Try, facet: str, reason: Reason) -> Iterator[Change]:
    """Other values of a facet, the nearest first."""
    about = here.registry.vocabulary.facets[facet]
    now: Any = {**here.request.facts(), **here.platform.facts()}.get(facet)
    if facet == "packages":
        return _packages(here, now, reason)
    if facet in _SETS:
        return _set_changes(here, facet, now)
    values: Iterable[Any] = ()
    if about.kind == "arch":
        values = (a.name for a in here.registry.vocabulary.architectures_of(here.platform.platform))
    elif about.kind in ("word", "boolean") and facet != "platform":
        values = about.words
    elif about.kind == "integer":
        values = _integers(here, facet, now or 0)
    return (Change(facet, value) for value in values if value != now)


def _packages(here: _Try, installed: Packages | None, reason: Reason) -> Iterator[Change]:
    """The package that the reason asks for; where it names none, each that is missing."""
    known = here.registry.vocabulary.packages
    missing = [p for p in known if p not in dict(installed or ())]
    asked = [f"{reason.asked}{reason.supported}"] if reason.asked in known else missing
    return (Change("packages", package) for package in asked)


def _set_changes(here: _Try, facet: str, words: frozenset[str]) -> Iterator[Change]:
    """A set with one word less; flags with one more too: a user switches one on, while features are the model's."""
    yield from (Change(facet, word, drop=True) for word in sorted(words))
    if facet == "flags":
        yield from (Change(facet, flag) for flag in here.registry.vocabulary.flags if flag not in words)


def _integers(here: _Try, facet: str, now: int) -> list[int]:
    """Integers at which something about the backend, or an order, changes its mind: the nearest first, upwards."""
    matchers = [test.matcher for test in _tests(here) if test.facet == facet]
    edges = {now, *(n for m in matchers for n in m.constants)}
    steps = {1, *(n for m in matchers for n in m.moduli)}
    near = {n for edge in edges for step in steps for n in (edge // step * step, -(-edge // step) * step)}
    return sorted((n for n in near if n > 0), key=lambda n: (n < now, abs(n - now)))


def _tests(here: _Try) -> Iterator[Clause | Claim]:
    """Every test that a request must pass on its way to the backend: the backend's own, and those of orders."""
    for variant in here.registry.backends[here.name].variants:
        yield from variant.claims
        for condition in (variant.when, variant.requires, *(rule.when for rule in variant.rules)):
            yield from condition.walk()
    for order in here.registry.orders.get(here.platform.platform, ()):
        yield from order.when.walk()
        for entry in order.entries:
            if entry.backend == here.name:
                yield from entry.condition.walk()
