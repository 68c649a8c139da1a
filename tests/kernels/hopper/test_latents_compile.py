"""The decode kernel of MLA in Gluon compiles for SM 9.0 without a GPU, as it is meant to."""

from __future__ import annotations

from support.compiled import COPY, PRODUCT
from support.compiler import Compiler
from support.gluon import LATENT_CASES

# rows fetched at once
BOXES = {64: 64, 16: 16, 48: 16, 128: 64}
# 64 keys of 576 columns are 36 products of scores, written for the first tile and for the others; a half of the outputs
# is 4, written twice for the left half, once for the right
PRODUCTS = 2 * 36 + 3 * 4


def test_it_fits_and_keeps_products_in_flight(compiler: Compiler) -> None:
    found = compiler.latent_facts(LATENT_CASES)
    assert {case for case, _ in found} == {case.name for case in LATENT_CASES}
    block_sizes = {case.name: case.block_size for case in LATENT_CASES}
    for case, facts in found:
        assert facts.spills == 0, (case, facts)
        assert not facts.serialised, (case, facts)
        assert facts.shared <= 232448, (case, facts)
        assert facts.instructions[PRODUCT] == PRODUCTS, (case, facts)
        # a tile is two halves and the rotary part, each in boxes
        assert facts.instructions[COPY] == 3 * 64 // BOXES[block_sizes[case]], (case, facts)
