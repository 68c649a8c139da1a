"""Matchers: what one value must be, as a predicate, in words, and with the values at which it changes its mind."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

_MEMO_LIMIT = 4096
_RANGE_LIMIT = 1 << 18


@dataclass(frozen=True, slots=True)
class Matcher:
    """What one matcher accepts, in words (``text``) and as a predicate with a memory.

    ``constants`` and ``moduli`` are the integers at which the predicate can change its mind, ``mentions`` the words it
    names: together they are enough to split a facet into classes of values that the data cannot tell apart. ``form`` is
    how a set is compared with ``mentions``: it holds all of them, any of them, none of them, or only these. A predicate
    is made of named functions only, so that a selection, which carries its registry, can be sent to another process.
    ``either`` lists the texts of which one is enough, where there are several.

    The memory holds what the predicate answered and nothing else: no answer depends on it, and no comparison, copy or
    pickle has it. So a matcher counts as immutable, and threads may share it.
    """

    text: str
    predicate: Callable[[Any], bool] = field(compare=False)
    constants: frozenset[int] = frozenset()
    moduli: frozenset[int] = frozenset()
    mentions: frozenset[Any] = frozenset()
    form: Literal["", "all", "any", "none", "only"] = ""
    either: tuple[str, ...] = ()
    _memo: dict[Any, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    @property
    def in_words(self) -> str:
        """The text at the end of a sentence: ``sm90, sm100 or sm103``. Amid conditions an "or" would mislead."""
        return f"{', '.join(self.either[:-1])} or {self.either[-1]}" if len(self.either) > 1 else self.text

    def matches(self, value: Any) -> bool:
        """Whether the matcher accepts the value."""
        memo = self._memo
        known = memo.get(value)
        if known is None:
            if len(memo) >= _MEMO_LIMIT:
                memo.clear()
            known = memo[value] = self.predicate(value)
        return known


class FieldMatcher(Matcher):
    """A matcher of a config's field, which holds whatever JSON can hold.

    It remembers no answer: a list or a mapping is no key of a dictionary, and ``True`` would be taken for ``1``.
    """

    __slots__ = ()

    def matches(self, value: Any) -> bool:
        return self.predicate(value)


def _always(value: Any) -> bool:
    return True


ANY = Matcher("anything", _always)


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
        from packaging.version import InvalidVersion

        try:
            return SpecifierSet(self.versions).contains(version, prereleases=True)
        except InvalidVersion:  # newer releases of packaging answer False themselves
            return False


def installed(wanted: Iterable[Requirement]) -> Matcher:
    """The test that all of some packages are installed."""
    wanted = tuple(wanted)
    text = " and ".join(map(str, wanted))
    return Matcher(text, partial(_all_met, wanted), mentions=frozenset(wanted), form="all")


def _all_met(wanted: tuple[Requirement, ...], packages: tuple[tuple[str, str], ...] | None) -> bool:
    return all(r.met_by(packages) for r in wanted)


def some_of(words: frozenset[str]) -> Matcher:
    """The test that a set holds at least one of some words."""
    return Matcher(" or ".join(sorted(words)), partial(_overlaps, words), mentions=words, form="any")


def _overlaps(words: frozenset[str], held: frozenset[str]) -> bool:
    return not words.isdisjoint(held)


def equals(value: Any, text: str) -> Matcher:
    return Matcher(text, partial(_same, value), mentions=frozenset({value}))


def _same(expected: Any, value: Any) -> bool:
    return bool(value == expected) and type(value) is type(expected)


def integer(value: int) -> Matcher:
    return Matcher(str(value), partial(operator.eq, value), constants=frozenset({value}))


def _globbed(pattern: str, value: Any) -> bool:
    return isinstance(value, str) and fnmatchcase(value, pattern)


def one_of(values: frozenset[Any], text: str, either: Iterable[str] = ()) -> Matcher:
    return Matcher(text, values.__contains__, mentions=values, either=tuple(either))


def bounded(min: int | None = None, max: int | None = None, below: int | None = None, multiple_of: int = 1) -> Matcher:  # noqa: A002
    """An integer within all of the bounds."""
    ends = [end for end in (max, None if below is None else below - 1) if end is not None]
    high = sorted(ends)[0] if ends else None
    # the integers on either side of where the predicate changes its mind
    near = ((min - 1, min) if min is not None else ()) + ((high, high + 1) if high is not None else ())
    moduli = frozenset({multiple_of}) if multiple_of > 1 else frozenset[int]()
    text = _bounds_text(min, high, f"multiples of {multiple_of}" if multiple_of > 1 else "")
    return Matcher(text, partial(_within, min, high, multiple_of), frozenset(filter(None, near)), moduli)


def _bounds_text(low: int | None, high: int | None, noun: str) -> str:
    if low is not None and high is not None:
        return f"{noun} from {low} to {high}" if noun else f"{low} to {high}"
    if high is not None:
        return f"{noun} up to {high}".lstrip()
    if low is not None:
        return f"{noun} from {low}" if noun else f"{low} or more"
    return noun or "given"


def _within(low: int | None, high: int | None, step: int, value: int | None) -> bool:
    return (
        value is not None
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (step == 1 or value % step == 0)
    )


def field_equals(value: Any, text: str) -> FieldMatcher:
    """A field that holds a value of the same kind: ``1`` is ``1.0``, but neither is ``true`` or ``"1"``."""
    return FieldMatcher(text, partial(_same_kind, value), mentions=frozenset({value}))


def _same_kind(expected: Any, value: Any) -> bool:
    if is_number(expected):
        return is_number(value) and bool(value == expected)
    return _same(expected, value)


def field_glob(pattern: str) -> FieldMatcher:
    """A field that holds text which a pattern with ``*`` and ``?`` matches."""
    return FieldMatcher(pattern, partial(_globbed, pattern), mentions=frozenset({pattern}))


def field_bounded(
    min: float | None = None,  # noqa: A002
    max: float | None = None,  # noqa: A002
    below: float | None = None,
    multiple_of: int = 1,
) -> FieldMatcher:
    """A field that holds a number within all of the bounds; what is not given, or no number, satisfies none."""
    texts = [f"multiples of {multiple_of}"] if multiple_of > 1 else []
    if min is not None and max is not None:
        texts.append(f"{min} to {max}")
    elif min is not None:
        texts.append(f"{min} or more")
    elif max is not None:
        texts.append(f"up to {max}")
    if below is not None:
        texts.append(f"below {below}")
    return FieldMatcher(", ".join(texts) or "a number", partial(_number_within, min, max, below, multiple_of))


def _number_within(low: float | None, high: float | None, below: float | None, step: int, value: Any) -> bool:
    return (
        is_number(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (below is None or value < below)
        and (step == 1 or value % step == 0)
    )


def is_number(value: object) -> bool:
    """Whether a value is an integer or a float; True and False are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def any_of(tests: list[Matcher]) -> Matcher:
    if len(tests) == 1:
        return tests[0]
    either = tuple(text for t in tests for text in t.either or (t.text,))
    return _merged(", ".join(t.text for t in tests), partial(_any_matches, tuple(tests)), tests, either)


