"""Codebooks are data: there is one for each format and width that is served, and other widths are refused."""

from __future__ import annotations

import pytest

from attnreg import Registry
from attnreg.language.packed import packed_formats
from attnreg.runtime.turboquant.codebooks import COEFFICIENTS, codebook


def test_each_width_that_is_served_has_one(default: Registry) -> None:
    (claims,) = ([c for c in v.claims if c.key == "head_sizes"] for v in default.backends["TURBOQUANT"].variants[-1:])
    widths = [size for size in range(1, 1025) if claims[0].matcher.matches(size)]
    formats = packed_formats(default.vocabulary.words["kv_dtypes"]).values()
    sides = {side for packed in formats for side in (packed.keys, packed.values) if side.code == "levels"}
    assert len(widths) > 50
    assert {side.bits for side in sides} == {3, 4}
    assert {(side.bits, side.columns(size)) for side in sides for size in widths} <= COEFFICIENTS.keys()


@pytest.mark.parametrize(("bits", "columns"), COEFFICIENTS)
def test_levels_are_what_the_polynomial_gives(bits: int, columns: int) -> None:
    book = codebook(bits, columns)
    a, b, c = book.coefficients
    x = [2 * code - 2**bits + 1 for code in range(2**bits)]
    assert [a * n + b * n**3 + c * n**5 for n in x] == pytest.approx(book.levels, abs=1e-12)
    assert sorted(book.levels) == list(book.levels) == [-level for level in reversed(book.levels)]
    assert len(book.thresholds) == 2**bits - 1


def test_other_widths_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"no codebook for codes of 4 bits of 512 columns.*4 bits of 256.*tools/codebooks"
    ):
        codebook(4, 512)
