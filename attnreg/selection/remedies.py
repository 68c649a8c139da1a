"""Remedies: the changes after which a candidate is chosen, found by a search that runs the selector on each change.

A chosen candidate with which the engine then fails counts as refused. No remedy leads to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.errors import RequestError
from attnreg.language.facets import CORE
from attnreg.language.matchers import Requirement
from attnreg.request import AttentionRequest
from attnreg.selection.pins import Means, means
from attnreg.selection.selector import evaluate_anew
from attnreg.selection.trace import Candidate, Reason, Selection

if TYPE_CHECKING:
    from attnreg.language.conditions import Clause
    from attnreg.platforms import Packages, Platform
    from attnreg.registry import Claim, Registry
    from attnreg.selection.question import Anew

_MOST_CHANGES = 5
_SETS = frozenset(f.name for f in CORE.values() if f.is_set)


@dataclass(frozen=True, slots=True)
class Change:
    """A new value for one facet; for a set facet, ``value`` is the word to add or, with ``drop``, to remove.

    ``means`` says how to get a package beside the installed ones.
    """

    facet: str
    value: Any
    drop: bool = False
    means: Means | None = None

    def apply(self, request: AttentionRequest, platform: Platform) -> tuple[AttentionRequest, Platform]:
        if self.facet in ("platform", "arch"):
            # the device belongs to the old architecture
            return request, dataclasses.replace(platform, **{self.facet: self.value, "device": None})
        if self.facet == "device":
            return request, dataclasses.replace(platform, device=self.value)
        if self.facet == "flags":
            flags = platform.flags - {self.value} if self.drop else platform.flags | {self.value}
            return request, dataclasses.replace(platform, flags=flags)
        if self.facet == "packages":
            # "" is a version that meets every requirement
            found = self.means or Means(Requirement(self.value))
            added = dict.fromkeys((r.package for r in (found.install, *found.brings)), "")
            packages = {**dict(platform.packages or ()), **added}
            return request, dataclasses.replace(platform, packages=packages)  # type: ignore[arg-type]
        if self.facet == "features":
            features = request.features - {self.value} if self.drop else request.features | {self.value}
            return dataclasses.replace(request, features=features), platform
        if self.facet in request.__dataclass_fields__:
            return dataclasses.replace(request, **{self.facet: self.value}), platform
        return dataclasses.replace(request, extra={**dict(request.extra), self.facet: self.value}), platform  # type: ignore[arg-type]

    @property
    def is_option(self) -> bool:
        """Whether it is an option for a whole model, from which each layer takes its own value."""
        if self.facet in CORE:
            core = CORE[self.facet]
            return core.of == "request" and core.decided_by == "user"
        return True

    def phrase(self) -> tuple[str, str]:
        """The change in words: a preposition and what follows it."""
        if self.facet == "features":
            return ("without", self.value) if self.drop else ("with", f"--feature {self.value}")
        if self.facet == "flags":
            return ("without", f"flag {self.value}") if self.drop else ("with", f"--flag {self.value}")
        if self.facet == "packages":
            return "with", f"package {self.value if self.means is None else self.means.text}"
        if self.facet in ("arch", "device"):
            return "on", str(self.value)
        if self.facet in CORE:
            if CORE[self.facet].decided_by == "model":
                return "for", f"{self.facet} {self.value}"
            return "with", f"--{self.facet.replace('_', '-')} {self.value}"
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return "with", f"--set {self.facet}={value}"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Changes after which a candidate is chosen.

    ``by_name`` is its name if a user must also name it, because other backends win in the order. ``leads_to`` is the
    variant that is then chosen, with its backend, if the printed reasons are those of another variant.
    """

    changes: tuple[Change, ...]
    by_name: str | None = None
    leads_to: str | None = None

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

    @property
    def sentence(self) -> str:
        """``would win, as FLASHMLA/paged, for attention mla``."""
        verb = "would be chosen" if self.by_name else "would win"
        return f"{verb}{f', as {self.leads_to},' if self.leads_to else ''} {self.text}"

    @property
    def of_model(self) -> bool:
        """Whether one of the changes is to the model itself, such as its head size or its features."""
        return any(c.facet in CORE and CORE[c.facet].decided_by == "model" for c in self.changes)

    def to_dict(self) -> dict[str, Any]:
        changes = [{"facet": c.facet, "value": c.value, "drop": c.drop} for c in self.changes]
        return {
            "text": self.text,
            "changes": changes,
            "by_name": self.by_name,
            "leads_to": self.leads_to,
            "of_model": self.of_model,
        }


