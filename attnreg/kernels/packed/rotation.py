# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The random-sign Hadamard matrix of packed keys and values, computed in registers, and rotations of tiles of queries.

The matrix's elements, 1 and -1, are exact in every type. So products with it are as exact as the sums of the matrix
units. The factor is applied to the result. `attnreg.runtime.turboquant.codec` defines the matrix.
"""

import triton
import triton.language as tl

# how many rows or columns of the matrix are used at once: more would not fit the registers
STEP = tl.constexpr(32)


@triton.jit
def sign_of(x):
    """Returns -1.0 for numbers with an odd number of set bits, else 1.0; float32."""
    x ^= x >> 8
    x ^= x >> 4
    x ^= x >> 2
    x ^= x >> 1
    return 1.0 - 2.0 * (x & 1)


@triton.jit
def hadamard(columns, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """Returns these columns of the Hadamard matrix, [ROWS, their number], of 1 and -1."""
    return sign_of(tl.arange(0, ROWS)[:, None] & columns[None, :]).to(DTYPE)


@triton.jit
def signs(offs_d):
    """Returns the signs of the rotation at these columns, 1 and -1 as float32."""
    number = (offs_d + 1).to(tl.uint32) * 0x9E3779B1
    number = (number ^ (number >> 15)) * 0x85EBCA6B
    odd = ((number ^ (number >> 13)) >> 15) & 1
    return 1.0 - 2.0 * odd.to(tl.float32)


@triton.jit
def load_rotated(query_ptr, exists, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns rows of SIZE elements, rotated, [BLOCK_M, BLOCK] float32, with their columns in the order of `columns`.

    query_ptr: [BLOCK_M, 1], the first element of each row.
    """
    WIDTH: tl.constexpr = STEP if BLOCK >= STEP else BLOCK
    # one block of rows of the matrix serves for all: the others differ only in the signs of columns
    matrix = sign_of(tl.arange(0, WIDTH)[:, None] & columns[None, :]).to(query_ptr.dtype.element_ty)
    rotated = tl.zeros([exists.shape[0], BLOCK], dtype=tl.float32)
    for first in tl.static_range(0, BLOCK, WIDTH):
        offs_d = first + tl.arange(0, WIDTH)
        x = tl.load(query_ptr + offs_d[None, :], mask=exists[:, None] & (offs_d < SIZE)[None, :], other=0.0)
        x = x * signs(offs_d).to(x.dtype)[None, :]
        rotated += tl.dot(x, matrix, input_precision="ieee") * sign_of(first & columns)[None, :]
    FACTOR: tl.constexpr = 1.0 / BLOCK**0.5
    return rotated * FACTOR
