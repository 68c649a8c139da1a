"""TurboQuant in float64: rows of keys or values to codes and scales, and back.

**Rotation.** A row x of size elements, filled up with zeros to a power of two, is multiplied by the signs of a random
sequence and by a Hadamard matrix, ``H[i, j] = (-1) ** popcount(i & j) / sqrt(columns)``. Both keep norms and products,
so ``q . k`` is the product of the rotated rows, and each rotated coordinate of a unit vector is distributed as one of a
random unit vector: nearly normal, whatever channels of x are large.

**Levels.** The rotated row divided by its root mean square is quantised coordinate by coordinate, to the nearest level
of a codebook made for that distribution (`codebooks`). The row that codes stand for is ``scale * level[code]``, whose
scale is chosen for the levels c that the row y was quantised to:

- ``norm``: ``|y| / |c|``. The row has the norm of x (norm correction). Its error is the least of rows of that norm in
  this direction; products with it are too small by ``cos(y, c)`` on average, about ``1 - error / 2``.
- ``unbiased``: ``|y|**2 / (y . c)``. Then ``y . (scale * c) = |y|**2`` for every row, and the error ``scale * c - y``
  is orthogonal to y. Under a rotation drawn uniformly at random its direction in that plane is uniform: the mean of the
  stored row over rotations is x, and that of its product with any fixed q is ``q . x``. (Source: EDEN, Vargaftik et
  al., arXiv:2108.08842. TurboQuant's own unbiased form adds a 1-bit residual, QJL, which is not used here.)
- ``fitted``: ``(y . c) / |c|**2``, the least squares, of the best of eight c: the row is quantised after a division by
  each of `FACTORS` times its root mean square. The codebook is the best for rows of all lengths together, a row of a
  hundred elements is better served by one that its own largest element stretches. Products are too small by the error.

**Uniform codes** of a group stand for ``zero + scale * code``: zero is its least element, and the largest has the
largest code.

**Scales are float16.** A row that holds a number that is not finite, or that needs a scale past the largest float16, is
stored with scales of NaN and codes of 0: what attends to it is NaN, and nothing else. Of float8_e4m3fn, such a row is
all NaN. Finite numbers past 448 are saturated there.

Source: Zandieh et al., TurboQuant, arXiv:2504.19874, sections 3.1 and 3.3.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attnreg.language.packed import Side
from attnreg.runtime.turboquant.cache_bytes import PackedBlock
from attnreg.runtime.turboquant.codebooks import codebook

# NaN, of float8_e4m3fn
NAN8 = 0x7F
# by which codes of `fitted` rows are tried: even steps from two thirds of the root mean square to seven sixths
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
    """The rows [..., size] float64 of which `rotated` gives these [..., columns]."""
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

    A number that lies between two codes, but for a 2**-16th of what the row is divided by, may become either. Where
    this is not the scale of the least squared error, the two are not equally near to it.
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

    ends, values: of the codebook's cells.
    """
    best = y.new_full((*y.shape[:-1], 1), -1.0)
    codes, scales, factors = torch.zeros_like(y, dtype=torch.long), best, best
    for factor in FACTORS:
        tried = torch.bucketize(unit / factor, ends)
        levels = values[tried]
        products, squares = (x.sum(-1, keepdim=True) for x in (y * levels, levels * levels))
        # what the fit takes off the square of the row
        better = products**2 / squares > best
        best = torch.where(better, products**2 / squares, best)
        codes, scales = torch.where(better, tried, codes), torch.where(better, products / squares, scales)
        factors = factors.masked_fill(better, factor)
    return codes, scales, factors


def _uniform(side: Side, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The codes [..., columns] of rows, and their scales and zeros [..., 2 * groups]. Zeros fill up the last codes."""
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

    Rotated rows stay so: the product of two of them is that of the rows themselves, and `unrotated` gives these.
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