def remedy(
    selection: Selection,
    candidate: Candidate,
    anew: Anew | None = None,
    tried: dict[Any, Selection | None] | None = None,
) -> Remedy | None:
    """The fewest changes after which ``candidate`` is chosen, confirmed by the selector; None where more are needed.

    Changes after which the order chooses it come before those after which a user must also name it. None too where the
    backend is chosen already, by another of its variants. ``anew``, of layers of a model, gives what they ask for under
    further options; the candidate is then to be chosen for all of it. ``tried`` keeps what the selector answers to the
    configurations that are tried: the searches for candidates of one selection share most of them.
    """
    if selection.backend is not None and selection.backend.name == candidate.name:
        return None
    entries = selection.order.entries if selection.order else ()
    # an order may name one variant of a backend
    name = next((e.backend for e in entries if e.where == candidate.where), candidate.name)
    requested, kept = selection.requested, {} if tried is None else tried
    for backend in (requested,) if requested else (None, name):
        start = _Attempt(name, backend, selection.registry, {}, kept, selection.request, selection.platform, anew=anew)
        for limit in range(_MOST_CHANGES + 1):
            changes = _search(start, limit)
            if changes is not None:
                changes = _needed(start, changes)
                enough = backend == requested or _is_chosen(dataclasses.replace(start, backend=requested), changes)
                return Remedy(changes, None if enough else name, _other_variant(start, changes, candidate))
    return None


