"""Values computed from other facets: copies and arithmetic, and the tests that split their operands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from attnreg.language.matchers import Matcher, bounded

Operation = Literal["product", "remainder", "quotient"]
_OPERATIONS: Mapping[Operation, Callable[[int, int], int]] = {
    "product": operator.mul,
    "remainder": operator.mod,
    "quotient": operator.floordiv,
}


class From(NamedTuple):
    """A copy of another facet's value, in place of a constant."""

    facet: str

    @property
    def facets(self) -> tuple[str, ...]:
        """The facets that are read."""
        return (self.facet,)

    def at(self, point: Any) -> Any:
        """The value at a point."""
        return point[self.facet]


class Computed(NamedTuple):
    """A number computed from two operands: each is an integer or the name of a facet.

    A quotient is the integer part, of two facets. The remainder of a step has an integer as one operand. The number
    is None if a facet is not given, or if the divisor is 0.
    """

    operation: Operation
    operands: tuple[str | int, str | int]

    @property
    def facets(self) -> tuple[str, ...]:
        """The facets that are read."""
        return tuple(dict.fromkeys(operand for operand in self.operands if isinstance(operand, str)))

    def at(self, point: Any) -> int | None:
        """The value at a point."""
        return self.of(*(point[o] if isinstance(o, str) else o for o in self.operands))

    def of(self, left: int | None, right: int | None) -> int | None:
        """The value for two operands."""
        if left is None or right is None or (self.operation != "product" and not right):
            return None
        return _OPERATIONS[self.operation](left, right)

    @property
    def text(self) -> str:
        """``num_heads × dcp_ranks``, ``256 mod block_size``."""
        return {"product": " × ", "remainder": " mod ", "quotient": " ÷ "}[self.operation].join(map(str, self.operands))


def taken_from(value: Any) -> tuple[str, ...]:
    """The facets that the value of a case or of a step is computed from; empty for a constant."""
    return value.facets if isinstance(value, From | Computed) else ()


def value_at(value: Any, point: Any) -> Any:
    """The value of a case or of a step at a point: the constant, or the number computed from other facets."""
    return value.at(point) if isinstance(value, From | Computed) else value


@cache
def operand_tests(value: From | Computed, test: Matcher) -> tuple[Matcher, ...]:
    """Tests of one operand that split its values into classes which ``test`` cannot tell apart.

    Two values that pass the same tests give the same answer of ``test``, whatever the other operand is. A quotient
    and a remainder of two facets have none: no condition that an analysis reads may name one (`Facet.divides`).
    """
    if isinstance(value, From):
        return (test,)
    left, right = value.operands
    if isinstance(left, str) and isinstance(right, str):
        assert value.operation == "product", value.text
        return (_GIVEN, *_of_a_factor(test))
    number, first = (left, False) if isinstance(left, int) else (right, True)
    assert isinstance(number, int)
    constants, moduli = frozenset[int](), frozenset[int]()
    if value.operation == "product":
        constants, moduli = frozenset(n for c in test.constants for n in (c // number, c // number + 1)), test.moduli
    elif first:
        moduli = frozenset({number})
    else:
        # a divisor above the number leaves the number itself as remainder
        constants = frozenset({number + 1})
    accepts = partial(_accepts, value, test, number, first)
    return (_GIVEN, Matcher(f"{value.text} {test.text}", accepts, constants, moduli))


_GIVEN = bounded()


def _accepts(value: Computed, test: Matcher, number: int, first: bool, operand: int | None) -> bool:
    return test.matches(value.of(operand, number) if first else value.of(number, operand))


def _of_a_factor(test: Matcher) -> Iterator[Matcher]:
    """Tests of one factor b of a product a × b.

    The product is at most c if b is at most c // a. A modulus m divides it if m / gcd(a, m) divides b.
    """
    for limit in {c for constant in test.constants for c in (constant - 1, constant) if c >= 0}:
        yield from map(_at_most, sorted({0, *(limit // n for n in range(1, limit + 1))}))
    for modulus in test.moduli:
        yield from map(_multiple_of, (n for n in range(2, modulus + 1) if modulus % n == 0))


@cache
def _at_most(number: int) -> Matcher:
    return bounded(max=number)


@cache
def _multiple_of(number: int) -> Matcher:
    return bounded(multiple_of=number)