def all_of(tests: list[Matcher]) -> Matcher:
    return _merged(", ".join(t.text for t in tests), partial(_all_match, tuple(tests)), tests)


def negation(test: Matcher) -> Matcher:
    return _merged(f"not {test.text}", partial(_differs, test), [test])


def _any_matches(tests: tuple[Matcher, ...], value: Any) -> bool:
    return any(t.matches(value) for t in tests)


def _all_match(tests: tuple[Matcher, ...], value: Any) -> bool:
    return all(t.matches(value) for t in tests)


def _differs(test: Matcher, value: Any) -> bool:
    return not test.matches(value)


def _merged(text: str, predicate: Callable[[Any], bool], tests: list[Matcher], either: tuple[str, ...] = ()) -> Matcher:
    kind = type(tests[0]) if tests else Matcher
    return kind(
        text,
        predicate,
        frozenset().union(*(t.constants for t in tests)),
        frozenset().union(*(t.moduli for t in tests)),
        frozenset().union(*(t.mentions for t in tests)),
        either=either,
    )


def integer_range(tests: Iterable[Matcher]) -> range:
    """Integers from 0 that, beside None, show every way in which tests can answer.

    Past the largest constant the answers repeat with the least common multiple of the moduli, so one period more is
    enough. Raises ValueError where that is too far to look at every integer.
    """
    constants = {1}
    moduli = {1}
    for test in tests:
        constants |= test.constants
        moduli |= test.moduli
    end = max(constants) + 1 + math.lcm(*moduli) + 1
    if end > _RANGE_LIMIT:
        raise ValueError(f"the numbers are too large: every integer up to {end - 1:,} would have to be looked at")
    return range(end)
