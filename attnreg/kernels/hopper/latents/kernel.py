# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-untyped-call, assignment"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The decode kernel of MLA for SM 9.0, in Gluon: absorbed queries against a paged cache of latents of 512 + 64.

A program computes 64 rows, query heads of one or more queries of a request, over tiles of 64 keys. A warp or a
warpgroup of `loads` loads the tiles, each as its left half, its right half and its rotary part; two buffers hold them.
The left warpgroup computes scores, weights, and the left half of the outputs. It hands the weights to the right
warpgroup, which computes the right half. Tiles are walked from the last to the first. So only the first tiles that a
program walks have keys that some rows do not see.

Arguments in capitals are constants.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from attnreg.kernels.hopper.latents.loads import BOXES, CONVERTERS, KEYS, ROPE, bring, half_of, rotary_of
from attnreg.kernels.hopper.latents.outputs import (
    FACTS,
    HALF,
    LANES,
    OUTPUTS,
    ROWS,
    SCORES,
    SWIZZLED,
    WIDE_ROWS,
    rows_of_tile,
    store_half,
    store_sums,
    tell,
    tile_of,
)
from attnreg.kernels.hopper.memory import to_float16, uniform
from attnreg.kernels.hopper.programs import part_of_program
from attnreg.kernels.triton.softmax import LOG2_E, LOWEST

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
NARROW_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q: gl.constexpr):
    """Returns the request of a tile, where request i owns the tiles from query_start_loc[i] // BLOCK_Q + i on."""
    req = -1
    for start in range(0, num_reqs, 128):
        i = start + gl.arange(0, 128, LANES)
        first_token = gl.load(query_start_loc_ptr + i, mask=i < num_reqs, other=0)
        req += gl.sum(((i < num_reqs) & (first_token // BLOCK_Q + i <= tile)).to(gl.int32), 0)
    return req


@gluon.jit
def _load_query(
    query_ptr, first_token, tile, query_len, shared,
    Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr,
    FIRST: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copies SIZE columns of the rows' queries, from FIRST on, to shared memory; rows that do not exist are 0."""
    token, head, exists = rows_of_tile(tile, query_len, NUM_HEADS, HEADS, gl.SliceLayout(1, LAYOUT))
    offs = (first_token + token).to(gl.int64) * Q_TOKEN + head.to(gl.int64) * Q_HEAD + FIRST
    columns = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
    query = gl.load(query_ptr + offs[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
    if gl.float16 == shared.dtype:
        query = to_float16(query)
    shared.store(query)


@gluon.jit
def _clear_rows(shared, count):
    """Sets the rows of a half tile [64, 256] from `count` on to 0: memory past the last key may hold NaN."""
    row = gl.arange(0, KEYS, gl.SliceLayout(1, WIDE_ROWS))
    values = shared.load(WIDE_ROWS)
    shared.store(gl.where((row < count)[:, None], values, 0.0))
    fence_async_shared()


@gluon.jit
def _masked(s, n, token, context, kv_len, CAUSAL: gl.constexpr):
    """Returns the scores of the keys from n on, with -inf for keys that a row does not see."""
    end = gl.minimum(kv_len, context + token + 1) if CAUSAL else token * 0 + kv_len
    keys = n + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    return gl.where(keys[None, :] < end[:, None], s, -float("inf"))


@gluon.jit
def _sums_of_lanes(p):
    """Returns each thread's own sum of the weights of each row, [64, 4]: four lanes share a row."""
    return gl.sum(gl.sum(p.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _factor(row_sum, kv_scale_ptr):
    """Returns the factor of the rows' sums of latents: the cache's scale over the sum of weights."""
    factor = 1.0 / gl.where(row_sum != 0, row_sum, 1.0)
    if kv_scale_ptr is not None:
        factor = factor * gl.load(kv_scale_ptr)
    return factor


@gluon.jit
def _left(
    query_ptr, output_ptr, lse_ptr, kv_scale_ptr, partial_ptr, partial_lse_ptr,
    query_left, query_rope, query_right, left, right, rope, weights, factors,
    query_full, left_full, left_empty, right_full, right_empty, weights_full, weights_empty,
    facts, kv_len, start, stop, tiles, unit,
    Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr,
    BY_ROW: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Computes scores, weights, and the left half of the outputs."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUTS, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUTS)
    row_max = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUTS)
    if tiles > 0:
        first_token, tile, query_len = tile_of(facts)
        context = kv_len - query_len
        token, _, _ = rows_of_tile(tile, query_len, NUM_HEADS, HEADS, gl.SliceLayout(1, SCORES))
        _load_query(query_ptr, first_token, tile, query_len, query_left.index(0), Q_TOKEN, Q_HEAD, NUM_HEADS, HEADS,
                    0, HALF, WIDE_ROWS)  # fmt: skip
        _load_query(query_ptr, first_token, tile, query_len, query_rope.index(0), Q_TOKEN, Q_HEAD, NUM_HEADS, HEADS,
                    2 * HALF, ROPE, NARROW_ROWS)  # fmt: skip
        fence_async_shared()
        zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        # the position of the first key that some row does not see
        hidden = context + tile * (ROWS // HEADS) + 1
        n = start + (tiles - 1) * KEYS
        if kv_scale_ptr is not None:
            unit = unit * gl.load(kv_scale_ptr)
        mbarrier.wait(left_full.index(0), 0)
        if not BY_ROW:  # noqa: SIM102 (the compiler decides the first, the device the second)
            if stop - n < KEYS:
                _clear_rows(half_of(left, 0), stop - n)
        s = warpgroup_mma(query_left.index(0), half_of(left, 0).permute([1, 0]), zeros, use_acc=False, is_async=True)
        mbarrier.wait(query_full, 0)
        mbarrier.wait(right_full.index(0), 0)
        s = warpgroup_mma(query_right.index(0), half_of(right, 0).permute([1, 0]), s, is_async=True)
        s = warpgroup_mma(query_rope.index(0), rotary_of(rope, 0).permute([1, 0]), s, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(right_empty.index(0))
        s = _masked(s, n, token, context, kv_len, CAUSAL)
        row_max = gl.maximum(gl.max(s, 1) * unit, LOWEST)
        p = gl.exp2(s * unit - row_max[:, None])
        sums = _sums_of_lanes(p)
        p16 = p.to(DTYPE)
        factors.store(gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES)))
        weights.store(p16)
        mbarrier.arrive(weights_full)
        operand = gl.convert_layout(p16, WEIGHTS)
        for i in range(1, tiles):
            turn = uniform(i)
            stage, full = turn & 1, (turn >> 1) & 1
            # zero is 0, which LLVM does not know. Otherwise it would compute the addresses of the query's 36 products
            # before the loop, and spill registers to keep them
            zero = turn >> 31
            n -= KEYS
            acc = warpgroup_mma(operand, half_of(left, stage ^ 1), acc, is_async=True)
            mbarrier.wait(left_full.index(stage), full)
            s = warpgroup_mma(
                query_left.index(zero), half_of(left, stage).permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(left_empty.index(stage ^ 1))
            mbarrier.wait(right_full.index(stage), full)
            s = warpgroup_mma(query_right.index(zero), half_of(right, stage).permute([1, 0]), s, is_async=True)
            s = warpgroup_mma(query_rope.index(zero), rotary_of(rope, stage).permute([1, 0]), s, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(right_empty.index(stage))
            if CAUSAL and HEADS * 2 <= ROWS:  # noqa: SIM102 (the compiler decides the first, the device the second)
                # a tile's queries see different numbers of keys, and these numbers may differ in two tiles of keys
                if n + KEYS > hidden:
                    s = _masked(s, n, token, context, kv_len, CAUSAL)
            new_max = gl.maximum(row_max, gl.max(s, 1) * unit)
            p = gl.exp2(s * unit - new_max[:, None])
            factor = gl.exp2(row_max - new_max)
            row_max = new_max
            p16 = p.to(DTYPE)
            mbarrier.wait(weights_empty, (i & 1) ^ 1)
            factors.store(factor)
            weights.store(p16)
            mbarrier.arrive(weights_full)
            sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None] + _sums_of_lanes(p)
            operand = gl.convert_layout(p16, WEIGHTS)
            acc = acc * gl.convert_layout(factor, OF_ROWS)[:, None]
        acc = warpgroup_mma(operand, half_of(left, (tiles - 1) & 1), acc, is_async=True)
        row_sum = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
        mbarrier.wait(weights_empty, (tiles & 1) ^ 1)
        factors.store(_factor(row_sum, kv_scale_ptr))
        mbarrier.arrive(weights_full)
        acc = warpgroup_mma_wait(0, [acc])
    factor = gl.convert_layout(_factor(row_sum, kv_scale_ptr), OF_ROWS)
    store_half(output_ptr, partial_ptr, acc, factor, left, facts, tiles, OUT_TOKEN, OUT_HEAD, NUM_HEADS, HEADS, 0,
               SPLIT, SHARED)  # fmt: skip
    store_sums(lse_ptr, partial_lse_ptr, row_max, row_sum, facts, NUM_HEADS, HEADS, SPLIT, SHARED)


@gluon.jit
def _right(
    query_ptr, output_ptr, partial_ptr, query_right, right, weights, factors,
    query_full, right_full, right_empty, weights_full, weights_empty,
    facts, start, stop, tiles,
    Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr,
    BY_ROW: gl.constexpr,
):  # fmt: skip
    """Computes the right half of the outputs, from the weights of the left warpgroup."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUTS, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUTS)
    acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUTS)
    factor = gl.full([ROWS], 1.0, gl.float32, OF_ROWS)
    if tiles > 0:
        first_token, tile, query_len = tile_of(facts)
        _load_query(query_ptr, first_token, tile, query_len, query_right.index(0), Q_TOKEN, Q_HEAD, NUM_HEADS, HEADS,
                    HALF, HALF, WIDE_ROWS)  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(query_full)
        mbarrier.wait(right_full.index(0), 0)
        count = stop - (start + (tiles - 1) * KEYS)
        if not BY_ROW:  # noqa: SIM102 (as above)
            if count < KEYS:
                _clear_rows(half_of(right, 0), count)
        for i in range(tiles):
            stage = i & 1
            mbarrier.wait(weights_full, i & 1)
            factor = factors.load(OF_ROWS)
            operand = weights.load(WEIGHTS)
            mbarrier.arrive(weights_empty)
            acc = acc * factor[:, None]
            mbarrier.wait(right_full.index(stage), (i >> 1) & 1)
            acc = warpgroup_mma(operand, half_of(right, stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(right_empty.index(stage))
        mbarrier.wait(weights_full, tiles & 1)
        factor = factors.load(OF_ROWS)
    store_half(output_ptr, partial_ptr, acc, factor, right, facts, tiles, OUT_TOKEN, OUT_HEAD, NUM_HEADS, HEADS, HALF,
               SPLIT, SHARED)  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "num_reqs", "min_query_len", "max_query_len", "min_split", "stride_table", "stride_lse", "softmax_scale",
        "slots",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "latent_ptr", "tile_scale_ptr", "kv_scale_ptr", "query_start_loc_ptr", "seq_lens_ptr",
        "block_table_ptr", "partial_ptr", "partial_lse_ptr",
    ],
)  # fmt: skip
def latent_attention_kernel(
    query_ptr, output_ptr, lse_ptr, latent_ptr, tile_scale_ptr, kv_scale_ptr,
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr, partial_ptr, partial_lse_ptr, wide_desc, narrow_desc,
    num_reqs, min_query_len, max_query_len, min_split, stride_table, stride_lse, softmax_scale, slots,
    Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr,
    CACHE: gl.constexpr, BOX: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, CAUSAL: gl.constexpr,
    ONE_TILE: gl.constexpr, SPLIT: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Computes the requests that have from min_query_len to max_query_len queries; ignores the others.

    Grid, tiles, splits and parts are those of `attnreg.kernels.mla.decode`. wide_desc, narrow_desc: descriptors of the
    cache for the copy engine, in boxes of BOX rows by 256 columns and by 64. Their dimensions are blocks, groups of 8
    rows, groups of 64 columns, rows and columns. They are None if a warpgroup loads. latent_ptr then is the cache: for
    8-bit numbers, as words of 32 bits, with strides in words. tile_scale_ptr: the scales of a latent's tiles, in the
    same memory, or None. kv_scale_ptr: the scale of all latents, or None. CACHE: the latents' `CacheLayout`.
    """
    SHARED: gl.constexpr = SHARES is not None
    if SPLIT or SHARED:
        # the merge may start setting up while this kernel runs; it waits for the results itself
        gdc_launch_dependents()
    # float16 holds every 8-bit float exactly, but not its product with the scale of its tile
    EXACT: gl.constexpr = CACHE.fp8 != "" and tile_scale_ptr is None
    DTYPE: gl.constexpr = gl.float16 if EXACT else query_ptr.dtype.element_ty
    BLOCK_Q: gl.constexpr = ROWS // HEADS
    HEAD_TILES: gl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    tile = gl.program_id(0) // HEAD_TILES
    req = tile
    part, parts = gl.program_id(1), gl.num_programs(1)
    number, apart = part, parts
    exists = req < num_reqs
    if SHARED:
        # a request's tiles have consecutive numbers
        each = 1 if ONE_TILE else (max_query_len + BLOCK_Q - 1) // BLOCK_Q
        number, apart, tile = tile // each, gl.num_programs(0) // HEAD_TILES // each, tile % each
        req, part, parts = part_of_program(
            query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, number, SHARES
        )
        exists = req < num_reqs
        req = gl.minimum(req, num_reqs - 1)
    elif ONE_TILE:
        tile = 0
    else:
        # a causal request's last tiles have the most keys, so they begin first
        tile = gl.num_programs(0) // HEAD_TILES - 1 - tile
        req = _find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q)
    first_token = gl.load(query_start_loc_ptr + req)
    query_len = gl.load(query_start_loc_ptr + req + 1) - first_token
    if not SHARED and not ONE_TILE:
        tile -= first_token // BLOCK_Q + req
    kv_len = gl.load(seq_lens_ptr + req)
    mine = (tile * BLOCK_Q < query_len) & (query_len >= min_query_len) & (query_len <= max_query_len)
    stop = kv_len
    if CAUSAL:
        stop = gl.minimum(kv_len, kv_len - query_len + gl.minimum(tile * BLOCK_Q + BLOCK_Q, query_len))
    start = 0
    slot = first_token
    if SHARED:
        mine = mine & exists
        slot = 0
    elif SPLIT:
        slot = gl.where(slots > 0, req * slots, first_token)
    if SPLIT or SHARED:
        # the parts of requests were counted in tiles of all keys, hidden ones included
        share = (kv_len + parts - 1) // parts if SHARED else gl.maximum((stop + parts - 1) // parts, min_split)
        share = (share + KEYS - 1) // KEYS * KEYS
        start = part * share
        stop = gl.minimum(start + share, stop)
    tiles = gl.where(mine, gl.maximum(stop - start + KEYS - 1, 0) // KEYS, 0)
    block_table_ptr += req.to(gl.int64) * stride_table
    last_block = gl.maximum(stop - 1, 0) // CACHE.block_size

    query_left = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], SWIZZLED)
    query_right = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], SWIZZLED)
    query_rope = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], SWIZZLED)
    left = gl.allocate_shared_memory(DTYPE, [2, KEYS // BOX, BOX // 8, HALF // 64, 8, 64], BOXES)
    right = gl.allocate_shared_memory(DTYPE, [2, KEYS // BOX, BOX // 8, HALF // 64, 8, 64], BOXES)
    rope = gl.allocate_shared_memory(DTYPE, [2, KEYS // BOX, BOX // 8, ROPE // 64, 8, 64], BOXES)
    weights = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], SWIZZLED)
    factors = gl.allocate_shared_memory(gl.float32, [ROWS], PLAIN)
    facts = gl.allocate_shared_memory(gl.int32, [FACTS], PLAIN)
    tell(facts, slot, first_token, tile, gl.where(mine, query_len, 0), stride_lse, parts, apart, number)
    query_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query_full, count=1)
    mbarrier.init(weights_full, count=1)
    mbarrier.init(weights_empty, count=1)
    for i in gl.static_range(2):
        mbarrier.init(left_full.index(i), count=1)
        mbarrier.init(left_empty.index(i), count=1)
        mbarrier.init(right_full.index(i), count=1)
        # both warpgroups read the right half, so two arrivals free it
        mbarrier.init(right_empty.index(i), count=2)
    fence_async_shared()
    BY_ROW: gl.constexpr = wide_desc is None
    CONVERTS: gl.constexpr = BY_ROW and CACHE.fp8 != ""
    # scales take more registers; the other kernels reload some numbers after their loops instead of keeping them
    REGISTERS: gl.constexpr = 112 if EXACT else 120
    # the tuples are literals here: in a variable, their constants would become tensors
    gl.warp_specialize([
        (_left, (query_ptr, output_ptr, lse_ptr, kv_scale_ptr, partial_ptr, partial_lse_ptr, query_left, query_rope,
                 query_right, left, right, rope, weights, factors, query_full, left_full, left_empty, right_full,
                 right_empty, weights_full, weights_empty, facts, kv_len, start, stop, tiles, softmax_scale * LOG2_E,
                 Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, NUM_HEADS, HEADS, CAUSAL, SPLIT, SHARED, BY_ROW,
                 DTYPE)),
        (_right, (query_ptr, output_ptr, partial_ptr, query_right, right, weights, factors, query_full, right_full,
                  right_empty, weights_full, weights_empty, facts, start, stop, tiles, Q_TOKEN, Q_HEAD, OUT_TOKEN,
                  OUT_HEAD, NUM_HEADS, HEADS, SPLIT, SHARED, BY_ROW)),
        (bring, (wide_desc, narrow_desc, latent_ptr, tile_scale_ptr, left, right, rope, left_full, left_empty,
                 right_full, right_empty, block_table_ptr, start, stop, tiles, last_block, CACHE, BOX)),
        # registers of the loading warps: converting needs room for a tile, and the addresses of many boxes some too
    ], [4, CONVERTERS if CONVERTS else 4 if BY_ROW else 1],
       [176 if CONVERTS else 216 if BOX == KEYS else 208,
        REGISTERS if CONVERTS else 24 if BOX == KEYS and not BY_ROW else 40])  # fmt: skip
