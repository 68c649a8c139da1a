# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""How a program of the attention kernel computes a tile of rows: it walks keys, and stores the result.

Tiles of keys that all rows see are computed without a mask. Arguments in capitals are constants, some of them named
tuples. Shapes are in capitals too: BLOCK_M is TILE.block_m.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from attnreg.kernels.packed.codes import column_of, half_as, load_levels, load_scaled, load_scales
from attnreg.kernels.packed.rotation import load_rotated
from attnreg.kernels.triton.fp8 import fp8_to_float16, stored_as
from attnreg.kernels.triton.layout import head_offset, load_blocks, load_tile, times
from attnreg.kernels.triton.rows import in_tree, phase_of_span, whole_tiles
from attnreg.kernels.triton.softmax import LN_2, LOG2_E, Softmax, no_keys, with_scores, with_sink


class Keys(NamedTuple):
    """The pointers to a request's keys and values. block_table_ptr: the request's row, None for packed keys.

    first_row: the first row of packed keys. last_block: the request's last block, used for block ids after it.
    """

    key_ptr: tl.tensor
    value_ptr: tl.tensor
    block_table_ptr: tl.tensor | None
    first_row: tl.tensor
    last_block: tl.tensor


class Query(NamedTuple):
    """The tile's queries: the first columns [BLOCK_M, BLOCK_D] and the others [BLOCK_M, BLOCK_REST], or None."""

    first: tl.tensor | None
    rest: tl.tensor | None


class Scoring(NamedTuple):
    """The factors that turn products of queries and keys into scores, in powers of 2; slopes [BLOCK_M] or None."""

    scale: tl.tensor
    softcap: tl.tensor
    slopes: tl.tensor | None


