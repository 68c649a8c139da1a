"""Matchers: tests of one value, each with a predicate, a text, and the values at which its answer can change."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any, Literal

_MEMO_LIMIT = 4096
_RANGE_LIMIT = 1 << 18


@dataclass(frozen=True, slots=True)
class Matcher:
    """A test of one value: a predicate, whose answers are cached, and a ``text`` that says what it accepts.

    ``constants`` and ``moduli`` are the integers at which the answer can change, ``mentions`` the words that the
    matcher names. Together they split a facet into classes of values that the data cannot tell apart. ``form`` says how
    a set is compared with ``mentions``: it holds all of them, any of them, none of them, or only these. ``either``
    lists the texts of alternatives, if there are several.

    The predicate is made of named functions, so that pickle can store a selection with its registry. Comparisons,
    copies and pickles leave the cache out: a matcher counts as immutable, and threads may share it.
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
        """The text for the end of a sentence: ``sm90, sm100 or sm103``.

        Between other conditions the "or" would be ambiguous; use ``text`` there.
        """
        return f"{', '.join(self.either[:-1])} or {self.either[-1]}" if len(self.either) > 1 else self.text

    def matches(self, value: Any) -> bool:
        """Whether the matcher accepts the value."""
        memo = self._memo
        answer = memo.get(value)
        if answer is None:
            if len(memo) >= _MEMO_LIMIT:
                memo.clear()
            answer = memo[value] = self.predicate(value)
        return answer


class FieldMatcher(Matcher):
    """A matcher of one field of a model's config, which may hold any JSON value.

    It caches no answers: a list or a mapping cannot be a key of the cache, and ``True`` would get the answer for ``1``.
    """

    __slots__ = ()

    def matches(self, value: Any) -> bool:
        return self.predicate(value)


def _always(value: Any) -> bool:
    return True


ANY = Matcher("anything", _always)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package and its accepted versions: a PEP 440 specifier, or "" for any version."""

    package: str
    versions: str = ""

    def __str__(self) -> str:
        return f"{self.package}{self.versions}"

    def met_by(self, packages: tuple[tuple[str, str], ...] | None) -> bool:
        """Whether installed packages (name, version) satisfy it; None means that every package is installed."""
        if packages is None:
            return True
        version = dict(packages).get(self.package)
        if version is None or not self.versions or not version:
            return version is not None
        # imported late: few selections compare versions
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion

        try:
            return SpecifierSet(self.versions).contains(version, prereleases=True)
        except InvalidVersion:  # newer releases of packaging answer False themselves
            return False


def installed(wanted: Iterable[Requirement]) -> Matcher:
    """A matcher of installed packages that accepts if they meet every requirement in ``wanted``."""
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


# the data names the same few hundred words thousands of times
@lru_cache(_MEMO_LIMIT, typed=True)
def equals(value: Any, text: str) -> Matcher:
    """A matcher of one value and its type: 1 does not match True."""
    return Matcher(text, partial(_same, value), mentions=frozenset({value}))


def _same(expected: Any, value: Any) -> bool:
    return bool(value == expected) and type(value) is type(expected)


@lru_cache(_MEMO_LIMIT, typed=True)
def integer(value: int) -> Matcher:
    return Matcher(str(value), partial(operator.eq, value), constants=frozenset({value}))


def _matches_glob(pattern: str, value: Any) -> bool:
    return isinstance(value, str) and fnmatchcase(value, pattern)


def one_of(values: frozenset[Any], text: str, either: Iterable[str] = ()) -> Matcher:
    return Matcher(text, values.__contains__, mentions=values, either=tuple(either))


def bounded(min: int | None = None, max: int | None = None, below: int | None = None, multiple_of: int = 1) -> Matcher:  # noqa: A002
    """A matcher of integers within all of the bounds; ``max`` is inclusive, ``below`` exclusive."""
    ends = [end for end in (max, None if below is None else below - 1) if end is not None]
    high = sorted(ends)[0] if ends else None
    # the integers on either side of each bound
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
    """A matcher of a field that equals a value: ``1`` equals ``1.0``, but neither equals ``true`` or ``"1"``."""
    return FieldMatcher(text, partial(_same_kind, value), mentions=frozenset({value}))


def _same_kind(expected: Any, value: Any) -> bool:
    if is_number(expected):
        return is_number(value) and bool(value == expected)
    return _same(expected, value)


def field_glob(pattern: str) -> FieldMatcher:
    """A matcher of a field whose text matches a pattern with ``*`` and ``?``."""
    return FieldMatcher(pattern, partial(_matches_glob, pattern), mentions=frozenset({pattern}))


def field_bounded(
    min: float | None = None,  # noqa: A002
    max: float | None = None,  # noqa: A002
    below: float | None = None,
    multiple_of: int = 1,
) -> FieldMatcher:
    """A matcher of a field that holds a number within all of the bounds; it refuses every other value."""
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
    return _merged(f"not {test.text}", partial(_does_not_match, test), [test])


# the combined matcher caches its answer, so these call the predicates of its parts, which cache nothing


def _any_matches(tests: tuple[Matcher, ...], value: Any) -> bool:
    for test in tests:  # noqa: SIM110 (a generator takes twice as long, thousands of times)
        if test.predicate(value):
            return True
    return False


def _all_match(tests: tuple[Matcher, ...], value: Any) -> bool:
    return all(test.predicate(value) for test in tests)


def _does_not_match(test: Matcher, value: Any) -> bool:
    return not test.predicate(value)


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
    """The integers from 0 that show every combination of answers that some matchers can give.

    Past the largest constant the answers repeat with the least common multiple of the moduli, so the range ends one
    period later. Raises ValueError if the range is too long to try every integer.
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
