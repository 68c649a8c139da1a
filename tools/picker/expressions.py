"""Conditions' smallest parts as JSON: the test of a matcher as an expression, and tables of equal parts."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable
from functools import partial
from typing import Any

from packaging.specifiers import SpecifierSet

from attnreg.language import matchers
from attnreg.language.matchers import Matcher, Requirement

_encoded = json.JSONEncoder(sort_keys=True).encode


class ExpressionError(ValueError):
    """Raised for a part of a registry that the evaluator has no expression for."""


class Tables:
    """The parts of a registry, each written once: table -> its parts as JSON."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, int]] = {}

    def add(self, table: str, part: object) -> int:
        """The index of a part in a table."""
        known = self.parts.setdefault(table, {})
        return known.setdefault(_encoded(part), len(known))

    def to_dict(self) -> dict[str, list[Any]]:
        return {table: [json.loads(part) for part in parts] for table, parts in self.parts.items()}


def mentions(matcher: Matcher) -> list[Any]:
    requirements = [m for m in matcher.mentions if isinstance(m, Requirement)]
    if requirements:
        return [_requirement(r) for r in sorted(requirements, key=str)]
    return sorted(matcher.mentions)


def _requirement(requirement: Requirement) -> dict[str, Any]:
    # in an order of their own: a set of specifiers has none
    specifiers = sorted([s.operator, s.version] for s in SpecifierSet(requirement.versions))
    return {"package": requirement.package, "versions": requirement.versions, "specifiers": specifiers}


def expression(matcher: Matcher) -> list[Any]:
    """The test of a matcher as a list: its operation, then what it compares with."""
    predicate: Any = matcher.predicate
    if predicate is matchers.ANY.predicate:
        return ["anything"]
    if isinstance(predicate, partial):
        return _applied(predicate)
    words = getattr(predicate, "__self__", None)
    # a method of the set of words
    operation = {
        "__contains__": "in",
        "issubset": "all of",
        "issuperset": "only",
        "isdisjoint": "none of",
    }.get(getattr(predicate, "__name__", ""))
    if isinstance(words, frozenset) and operation:
        return [operation, _sorted(words)]
    raise ExpressionError(f"no expression for {matcher.text!r}: {predicate!r}")


def _applied(predicate: partial[bool]) -> list[Any]:
    arguments = predicate.args
    if predicate.func is operator.eq or predicate.func is matchers._same:
        return ["is", arguments[0]]
    if predicate.func is matchers._within:
        return ["within", *arguments]
    if predicate.func is matchers._overlaps:
        return ["any of", _sorted(arguments[0])]
    if predicate.func is matchers._all_met:
        return ["installed", [_requirement(r) for r in arguments[0]]]
    if predicate.func is matchers._does_not_match:
        return ["not", expression(arguments[0])]
    several = {matchers._any_matches: "or", matchers._all_match: "and"}.get(predicate.func)
    if several is None:
        raise ExpressionError(f"no expression for {predicate!r}")
    return [several, *(expression(test) for test in arguments[0])]


def _sorted(words: Iterable[Any]) -> list[Any]:
    """Words in an order of their own; not given, and numbers, among them."""
    return sorted(words, key=lambda word: (type(word).__name__, word if word is not None else 0))
