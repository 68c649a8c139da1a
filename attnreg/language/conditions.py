"""Conditions: their evaluation at a point, and their text. `attnreg.compile.conditions` parses them.

A condition maps facets to matchers, and every matcher must hold::

    {arch: sm90}   {arch: {min: sm100, below: sm110}}   {kv_dtype: [auto, "fp8*"]}   {head_size: {multiple_of: 16}}
    {features: [sinks]}   {features: {any: [sinks, alibi]}}   {without: [sinks]}   {not: {...}}   {any: [{...}, {...}]}

A matcher is a value (``null``: not given), a word with ``*`` and ``?``, a list, or a mapping of operators. One matcher
of a list must hold, and every operator of a mapping. For set facets a list asks for all of its words, ``any`` for at
least one of its words, and ``only`` for no words but its own. A value that is not given satisfies no bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from attnreg.errors import Location
from attnreg.language.matchers import Matcher

NOWHERE = Location("", 0, 0)


class FacetValues(Protocol):
    """Facet -> value, for every facet that a condition names: the point at which a condition is evaluated."""

    def __getitem__(self, facet: str, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Clause:
    """A facet, the matcher that its value must pass, and the location of both in the data."""

    facet: str
    matcher: Matcher
    where: Location

    def holds(self, point: FacetValues) -> bool:
        return self.matcher.matches(point[self.facet])

    @property
    def nouns(self) -> tuple[str, ...]:
        """The words of a clause on a set, each with its noun: ``alibi``, ``flag aiter``, ``package triton``."""
        noun = {"features": "", "flags": "flag ", "packages": "package "}.get(self.facet, f"{self.facet} ")
        return tuple(noun + word for word in sorted(map(str, self.matcher.mentions)))

    def describe(self) -> str:
        """The clause in words: ``arch sm90 or later``, ``sinks``, ``flag aiter``, ``without alibi``."""
        text, form = self.matcher.text, self.matcher.form
        if form == "none":
            return text
        if form == "only":
            return f"{self.facet} {text}"
        if form == "all":
            return " and ".join(self.nouns)
        if form == "any":
            return f"({' or '.join(self.nouns)})" if len(self.nouns) > 1 else self.nouns[0]
        return f"{self.facet} {text}"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition: it holds if every clause, one condition of each ``any_of`` group and none of ``none_of`` hold."""

    clauses: tuple[Clause, ...] = ()
    any_of: tuple[tuple[Condition, ...], ...] = ()
    none_of: tuple[Condition, ...] = ()
    where: Location = NOWHERE

    def holds(self, point: FacetValues) -> bool:
        """Whether the condition holds at a point (facet -> value)."""
        for clause in self.clauses:
            if not clause.matcher.matches(point[clause.facet]):
                return False
        # called often: loops are cheaper than any() and all()
        for group in self.any_of:
            for condition in group:
                if condition.holds(point):
                    break
            else:
                return False
        for condition in self.none_of:  # noqa: SIM110  (as above)
            if condition.holds(point):
                return False
        return True

    def decided(self, known: Mapping[str, Any]) -> bool | None:
        """Whether the condition holds at known values of some facets; None if the other facets decide."""
        parts = [clause.holds(known) if clause.facet in known else None for clause in self.clauses]
        parts += [_negated(_all(_negated(c.decided(known)) for c in group)) for group in self.any_of]
        parts += [_negated(condition.decided(known)) for condition in self.none_of]
        return _all(parts)

    def refuted(self, known: Mapping[str, Any]) -> Condition:
        """The parts of the condition that fail at known values of some facets; an empty condition if no part fails."""
        return Condition(
            tuple(clause for clause in self.clauses if clause.facet in known and not clause.holds(known)),
            tuple(group for group in self.any_of if all(c.decided(known) is False for c in group)),
            tuple(condition for condition in self.none_of if condition.decided(known)),
            self.where,
        )

    def remainder(self, known: Mapping[str, Any]) -> Condition:
        """The condition without the parts that hold at known values of some facets.

        The caller makes sure that no part fails at these values.
        """
        groups = [
            tuple(c.remainder(known) for c in group if c.decided(known) is None)
            for group in self.any_of
            if not any(c.decided(known) for c in group)
        ]
        return Condition(
            tuple(clause for clause in self.clauses if clause.facet not in known),
            tuple(groups),
            tuple(condition.remainder(known) for condition in self.none_of if condition.decided(known) is None),
            self.where,
        )

    def describe(self) -> str:
        """The condition in words."""
        parts = [clause.describe() for clause in self.clauses]
        parts += ["(" + " or ".join(c.describe() for c in group) + ")" for group in self.any_of]
        parts += [f"not ({condition.describe()})" for condition in self.none_of]
        return " and ".join(parts) or "always"

    def walk(self) -> Iterator[Clause]:
        """Every clause of the condition, those of nested conditions included."""
        yield from self.clauses
        for group in self.any_of:
            for condition in group:
                yield from condition.walk()
        for condition in self.none_of:
            yield from condition.walk()

    @property
    def facets(self) -> tuple[str, ...]:
        """The facets that the condition names, each once, in order of appearance."""
        return tuple(dict.fromkeys(clause.facet for clause in self.walk()))


ALWAYS = Condition()


def _all(parts: Iterable[bool | None]) -> bool | None:
    """Whether all parts hold: False if one does not, else None if one is open."""
    answers = list(parts)
    return False if False in answers else None if None in answers else True


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value
