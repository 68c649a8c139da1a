"""The tool that made the codebooks gives those that are shipped, on any processor, and they are good ones."""

from __future__ import annotations

import pytest
from support.pages.codebooks import tool

from attnreg.runtime.turboquant.codebooks import COEFFICIENTS, codebook

BOOKS = sorted(COEFFICIENTS)
# Lloyd-Max levels and errors of the normal distribution, from Max (1960), table I
MAX_1960 = {
    2: (0.1175, (0.4528, 1.510)),
    3: (0.03454, (0.2451, 0.7560, 1.344, 2.152)),
    4: (0.009497, (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733)),
}


def test_the_tool_makes_each_codebook_that_is_shipped() -> None:
    assert [(bits, size) for bits in tool.BITS for size in tool.SIZES] == BOOKS


@pytest.mark.parametrize(("bits", "size"), BOOKS)
def test_the_tool_gives_the_shipped_numbers(bits: int, size: int) -> None:
    shipped, found = codebook(bits, size), tool.polynomial(bits, size)
    assert found.coefficients == pytest.approx(shipped.coefficients, rel=1e-9, abs=0)
    assert found.levels == pytest.approx(shipped.levels, abs=1e-9)
    assert [tool.rounded(x) for x in shipped.coefficients] == [*shipped.coefficients]


@pytest.mark.parametrize("bits", MAX_1960)
def test_free_levels_tend_to_the_published_ones_of_the_normal_distribution(bits: int) -> None:
    error, levels = MAX_1960[bits]
    best = tool.lloyd_max(bits, 1 << 16)
    assert best.error == pytest.approx(error, rel=1e-3)
    assert best.levels[2 ** (bits - 1) :] == pytest.approx(levels, rel=1e-3)


@pytest.mark.parametrize(("bits", "size"), BOOKS)
def test_levels_of_a_polynomial_cost_a_quarter_of_a_percent(bits: int, size: int) -> None:
    best = tool.lloyd_max(bits, size).error
    assert best <= tool.polynomial(bits, size).error * (1 + 1e-9) <= best * 1.0025