@triton.jit
def _load_query(
    query_ptr, exists, first_column, Q: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Returns BLOCK columns of the tile's queries [BLOCK_M, BLOCK], in the products' dtype and the keys' order."""
    offs_d = first_column + column_of(K, BLOCK, True)
    if Q.unrotated > 0:
        query = load_rotated(query_ptr, exists, offs_d, Q.unrotated, BLOCK)
    else:
        query = tl.load(query_ptr + offs_d[None, :], mask=exists[:, None] & (offs_d < K.size)[None, :], other=0.0)
    if query.dtype.primitive_bitwidth == 8:
        FP8: tl.constexpr = Q.fp8
        query = fp8_to_float16(query, FP8)
    if tl.float16 == DTYPE and query.dtype != tl.float16:
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return query.to(DTYPE)


@triton.jit
def _scale(
    softmax_scale, softcap, q_scale_ptr, k_scale_ptr, kv_head,
    Q: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Returns the factor of products, and the softcap, for scores as exponents of 2; the scales [num_kv_heads]."""
    scale = softmax_scale * (1.0 if SOFTCAP else LOG2_E)
    if SOFTCAP:
        # the argument of tanh, which is computed from powers of 2
        scale = softmax_scale / softcap * LOG2_E
        softcap = softcap * LOG2_E
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + times(kv_head, K.stride_scale, COUNT))
    if q_scale_ptr is not None:
        scale *= tl.load(q_scale_ptr + times(kv_head, Q.scale, COUNT))
    return scale, softcap


@triton.jit
def _first_row(key_start_loc_ptr, req, first_token, BLOCK_SIZE: tl.constexpr):
    """Returns the row at which a request's packed keys begin; 0 in a cache."""
    first_row = tl.cast(0, tl.int64)
    if BLOCK_SIZE == 0:
        first_row += first_token if key_start_loc_ptr is None else tl.load(key_start_loc_ptr + req)
    return first_row


@triton.jit
def _last_block(block_table_ptr, span, BLOCK_SIZE: tl.constexpr):
    """Returns the cache block of the last key that this program walks, 0 if it walks none."""
    last_block = 0
    if BLOCK_SIZE > 0:
        has_keys = span.start < span.stop
        last_block = tl.load(block_table_ptr + (span.stop - 1) // BLOCK_SIZE, mask=has_keys, other=0).to(tl.int64)
    return last_block


@triton.jit
def _load_keys(
    keys, block, n, stop, first_column,
    K: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, EXIST: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns columns of the keys from n on, as `load_tile` does, [BLOCK_N, BLOCK]; levels without their scales."""
    if K.code == "levels":
        k = load_levels(keys.key_ptr, block, n, stop, first_column, K, WHOLE, BLOCK_N, BLOCK, True)
        k = half_as(k, DTYPE)
    elif K.code == "uniform":
        k = load_scaled(keys.key_ptr, block, n, stop, first_column, K, WHOLE, BLOCK_N, BLOCK, True, DTYPE)
    else:
        k = load_tile(
            keys.key_ptr, block, keys.first_row, n, stop, first_column, K, WHOLE, BLOCK_N, BLOCK, EXIST, DTYPE
        )
    return k


@triton.jit
def _products(
    query, query_ptr, exists, keys, block, n, stop, head_size,
    Q: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Returns the products [BLOCK_M, BLOCK_N] of the rows with the keys from n on, and the next tile's cache blocks.

    query: the first BLOCK_D columns, and the rest or None; both None if the registers do not hold them. head_size:
    K.size, unknown to the compiler.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    if query.first is not None:
        # [BLOCK_N, BLOCK_D]
        k = _load_keys(keys, block, n, stop, 0, K, WHOLE, BLOCK_N, TILE.block_d, K.size >= TILE.block_d, COMPUTE_DTYPE)
    if query.rest is not None:
        # [BLOCK_N, BLOCK_REST]
        k_rest = _load_keys(keys, block, n, stop, TILE.block_d, K, WHOLE, BLOCK_N, TILE.block_rest,
                            K.size >= TILE.block_d + TILE.block_rest, COMPUTE_DTYPE)  # fmt: skip
    # loads the next tile's block ids before its keys
    next_block = load_blocks(keys.block_table_ptr, n + BLOCK_N, stop, keys.last_block, K.block_size, BLOCK_N)
    if query.first is not None:
        s = tl.dot(query.first, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if query.rest is not None:
            s = tl.dot(query.rest, k_rest.T, s, input_precision="ieee")
    else:
        # registers cannot hold the whole query. With a head_size that it knows, the compiler would unroll and spill
        s = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for d in tl.range(0, head_size, TILE.block_k, disable_licm=True):
            some_q = _load_query(query_ptr, exists, d, Q, K, TILE.block_k, COMPUTE_DTYPE)
            some_k = _load_keys(keys, block, n, stop, d, K, WHOLE, BLOCK_N, TILE.block_k, K.size % TILE.block_k == 0,
                                COMPUTE_DTYPE)  # fmt: skip
            s = tl.dot(some_q, some_k.T, s, input_precision="ieee")
    if K.code == "levels":
        s *= load_scales(keys.key_ptr, block, n, stop, K, WHOLE, BLOCK_N)[None, :]
    return s, next_block


@triton.jit
def _scores(s, rows, offs_n, scoring, SOFTCAP: tl.constexpr):
    """Returns the scores of products with the keys at offs_n, and a factor that still has to be applied."""
    # plain scores are scaled inside the exponent, at no cost; scores with a softcap or slopes are scaled here
    unit = scoring.scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        s = scoring.softcap * (1.0 - 2.0 / (tl.exp2(s * (scoring.scale * 2.0)) + 1.0))
        unit = 1.0
    if scoring.slopes is not None:
        distance = tl.abs(rows.position[:, None] - offs_n[None, :])
        s = s * unit - scoring.slopes[:, None] * distance.to(tl.float32)
        unit = 1.0
    return s, unit


@triton.jit
def _masked(s, rows, offs_n, tree, BEGINS: tl.constexpr):
    """Returns the scores, -inf for keys that a row does not see. BEGINS: some rows do not see the first keys."""
    visible = offs_n[None, :] < rows.end[:, None]  # [BLOCK_M, BLOCK_N]
    if BEGINS:
        visible &= offs_n[None, :] >= rows.begin[:, None]
    if tree is not None:
        visible &= in_tree(tree, rows, offs_n, visible)
    return tl.where(visible, s, float("-inf"))


@triton.jit
def _attend_tile(
    state, block, n, query, query_ptr, rows, keys, span, tree, scoring, head_size,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr, BEGINS: tl.constexpr, SOFTCAP: tl.constexpr, PEEL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Returns the state after the BLOCK_N keys from n on, which are in `block`, and the next tile's cache blocks.

    WHOLE: all rows see all of these keys.
    """
    offs_n = n + tl.arange(0, TILE.block_n)
    s, next_block = _products(
        query, query_ptr, rows.exists, keys, block, n, span.stop, head_size, Q, K, TILE, COMPUTE_DTYPE, WHOLE
    )
    s, unit = _scores(s, rows, offs_n, scoring, SOFTCAP)
    hides = not WHOLE
    if not PEEL:
        hides = (n < span.whole_start) | (n + TILE.block_n > span.whole_stop)
    if hides:
        s = _masked(s, rows, offs_n, tree, BEGINS)
    p, state = with_scores(state, s, unit)
    # [BLOCK_N, BLOCK_DV]
    if V.code == "levels" and tl.float16 != VALUE_DTYPE:
        # the weight times the scale may be smaller than float16 holds
        p *= load_scales(keys.value_ptr, block, n, span.stop, V, WHOLE, TILE.block_n)[None, :]
        v = load_levels(keys.value_ptr, block, n, span.stop, 0, V, WHOLE, TILE.block_n, TILE.block_dv, False)
        v = half_as(v, VALUE_DTYPE)
    elif V.code == "levels" or V.code == "uniform":
        v = load_scaled(
            keys.value_ptr, block, n, span.stop, 0, V, WHOLE, TILE.block_n, TILE.block_dv, False, VALUE_DTYPE
        )
    else:
        v = load_tile(
            keys.value_ptr, block, keys.first_row, n, span.stop, 0, V, WHOLE, TILE.block_n, TILE.block_dv,
            V.size == TILE.block_dv, VALUE_DTYPE,
        )  # fmt: skip
    acc = tl.dot(p.to(VALUE_DTYPE), v, state.acc, input_precision="ieee")
    return Softmax(acc, state.row_max, state.row_sum), next_block


@triton.jit
def _scale_values(state, v_scale_ptr, kv_head, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """Returns the state times the values' scale; v_scale_ptr [num_kv_heads]."""
    acc = state.acc
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + times(kv_head, STRIDE, COUNT))
    return Softmax(acc, state.row_max, state.row_sum)


@triton.jit
def store_output(
    state, rows, first_token, output_ptr, lse_ptr, sinks_ptr, out_scale_ptr, stride_lse, OUT: tl.constexpr,
    HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stores the rows' outputs, and the natural logarithm of each row's sum of weights."""
    offs_dv = column_of(V, TILE.block_dv, False)
    is_dv = (offs_dv < V.size)[None, :]
    if sinks_ptr is not None:
        sinks_ptr += times(rows.head, HEADS.sink, NUM_HEADS)
        sink = tl.load(sinks_ptr, mask=rows.exists, other=0.0).to(tl.float32) * LOG2_E
        state = with_sink(state, sink)
    # != 0 is true for NaN too, so that a sum of NaN stays NaN, as from keys marked with NaN
    has_keys = state.row_sum != 0
    row_sum = tl.where(has_keys, state.row_sum, 1.0)
    output = state.acc / row_sum[:, None]  # [BLOCK_M, BLOCK_DV]
    output_offs = (first_token + rows.token) * OUT.token + times(rows.head, OUT.head, NUM_HEADS)  # [BLOCK_M]
    FP8: tl.constexpr = OUT.fp8
    out_scale = 1.0 if out_scale_ptr is None else tl.load(out_scale_ptr)
    tl.store(output_ptr + output_offs[:, None] + offs_dv[None, :], stored_as(output, out_scale, output_ptr, FP8),
             mask=rows.exists[:, None] & is_dv)  # fmt: skip
    if lse_ptr is not None:
        lse = tl.where(has_keys, (state.row_max + tl.log2(row_sum)) * LN_2, float("-inf"))
        tl.store(lse_ptr + rows.head.to(tl.int64) * stride_lse + first_token + rows.token, lse, mask=rows.exists)


@triton.jit
def attend(
    rows, span, req, first_token, kv_head, tree, query_ptr, key_ptr, value_ptr, slopes_ptr, q_scale_ptr, k_scale_ptr,
    v_scale_ptr, key_start_loc_ptr, block_table_ptr, head_size, stride_table, stride_key_head, stride_value_head,
    softmax_scale, softcap,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr, PEEL: tl.constexpr,
):  # fmt: skip
    """Returns the rows' state after the keys of a span; the arguments are the kernel's."""
    query_ptr += (first_token + rows.token)[:, None] * Q.token + times(rows.head[:, None], Q.head, NUM_HEADS)
    first, rest = None, None
    if TILE.block_k == TILE.block_d + TILE.block_rest:
        first = _load_query(query_ptr, rows.exists, 0, Q, K, TILE.block_d, COMPUTE_DTYPE)
        if TILE.block_rest > 0:
            rest = _load_query(query_ptr, rows.exists, TILE.block_d, Q, K, TILE.block_rest, COMPUTE_DTYPE)
    query = Query(first, rest)
    scale, softcap = _scale(softmax_scale, softcap, q_scale_ptr, k_scale_ptr, kv_head, Q, K, NUM_KV_HEADS, SOFTCAP)
    slopes = None
    if slopes_ptr is not None:
        slopes_ptr += times(rows.head, HEADS.slope, NUM_HEADS)  # [BLOCK_M]
        slopes = tl.load(slopes_ptr, mask=rows.exists, other=0.0).to(tl.float32) * LOG2_E
    scoring = Scoring(scale, softcap, slopes)
    state = no_keys(TILE.block_m, TILE.block_dv)

    if block_table_ptr is not None:
        block_table_ptr += req.to(tl.int64) * stride_table
    key_ptr += head_offset(kv_head, stride_key_head, K, NUM_KV_HEADS)
    value_ptr += head_offset(kv_head, stride_value_head, V, NUM_KV_HEADS)
    first_row = _first_row(key_start_loc_ptr, req, first_token, K.block_size)
    keys = Keys(key_ptr, value_ptr, block_table_ptr, first_row, _last_block(block_table_ptr, span, K.block_size))
    block = load_blocks(block_table_ptr, span.start, span.stop, keys.last_block, K.block_size, TILE.block_n)
    first_whole, last_whole = whole_tiles(span, PEEL, TILE.block_n)
    # without PEEL, all tiles are in phase 2; phase 0 exists only if a mask hides the first keys
    BEGINS: tl.constexpr = MASK.left >= 0 or MASK.chunk > 0
    for PHASE in tl.static_range((0 if BEGINS else 1) if PEEL else 2, 3):
        first, last = phase_of_span(span, first_whole, last_whole, PHASE)
        for n in tl.range(first, last, TILE.block_n, num_stages=1 if PEEL and PHASE != 1 else None):
            state, block = _attend_tile(
                state, block, n, query, query_ptr, rows, keys, span, tree, scoring, head_size, Q, K, V, TILE,
                COMPUTE_DTYPE, VALUE_DTYPE, BEGINS, SOFTCAP, PEEL, PHASE == 1,
            )  # fmt: skip

    return _scale_values(state, v_scale_ptr, kv_head, V.stride_scale, NUM_KV_HEADS)
