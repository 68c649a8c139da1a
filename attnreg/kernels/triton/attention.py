# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
# ruff: noqa: N803, N806, SIM108 (constexprs are written in capitals)
"""The attention kernel: a batch of requests of any lengths against paged or packed keys and values.

One program computes one tile of rows for one KV head. A tile's rows are BLOCK_Q consecutive queries of one request,
each with the HEADS query heads that share the KV head, so that every key is loaded once for all of them. Long contexts
are cut into splits, one program each, and `_merge_splits_kernel` puts the parts together.

Causality, windows and bidirectional ranges come down to one thing: the half-open interval of keys that a row sees,
which always holds the row's own position. Keys that all rows of a tile see whole are walked without a mask.
"""

import triton
import triton.language as tl

from attnreg.kernels.triton.fp8 import fp8_to_float16
from attnreg.kernels.triton.layout import columns

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# the maximum of no scores: below every score, but finite, because -inf - -inf is NaN
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q: tl.constexpr):
    """The request that a tile belongs to, where request i owns the tiles from query_start_loc[i] // BLOCK_Q + i on."""
    LANES: tl.constexpr = 128
    req = -1
    for start in range(0, num_reqs, LANES):
        i = start + tl.arange(0, LANES)
        first_token = tl.load(query_start_loc_ptr + i, mask=i < num_reqs, other=0.0)
        starts_before = (i < num_reqs) & (first_token // BLOCK_Q + i <= tile)
        req += tl.sum(starts_before.to(tl.int32))
    return req


@triton.jit
def _visible_keys(position, kv_len, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that a query at this position sees, and the end of its keys; both grow with the position."""
    begin = position * 0
    end = position * 0 + kv_len
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    if WINDOW > 0:
        begin = tl.maximum(begin, position - (WINDOW - 1))
        end = tl.minimum(end, position + WINDOW)
    return begin, end


@triton.jit
def _load_blocks(block_table_ptr, start, stop, last_block, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The cache blocks of the BLOCK_N keys from `start` on: one for all where they share it, else one for each key."""
    if BLOCK_SIZE == 0:
        # packed keys are one block
        block = tl.cast(0, tl.int64)
    elif BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(block_table_ptr + start // BLOCK_SIZE, mask=start < stop, other=0).to(tl.int64)
    else:
        index = (start + tl.arange(0, BLOCK_N)) // BLOCK_SIZE
        block = tl.load(block_table_ptr + index, mask=index <= (stop - 1) // BLOCK_SIZE, other=last_block).to(tl.int64)
    return block


@triton.jit
def _load_tile(
    cache_ptr, block, first_row, start, stop, first_column,
    STRIDE_B: tl.constexpr, STRIDE_T: tl.constexpr, STRIDE_X: tl.constexpr, VECTOR: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """The keys or values [BLOCK_N, BLOCK] of one KV head from `start` on, in the dtype of the dots.

    WHOLE: none of them is at or past `stop`. Otherwise the last one is repeated there: memory that holds no key may
    hold NaN, and 0 * NaN is NaN. VECTOR, STRIDE_X: see `columns`.
    """
    key = start + tl.arange(0, BLOCK_N)
    if not WHOLE:
        key = tl.minimum(key, stop - 1)
    rows = block * STRIDE_B + (first_row + (key if BLOCK_SIZE == 0 else key % BLOCK_SIZE)) * STRIDE_T
    if WHOLE and VECTOR == 1 and STRIDE_T == 1 and STRIDE_B % 16 == 0:
        # the compiler cannot know that a table's entry is the same for a block's keys, which lie side by side
        rows = tl.max_contiguous(tl.multiple_of(rows, 16), 16)
    offs_d = first_column + tl.arange(0, BLOCK)
    pointers = cache_ptr + rows[:, None] + columns(offs_d, VECTOR, STRIDE_X)[None, :]
    if SIZE % BLOCK == 0:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(offs_d < SIZE)[None, :], other=0.0)
    if tile.dtype.primitive_bitwidth == 8:
        tile = fp8_to_float16(tile, FP8)
    return tile.to(COMPUTE_DTYPE)


@triton.jit
def _load_query(query_ptr, is_row, first_column, SIZE: tl.constexpr, BLOCK: tl.constexpr, COMPUTE_DTYPE: tl.constexpr):
    """BLOCK columns of the tile's queries, in the dtype of the dots."""
    offs_d = first_column + tl.arange(0, BLOCK)
    query = tl.load(query_ptr + offs_d[None, :], mask=is_row[:, None] & (offs_d < SIZE)[None, :], other=0.0)
    if tl.float16 == COMPUTE_DTYPE and query.dtype != tl.float16:
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0)
    return query.to(COMPUTE_DTYPE)


@triton.jit(
    do_not_specialize=[
        "num_reqs", "min_query_len", "max_query_len", "slots", "num_ranges", "min_split", "head_size",
        "stride_table", "stride_lse", "softmax_scale", "softcap",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "partial_ptr", "partial_lse_ptr", "query_start_loc_ptr", "key_start_loc_ptr", "seq_lens_ptr",
        "block_table_ptr", "ranges_ptr", "sinks_ptr", "slopes_ptr", "k_scale_ptr", "v_scale_ptr",
    ],
)  # fmt: skip
def _attention_kernel(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    query_start_loc_ptr, key_start_loc_ptr, seq_lens_ptr, block_table_ptr, ranges_ptr,
    sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr,
    num_reqs, min_query_len, max_query_len, slots, num_ranges, min_split, head_size, stride_table, stride_lse,
    softmax_scale, softcap,
    STRIDE_QT: tl.constexpr, STRIDE_QH: tl.constexpr, STRIDE_OT: tl.constexpr, STRIDE_OH: tl.constexpr,
    STRIDE_KB: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_KH: tl.constexpr,
    STRIDE_VB: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_VH: tl.constexpr,
    STRIDE_KX: tl.constexpr, STRIDE_VX: tl.constexpr, K_VECTOR: tl.constexpr, V_VECTOR: tl.constexpr,
    STRIDE_K_SCALE: tl.constexpr, STRIDE_V_SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    ONE_TILE: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, PEEL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Attention of the requests that have from min_query_len to max_query_len queries; other requests are left alone.

    Grid: (tiles * NUM_KV_HEADS * cdiv(GROUP, HEADS), splits). BLOCK_SIZE 0: keys and values are packed, not paged.
    ONE_TILE: no request has more than BLOCK_M // HEADS queries, and tile i is request i.
    SPLIT: the parts go to partial_ptr [num_reqs * slots, num_heads, splits, HEAD_SIZE_V] and, with the logarithms (base
    2) of their sums, to partial_lse_ptr; a request cuts its keys into parts of min_split or more.
    PEEL: tiles that all rows see whole have a loop of their own. FP8: the format of 8-bit keys and values.
    BLOCK_K: the columns of queries and keys that one product takes; head_size: HEAD_SIZE, unknown to the compiler.
    The optional pointers (lse, ranges, sinks, slopes, scales) are None where the feature is not used.
    """
    if DEPENDENT_LAUNCH:
        # the merge may be set up while this kernel still runs; it waits for the results itself
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    head_tile = tl.program_id(0) % (NUM_KV_HEADS * HEAD_TILES)
    tile = tl.program_id(0) // (NUM_KV_HEADS * HEAD_TILES)
    kv_head = head_tile // HEAD_TILES
    if ONE_TILE:
        req = tile
        tile = 0
    else:
        # a causal request's last tiles have the most keys: they begin first
        tile = tl.num_programs(0) // (NUM_KV_HEADS * HEAD_TILES) - 1 - tile
        req = _find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q)
    # int64 before any multiply: token * stride passes 2**31 in long prefills
    first_token = tl.load(query_start_loc_ptr + req).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + req + 1) - first_token).to(tl.int32)
    if not ONE_TILE:
        tile -= (first_token // BLOCK_Q).to(tl.int32) + req
    if (tile * BLOCK_Q >= query_len) | (query_len < min_query_len) | (query_len > max_query_len):
        return
    kv_len = tl.load(seq_lens_ptr + req)

    # the rows of the tile: which token and head each is, and the keys that it sees
    offs_m = tl.arange(0, BLOCK_M)
    token = tile * BLOCK_Q + offs_m // HEADS
    head_in_group = head_tile % HEAD_TILES * HEADS + offs_m % HEADS
    head = kv_head * GROUP + head_in_group
    is_row = (offs_m < BLOCK_Q * HEADS) & (token < query_len) & (head_in_group < GROUP)
    position = kv_len - query_len + token
    row_begin, row_end = _visible_keys(position, kv_len, CAUSAL, WINDOW)
    # the keys that any row sees, [start, stop), and those that all rows see, [whole_start, whole_stop)
    first_position = kv_len - query_len + tile * BLOCK_Q
    last_position = kv_len - query_len + tl.minimum(tile * BLOCK_Q + BLOCK_Q, query_len) - 1
    start, whole_stop = _visible_keys(first_position, kv_len, CAUSAL, WINDOW)
    whole_start, stop = _visible_keys(last_position, kv_len, CAUSAL, WINDOW)
    if ranges_ptr is not None:
        for i in range(num_ranges):
            range_ptr = ranges_ptr + (req.to(tl.int64) * num_ranges + i) * 2
            begin, end = tl.load(range_ptr), tl.minimum(tl.load(range_ptr + 1), kv_len)
            inside = (position >= begin) & (position < end)
            row_begin = tl.where(inside, tl.minimum(row_begin, begin), row_begin)
            row_end = tl.where(inside, tl.maximum(row_end, end), row_end)
        start = tl.minimum(start, tl.min(row_begin))
        stop = tl.maximum(stop, tl.max(row_end))
    # keys that share a cache block are found together, and at best a tile lies in one block
    ALIGNMENT: tl.constexpr = 1 if BLOCK_SIZE == 0 else (BLOCK_N if BLOCK_SIZE % BLOCK_N == 0 else 16)
    start = start // ALIGNMENT * ALIGNMENT
    if SPLIT:
        num_splits = tl.num_programs(1)
        share = tl.cdiv(tl.maximum(tl.cdiv(stop - start, num_splits), min_split), BLOCK_N) * BLOCK_N
        start += tl.program_id(1) * share
        stop = tl.minimum(start + share, stop)

    query_ptr += (first_token + token)[:, None] * STRIDE_QT + head[:, None] * STRIDE_QH
    if BLOCK_K == BLOCK_D:
        query = _load_query(query_ptr, is_row, 0, HEAD_SIZE, BLOCK_D, COMPUTE_DTYPE)
    scale = softmax_scale * (1.0 if SOFTCAP else LOG2_E)
    if SOFTCAP:
        # the argument of the hyperbolic tangent, which is made of powers of 2
        scale = softmax_scale / softcap * LOG2_E
        softcap = softcap * LOG2_E
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head * STRIDE_K_SCALE)
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E

    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if block_table_ptr is not None:
        block_table_ptr += req.to(tl.int64) * stride_table
    key_ptr += kv_head * STRIDE_KH
    value_ptr += kv_head * STRIDE_VH
    first_row = tl.cast(0, tl.int64)
    if BLOCK_SIZE == 0:
        first_row += first_token if key_start_loc_ptr is None else tl.load(key_start_loc_ptr + req)
    last_block = 0
    if BLOCK_SIZE > 0:
        last_block = tl.load(block_table_ptr + (stop - 1) // BLOCK_SIZE, mask=start < stop, other=0).to(tl.int64)
    block = _load_blocks(block_table_ptr, start, stop, last_block, BLOCK_SIZE, BLOCK_N)
    first_whole, last_whole = start, start
    if PEEL:
        # where the tiles begin and end that all rows see whole
        first_whole += tl.cdiv(tl.maximum(whole_start - start, 0), BLOCK_N) * BLOCK_N
        last_whole += tl.maximum(tl.minimum(whole_stop, stop) - start, 0) // BLOCK_N * BLOCK_N
    # the tiles before those, which only a window makes; those; and the others, which are all without PEEL
    for PHASE in tl.static_range((0 if WINDOW > 0 else 1) if PEEL else 2, 3):
        if PHASE == 0:
            first, last = start, tl.minimum(first_whole, stop)
        elif PHASE == 1:
            first, last = first_whole, last_whole
        else:
            first, last = tl.maximum(first_whole, last_whole), stop
        for n in tl.range(first, last, BLOCK_N, num_stages=1 if PEEL and PHASE != 1 else None):
            keys = n + tl.arange(0, BLOCK_N)
            if BLOCK_K == BLOCK_D:
                k = _load_tile(
                    key_ptr, block, first_row, n, stop, 0, STRIDE_KB, STRIDE_KT, STRIDE_KX, K_VECTOR, HEAD_SIZE,
                    BLOCK_SIZE, PHASE == 1, BLOCK_N, BLOCK_D, COMPUTE_DTYPE, FP8,
                )  # fmt: skip
            # the next tile's blocks are on their way before its keys are fetched
            next_block = _load_blocks(block_table_ptr, n + BLOCK_N, stop, last_block, BLOCK_SIZE, BLOCK_N)
            if BLOCK_K == BLOCK_D:
                s = tl.dot(query, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            else:
                # the registers do not hold all of the query. A compiler that knew head_size would unroll this and try
                s = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                for d in tl.range(0, head_size, BLOCK_K, disable_licm=True):
                    some_q = _load_query(query_ptr, is_row, d, HEAD_SIZE, BLOCK_K, COMPUTE_DTYPE)
                    some_k = _load_tile(
                        key_ptr, block, first_row, n, stop, d, STRIDE_KB, STRIDE_KT, STRIDE_KX, K_VECTOR, HEAD_SIZE,
                        BLOCK_SIZE, PHASE == 1, BLOCK_N, BLOCK_K, COMPUTE_DTYPE, FP8,
                    )  # fmt: skip
                    s = tl.dot(some_q, some_k.T, s, input_precision="ieee")
            # plain scores are scaled inside the exponent, at no cost; the others have to be scaled here
            unit = scale
            if SOFTCAP:
                # tanh(x) = 1 - 2 / (exp(2x) + 1)
                s = softcap * (1.0 - 2.0 / (tl.exp2(s * (scale * 2.0)) + 1.0))
                unit = 1.0
            if slopes_ptr is not None:
                s = s * unit - slopes[:, None] * tl.abs(position[:, None] - keys[None, :]).to(tl.float32)
                unit = 1.0
            hides = PHASE != 1
            if not PEEL:
                hides = (n < whole_start) | (n + BLOCK_N > whole_stop)
            if hides:
                visible = keys[None, :] < row_end[:, None]
                if WINDOW > 0:
                    visible &= keys[None, :] >= row_begin[:, None]
                s = tl.where(visible, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1) * unit)
            p = tl.exp2(s * unit - new_max[:, None])
            alpha = tl.exp2(row_max - new_max)
            row_sum = row_sum * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            v = _load_tile(
                value_ptr, block, first_row, n, stop, 0, STRIDE_VB, STRIDE_VT, STRIDE_VX, V_VECTOR, HEAD_SIZE_V,
                BLOCK_SIZE, PHASE == 1, BLOCK_N, BLOCK_DV, COMPUTE_DTYPE, FP8,
            )  # fmt: skip
            acc = tl.dot(p.to(COMPUTE_DTYPE), v, acc, input_precision="ieee")
            row_max = new_max
            block = next_block
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + kv_head * STRIDE_V_SCALE)

    offs_dv = tl.arange(0, BLOCK_DV)
    is_dv = (offs_dv < HEAD_SIZE_V)[None, :]
    if SPLIT:
        if ONE_TILE or BLOCK_M * BLOCK_DV < 16384:
            slot = req.to(tl.int64) * slots + token
            part = (slot * (NUM_KV_HEADS * GROUP) + head) * num_splits + tl.program_id(1)
        else:
            # a large tile has no registers for int64: up to the tile they are needed, within it 32 bits do
            first_slot = req.to(tl.int64) * slots + tile * BLOCK_Q
            first_part = first_slot * (NUM_KV_HEADS * GROUP) * num_splits + tl.program_id(1)
            partial_ptr += first_part * HEAD_SIZE_V
            partial_lse_ptr += first_part
            part = ((token - tile * BLOCK_Q) * (NUM_KV_HEADS * GROUP) + head) * num_splits
        # a part without a key has no output to store: the merge sees its sum and skips it
        has_keys = row_sum > 0
        row_sum = tl.where(has_keys, row_sum, 1.0)
        parts = acc / row_sum[:, None]
        tl.store(partial_ptr + part[:, None] * HEAD_SIZE_V + offs_dv[None, :], parts,
                 mask=(is_row & has_keys)[:, None] & is_dv)  # fmt: skip
        log_sum = tl.where(has_keys, row_max + tl.log2(row_sum), float("-inf"))
        tl.store(partial_lse_ptr + part, log_sum, mask=is_row)
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            new_max = tl.maximum(row_max, sink)
            alpha = tl.exp2(row_max - new_max)
            row_sum = row_sum * alpha + tl.exp2(sink - new_max)
            acc *= alpha[:, None]
            row_max = new_max
        has_keys = row_sum > 0
        row_sum = tl.where(has_keys, row_sum, 1.0)
        output = acc / row_sum[:, None]
        output_offs = (first_token + token) * STRIDE_OT + head * STRIDE_OH
        tl.store(output_ptr + output_offs[:, None] + offs_dv[None, :], output.to(output_ptr.dtype.element_ty),
                 mask=is_row[:, None] & is_dv)  # fmt: skip
        if lse_ptr is not None:
            lse = tl.where(has_keys, (row_max + tl.log2(row_sum)) * LN_2, float("-inf"))
            tl.store(lse_ptr + head.to(tl.int64) * stride_lse + first_token + token, lse, mask=is_row)


@triton.jit(
    do_not_specialize=["min_query_len", "max_query_len", "slots", "num_splits", "stride_lse"],
    do_not_specialize_on_alignment=["lse_ptr", "partial_ptr", "partial_lse_ptr", "query_start_loc_ptr", "sinks_ptr"],
)
def _merge_splits_kernel(
    output_ptr, lse_ptr, partial_ptr, partial_lse_ptr, query_start_loc_ptr, sinks_ptr,
    min_query_len, max_query_len, slots, num_splits, stride_lse,
    STRIDE_OT: tl.constexpr, STRIDE_OH: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Puts together the parts that `_attention_kernel` made, in order. Grid: (num_reqs * slots, num_heads)."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    req, token = slot // slots, slot % slots
    first_token = tl.load(query_start_loc_ptr + req).to(tl.int64)
    query_len = tl.load(query_start_loc_ptr + req + 1) - first_token
    first_part = (slot * tl.num_programs(1) + head) * num_splits
    offs_s = tl.arange(0, BLOCK_S)
    offs_dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    row_max = tl.full([], LOWEST, dtype=tl.float32)
    row_sum = tl.full([], 0.0, dtype=tl.float32)
    if sinks_ptr is not None:
        row_max = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        row_sum = tl.full([], 1.0, dtype=tl.float32)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    for s in range(0, num_splits, BLOCK_S):
        parts = first_part + s + offs_s
        is_part = s + offs_s < num_splits
        # no load waits for another: the parts are read before it is known which of them were written
        log_sums = tl.load(partial_lse_ptr + parts, mask=is_part, other=float("-inf"))
        values = tl.load(partial_ptr + parts[:, None] * HEAD_SIZE_V + offs_dv[None, :],
                         mask=is_part[:, None] & (offs_dv < HEAD_SIZE_V)[None, :], other=0.0)  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(log_sums, 0))
        weights = tl.exp2(log_sums - new_max)
        alpha = tl.exp2(row_max - new_max)
        # where, not a product: what was not written may be NaN
        acc = acc * alpha + tl.sum(tl.where((weights > 0)[:, None], values * weights[:, None], 0.0), 0)
        row_sum = row_sum * alpha + tl.sum(weights, 0)
        row_max = new_max
    is_row = (token < query_len) & (query_len >= min_query_len) & (query_len <= max_query_len)
    has_keys = row_sum > 0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    output_offs = (first_token + token) * STRIDE_OT + head * STRIDE_OH + offs_dv
    tl.store(output_ptr + output_offs, (acc / row_sum).to(output_ptr.dtype.element_ty),
             mask=is_row & (offs_dv < HEAD_SIZE_V))  # fmt: skip
    if lse_ptr is not None:
        lse = tl.where(has_keys, (row_max + tl.log2(row_sum)) * LN_2, float("-inf"))
        tl.store(lse_ptr + head * stride_lse + first_token + token, lse, mask=is_row)
