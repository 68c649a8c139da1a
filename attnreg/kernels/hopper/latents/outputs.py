# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The rows of a tile of the kernel in `kernel`, and how it stores their outputs and the sums of their weights."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnreg.kernels.hopper.memory import STAGED
from attnreg.kernels.triton.softmax import LN_2

ROWS, HALF = (gl.constexpr(n) for n in (64, 256))
# accumulators of one warpgroup, [64, 64] and [64, 256]
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
# as copies write shared memory, and as products read it
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# 16 bytes a thread, whole rows a warp
WIDE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
STAGED_ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def rows_of_tile(tile, query_len, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the rows of a tile, [64] in a layout: query token of the request, head, and whether there is one."""
    BLOCK_Q: gl.constexpr = ROWS // HEADS
    r = gl.arange(0, ROWS, LAYOUT)
    # asked for where it is needed: a number that is passed on takes a register for the whole loop
    head_tile = gl.program_id(0) % ((NUM_HEADS + HEADS - 1) // HEADS)
    token, head = tile * BLOCK_Q + r // HEADS, head_tile * HEADS + r % HEADS
    return token, head, (r < BLOCK_Q * HEADS) & (token < query_len) & (head < NUM_HEADS)


@gluon.jit
def _part_of_rows(slots, req, first_token, token, head, NUM_HEADS: gl.constexpr):
    """Returns the index of each row's part among those of all splits; slots: as in `splits.store_part`."""
    slot = gl.where(slots > 0, req.to(gl.int64) * slots, first_token.to(gl.int64)) + token
    return (slot * NUM_HEADS + head) * gl.num_programs(1) + gl.program_id(1)


@gluon.jit
def store_half(
    output_ptr, partial_ptr, acc, factor, tiles, slots, req, first_token, tile, query_len,
    OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr,
    FIRST: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Stores half of the rows' outputs, from column FIRST on, times a factor for each row.

    By way of the memory of the half tiles, which is free by now.
    """
    acc = acc * factor[:, None]
    if SPLIT:
        staged = tiles._reinterpret(gl.float32, [ROWS, HALF], STAGED)
        staged.store(acc)
        token, head, exists = rows_of_tile(tile, query_len, NUM_HEADS, HEADS, gl.SliceLayout(1, STAGED_ROWS))
        offs = _part_of_rows(slots, req, first_token, token, head, NUM_HEADS) * (2 * HALF)
        columns = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, STAGED_ROWS))
        # parts are in memory of the run's own
        target = gl.multiple_of(partial_ptr + offs[:, None] + columns[None, :], [16, 16])
        gl.store(target, staged.load(STAGED_ROWS), mask=exists[:, None])
    else:
        staged = tiles.index(0)._reinterpret(output_ptr.dtype.element_ty, [ROWS, HALF], SWIZZLED)
        staged.store(acc.to(output_ptr.dtype.element_ty))
        token, head, exists = rows_of_tile(tile, query_len, NUM_HEADS, HEADS, gl.SliceLayout(1, WIDE_ROWS))
        offs = (first_token + token).to(gl.int64) * OUT_TOKEN + head.to(gl.int64) * OUT_HEAD
        columns = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, WIDE_ROWS))
        gl.store(output_ptr + offs[:, None] + columns[None, :], staged.load(WIDE_ROWS), mask=exists[:, None])


@gluon.jit
def store_sums(
    lse_ptr, partial_lse_ptr, row_max, row_sum, stride_lse, slots, req, first_token, tile, query_len,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Stores the logarithms of the rows' sums of weights: base 2 for a part, else the natural ones."""
    token, head, exists = rows_of_tile(tile, query_len, NUM_HEADS, HEADS, gl.SliceLayout(1, SCORES))
    # a sum of NaN has to be seen: a part without keys is dropped
    log_sum = gl.where(row_sum != 0, row_max + gl.log2(gl.where(row_sum != 0, row_sum, 1.0)), -float("inf"))
    if SPLIT:
        gl.store(partial_lse_ptr + _part_of_rows(slots, req, first_token, token, head, NUM_HEADS), log_sum, mask=exists)
    elif lse_ptr is not None:
        gl.store(lse_ptr + head.to(gl.int64) * stride_lse + first_token + token, log_sum * LN_2, mask=exists)