def _needed(start: _Attempt, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """The changes without superfluous ones: a later change may lead to another variant, which needs fewer changes."""
    for change in changes:
        rest = tuple(other for other in changes if other is not change)
        if _is_chosen(start, rest):
            return _needed(start, rest)
    return changes


def _is_chosen(attempt: _Attempt, changes: Iterable[Change]) -> bool:
    """Whether the backend is chosen after some changes."""
    end = _end(attempt, changes)
    candidate = None if end is None else end.candidate()
    return end is not None and candidate is not None and candidate.accepted and end.holds()


def _other_variant(attempt: _Attempt, changes: Iterable[Change], told: Candidate) -> str | None:
    """The variant that is chosen after some changes, if it is not the printed candidate's."""
    end = _end(attempt, changes)
    candidate = None if end is None else end.candidate()
    return candidate.title if candidate is not None and told.variant and candidate.title != told.title else None


def _end(attempt: _Attempt, changes: Iterable[Change]) -> _Attempt | None:
    """The configuration after some changes; None if one of them is not valid."""
    end: _Attempt | None = attempt
    for change in changes:
        end = None if end is None else end.after(change)
    return end


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One configuration of the search, and ``name``, the backend or the variant that the search wants to be chosen.

    ``backend`` is the one that the request names, if any. ``steps`` caches the changes to try from each configuration,
    because a deeper search repeats the shallower one, ``tried`` what the selector answers to each. ``changed`` holds
    the facets that have a new value, ``path`` the changes up to here, and ``anew`` gives what layers of a model ask for
    under further options.
    """

    name: str
    backend: str | None
    registry: Registry
    steps: dict[Any, list[tuple[Change, _Attempt]]]
    tried: dict[Any, Selection | None]
    request: AttentionRequest
    platform: Platform
    anew: Anew | None = None
    changed: frozenset[str] = frozenset()
    path: tuple[Change, ...] = ()

    def candidate(self) -> Candidate | None:
        """The verdict on the backend in this configuration; None where it is no candidate."""
        key = self.request, self.platform, self.backend
        if key not in self.tried:
            try:
                self.tried[key] = evaluate_anew(self.request, self.platform, self.registry, self.backend)
            except RequestError:
                self.tried[key] = None
        selection = self.tried[key]
        if selection is None:
            return None
        chosen = selection.chosen
        if chosen and self.name in (chosen.name, chosen.title):
            return dataclasses.replace(chosen, reasons=_failures(selection)) if selection.fails else chosen
        refused = (c for c in selection.candidates if not c.accepted)
        return next((c for c in refused if self.name in (c.name, c.title)), None)

    def after(self, change: Change) -> _Attempt | None:
        """The configuration after one change; None if it is not valid."""
        try:
            request, platform = change.apply(self.request, self.platform)
        except RequestError:
            return None
        changed = self.changed if change.facet in _SETS else self.changed | {change.facet}
        return dataclasses.replace(self, request=request, platform=platform, changed=changed, path=(*self.path, change))

    def holds(self) -> bool:
        """Whether a model's layers, too, get the backend after the changes are given as options.

        A layer may take another value than the option's: with a packed KV dtype the first and last layers keep a plain
        cache.
        """
        options = {c.facet: c.value for c in self.path if c.is_option}
        if self.anew is None or not options:
            return True
        requests = self.anew(options)
        others = [c for c in self.path if not c.is_option]
        start = dataclasses.replace(self, anew=None)
        return bool(requests) and all(_is_chosen(dataclasses.replace(start, request=r), others) for r in requests)


def _failures(selection: Selection) -> tuple[Reason, ...]:
    """The known failures of the engine with the chosen backend, as reasons against it."""
    fails = (f for f in selection.consequences if f.kind == "fails")
    return tuple(Reason("fails", f.facets, f.where, sentence=f.text) for f in fails)


def _search(attempt: _Attempt, limit: int) -> tuple[Change, ...] | None:
    """At most ``limit`` changes after which the backend is chosen; each removes the first reason against it."""
    candidate = attempt.candidate()
    if candidate is None:
        return None
    if candidate.accepted:
        return () if attempt.holds() else None
    key = attempt.request, attempt.platform, attempt.changed
    if limit and key not in attempt.steps:
        attempt.steps[key] = list(_steps(attempt, candidate))
    for change, following in attempt.steps[key] if limit else ():
        rest = _search(following, limit - 1)
        if rest is not None:
            return (change, *rest)
    return None


def _steps(attempt: _Attempt, candidate: Candidate) -> Iterator[tuple[Change, _Attempt]]:
    """Changes that remove the first reason: for each facet, the two that leave the fewest reasons."""
    reason = candidate.reasons[0]
    if reason.kind in ("denied", "status", "module", "emulated"):
        return
    facets = _plain_facets(reason.facets, attempt.registry)
    if attempt.anew is not None:
        # an option for a model cannot set these facets
        facets = tuple(f for f in facets if not attempt.registry.vocabulary.facets[f].follows)
    for facet in facets:
        steps: list[tuple[int, Change, _Attempt]] = []
        for change in _changes(attempt, facet, reason) if facet not in attempt.changed else ():
            following = attempt.after(change)
            verdict = following.candidate() if following else None
            if following and verdict and _identity(reason) not in map(_identity, verdict.reasons):
                steps.append((len(verdict.reasons), change, following))
        yield from (step[1:] for step in sorted(steps, key=lambda step: step[0])[:2])


def _identity(reason: Reason) -> Any:
    """The parts of a reason that stay the same when a value changes: kind, line, facets, and a set facet's word."""
    word = reason.asked if set(reason.facets[:1]) & _SETS else None
    return reason.kind, reason.where, reason.facets, word


def _plain_facets(facets: Iterable[str], registry: Registry) -> tuple[str, ...]:
    """The facets that a user can change; a derived facet is replaced by the facets that it is computed from."""
    out: dict[str, None] = {}
    for facet in facets:
        derived = registry.derived.get(facet)
        if derived is None:
            out |= dict.fromkeys(f for f in (facet,) if f in registry.vocabulary.facets)
        else:
            out |= dict.fromkeys(_plain_facets((f for when, _, _ in derived.cases for f in when.facets), registry))
    return tuple(out)


def _changes(attempt: _Attempt, facet: str, reason: Reason) -> Iterator[Change]:
    """Other values of a facet, the nearest first."""
    kind = attempt.registry.vocabulary.facets[facet].kind
    current: Any = {**attempt.request.facts(), **attempt.platform.facts()}.get(facet)
    if facet == "packages":
        return _packages(attempt, current, reason)
    if facet in _SETS:
        return _set_changes(attempt, facet, current)
    values: Iterable[Any] = ()
    if kind == "arch":
        values = (a.name for a in attempt.registry.vocabulary.architectures_of(attempt.platform.platform))
    elif facet == "device":
        vocabulary = attempt.registry.vocabulary
        values = (d for d in vocabulary.words_of(facet) if vocabulary.arch_of(d) == attempt.platform.arch)
    elif kind in ("word", "boolean") and facet != "platform":
        values = attempt.registry.vocabulary.facets[facet].words
    elif kind == "integer":
        values = _integers(attempt, facet, current or 0)
    return (Change(facet, value) for value in values if value != current)


def _packages(attempt: _Attempt, installed: Packages | None, reason: Reason) -> Iterator[Change]:
    """Installing the package that the reason names; if it names none, each package that is not installed."""
    known = attempt.registry.vocabulary.packages
    missing = [p for p in known if p not in dict(installed or ())]
    wanted = [Requirement(reason.asked, reason.supported)] if reason.asked in known else map(Requirement, missing)
    found = (means(requirement, installed, known) for requirement in wanted)
    return (Change("packages", str(one.install), means=one) for one in found)


def _set_changes(attempt: _Attempt, facet: str, words: frozenset[str]) -> Iterator[Change]:
    """A set with one word less; for flags also one word more: a user can set a flag but not a model's feature."""
    yield from (Change(facet, word, drop=True) for word in sorted(words))
    if facet == "flags":
        yield from (Change(facet, flag) for flag in attempt.registry.vocabulary.flags if flag not in words)


def _integers(attempt: _Attempt, facet: str, current: int) -> list[int]:
    """The integers at which a test of the backend or of an order changes its answer.

    Larger ones than ``current`` come first; the nearest lead.
    """
    matchers = [test.matcher for test in _tests(attempt) if test.facet == facet]
    edges = {current, *(n for m in matchers for n in m.constants)}
    steps = {1, *(n for m in matchers for n in m.moduli)}
    near = {n for edge in edges for step in steps for n in (edge // step * step, -(-edge // step) * step)}
    return sorted((n for n in near if n > 0), key=lambda n: (n < current, abs(n - current)))


def _tests(attempt: _Attempt) -> Iterator[Clause | Claim]:
    """Every test that decides whether the backend is chosen: its own tests, and those of the platform's orders."""
    row = attempt.registry.row(attempt.name)
    assert row is not None
    for variant in row.variants:
        yield from variant.claims
        failing = (known.when for known in variant.consequences if known.fails)
        for condition in (variant.when, variant.requires, *(rule.when for rule in variant.rules), *failing):
            yield from condition.walk()
    for order in attempt.registry.orders.get(attempt.platform.platform, ()):
        yield from order.when.walk()
        for entry in order.entries:
            if entry.row == row.name:
                yield from entry.condition.walk()
