# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The attention kernel: a batch of requests of any lengths against paged or packed keys and values.

One program computes one tile of rows for one KV head, so that every key is loaded once for all query heads of its group
(`rows`). Long contexts are cut into parts, one program each. Every request has equally many parts; if only the device
knows the lengths, all parts have one size instead (`splits.shares`). A second kernel merges the parts (`splits.merge`).

The functions are inlined: they compile to one long function, instruction for instruction. Arguments in capitals are
constants, some of them named tuples. Shapes are in capitals too: BLOCK_M is TILE.block_m.
"""

import triton
import triton.language as tl

from attnreg.kernels.packed.codes import column_of
from attnreg.kernels.triton.attend import attend, store_output
from attnreg.kernels.triton.inside.uniform import uniform
from attnreg.kernels.triton.rows import (
    find_tile,
    place_of_program,
    program_span,
    rows_of_tile,
    span_of_part,
    tree_of_rows,
    with_ranges,
)
from attnreg.kernels.triton.splits.parts import store_no_part, store_part, store_part_of_share
from attnreg.kernels.triton.splits.shares import part_of_program


@triton.jit(
    do_not_specialize=[
        "num_reqs", "min_query_len", "max_query_len", "slots", "num_ranges", "min_split", "head_size",
        "programs_at_once", "stride_table", "stride_ranges", "stride_range", "stride_tree", "stride_lse",
        "stride_key_head", "stride_value_head", "softmax_scale", "softcap",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "partial_ptr", "partial_lse_ptr", "query_start_loc_ptr", "seq_lens_ptr", "key_start_loc_ptr",
        "causal_ptr", "block_table_ptr", "ranges_ptr", "tree_ptr", "sinks_ptr", "slopes_ptr", "q_scale_ptr",
        "k_scale_ptr", "v_scale_ptr", "out_scale_ptr",
    ],
)  # fmt: skip
def _attention_kernel(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, sinks_ptr, slopes_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    out_scale_ptr, query_start_loc_ptr, seq_lens_ptr, key_start_loc_ptr, causal_ptr, block_table_ptr, ranges_ptr,
    tree_ptr, partial_ptr, partial_lse_ptr,
    num_reqs, min_query_len, max_query_len, slots, num_ranges, min_split, head_size, programs_at_once,
    stride_table, stride_ranges, stride_range, stride_tree, stride_lse, stride_key_head, stride_value_head,
    softmax_scale, softcap,
    Q: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    ONE_TILE: tl.constexpr, SPLIT: tl.constexpr, SHARES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    PEEL: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Computes the requests that have from min_query_len to max_query_len queries; ignores the others.

    Grid: (tiles * NUM_KV_HEADS * cdiv(GROUP, heads), splits). Q, OUT: `Strides`. K, V: `CacheLayout`. HEADS: `PerHead`.
    TILE: `Tile`. MASK: `Mask`. COMPUTE_DTYPE, VALUE_DTYPE: of the products with keys, and of those with values.
    ONE_TILE: no request has more than BLOCK_M // heads queries, and tile i is request i.
    SPLIT: parts go to partial_ptr and partial_lse_ptr; a request cuts its keys into parts of min_split or more.
    SHARES: `Shares`, with ONE_TILE only; programs share out the keys of all requests, and some programs get none.
    PEEL: tiles whose keys all rows see have a loop of their own. head_size: K.size, unknown to the compiler.
    GPU: as in `uniform`.
    programs_at_once: how many programs of a tile run side by side, a divisor of their number.
    The optional pointers (lse, causal, ranges, tree, sinks, slopes, scales) are None if the feature is not used.
    """
    if DEPENDENT_LAUNCH:
        # the merge may start setting up while this kernel runs; it waits for the results itself
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = TILE.block_m // TILE.heads
    HEAD_TILES: tl.constexpr = (GROUP + TILE.heads - 1) // TILE.heads
    PROGRAMS: tl.constexpr = NUM_KV_HEADS * HEAD_TILES
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    tile, head_tile = place_of_program(programs_at_once, PROGRAMS, ONE_TILE)
    kv_head = head_tile // HEAD_TILES
    if SHARES is not None:
        program = tile
        tile, part, parts = part_of_program(
            query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, tl.arange(0, SHARES.lanes),
            program, SHARES,
        )  # fmt: skip
        tile, part, parts = uniform(tile, GPU), uniform(part, GPU), uniform(parts, GPU)
        if tile >= num_reqs:
            return
    req, first_token, query_len, tile = find_tile(query_start_loc_ptr, num_reqs, tile, BLOCK_Q, ONE_TILE, GPU)
    if (tile * BLOCK_Q >= query_len) | (query_len < min_query_len) | (query_len > max_query_len):
        return
    kv_len = tl.load(seq_lens_ptr + req)
    causal = None
    if causal_ptr is not None:
        causal = tl.load(causal_ptr + req) != 0
    rows, span = rows_of_tile(tile, kv_head, head_tile % HEAD_TILES, query_len, kv_len, causal, TILE, GROUP, MASK)
    if ranges_ptr is not None:
        rows, span = with_ranges(
            rows, span, req, ranges_ptr, num_ranges, stride_ranges, stride_range, kv_len, MASK, GPU
        )
    tree = None
    if tree_ptr is not None:
        tree, span = tree_of_rows(tree_ptr, stride_tree, first_token, rows, span, kv_len - query_len)
    if SHARES is not None:
        span = span_of_part(span, kv_len, part, parts, TILE.block_n)
    else:
        span = program_span(span, min_split, K.block_size, TILE.block_n, SPLIT)
    if SPLIT:  # noqa: SIM102 (the compiler decides the first, the device the second)
        # requests with fewer keys than others have fewer parts
        if span.start >= span.stop:
            store_no_part(rows, req, first_token, tile, slots, partial_lse_ptr, NUM_HEADS, TILE, ONE_TILE)
            return

    state = attend(
        rows, span, req, first_token, kv_head, tree, query_ptr, key_ptr, value_ptr, slopes_ptr, q_scale_ptr,
        k_scale_ptr, v_scale_ptr, key_start_loc_ptr, block_table_ptr, head_size, stride_table, stride_key_head,
        stride_value_head, softmax_scale, softcap, Q, K, V, HEADS, TILE, COMPUTE_DTYPE, VALUE_DTYPE, NUM_KV_HEADS,
        NUM_HEADS, MASK, SOFTCAP, PEEL,
    )  # fmt: skip
    whole = not SPLIT
    if SHARES is not None:
        whole = parts == 1
        if not whole:
            store_part_of_share(
                state, rows, program, tl.num_programs(0) // PROGRAMS, partial_ptr, partial_lse_ptr,
                column_of(V, TILE.block_dv, False), NUM_HEADS, V.size,
            )  # fmt: skip
    elif SPLIT:
        store_part(
            state, rows, req, first_token, tile, slots, partial_ptr, partial_lse_ptr,
            column_of(V, TILE.block_dv, False), NUM_HEADS, V.size, TILE, ONE_TILE,
        )  # fmt: skip
    if whole:
        store_output(
            state, rows, first_token, output_ptr, lse_ptr, sinks_ptr, out_scale_ptr, stride_lse, OUT, HEADS, NUM_HEADS,
            V, TILE,
        )  # fmt: skip
