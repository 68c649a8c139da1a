# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Attention over split keys: the code that stores a program's part.

A part is the result of one program for a row: its output, and the logarithm (base 2) of the sum of its weights. Parts
are in partial_ptr [num_reqs * slots, num_heads, splits, head_size_v] and partial_lse_ptr, without the last dimension.
If slots is 0, parts are by row: [rows, num_heads, splits, head_size_v].

If programs share keys out (`shares`), all parts of a launch have consecutive numbers. They are in partial_ptr
[slots, num_heads, programs, head_size_v]. A request with a single part stores none.
"""

import triton
import triton.language as tl


@triton.jit
def _parts_of(
    rows, req, first_token, tile, slots, NUM_HEADS: tl.constexpr, TILE: tl.constexpr, ONE_TILE: tl.constexpr
):  # fmt: skip
    """Returns the offset of the tile's parts, and where each row's part is from there on, [BLOCK_M]."""
    first_slot = tl.where(slots > 0, req.to(tl.int64) * slots, first_token)
    if ONE_TILE or TILE.block_m * TILE.block_dv < 16384:
        first_part = tl.program_id(1).to(tl.int64)
        part = ((first_slot + rows.token) * NUM_HEADS + rows.head) * tl.num_programs(1)
    else:
        # a large tile has no registers for int64: the tile's offset needs 64 bits, offsets within the tile only 32
        BLOCK_Q: tl.constexpr = TILE.block_m // TILE.heads
        first_slot += tile * BLOCK_Q
        first_part = first_slot * NUM_HEADS * tl.num_programs(1) + tl.program_id(1)
        part = ((rows.token - tile * BLOCK_Q) * NUM_HEADS + rows.head) * tl.num_programs(1)
    return first_part, part


@triton.jit
def store_no_part(
    rows, req, first_token, tile, slots, partial_lse_ptr,
    NUM_HEADS: tl.constexpr, TILE: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Stores that this program's split has no keys."""
    first_part, part = _parts_of(rows, req, first_token, tile, slots, NUM_HEADS, TILE, ONE_TILE)
    tl.store(partial_lse_ptr + first_part + part, float("-inf"), mask=rows.exists)


@triton.jit
def store_part(
    state, rows, req, first_token, tile, slots, partial_ptr, partial_lse_ptr, offs_dv,
    NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Stores the rows' softmax over the keys of this program's split; offs_dv: the columns of state.acc."""
    first_part, part = _parts_of(rows, req, first_token, tile, slots, NUM_HEADS, TILE, ONE_TILE)
    _store_part(state, rows, first_part, part, partial_ptr, partial_lse_ptr, offs_dv, SIZE)


@triton.jit
def store_part_of_share(
    state, rows, number, programs, partial_ptr, partial_lse_ptr, offs_dv, NUM_HEADS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Stores the rows' softmax over the keys of part ``number``; programs: how many parts there is room for."""
    part = (rows.token * NUM_HEADS + rows.head) * programs
    _store_part(state, rows, number.to(tl.int64), part.to(tl.int64), partial_ptr, partial_lse_ptr, offs_dv, SIZE)


@triton.jit
def _store_part(state, rows, first_part, part, partial_ptr, partial_lse_ptr, offs_dv, SIZE: tl.constexpr):
    """Stores the rows' softmax as parts; part: their places, counted from first_part."""
    is_dv = (offs_dv < SIZE)[None, :]
    partial_ptr += first_part * SIZE
    if SIZE % 4 == 0:
        # parts are in the run's own memory, so this alignment is certain
        partial_ptr = tl.multiple_of(partial_ptr, 16)
    partial_lse_ptr += first_part
    # a part without a key stores no output: the merge skips it, because the logarithm of its sum is -inf
    has_keys = state.row_sum != 0
    row_sum = tl.where(has_keys, state.row_sum, 1.0)
    parts = state.acc / row_sum[:, None]  # [BLOCK_M, BLOCK_DV]
    tl.store(partial_ptr + part[:, None] * SIZE + offs_dv[None, :], parts,
             mask=(rows.exists & has_keys)[:, None] & is_dv)  # fmt: skip
    log_sum = tl.where(has_keys, state.row_max + tl.log2(row_sum), float("-inf"))
    tl.store(partial_lse_ptr + part, log_sum, mask=rows.exists)
