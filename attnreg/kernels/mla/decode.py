# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The decode kernel of MLA: queries that absorbed W_UK against a paged cache of latents.

One program computes a tile of rows, query heads of one or more queries of a request. A latent is loaded once and is
both key and value: scores are products with the latent and with its rotary part, the output is a sum of latents. Long
contexts are cut into splits, one program each. `attnreg.kernels.triton.splits` merges their parts.

The functions are inlined into the kernel. Arguments in capitals are constants, some of them named tuples. Shapes are in
capitals too: BLOCK_M is TILE.block_m.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from attnreg.kernels.triton.fp8 import fp8_to_float16
from attnreg.kernels.triton.inside.uniform import uniform
from attnreg.kernels.triton.layout import load_blocks, times
from attnreg.kernels.triton.rows import find_tile, program_span, rows_of_tile, span_of_part
from attnreg.kernels.triton.softmax import LN_2, LOG2_E, Softmax, no_keys, with_scores
from attnreg.kernels.triton.splits.parts import store_no_part, store_part, store_part_of_share
from attnreg.kernels.triton.splits.shares import part_of_program


class Latents(NamedTuple):
    """The pointers to a request's latents, their rotary parts, the scales of their tiles (or None), and the request's
    row of the block table. last_block: its last block, used for block ids after it."""

    latent_ptr: tl.tensor
    rope_ptr: tl.tensor
    tile_scale_ptr: tl.tensor | None
    block_table_ptr: tl.tensor
    last_block: tl.tensor


