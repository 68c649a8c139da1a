"""Bounds in words, as attnreg prints them, are refused with the same bounds as data."""

from __future__ import annotations

import pytest
from support.registries import tiny
from support.registries.tiny import row

from attnreg.errors import RegistryError
from attnreg.language.matchers import bounded
from attnreg.language.numbers import bounds_help

BOUNDS = [
    {"multiple_of": 16},
    {"multiple_of": 8, "max": 256},
    {"multiple_of": 8, "min": 64, "max": 256},
    {"multiple_of": 8, "min": 64},
    {"min": 64, "max": 256},
    {"max": 128},
    {"min": 64},
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_printed_bounds_become_data(bounds: dict[str, int]) -> None:
    text = bounded(**bounds).text
    written = ", ".join(f"{name}: {bound}" for name, bound in bounds.items())
    assert bounds_help(text) == f"write {{{written}}}"


@pytest.mark.parametrize("value", ["any", "same", "", "16 bytes", "multiples", 16, None, ["multiples of 16"]], ids=str)
def test_other_values_get_no_bounds(value: object) -> None:
    assert bounds_help(value) == ""


def test_a_row_with_bounds_in_words_is_refused_with_the_cure() -> None:
    with pytest.raises(RegistryError) as refused:
        tiny.load({"A": row(capabilities={"head_sizes": "multiples of 16"})})
    (problem,) = refused.value.problems
    assert problem.help == "write {multiple_of: 16}"
