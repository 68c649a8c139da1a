# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Attention over split keys: the code that stores a program's part, and the kernel that merges the parts.

A part is the result of one program for a row: its output, and the logarithm (base 2) of the sum of its weights. Parts
are in partial_ptr [num_reqs * slots, num_heads, splits, head_size_v] and partial_lse_ptr, without the last dimension.
Where slots are 0, parts are by row: [rows, num_heads, splits, head_size_v].
"""

import triton
import triton.language as tl

from attnreg.kernels.triton.fp8 import stored_as
from attnreg.kernels.triton.rows import request_of_row
from attnreg.kernels.triton.softmax import LN_2, LOG2_E, LOWEST


@triton.jit
def store_part(
    state, rows, req, first_token, tile, slots, partial_ptr, partial_lse_ptr,
    NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Stores the rows' softmax over the keys of this program's split."""
    BLOCK_Q: tl.constexpr = TILE.block_m // TILE.heads
    offs_dv = tl.arange(0, TILE.block_dv)
    is_dv = (offs_dv < SIZE)[None, :]
    first_slot = tl.where(slots > 0, req.to(tl.int64) * slots, first_token)
    if ONE_TILE or TILE.block_m * TILE.block_dv < 16384:
        slot = first_slot + rows.token
        part = (slot * NUM_HEADS + rows.head) * tl.num_programs(1) + tl.program_id(1)  # [BLOCK_M]
    else:
        # a large tile has no registers for int64: the tile's offset needs 64 bits, offsets within the tile only 32
        first_slot += tile * BLOCK_Q
        first_part = first_slot * NUM_HEADS * tl.num_programs(1) + tl.program_id(1)
        partial_ptr += first_part * SIZE
        partial_lse_ptr += first_part
        part = ((rows.token - tile * BLOCK_Q) * NUM_HEADS + rows.head) * tl.num_programs(1)
    # a part without a key has no output to store: the merge skips it by its sum
    has_keys = state.row_sum > 0
    row_sum = tl.where(has_keys, state.row_sum, 1.0)
    parts = state.acc / row_sum[:, None]  # [BLOCK_M, BLOCK_DV]
    tl.store(partial_ptr + part[:, None] * SIZE + offs_dv[None, :], parts,
             mask=(rows.exists & has_keys)[:, None] & is_dv)  # fmt: skip
    log_sum = tl.where(has_keys, state.row_max + tl.log2(row_sum), float("-inf"))
    tl.store(partial_lse_ptr + part, log_sum, mask=rows.exists)


@triton.jit(
    do_not_specialize=["num_reqs", "min_query_len", "max_query_len", "slots", "num_splits", "stride_lse"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "partial_ptr",
        "partial_lse_ptr",
        "query_start_loc_ptr",
        "sinks_ptr",
        "out_scale_ptr",
    ],
)
def _merge_splits_kernel(
    output_ptr, lse_ptr, partial_ptr, partial_lse_ptr, query_start_loc_ptr, sinks_ptr, out_scale_ptr,
    num_reqs, min_query_len, max_query_len, slots, num_splits, stride_lse,
    OUT: tl.constexpr, SINK_STRIDE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    BY_ROW: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Puts together the parts that `_attention_kernel` made, in order.

    Grid: (num_reqs * slots, num_heads), or where parts are BY_ROW (rows, num_heads). OUT: the output's `Strides`.
    BLOCK_S: parts that are read at once.
    """
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if BY_ROW:
        req = request_of_row(query_start_loc_ptr, num_reqs, slot)
        first_token = tl.load(query_start_loc_ptr + req).to(tl.int64)
        token = slot - first_token
    else:
        req, token = slot // slots, slot % slots
        first_token = tl.load(query_start_loc_ptr + req).to(tl.int64)
    query_len = tl.load(query_start_loc_ptr + req + 1) - first_token
    is_row = (token < query_len) & (query_len >= min_query_len) & (query_len <= max_query_len)
    if BY_ROW:  # noqa: SIM102 (the compiler decides the first, the device the second)
        # padding, and the rows of other launches
        if not is_row:
            return
    first_part = (slot * tl.num_programs(1) + head) * num_splits
    offs_s = tl.arange(0, BLOCK_S)
    offs_dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    row_max = tl.full([], LOWEST, dtype=tl.float32)
    row_sum = tl.full([], 0.0, dtype=tl.float32)
    if sinks_ptr is not None:
        row_max = tl.load(sinks_ptr + head * SINK_STRIDE).to(tl.float32) * LOG2_E
        row_sum = tl.full([], 1.0, dtype=tl.float32)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    for s in range(0, num_splits, BLOCK_S):
        parts = first_part + s + offs_s
        is_part = s + offs_s < num_splits
        # values are loaded without waiting for the sums, so unwritten parts are read too
        log_sums = tl.load(partial_lse_ptr + parts, mask=is_part, other=float("-inf"))  # [BLOCK_S]
        values = tl.load(partial_ptr + parts[:, None] * HEAD_SIZE_V + offs_dv[None, :],
                         mask=is_part[:, None] & (offs_dv < HEAD_SIZE_V)[None, :], other=0.0)  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(log_sums, 0))
        weights = tl.exp2(log_sums - new_max)
        alpha = tl.exp2(row_max - new_max)
        # where, not a product: an unwritten part may hold NaN
        acc = acc * alpha + tl.sum(tl.where((weights > 0)[:, None], values * weights[:, None], 0.0), 0)
        row_sum = row_sum * alpha + tl.sum(weights, 0)
        row_max = new_max
    has_keys = row_sum > 0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    output_offs = (first_token + token) * OUT.token + head * OUT.head + offs_dv
    FP8: tl.constexpr = OUT.fp8
    out_scale = 1.0 if out_scale_ptr is None else tl.load(out_scale_ptr)
    tl.store(output_ptr + output_offs, stored_as(acc / row_sum, out_scale, output_ptr, FP8),
             mask=is_row & (offs_dv < HEAD_SIZE_V))  # fmt: skip
    if lse_ptr is not None:
        lse = tl.where(has_keys, (row_max + tl.log2(row_sum)) * LN_2, float("-inf"))
        tl.store(lse_ptr + head * stride_lse + first_token + token, lse, mask=is_row)
