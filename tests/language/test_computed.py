"""Products, remainders and quotients: their values, and the tests of an operand that settle a test of the result."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable

import pytest

from attnreg.language.computed import Computed, From, operand_tests, taken_from, value_at
from attnreg.language.matchers import Matcher, all_of, any_of, bounded, integer, negation
from attnreg.language.vocabulary import NAMED

POINT = {"a": 12, "b": 5, "absent": None, "none": 0}


@pytest.mark.parametrize(
    ("operation", "operands", "value"),
    [
        ("product", ("a", "b"), 60),
        ("product", ("a", "a"), 144),
        ("product", (8, "b"), 40),
        ("product", ("a", "absent"), None),
        ("product", ("a", "none"), 0),
        ("remainder", ("a", 5), 2),
        ("remainder", (256, "b"), 1),
        ("remainder", (256, "none"), None),
        ("remainder", (256, "absent"), None),
        ("remainder", ("a", "b"), 2),
        ("remainder", ("a", "none"), None),
        ("quotient", ("a", "b"), 2),
        ("quotient", ("a", "a"), 1),
        ("quotient", ("b", "a"), 0),
        ("quotient", ("a", "none"), None),
        ("quotient", ("a", "absent"), None),
        ("quotient", ("absent", "a"), None),
    ],
)
def test_values(operation, operands, value):
    computed = Computed(operation, operands)
    assert value_at(computed, POINT) == value
    assert set(taken_from(computed)) == {o for o in operands if isinstance(o, str)}


def test_a_copy_and_a_constant():
    assert (value_at(From("a"), POINT), taken_from(From("a"))) == (12, ("a",))
    assert (value_at("a", POINT), taken_from("a")) == ("a", ())
    assert operand_tests(From(NAMED), test := integer(3)) == (test,)


def drawn(random_: random.Random) -> Matcher:
    """A test of an integer as conditions make them."""
    low, size = random_.randint(0, 20), random_.randint(0, 20)
    tests = [integer(low), bounded(min=low), bounded(max=low), bounded(low, low + size),
             bounded(multiple_of=random_.choice([2, 3, 4, 6])), bounded(max=30, multiple_of=4)]  # fmt: skip
    first, second = random_.sample(tests, 2)
    return random_.choice([first, negation(first), any_of([first, second]), all_of([first, negation(second)])])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("operation", "operands"),
    [("product", ("a", "b")), ("product", ("a", 6)), ("product", (4, "b")), ("remainder", ("a", 6)),
     ("remainder", (24, "b"))],
)  # fmt: skip
def test_values_that_pass_the_same_tests_stand_for_each_other(seed, operation, operands):
    computed = Computed(operation, operands)
    test = drawn(random.Random(seed))
    tests = operand_tests(computed, test)

    def classes(operand):
        """The values of each class, which no test tells apart."""
        if isinstance(operand, int):
            return [[operand]]
        found: dict[Hashable, list[int | None]] = {}
        for value in [None, *range(60)]:
            found.setdefault((value is None, *(t.matches(value) for t in tests)), []).append(value)
        return found.values()

    for left, right in itertools.product(*map(classes, operands)):
        answers = {test.matches(computed.of(*pair)) for pair in itertools.product(left, right)}
        assert len(answers) == 1, (test.text, left, right)
