# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The facts of a tile that warpgroups of the kernel in `kernel` share, and how they store its outputs and sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnreg.kernels.hopper.memory import STAGED
from attnreg.kernels.hopper.releases import reinterpret
from attnreg.kernels.triton.softmax import LN_2

ROWS, HALF = (gl.constexpr(n) for n in (64, 256))
# accumulators of one warpgroup, [64, 64] and [64, 256]
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
# written by copies and read by products
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# a thread has 16 bytes, a warp whole rows
WIDE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
# how many facts a tile has, a power of 2
FACTS = gl.constexpr(8)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
STAGED_ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def rows_of_tile(tile, query_len, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the rows of a tile, [64] in a layout: query token of the request, head, and whether the row exists."""
    BLOCK_Q: gl.constexpr = ROWS // HEADS
    r = gl.arange(0, ROWS, LAYOUT)
    # computed where it is needed: as an argument it would take a register for the whole loop
    head_tile = gl.program_id(0) % ((NUM_HEADS + HEADS - 1) // HEADS)
    token, head = tile * BLOCK_Q + r // HEADS, head_tile * HEADS + r % HEADS
    return token, head, (r < BLOCK_Q * HEADS) & (token < query_len) & (head < NUM_HEADS)


@gluon.jit
def tell(facts, slot, first_token, tile, query_len, stride_lse, parts, apart, number):
    """Writes the facts of the tile to shared memory: as arguments, they would take the warpgroups registers for their
    whole loop. slot: of the first query's parts. apart: the distance of two rows' parts. number: of this tile's part.
    parts: how many parts the request's keys have."""
    i = gl.arange(0, FACTS, LANES)
    x = gl.where(i == 0, slot, 0) + gl.where(i == 1, first_token, 0) + gl.where(i == 2, tile, 0)
    x += gl.where(i == 3, query_len, 0) + gl.where(i == 4, stride_lse, 0) + gl.where(i == 5, parts, 0)
    facts.store(x + gl.where(i == 6, apart, 0) + gl.where(i == 7, number, 0))


@gluon.jit
def _told(facts, N: gl.constexpr):
    """Returns fact N of the tile."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([FACTS], [32], [4], [0])
    return gl.sum(gl.where(gl.arange(0, FACTS, LAYOUT) == N, facts.load(LAYOUT), 0), 0)


@gluon.jit
def tile_of(facts):
    """Returns the first token of the tile's request, the tile's number in it, and the request's queries; 0 if another
    launch computes the request."""
    return _told(facts, 1), _told(facts, 2), _told(facts, 3)


@gluon.jit
def _part_of_rows(facts, token, head, NUM_HEADS: gl.constexpr):
    """Returns the index of each row's part, as `splits.parts` defines it."""
    return ((_told(facts, 0).to(gl.int64) + token) * NUM_HEADS + head) * _told(facts, 6) + _told(facts, 7)


@gluon.jit
def store_half(
    output_ptr, partial_ptr, acc, factor, half, facts, tiles,
    OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr,
    FIRST: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Stores half of the rows' outputs, from column FIRST on, times a factor for each row: as output, or as a part.

    The stores go through the memory of the half tiles, which is free by now.
    """
    acc = acc * factor[:, None]
    parts = 1
    if SHARED:
        parts = _told(facts, 5)
    # Triton 3.6 cannot compile these branches as functions
    if SPLIT or SHARED:  # noqa: SIM102 (the compiler decides the first, the device the second)
        if (tiles > 0) & (SPLIT or parts > 1):
            tile, query_len = _told(facts, 2), _told(facts, 3)
            staged = reinterpret(half, gl.float32, [ROWS, HALF], STAGED)
            staged.store(acc)
            token, head, exists = rows_of_tile(tile, query_len, NUM_HEADS, HEADS, gl.SliceLayout(1, STAGED_ROWS))
            offs = _part_of_rows(facts, token, head, NUM_HEADS) * (2 * HALF)
            columns = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, STAGED_ROWS))
            # parts are in the run's own memory, so this alignment is certain
            target = gl.multiple_of(partial_ptr + offs[:, None] + columns[None, :], [16, 16])
            gl.store(target, staged.load(STAGED_ROWS), mask=exists[:, None])
    if not SPLIT:  # noqa: SIM102 (as above)
        if parts == 1:
            first_token, tile, query_len = tile_of(facts)
            staged = reinterpret(half.index(0), output_ptr.dtype.element_ty, [ROWS, HALF], SWIZZLED)
            staged.store(acc.to(output_ptr.dtype.element_ty))
            token, head, exists = rows_of_tile(tile, query_len, NUM_HEADS, HEADS, gl.SliceLayout(1, WIDE_ROWS))
            offs = (first_token + token).to(gl.int64) * OUT_TOKEN + head.to(gl.int64) * OUT_HEAD
            columns = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, WIDE_ROWS))
            gl.store(output_ptr + offs[:, None] + columns[None, :], staged.load(WIDE_ROWS), mask=exists[:, None])


@gluon.jit
def store_sums(
    lse_ptr, partial_lse_ptr, row_max, row_sum, facts,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Stores the logarithms of the rows' sums of weights: base 2 for a part, else the natural ones."""
    first_token, tile, query_len = tile_of(facts)
    token, head, exists = rows_of_tile(tile, query_len, NUM_HEADS, HEADS, gl.SliceLayout(1, SCORES))
    # a part without keys is dropped; != 0 is true for NaN too, so that a sum of NaN stays NaN
    log_sum = gl.where(row_sum != 0, row_max + gl.log2(gl.where(row_sum != 0, row_sum, 1.0)), -float("inf"))
    whole = exists
    if SHARED:
        whole = exists & (_told(facts, 5) == 1)
        exists = exists & (_told(facts, 5) > 1)
    if SPLIT or SHARED:
        gl.store(partial_lse_ptr + _part_of_rows(facts, token, head, NUM_HEADS), log_sum, mask=exists)
    if not SPLIT and lse_ptr is not None:
        lse_ptr += head.to(gl.int64) * _told(facts, 4) + first_token + token
        gl.store(lse_ptr, log_sum * LN_2, mask=whole)
