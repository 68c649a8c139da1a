"""TurboQuant in float64: its errors are those of theory, its products are unbiased as stated, and bytes are exact."""

from __future__ import annotations

import math

import pytest
import torch
from support.pages.codebooks import tool

from attnreg.language.packed import Side
from attnreg.runtime.turboquant import codec
from attnreg.runtime.turboquant.cache_bytes import PackedBlock
from attnreg.runtime.turboquant.codebooks import codebook

SIZES = (64, 96, 128, 256)
SIDES = [
    *(Side(bits, "hadamard", scale) for bits in (2, 3, 4) for scale in ("norm", "unbiased", "fitted")),  # type: ignore[arg-type]
    *(Side(bits, group=group) for bits in (2, 3, 4) for group in (0, 32)),
    Side(8),
]


def unit_rows(count: int, size: int) -> torch.Tensor:
    rows = torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    return rows / rows.norm(dim=-1, keepdim=True)


def stored(side: Side, rows: torch.Tensor) -> torch.Tensor:
    """The rows that the bytes of rows stand for, in their own basis."""
    page = PackedBlock(side, rows.shape[-1], 16)
    found = codec.decode(page, codec.encode(page, rows))
    return codec.unrotated(found, rows.shape[-1]) if side.code == "levels" else found


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_rotated_rows_are_distorted_as_theory_says(bits: int, size: int) -> None:
    columns = Side(bits, "hadamard", "norm").columns(size)
    rows, theory = unit_rows(4000, size), tool.lloyd_max(bits, columns).error
    # arXiv:2504.19874, theorem 1: 0.117, 0.03 and 0.009 for 2, 3 and 4 bits
    assert theory == pytest.approx({2: 0.117, 3: 0.0345, 4: 0.0095}[bits], rel=0.05)
    # an unbiased row is longer than its levels' best: its error is e / (1 - e)
    for scale, expected in (("norm", theory), ("unbiased", theory / (1 - theory))):
        side = Side(bits, "hadamard", scale)  # type: ignore[arg-type]
        page = PackedBlock(side, size, 16)
        errors = codec.decode(page, codec.encode(page, rows)) - codec.rotated(rows, columns)
        assert float(errors.square().sum(-1).mean()) == pytest.approx(expected, rel=0.05)
        # of a row that was filled up, the part of the error in the padding is no error of the row
        distortion = (stored(side, rows) - rows).square().sum(-1).mean()
        assert float(distortion) == pytest.approx(expected * size / columns, rel=0.05)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scales_keep_the_norm_or_the_product_with_the_row_itself(bits: int) -> None:
    rows = unit_rows(500, 128)
    kept = stored(Side(bits, "hadamard", "norm"), rows)
    assert kept.norm(dim=-1).tolist() == pytest.approx([1.0] * 500, rel=2**-10)
    straight = stored(Side(bits, "hadamard", "unbiased"), rows)
    assert (straight * rows).sum(-1).tolist() == pytest.approx([1.0] * 500, rel=2**-10)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_a_fitted_scale_has_the_least_error(size: int) -> None:
    rows = unit_rows(500, size)

    def errors(scale: str, bits: int) -> torch.Tensor:
        return (stored(Side(bits, "hadamard", scale), rows) - rows).square().sum(-1)  # type: ignore[arg-type]

    for bits in (2, 3, 4):
        fitted = errors("fitted", bits)
        assert float(fitted.mean()) < 0.97 * min(float(errors(scale, bits).mean()) for scale in ("norm", "unbiased"))
    # codes between the least and the largest element of a rotated row, which take two bytes more
    uniform = codec.rotated(rows, size)
    plain = (stored(Side(4), uniform) - uniform).square().sum(-1)
    assert float(errors("fitted", 4).mean()) < float(plain.mean())
    # the error of a least square is orthogonal to the row that is stored
    kept = stored(Side(4, "hadamard", "fitted"), rows)
    assert ((rows - kept) * kept).sum(-1).tolist() == pytest.approx([0.0] * 500, abs=1e-3)


