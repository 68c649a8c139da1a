"""The decode kernel of MLA in Gluon compiles for SM 9.0 without a GPU, as it is meant to."""

from __future__ import annotations

import triton
from support.compilers import spills
from support.compilers.compiled import COPY, PRODUCT
from support.compilers.compiler import Compiler
from support.compilers.gluon import LATENT_CASES, LatentCase

# rows fetched at once
BOXES = {64: 64, 16: 16, 48: 16, 128: 64}
# 64 keys of 576 columns are 36 products of scores, written for the first tile and for the others; a half of the outputs
# is 4, written twice for the left half, once for the right
PRODUCTS = 2 * 36 + 3 * 4


def test_it_fits_and_keeps_products_in_flight(compiler: Compiler) -> None:
    found = compiler.latent_facts(LATENT_CASES)
    cases = {case.name: case for case in LATENT_CASES}
    assert {case for case, _ in found} == {*cases}
    spilled = [(("sm90", name, "latents in Gluon"), facts.spills) for name, facts in found]
    assert not spills.problems(spilled, triton.__version__)
    for name, facts in found:
        case = cases[name]
        assert not facts.serialised, (case, facts)
        assert facts.shared <= 232448, (case, facts)
        assert facts.instructions[PRODUCT] == PRODUCTS, (case, facts)
        assert facts.instructions.get(COPY, 0) == _copies(case), (case, facts)


def test_a_sum_of_nan_counts_as_one_of_keys(compiler: Compiler) -> None:
    # the merge drops a part without keys: of a query that is no number it made zeros. All comparisons are with a sum of
    # 0, and NaN is unordered and not equal to it
    cases = tuple(case for case in LATENT_CASES if case.name in ("64 requests", "split", "fp8, split, 16 heads"))
    found = compiler.call("gluon", "latent_comparisons", cases)
    assert found == [(case.name, {"une"}) for case in cases]


def _copies(case: LatentCase) -> int:
    """The copy engine's: a tile is two halves and the rotary part, each in boxes; other tiles are read row by row."""
    by_row = case.kv_dtype != "auto" or case.block_size < 16
    return 0 if by_row else 3 * 64 // BOXES[case.block_size]
