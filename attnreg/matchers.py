"""Matchers: what one value must be, as a predicate, in words, and with the values at which it changes its mind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

_MEMO_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Matcher:
    """What one matcher accepts, in words (``text``) and as a predicate with a memory.

    ``constants`` and ``moduli`` are the integers at which the predicate can change its mind, ``mentions`` the words it
    names: together they are enough to split a facet into classes of values that the data cannot tell apart. ``form`` is
    how a set is compared with ``mentions``: it holds all of them, none of them, or nothing else.
    """

    text: str
    predicate: Callable[[Any], bool]
    constants: frozenset[int] = frozenset()
    moduli: frozenset[int] = frozenset()
    mentions: frozenset[Any] = frozenset()
    form: Literal["", "all", "none", "only"] = ""
    _memo: dict[Any, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def matches(self, value: Any) -> bool:
        """Whether the matcher accepts the value."""
        memo = self._memo
        known = memo.get(value)
        if known is None:
            if len(memo) >= _MEMO_LIMIT:
                memo.clear()
            known = memo[value] = self.predicate(value)
        return known


ANY = Matcher("anything", lambda value: True)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package and the versions of it that will do (a PEP 440 specifier; empty: any)."""

    package: str
    versions: str = ""

    def __str__(self) -> str:
        return f"{self.package}{self.versions}"

    def met_by(self, packages: tuple[tuple[str, str], ...] | None) -> bool:
        """Whether installed packages (name, version) satisfy it; None stands for everything installed."""
        if packages is None:
            return True
        version = dict(packages).get(self.package)
        if version is None or not self.versions or not version:
            return version is not None
        # imported late: a version is compared only where one was given
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(self.versions).contains(version, prereleases=True)


def installed(wanted: Iterable[Requirement]) -> Matcher:
    """The test that all of some packages are installed."""
    wanted = tuple(wanted)
    text = " and ".join(map(str, wanted))
    return Matcher(text, lambda v: all(r.met_by(v) for r in wanted), mentions=frozenset(wanted), form="all")


def equals(value: Any, text: str) -> Matcher:
    return Matcher(text, lambda v: v == value and type(v) is type(value), mentions=frozenset({value}))


def one_of(values: frozenset[Any], text: str) -> Matcher:
    return Matcher(text, values.__contains__, mentions=values)


def bounded(min: int | None = None, max: int | None = None, below: int | None = None, multiple_of: int = 1) -> Matcher:  # noqa: A002
    high = max if below is None else below - 1 if max is None else (max if max < below else below - 1)

    def accepts(v: Any) -> bool:
        return (
            v is not None
            and (min is None or v >= min)
            and (high is None or v <= high)
            and (multiple_of == 1 or v % multiple_of == 0)
        )

    constants = frozenset(
        x for x in (min, None if min is None else min - 1, high, None if high is None else high + 1) if x
    )
    noun = f"multiples of {multiple_of}" if multiple_of > 1 else ""
    if min is not None and high is not None:
        text = f"{noun} from {min} to {high}".strip() if noun else f"{min} to {high}"
    elif high is not None:
        text = f"{noun} up to {high}" if noun else f"up to {high}"
    elif min is not None:
        text = f"{noun} from {min}" if noun else f"{min} or more"
    else:
        text = noun
    return Matcher(text, accepts, constants, frozenset({multiple_of}) if multiple_of > 1 else frozenset())


def any_of(tests: list[Matcher]) -> Matcher:
    if len(tests) == 1:
        return tests[0]
    return _merged(", ".join(t.text for t in tests), lambda v: any(t.matches(v) for t in tests), tests)


def all_of(tests: list[Matcher]) -> Matcher:
    return _merged(", ".join(t.text for t in tests), lambda v: all(t.matches(v) for t in tests), tests)


def negation(test: Matcher) -> Matcher:
    return _merged(f"not {test.text}", lambda v: not test.matches(v), [test])


def _merged(text: str, predicate: Callable[[Any], bool], tests: list[Matcher]) -> Matcher:
    return Matcher(
        text,
        predicate,
        frozenset().union(*(t.constants for t in tests)),
        frozenset().union(*(t.moduli for t in tests)),
        frozenset().union(*(t.mentions for t in tests)),
    )


def integer_range(tests: Iterable[Matcher]) -> range:
    """Integers from 1 that, beside None, show every way in which tests can answer.

    Past the largest constant the answers repeat with the product of the moduli, so one period more is enough.
    """
    constants = {1}
    moduli = {1}
    for test in tests:
        constants |= test.constants
        moduli |= test.moduli
    return range(max(constants) + 1 + math.lcm(*moduli) + 1)