@pytest.mark.parametrize("scale", ["norm", "unbiased"])
def test_products_are_unbiased_over_rotations_as_stated(scale: str) -> None:
    # a rotation drawn at random is one of the rows and the query together, before the format's own
    generator = torch.Generator().manual_seed(7)
    size, draws, bits = 32, 4000, 3
    rotations = torch.linalg.qr(torch.randn(draws, size, size, dtype=torch.float64, generator=generator)).Q
    row, query = unit_rows(2, size)
    query = (query + row) / 2
    found = stored(Side(bits, "hadamard", scale), rotations @ row)  # type: ignore[arg-type]
    products = (found * (rotations @ query)).sum(-1)
    spread = float(products.std()) / math.sqrt(draws)
    exact = float(row @ query)
    if scale == "unbiased":
        assert abs(float(products.mean()) - exact) < 4 * spread
    else:
        # too small by the cosine between a row and its levels
        error = tool.polynomial(bits, size).error
        assert float(products.mean()) == pytest.approx(exact * math.sqrt(1 - error), abs=4 * spread)
        assert float(products.mean()) < exact - 10 * spread


@pytest.mark.parametrize("size", [5, 16, 80, 128])
def test_rotations_keep_products_and_are_undone(size: int) -> None:
    rows, columns = unit_rows(8, size), max(16, 1 << (size - 1).bit_length())
    turned = codec.rotated(rows, columns)
    assert torch.allclose(turned @ turned.T, rows @ rows.T, atol=1e-14)
    assert torch.allclose(codec.unrotated(turned, size), rows, atol=1e-14)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("size", [24, 80, 128])
def test_bytes_hold_codes_and_scales(side: Side, size: int) -> None:
    page = PackedBlock(side, size, 32)
    rows = unit_rows(64, size).view(2, 32, size)
    bytes_ = codec.encode(page, rows)
    assert bytes_.shape == (2, 32, page.row_bytes)
    pages = page.blocks(bytes_)
    assert pages.shape == (2, page.bytes)
    assert torch.equal(page.rows(pages), bytes_)
    codes, numbers = page.unpacked(bytes_)
    assert torch.equal(page.packed(codes, numbers), bytes_)
    # what was decoded is encoded alike
    if side.code == "uniform":
        assert torch.allclose(codec.decode(page, bytes_), rows, atol=float(numbers.max()) / 2 + 1e-3)


@pytest.mark.parametrize("side", SIDES)
def test_rows_without_numbers_are_marked(side: Side) -> None:
    rows = unit_rows(6, 64)
    rows[0, 3] = torch.nan
    rows[1, 0] = torch.inf
    rows[2] = 0.0
    rows[3] *= 1e30
    found = stored(side, rows)
    assert found[:2].isnan().all()
    assert (found[2] == 0).all()
    # float8 saturates; others have a scale, which float16 cannot hold
    assert bool(found[3].isnan().all()) == (side.code != "fp8")
    assert found[4:].isfinite().all()


def test_equal_elements_are_exact_in_uniform_codes() -> None:
    rows = torch.full((3, 32), 0.5, dtype=torch.float64)
    assert torch.equal(stored(Side(4), rows), rows)


def test_a_number_between_two_codes_may_become_either() -> None:
    """With a scale by norm the two are not equally near: more error is allowed of such rows, and of no others."""
    side = Side(4, "hadamard", "norm")
    rows = unit_rows(2, 128)
    threshold = float(codebook(4, 128).thresholds[-1])
    unit = codec.rotated(rows, 128)
    # the first row's largest number is put on the last threshold, in units of the row's root mean square
    at = int(unit[0].argmax())
    rest = unit[0].clone()
    rest[at] = 0.0
    unit[0] = rest
    unit[0, at] = threshold * (rest.square().sum() / (128 - threshold**2)).sqrt()
    allowed = codec.undecided(side, codec.unrotated(unit, 128))
    assert allowed[0] > 0
    assert allowed[1] == 0


def test_a_fitted_number_between_two_codes_of_the_best_factor_may_become_either() -> None:
    """Each factor has its own codes; those of the chosen one are stored."""
    side, threshold = Side(4, "hadamard", "fitted"), float(codebook(4, 128).thresholds[-1])
    rest = codec.rotated(unit_rows(1, 128), 128)[0]
    at = int(rest.abs().argmax())
    found = []
    for factor in codec.FACTORS:
        # a number of `factor` times the last threshold, in units of the root mean square of the row with it
        unit, edge = rest.clone(), threshold * factor
        unit[at] = 0.0
        unit[at] = edge * (unit.square().sum() / (128 - edge**2)).sqrt()
        found.append(float(codec.undecided(side, codec.unrotated(unit[None], 128))))
    assert 0 < sum(x > 0 for x in found) < len(found)
