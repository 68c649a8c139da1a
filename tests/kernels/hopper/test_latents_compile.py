"""The decode kernel of MLA in Gluon compiles for SM 9.0 without a GPU, as it is meant to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.compiler import Compiler
from support.gluon import LatentCase

CASES = (
    LatentCase("64 requests"),
    LatentCase("split", requests=1),
    LatentCase("16 heads, 4 queries, blocks of 16", heads=16, queries=4, block_size=16),
    LatentCase("20 heads, prompts, blocks of 48", heads=20, queries=30, requests=2, keys=100, block_size=48),
    LatentCase("float16, not causal, no lse", heads=40, dtype="float16", causal=False, lse=False, block_size=128),
)
# rows fetched at once
BOXES = {64: 64, 16: 16, 48: 16, 128: 64}
# 64 keys of 576 columns are 36 products of scores, written for the first tile and for the others; a half of the outputs
# is 4, written twice for the left half, once for the right
PRODUCTS = 2 * 36 + 3 * 4


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.close()


def test_it_fits_and_keeps_products_in_flight(compiler: Compiler) -> None:
    found = compiler.latent_usages(CASES)
    assert {usage.case for usage in found} == {case.name for case in CASES}
    block_sizes = {case.name: case.block_size for case in CASES}
    for usage in found:
        assert usage.spills == 0, usage
        assert not usage.serialised, usage
        assert usage.shared <= 232448, usage
        assert usage.products == PRODUCTS, usage
        # a tile is nine columns of boxes
        assert usage.copies == 9 * 64 // BOXES[block_sizes[usage.case]], usage
