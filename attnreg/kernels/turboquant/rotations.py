# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Rotations by a random-sign Hadamard matrix: of queries into the basis of rotated keys, of outputs back from values'.

The matrix is made in registers. Its elements, 1 and -1, are exact in every type, so products with it are as exact as
the sums of the matrix units; the factor is applied to the result. `attnreg.runtime.turboquant.codec` defines it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.launch import Kernel

# columns of a rotated row that are computed at once: more would not fit the registers
STEP = tl.constexpr(32)
# rows of a program, the same for every batch: the order of sums may not depend on it
_ROWS = 16


@triton.jit
def _sign(x):
    """Returns -1.0 where a number has an odd number of bits, else 1.0; float32."""
    x ^= x >> 8
    x ^= x >> 4
    x ^= x >> 2
    x ^= x >> 1
    return 1.0 - 2.0 * (x & 1)


@triton.jit
def hadamard(first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Returns columns of the Hadamard matrix, from one on, [ROWS, COLUMNS], of 1 and -1."""
    return _sign(tl.arange(0, ROWS)[:, None] & (first + tl.arange(0, COLUMNS))[None, :]).to(DTYPE)


@triton.jit
def flipped(x, first):
    """Returns rows whose products with the first columns of the matrix are those of x [BLOCK_R, BLOCK] with later ones.

    first: the first of the later columns, a multiple of their number, a power of 2: their bits are apart from its own.
    """
    return x * _sign(tl.arange(0, x.shape[1]) & first).to(x.dtype)[None, :]


@triton.jit
def signs(offs_d):
    """Returns the signs of the rotation at some columns, 1 and -1 as float32."""
    number = (offs_d + 1).to(tl.uint32) * 0x9E3779B1
    number = (number ^ (number >> 15)) * 0x85EBCA6B
    odd = ((number ^ (number >> 13)) >> 15) & 1
    return 1.0 - 2.0 * odd.to(tl.float32)


@triton.jit(do_not_specialize=["num_reqs", "num_rows"], do_not_specialize_on_alignment=["query_start_loc_ptr"])
def _rotate_kernel(
    source_ptr, target_ptr, query_start_loc_ptr, num_reqs, num_rows,
    SOURCE_TOKEN: tl.constexpr, SOURCE_HEAD: tl.constexpr, TARGET_TOKEN: tl.constexpr, TARGET_HEAD: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr, BLOCK_R: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rotates the rows (token, head) of a batch, or with BACK rotates them back; padding is neither read nor written.

    Grid: (cdiv(num_rows, BLOCK_R)). Rows have SIZE elements in the model's basis, and COLUMNS in that of codes. BACK:
    the source is float32, and is multiplied as the sum of two numbers of the target's type.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = row // HEADS, row % HEADS
    exists = (row < num_rows) & (token < tl.load(query_start_loc_ptr + num_reqs))
    source_ptr += (token * SOURCE_TOKEN + head * SOURCE_HEAD)[:, None]
    target_ptr += (token * TARGET_TOKEN + head * TARGET_HEAD)[:, None]
    DTYPE: tl.constexpr = target_ptr.dtype.element_ty
    FACTOR: tl.constexpr = 1.0 / COLUMNS**0.5
    # all blocks of the matrix are the first one, or its negative
    matrix = hadamard(0, WIDTH, WIDTH, DTYPE)
    for first in tl.range(0, COLUMNS, WIDTH, num_stages=1):
        offs_t = first + tl.arange(0, WIDTH)
        y = tl.zeros([BLOCK_R, WIDTH], dtype=tl.float32)
        # rows are read again for each part of the columns: a whole one would fill the registers
        for d in tl.range(0, COLUMNS, WIDTH, num_stages=1):
            offs_d = d + tl.arange(0, WIDTH)
            mask = exists[:, None] if BACK else exists[:, None] & (offs_d < SIZE)[None, :]
            x = tl.load(source_ptr + offs_d[None, :], mask=mask, other=0.0).to(tl.float32) * _sign(d & first)
            x = x * FACTOR if BACK else x * signs(offs_d)[None, :]
            high = x.to(DTYPE)
            y = tl.dot(high, matrix, y, input_precision="ieee")
            if BACK:
                y = tl.dot((x - high.to(tl.float32)).to(DTYPE), matrix, y, input_precision="ieee")
        y = y * signs(offs_t)[None, :] if BACK else y * FACTOR
        mask = exists[:, None] & (offs_t < SIZE)[None, :] if BACK else exists[:, None]
        tl.store(target_ptr + offs_t[None, :], y.to(DTYPE), mask=mask)


_ROTATE = Kernel(_rotate_kernel, ("source_ptr", "target_ptr", "query_start_loc_ptr", "num_reqs", "num_rows"))


class _Code(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides."""

    dtype: torch.dtype
    heads: int
    size: int
    columns: int
    back: bool

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        source, target = key
        return {
            "SOURCE_TOKEN": source[0],
            "SOURCE_HEAD": source[1],
            "TARGET_TOKEN": target[0],
            "TARGET_HEAD": target[1],
            "HEADS": self.heads,
            "SIZE": self.size,
            "COLUMNS": self.columns,
            "BACK": self.back,
            "BLOCK_R": _ROWS,
            "WIDTH": min(STEP.value, self.columns),
        }


def rotate(source: Tensor, target: Tensor, query_start_loc: Tensor, size: int, columns: int, *, back: bool) -> None:
    """Writes the rotated rows of source [tokens, heads, size or columns] to target, or with ``back`` rotates them back.

    Rows at and past ``query_start_loc[-1]`` are padding. Without ``back`` source and target have one type, with it the
    source is float32. Widths: those of `_rotate_kernel`.
    """
    tokens, heads, _ = source.shape
    if not tokens:
        return
    code = _Code(target.dtype, heads, size, columns, back)
    grid = (-(-tokens * heads // _ROWS), 1, 1)
    values = (source, target, query_start_loc, query_start_loc.shape[0] - 1, tokens * heads)
    _ROTATE.variant(source.device, code).launch((source.stride(), target.stride()), grid, values)