@triton.jit
def load_columns(query_ptr, exists, first, SIZE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Returns columns of the rows' queries, from ``first`` on, [BLOCK_M, BLOCK] in the dtype of the products."""
    offs_d = first + tl.arange(0, BLOCK)
    query = tl.load(query_ptr[:, None] + offs_d[None, :], mask=exists[:, None] & (offs_d < SIZE)[None, :], other=0.0)
    if tl.float16 == DTYPE and query.dtype != tl.float16:
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return query.to(DTYPE)


@triton.jit
def rows_of_keys(block, n, stop, LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns where the BLOCK_N keys from n on begin in the cache: a common offset, and each key's own, [BLOCK_N].

    From `stop` on, the last key is repeated: memory after it may hold NaN, and 0 * NaN is NaN.
    """
    offs_n = tl.minimum(tl.arange(0, BLOCK_N), stop - 1 - n)
    if LAYOUT.block_size % BLOCK_N == 0:
        # the keys are in one block, one after the other
        first = block * LAYOUT.stride_block + tl.cast(n % LAYOUT.block_size, tl.int64) * LAYOUT.stride_token
        rows = times(offs_n, LAYOUT.stride_token, BLOCK_N)
    else:
        first = tl.cast(0, tl.int64)
        rows = block * LAYOUT.stride_block
        rows += times((n + offs_n) % LAYOUT.block_size, LAYOUT.stride_token, LAYOUT.block_size)
    return first, rows


@triton.jit
def load_part(
    cache_ptr, tile_scale_ptr, block, n, stop, first_column, LAYOUT: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns columns of the latents, or of the rotary parts, of the keys from n on, [BLOCK_N, BLOCK].

    tile_scale_ptr: of the scales, or None. With scales, the columns belong to one tile.
    """
    first, rows = rows_of_keys(block, n, stop, LAYOUT, BLOCK_N)
    offs_d = first_column + tl.arange(0, BLOCK)
    pointers = cache_ptr + first + rows[:, None] + offs_d[None, :]
    if LAYOUT.size % BLOCK == 0:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(offs_d < LAYOUT.size)[None, :], other=0.0)
    if tile.dtype.primitive_bitwidth == 8:
        FP8: tl.constexpr = LAYOUT.fp8
        tile = fp8_to_float16(tile, FP8)
    if tile_scale_ptr is not None:
        first, rows = rows_of_keys(block, n, stop, SCALES, BLOCK_N)
        scale = tl.load(tile_scale_ptr + first + rows + first_column // (LAYOUT.size // SCALES.size))
        tile = tile.to(tl.float32) * scale[:, None]
    return tile.to(DTYPE)


@triton.jit
def load_scaled(
    latents, block, n, stop,
    LATENT: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns the latents [BLOCK_N, LATENT.size] of the keys from n on, each tile of elements times its scale."""
    TILES: tl.constexpr = SCALES.size
    WIDTH: tl.constexpr = LATENT.size // TILES
    tiles = tl.arange(0, TILES)
    columns = tiles[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    first, rows = rows_of_keys(block, n, stop, SCALES, BLOCK_N)
    scales = tl.load(latents.tile_scale_ptr + first + rows[:, None] + tiles[None, :])  # [BLOCK_N, TILES]
    first, rows = rows_of_keys(block, n, stop, LATENT, BLOCK_N)
    numbers = tl.load(latents.latent_ptr + first + rows[:, None, None] + columns[None, :, :])
    FP8: tl.constexpr = LATENT.fp8
    scaled = fp8_to_float16(numbers, FP8).to(tl.float32) * scales[:, :, None]
    return tl.reshape(scaled.to(DTYPE), [BLOCK_N, TILES * WIDTH])


@triton.jit
def load_latent(
    latents, block, n, stop,
    LATENT: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns all columns of the latents of the keys from n on, [BLOCK_N, BLOCK]."""
    if latents.tile_scale_ptr is not None:
        latent = load_scaled(latents, block, n, stop, LATENT, SCALES, BLOCK_N, DTYPE)
    else:
        latent = load_part(latents.latent_ptr, None, block, n, stop, 0, LATENT, SCALES, BLOCK_N, BLOCK, DTYPE)
    return latent


@triton.jit
def _attend_tile(
    state, block, n, query, query_ptr, query_rope, rows, latents, stop, rank, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns the state after the BLOCK_N keys from n on, which are in `block`, and the next tile's cache blocks.

    query: None if the registers do not hold it; rank: LATENT.size, unknown to the compiler.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    if query is not None:
        latent = load_latent(latents, block, n, stop, LATENT, SCALES, BLOCK_N, TILE.block_dv, DTYPE)
        s = tl.dot(query, latent.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    else:
        # with a rank that it knows, the compiler would unroll the loop and spill
        s = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for d in tl.range(0, rank, TILE.block_k, disable_licm=True):
            some_query = load_columns(query_ptr, rows.exists, d, LATENT.size, TILE.block_k, DTYPE)
            some_latent = load_part(
                latents.latent_ptr, latents.tile_scale_ptr, block, n, stop, d, LATENT, SCALES, BLOCK_N, TILE.block_k,
                DTYPE,
            )  # fmt: skip
            s = tl.dot(some_query, some_latent.T, s, input_precision="ieee")
    if ROPE.size > 0:
        rope = load_part(latents.rope_ptr, None, block, n, stop, 0, ROPE, SCALES, BLOCK_N, TILE.block_d, DTYPE)
        s = tl.dot(query_rope, rope.T, s, input_precision="ieee")
    # loads the next tile's block ids before its keys
    next_block = load_blocks(latents.block_table_ptr, n + BLOCK_N, stop, latents.last_block, LATENT.block_size, BLOCK_N)
    s = tl.where((n + tl.arange(0, BLOCK_N))[None, :] < rows.end[:, None], s, float("-inf"))
    p, state = with_scores(state, s, scale)
    if query is None:
        latent = load_latent(latents, block, n, stop, LATENT, SCALES, BLOCK_N, TILE.block_dv, DTYPE)
    acc = tl.dot(p.to(DTYPE), latent, state.acc, input_precision="ieee")
    return Softmax(acc, state.row_max, state.row_sum), next_block


@triton.jit
def store_rows(
    state, rows, first_token, output_ptr, lse_ptr, stride_lse, OUT: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Stores the rows' outputs, and the natural logarithm of each row's sum of weights."""
    offs_dv = tl.arange(0, TILE.block_dv)
    # != 0 is true for NaN too, so that a sum of NaN stays NaN
    has_keys = state.row_sum != 0
    row_sum = tl.where(has_keys, state.row_sum, 1.0)
    output = state.acc / row_sum[:, None]  # [BLOCK_M, BLOCK_DV]
    offs = (first_token + rows.token) * OUT.token + rows.head.to(tl.int64) * OUT.head  # [BLOCK_M]
    tl.store(output_ptr + offs[:, None] + offs_dv[None, :], output.to(output_ptr.dtype.element_ty),
             mask=rows.exists[:, None] & (offs_dv < SIZE)[None, :])  # fmt: skip
    if lse_ptr is not None:
        lse = tl.where(has_keys, (state.row_max + tl.log2(row_sum)) * LN_2, float("-inf"))
        tl.store(lse_ptr + rows.head.to(tl.int64) * stride_lse + first_token + rows.token, lse, mask=rows.exists)


@triton.jit
def _store(
    state, rows, req, first_token, tile, slots, number, parts, apart, output_ptr, lse_ptr, partial_ptr,
    partial_lse_ptr, stride_lse, OUT: tl.constexpr, SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Stores the rows' outputs, or part ``number`` of them if there are several; apart: the number of programs."""
    whole = not SPLIT
    if SHARED:
        whole = parts == 1
        if not whole:
            store_part_of_share(
                state, rows, number, apart, partial_ptr, partial_lse_ptr, tl.arange(0, TILE.block_dv),
                NUM_HEADS, SIZE,
            )  # fmt: skip
    elif SPLIT:
        store_part(
            state, rows, req, first_token, tile, slots, partial_ptr, partial_lse_ptr, tl.arange(0, TILE.block_dv),
            NUM_HEADS, SIZE, TILE, False,
        )  # fmt: skip
    if whole:
        store_rows(state, rows, first_token, output_ptr, lse_ptr, stride_lse, OUT, SIZE, TILE)


@triton.jit(
    do_not_specialize=[
        "num_reqs", "min_query_len", "max_query_len", "slots", "min_split", "rank", "stride_table", "stride_lse",
        "softmax_scale",
    ],
    do_not_specialize_on_alignment=[
        "tile_scale_ptr", "lse_ptr", "kv_scale_ptr", "query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr",
        "partial_ptr", "partial_lse_ptr",
    ],
)  # fmt: skip
def _latent_attention_kernel(
    query_ptr, latent_ptr, rope_ptr, output_ptr, tile_scale_ptr, lse_ptr, kv_scale_ptr,
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr, partial_ptr, partial_lse_ptr,
    num_reqs, min_query_len, max_query_len, min_split, rank, stride_table, stride_lse, softmax_scale, slots,
    Q: tl.constexpr, OUT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, SCALES: tl.constexpr,
    TILE: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, NUM_HEADS: tl.constexpr, MASK: tl.constexpr,
    ONE_TILE: tl.constexpr, SPLIT: tl.constexpr, SHARES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    GPU: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Computes the requests that have from min_query_len to max_query_len queries; ignores the others.

    Grid: (tiles * cdiv(NUM_HEADS, heads), splits). Q, OUT: `Strides`. LATENT, ROPE: `CacheLayout`, of the latents and
    their rotary parts; SCALES: of the latents' scales, in float32, if they have any. TILE: `Tile`; its block_d is that
    of the rotary part. ONE_TILE: no request has more than BLOCK_M // heads queries, and tile i is request i. SPLIT:
    parts go to partial_ptr and partial_lse_ptr; a request cuts its keys into parts of min_split or more. SHARES:
    `Shares`; programs share out the keys of all requests, and some programs get none. rank: LATENT.size, unknown to the
    compiler. GPU: as in `uniform`. IN_PLACE: LLVM moves no computation out of the loop over keys.
    """
    if DEPENDENT_LAUNCH:
        # the merge may start setting up while this kernel runs; it waits for the results itself
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = TILE.block_m // TILE.heads
    HEAD_TILES: tl.constexpr = (NUM_HEADS + TILE.heads - 1) // TILE.heads
    head_tile = tl.program_id(0) % HEAD_TILES
    tile = tl.program_id(0) // HEAD_TILES
    number, part, parts, apart = tile, 0, 1, 0
    if SHARES is not None:
        # a request's tiles have consecutive numbers
        each = 1 if ONE_TILE else tl.cdiv(max_query_len, BLOCK_Q)
        number, apart, tile_of_request = tile // each, tl.num_programs(0) // HEAD_TILES // each, tile % each
        tile, part, parts = part_of_program(
            query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, tl.arange(0, SHARES.lanes),
            number, SHARES,
        )  # fmt: skip
        tile, part, parts = uniform(tile, GPU), uniform(part, GPU), uniform(parts, GPU)
        if tile >= num_reqs:
            return
        req, first_token, query_len, _ = find_tile(query_start_loc_ptr, num_reqs, tile, BLOCK_Q, True, GPU)
        tile = tile_of_request
    else:
        if not ONE_TILE:
            # a causal request's last tiles have the most keys, so they begin first
            tile = tl.num_programs(0) // HEAD_TILES - 1 - tile
        req, first_token, query_len, tile = find_tile(query_start_loc_ptr, num_reqs, tile, BLOCK_Q, ONE_TILE, GPU)
    if (tile * BLOCK_Q >= query_len) | (query_len < min_query_len) | (query_len > max_query_len):
        return
    kv_len = tl.load(seq_lens_ptr + req)
    rows, span = rows_of_tile(tile, 0, head_tile, query_len, kv_len, None, TILE, NUM_HEADS, MASK)
    if SHARES is not None:
        span = span_of_part(span, kv_len, part, parts, TILE.block_n)
    else:
        span = program_span(span, min_split, LATENT.block_size, TILE.block_n, SPLIT)
    if SPLIT:  # noqa: SIM102 (the compiler decides the first, the device the second)
        if span.start >= span.stop:
            store_no_part(rows, req, first_token, tile, slots, partial_lse_ptr, NUM_HEADS, TILE, False)
            return

    query_ptr += (first_token + rows.token) * Q.token + rows.head.to(tl.int64) * Q.head  # [BLOCK_M]
    query, query_rope = None, None
    if TILE.block_k == TILE.block_dv:
        query = load_columns(query_ptr, rows.exists, 0, LATENT.size, TILE.block_dv, COMPUTE_DTYPE)
    if ROPE.size > 0:
        query_rope = load_columns(query_ptr + LATENT.size, rows.exists, 0, ROPE.size, TILE.block_d, COMPUTE_DTYPE)
    kv_scale = 1.0 if kv_scale_ptr is None else tl.load(kv_scale_ptr)
    scale = softmax_scale * LOG2_E * kv_scale
    state = no_keys(TILE.block_m, TILE.block_dv)

    block_table_ptr += req.to(tl.int64) * stride_table
    has_keys = span.start < span.stop
    last_block = tl.load(block_table_ptr + (span.stop - 1) // LATENT.block_size, mask=has_keys, other=0).to(tl.int64)
    latents = Latents(latent_ptr, rope_ptr, tile_scale_ptr, block_table_ptr, last_block)
    block = load_blocks(block_table_ptr, span.start, span.stop, last_block, LATENT.block_size, TILE.block_n)
    # one masked loop: a loop without a mask and a second one for the last tile would spill registers
    for n in tl.range(span.start, span.stop, TILE.block_n, disable_licm=IN_PLACE):
        state, block = _attend_tile(
            state, block, n, query, query_ptr, query_rope, rows, latents, span.stop, rank, scale, LATENT, ROPE, SCALES,
            TILE, COMPUTE_DTYPE,
        )  # fmt: skip

    state = Softmax(state.acc * kv_scale, state.row_max, state.row_sum)
    _store(
        state, rows, req, first_token, tile, slots, number, parts, apart, output_ptr, lse_ptr, partial_ptr,
        partial_lse_ptr, stride_lse, OUT, LATENT.size, NUM_HEADS, TILE, SPLIT, SHARES is not None,
    )  # fmt: skip
