"""TurboQuant in float64: rows of keys or values to codes and scales, and back.

**Rotation.** A row x of size elements is padded with zeros to a power of two. It is then multiplied by the signs of a
random sequence, and by a Hadamard matrix ``H[i, j] = (-1) ** popcount(i & j) / sqrt(columns)``. Both keep norms and
products, so ``q . k`` is the product of the rotated rows. Each rotated coordinate of a unit vector is distributed like
a coordinate of a random unit vector: nearly normal, whatever channels of x are large.

**Levels.** The rotated row y is divided by its root mean square. Each coordinate is then quantised to the nearest level
of a codebook made for that distribution (`codebooks`). Codes stand for the row ``scale * c``, where c are the levels of
the codes. The scale is one of:

- ``norm``: ``|y| / |c|``. The decoded row has the norm of x (norm correction). Products with it are too small by the
  factor ``cos(y, c)`` on average, about ``1 - error / 2``.
- ``unbiased``: ``|y|**2 / (y . c)``. Then ``y . (scale * c) = |y|**2`` for every row, and the error ``scale * c - y``
  is orthogonal to y. Under a rotation drawn uniformly at random, the error has a uniform direction in the space
  orthogonal to y. So the mean of the stored row over rotations is x, and the mean of its product with any fixed q is
  ``q . x``. (Source: EDEN, Vargaftik et al., arXiv:2108.08842. TurboQuant's own unbiased form adds a 1-bit residual,
  QJL, which is not used here.)
- ``fitted``: ``(y . c) / |c|**2``, the least squares, for the best of eight c. Each c quantises the row after a
  division by one of `FACTORS` times its root mean square. The codebook is the best for all rows together; a row of a
  hundred elements is served better by one stretched to its own largest element. Products are too small by the error.

**Uniform codes** of a group stand for ``zero + scale * code``. Zero is the group's least element; the largest element
has the largest code.

**Scales are float16.** Some rows cannot be stored: those that hold a number that is not finite, or that need a scale
past the largest float16. They get scales of NaN and codes of 0. Queries that attend to them get NaN; others do not. In
float8_e4m3fn, a row with a number that is not finite is all NaN, and finite numbers past 448 are saturated.

Source: Zandieh et al., TurboQuant, arXiv:2504.19874, sections 3.1 and 3.3.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attnreg.language.packed import Side
from attnreg.runtime.turboquant.cache_bytes import PackedBlock
from attnreg.runtime.turboquant.codebooks import codebook

# NaN as a float8_e4m3fn
NAN8 = 0x7F
# the factors of the codes that `fitted` rows try: even steps from two thirds to seven sixths of the root mean square
FACTORS = tuple(0.68 + 0.07 * i for i in range(8))


@functools.cache
def signs(columns: int) -> Tensor:
    """The signs of the rotation, [columns] float64: bit 15 of a hash of the column's number."""
    numbers = torch.arange(1, columns + 1) * 0x9E3779B1 & 0xFFFFFFFF
    numbers = (numbers ^ numbers >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    odd = (numbers ^ numbers >> 13) >> 15 & 1
    return torch.where(odd == 1, -1.0, 1.0).double()


@functools.cache
def hadamard(columns: int) -> Tensor:
    """The Hadamard matrix, [columns, columns] float64, orthogonal and symmetric."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < columns:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div(columns**0.5)


def rotated(rows: Tensor, columns: int) -> Tensor:
    """Rows [..., size] in the basis of the codes: [..., columns] float64."""
    rows = torch.nn.functional.pad(rows.double(), (0, columns - rows.shape[-1]))
    return rows * signs(columns).to(rows.device) @ hadamard(columns).to(rows.device)


def unrotated(rows: Tensor, size: int) -> Tensor:
    """The rows [..., size] float64 that `rotated` turns into these [..., columns]."""
    columns = rows.shape[-1]
    return (rows.double() @ hadamard(columns).to(rows.device) * signs(columns).to(rows.device))[..., :size]


def encode(page: PackedBlock, rows: Tensor) -> Tensor:
    """The bytes [..., row_bytes] of rows [..., size]."""
    side, exact = page.side, rows.double()
    finite = exact.isfinite().all(-1, keepdim=True)
    exact = exact.where(finite, 0.0)
    if side.code == "fp8":
        eight = exact.clamp(-448.0, 448.0).float().to(torch.float8_e4m3fn).view(torch.uint8)
        return eight.masked_fill(~finite, NAN8)
    codes, numbers = _levels(side, exact) if side.code == "levels" else _uniform(side, exact)
    stored = numbers.to(torch.float16)
    held = finite & stored.isfinite().all(-1, keepdim=True)
    return page.packed(codes.masked_fill(~held, 0), stored.masked_fill(~held, torch.nan))


def _levels(side: Side, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The codes [..., columns] of rows, and their scales [..., 1]."""
    columns = side.columns(rows.shape[-1])
    y, book = rotated(rows, columns), codebook(side.bits, columns)
    norm = y.norm(dim=-1, keepdim=True)
    unit = y / norm.where(norm > 0, 1.0) * columns**0.5
    ends, values = unit.new_tensor(book.thresholds), unit.new_tensor(book.levels)
    if side.scale == "fitted":
        return _fitted(y, unit, ends, values)[:2]
    codes = torch.bucketize(unit, ends)
    levels = values[codes]
    if side.scale == "norm":
        return codes, norm / levels.norm(dim=-1, keepdim=True)
    products = (y * levels).sum(-1, keepdim=True)
    return codes, norm**2 / products.where(norm > 0, 1.0)


def undecided(side: Side, rows: Tensor) -> Tensor:
    """The most that another rounding may add to the squared error of rows [...] as levels.

    A number may lie between two codes, within 2**-16 of the row's divisor. Rounding then decides which code it gets.
    If the scale is not that of the least squared error, the two codes have different errors.
    """
    columns = side.columns(rows.shape[-1])
    y, book = rotated(rows, columns), codebook(side.bits, columns)
    size = y.norm(dim=-1) / columns**0.5
    unit = y / size.where(size > 0, 1.0)[..., None]
    ends, values = unit.new_tensor(book.thresholds), unit.new_tensor(book.levels)
    if side.scale == "fitted":
        unit = unit / _fitted(y, unit, ends, values)[2]
    between = (unit[..., None] - ends).abs().amin(-1) < 2**-16
    most: Tensor = between.sum(-1) * (values.diff().max() * size).square()
    return most


def _fitted(y: Tensor, unit: Tensor, ends: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes and the scale of the least squared error, and the factor that led to them.

    ends, values: the thresholds and the levels of the codebook.
    """
    best = y.new_full((*y.shape[:-1], 1), -1.0)
    codes, scales, factors = torch.zeros_like(y, dtype=torch.long), best, best
    for factor in FACTORS:
        tried = torch.bucketize(unit / factor, ends)
        levels = values[tried]
        products, squares = (x.sum(-1, keepdim=True) for x in (y * levels, levels * levels))
        # how much the fit reduces the row's square
        better = products**2 / squares > best
        best = torch.where(better, products**2 / squares, best)
        codes, scales = torch.where(better, tried, codes), torch.where(better, products / squares, scales)
        factors = factors.masked_fill(better, factor)
    return codes, scales, factors


def _uniform(side: Side, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The codes [..., columns] of rows, padded with 0, and their scales and zeros [..., 2 * groups]."""
    size, groups, most = rows.shape[-1], side.groups(rows.shape[-1]), 2**side.bits - 1
    parts = torch.split(rows, side.group or size, -1)
    zeros = torch.stack([x.amin(-1) for x in parts], -1).to(torch.float16).double()
    scales = (torch.stack([x.amax(-1) for x in parts], -1) - zeros) / most
    scales = scales.clamp(min=0).to(torch.float16).double()
    each = torch.arange(size, device=rows.device) // (side.group or size)
    step = scales.where(scales > 0, 1.0)[..., each]
    codes = ((rows - zeros[..., each]) / step + 0.5).floor().clamp(0, most).where(scales[..., each] > 0, 0.0)
    assert scales.shape[-1] == groups
    return torch.nn.functional.pad(codes, (0, side.columns(size) - size)), torch.cat([scales, zeros], -1)


def decode(page: PackedBlock, bytes_: Tensor) -> Tensor:
    """What bytes [..., row_bytes] of rows stand for, in the basis of the codes: [..., columns] or [..., size] float64.

    Rotated rows stay rotated: the product of two of them is that of the rows themselves. `unrotated` turns them back.
    """
    side = page.side
    codes, numbers = page.unpacked(bytes_)
    if side.code == "fp8":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    if side.code == "levels":
        return numbers * numbers.new_tensor(codebook(side.bits, codes.shape[-1]).levels)[codes]
    scales, zeros = numbers.chunk(2, -1)
    each = torch.arange(page.size, device=codes.device) // (side.group or page.size)
    return zeros[..., each] + scales[..., each] * codes[..., : page.size]
