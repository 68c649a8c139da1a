"""Errors in words: with what they were raised from."""

import pytest

from attnreg.errors import first_cause, in_a_line, in_words


def raised(error: Exception, *causes: Exception) -> Exception:
    """An error that was raised from the first of some causes, that from the second, and so on."""
    for one, cause in zip((error, *causes), causes, strict=False):
        one.__cause__ = cause
    return error


PLACE = "at 104:4:\n    gl.warp_specialize([\n    ^"
ERRORS = [
    (raised(RuntimeError("no memory")), "RuntimeError: no memory", "RuntimeError: no memory"),
    (raised(RuntimeError()), "RuntimeError", "RuntimeError"),
    (
        raised(ValueError(PLACE), ValueError("at 3:1"), RuntimeError("`copy` has been removed\nuse `load`")),
        f"ValueError: {PLACE}; the cause: RuntimeError: `copy` has been removed\nuse `load`",
        "RuntimeError: `copy` has been removed",
    ),
    # a text that has that of its cause
    (raised(RuntimeError("ValueError('a mask')"), ValueError("a mask")), "RuntimeError: ValueError('a mask')",
     "ValueError: a mask"),
    # a compiler's own words follow the place
    (raised(ValueError(f"{PLACE}\nno such type")), f"ValueError: {PLACE}\nno such type", "no such type"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "line"), ERRORS)
def test_an_error_in_words(error: Exception, words: str, line: str) -> None:
    assert (in_words(error), in_a_line(error)) == (words, line)


def test_causes_that_go_round_in_a_circle_come_to_an_end() -> None:
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert first_cause(one) is two
    assert in_words(one) == "RuntimeError: one; the cause: RuntimeError: two"
