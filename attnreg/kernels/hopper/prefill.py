# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The attention kernel for prompts on SM 9.0, in Gluon: wgmma fed by TMA, with a warp that loads and two that compute.

A block of threads stays on its multiprocessor and takes tiles until none is left. Its last warp (`prefill_loads`) finds
them: it looks up the request, tells the consumers through shared memory what to compute, and has the copy engine load
the queries, and keys and values block by block, some blocks ahead. Two warpgroups compute 64 rows each (`_consume`). A
row is one query of one head; heads that share a KV head are rows of the same tile, so that their keys are loaded once.

Keys are walked from the last block to the first: so the blocks with hidden keys come first, and of these only the very
first can hold keys past the request's end, whose memory may hold anything. In each step the products of a block with
the queries are under way, and those of the block before with its values; the block's softmax overlaps the latter.

Arguments in capitals are constants.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnreg.kernels.hopper.prefill_loads import produce
from attnreg.kernels.hopper.prefill_shared import (
    AHEAD,
    FACTS,
    GROUPS,
    ROWS,
    Batch,
    Outputs,
    Places,
    Shared,
    next_tile,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# the maximum of no scores: below every score, but finite, because -inf - -inf is NaN
LOWEST = gl.constexpr(-1.0e30)


@gluon.constexpr_function
def _turn_asm(barrier, wait):
    return f"bar.{'sync' if wait else 'arrive'} {barrier}, 256; mov.b32 $0, $1;"


@gluon.jit
def _turn(BARRIER: gl.constexpr, WAIT: gl.constexpr):
    """Waits at a barrier of both warpgroups, or only arrives there. Gluon has none that it does not use itself."""
    t = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    ASM: gl.constexpr = _turn_asm(BARRIER, WAIT)
    gl.inline_asm_elementwise(ASM, "=r,r", [t], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _take_turn(W: gl.constexpr, C: gl.constexpr):
    """Waits until it is this warpgroup's turn to issue products."""
    if C.take_turns:
        _turn(8 + W, True)


@gluon.jit
def _give_turn(W: gl.constexpr, C: gl.constexpr):
    """Lets the other warpgroup issue its products."""
    if C.take_turns:
        _turn(9 - W, False)


@gluon.jit
def _scores(s, scale, softcap, SOFTCAP: gl.constexpr):
    """Returns products as scores, exponents of 2, up to a factor still to be applied."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        s = softcap * (1.0 - 2.0 / (gl.exp2(s * (scale * 2.0)) + 1.0))
    return s


@gluon.jit
def _hidden(s, key, position, keys, C: gl.constexpr):
    """Returns scores of the keys from ``key`` on, -inf where a row at a position does not see one."""
    BLOCK_N: gl.constexpr = C.block_n
    offs_n = key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
    if C.right >= 0:
        end = gl.minimum(position + (C.right + 1), keys)
        visible = offs_n[None, :] < end[:, None]
    else:
        visible = (offs_n < keys)[None, :] & (position > -2147483647)[:, None]
    if C.left >= 0:
        visible = visible & (offs_n[None, :] >= (position - C.left)[:, None])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _hides(key, first, keys, C: gl.constexpr):
    """Returns whether a warpgroup has a row that does not see one of the keys from ``key`` on, but for the first block.

    first: the position of its first row.
    """
    hides = False
    if C.right >= 0:
        hides = key + C.block_n > gl.minimum(keys, first + (C.right + 1))
    if C.left >= 0:
        hides = hides | (key < first + (ROWS // C.pack - 1 - C.left))
    return hides


@gluon.jit
def _lane_sums(p, C: gl.constexpr):
    """Returns the sums of the weights that a lane holds itself, [ROWS, 4]; the lanes of a row meet after the loop."""
    return gl.sum(gl.sum(p.reshape([ROWS, C.block_n // 8, 4, 2]), 3), 1)


@gluon.jit
def _clear_past(v, keys, C: gl.constexpr):
    """Zeroes the values of a block from its row ``keys`` on: a weight of 0 times NaN would be NaN.

    Both warpgroups do so; rows before stay as they are.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (C.size // 8), C.size // 8], [4, 1], [1, 0])
    for x in gl.static_range(C.block_n // 16):
        if keys < x * 16 + 16:
            part = v.slice(x * 16, 16, 0)
            rows = x * 16 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
            part.store(gl.where((rows < keys)[:, None], part.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def _store_part(o, outputs, tile, first, queries, C: gl.constexpr):
    """Stores the rows of the first queries of a warpgroup, which begins at ``first``; the others are not the tile's."""
    LANES: gl.constexpr = C.size // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    SIZE: gl.constexpr = C.size
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = (tile.row + first + rows // C.pack).to(gl.int64)
    offs = token * outputs.stride_token + (tile.head + rows % C.pack) * outputs.stride_head
    offs_d = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
    exists = (rows // C.pack < queries)[:, None] & (offs_d >= 0)[None, :]
    gl.store(outputs.output + offs[:, None] + offs_d[None, :], o.load(LAYOUT), mask=exists)


@gluon.jit
def _finish(W: gl.constexpr, acc, row_max, total, tile, o_desc, shared, outputs, C: gl.constexpr):
    """Stores the rows of a warpgroup; acc [ROWS, size], row_max and total, the sums of their weights, [ROWS]."""
    QUERIES: gl.constexpr = ROWS // C.pack
    rows = gl.arange(0, ROWS, row_max.type.layout)
    queries = tile.queries - W * QUERIES
    exists = rows // C.pack < queries
    token = tile.row + W * QUERIES + rows // C.pack
    head = tile.head + rows % C.pack
    factor = gl.full([ROWS], 1.0, gl.float32, row_max.type.layout)
    if C.sinks:
        sink = gl.load(outputs.sinks + head * outputs.stride_sink, mask=exists, other=0.0).to(gl.float32) * LOG2_E
        new_max = gl.maximum(row_max, sink)
        factor = gl.exp2(row_max - new_max)
        total = total * factor + gl.exp2(sink - new_max)
        row_max = new_max
    # a sum of NaN has to be seen
    has_keys = total != 0
    total = gl.where(has_keys, total, 1.0)
    if C.lse:
        lse = gl.where(has_keys, (row_max + gl.log2(total)) * LN_2, float("-inf"))
        gl.store(outputs.lse + head.to(gl.int64) * outputs.stride_lse + token, lse, mask=exists)
    acc = acc * gl.convert_layout(factor / total, gl.SliceLayout(1, acc.type.layout))[:, None]
    o = shared.o.index(W).reshape([ROWS, C.size])
    tma.store_wait(0)
    o.store(acc.to(o_desc.dtype))
    fence_async_shared()
    if queries >= QUERIES:
        tma.async_copy_shared_to_global(o_desc, [tile.row + W * QUERIES, tile.head, 0], shared.o.index(W))
        if C.output_in_query:
            tma.store_wait(0)
    else:
        _store_part(o, outputs, tile, W * QUERIES, queries, C)
    if C.output_in_query:
        mbarrier.arrive(shared.q_empty.index(W))


@gluon.jit
def _consume(W: gl.constexpr, o_desc, shared, outputs, scale, softcap, C: gl.constexpr):
    """Computes the rows of warpgroup W of every tile."""
    SIZE: gl.constexpr = C.size
    BLOCK_N: gl.constexpr = C.block_n
    QUERIES: gl.constexpr = ROWS // C.pack
    DTYPE: gl.constexpr = o_desc.dtype
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    LP: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    LR: gl.constexpr = gl.SliceLayout(1, LS)
    LRO: gl.constexpr = gl.SliceLayout(1, LO)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, LS)
    unit = 1.0 if C.softcap else scale
    taken = 0
    used = 0
    if W == 1:
        _give_turn(W, C)
    tile = next_tile(shared, taken)
    while tile.blocks > 0:
        rows = gl.arange(0, ROWS, LR)
        first = tile.position + W * QUERIES
        position = first + rows // C.pack
        at = taken % C.q_stages * GROUPS + W
        q = shared.q.index(at).reshape([ROWS, SIZE])
        mbarrier.wait(shared.q_full.index(at), (taken // C.q_stages) & 1)

        stage = used % C.stages
        phase = (used // C.stages) & 1
        key = tile.begin + (tile.blocks - 1) * BLOCK_N
        if key + BLOCK_N > tile.keys:
            mbarrier.wait(shared.v_full.index(stage), phase)
            _clear_past(shared.v.index(stage), tile.keys - key, C)
        mbarrier.wait(shared.k_full.index(stage), phase)
        _take_turn(W, C)
        s = warpgroup_mma(q, shared.k.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)
        _give_turn(W, C)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(shared.k_empty.index(stage))
        s = _hidden(_scores(s, scale, softcap, C.softcap), key, position, tile.keys, C)
        row_max = gl.maximum(gl.max(s, 1) * unit, LOWEST)
        p = gl.exp2(s * unit - row_max[:, None])
        row_sum = _lane_sums(p, C)
        weights = gl.convert_layout(p.to(DTYPE), LP)
        acc = gl.zeros([ROWS, SIZE], gl.float32, LO)
        for _ in range(1, tile.blocks):
            stage_v = stage
            phase_v = phase
            used += 1
            stage = used % C.stages
            phase = (used // C.stages) & 1
            key -= BLOCK_N
            mbarrier.wait(shared.k_full.index(stage), phase)
            _take_turn(W, C)
            s = warpgroup_mma(q, shared.k.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)
            mbarrier.wait(shared.v_full.index(stage_v), phase_v)
            acc = warpgroup_mma(weights, shared.v.index(stage_v), acc, is_async=True)
            _give_turn(W, C)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(shared.k_empty.index(stage))
            s = _scores(s, scale, softcap, C.softcap)
            if _hides(key, first, tile.keys, C):
                s = _hidden(s, key, position, tile.keys, C)
            new_max = gl.maximum(row_max, gl.max(s, 1) * unit)
            p = gl.exp2(s * unit - new_max[:, None])
            alpha = gl.exp2(row_max - new_max)
            row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]
            row_sum += _lane_sums(p, C)
            row_max = new_max
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(shared.v_empty.index(stage_v))
            acc = acc * gl.convert_layout(alpha, LRO)[:, None]
            weights = gl.convert_layout(p.to(DTYPE), LP)
        if not C.output_in_query:
            mbarrier.arrive(shared.q_empty.index(at))
        mbarrier.wait(shared.v_full.index(stage), phase)
        acc = warpgroup_mma(weights, shared.v.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.v_empty.index(stage))
        used += 1

        _finish(W, acc, row_max, gl.convert_layout(gl.sum(row_sum, 1), LR), tile, o_desc, shared, outputs, C)
        taken += 1
        tile = next_tile(shared, taken)
    tma.store_wait(0)
    if W == 0:
        _take_turn(W, C)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Returns COUNT barriers for so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(
    do_not_specialize=[
        "num_reqs", "stride_table", "min_query_len", "max_query_len", "tiles", "heads_at_once", "k_block", "k_head",
        "k_column", "v_block", "v_head", "v_column", "stride_token", "stride_head", "stride_lse", "stride_sink",
        "scale", "softcap",
    ],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "key_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "taken_ptr", "output_ptr",
        "lse_ptr", "sinks_ptr",
    ],
)  # fmt: skip
def prefill_kernel(
    q_desc, k_desc, v_desc, o_desc, query_start_loc_ptr, key_start_loc_ptr, seq_lens_ptr, block_table_ptr, taken_ptr,
    output_ptr, lse_ptr, sinks_ptr, num_reqs, stride_table: gl.int64, min_query_len, max_query_len, tiles,
    heads_at_once, k_block, k_head, k_column, v_block, v_head, v_column, stride_token: gl.int64,
    stride_head: gl.int64, stride_lse: gl.int64, stride_sink, scale, softcap, C: gl.constexpr,
):  # fmt: skip
    """Computes the requests that have from min_query_len to max_query_len queries; leaves the others alone.

    Strides are of 64 bits: one widened in the kernel would be widened at its beginning, and be spilled.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(DTYPE, [C.q_stages * GROUPS, ROWS // C.pack, C.pack, C.size], q_desc.layout)
    if C.output_in_query:
        o = q
    else:
        o = gl.allocate_shared_memory(DTYPE, [GROUPS, ROWS // C.pack, C.pack, C.size], o_desc.layout)
    shared = Shared(
        q,
        gl.allocate_shared_memory(DTYPE, [C.stages, C.block_n, C.size], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [C.stages, C.block_n, C.size], v_desc.layout),
        o,
        gl.allocate_shared_memory(gl.int32, [AHEAD, FACTS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        _barriers(C.q_stages * GROUPS, 1), _barriers(C.q_stages * GROUPS, 1), _barriers(C.stages, 1),
        _barriers(C.stages, GROUPS), _barriers(C.stages, 1), _barriers(C.stages, GROUPS), _barriers(AHEAD, 1),
        _barriers(AHEAD, GROUPS),
    )  # fmt: skip
    fence_async_shared()
    batch = Batch(query_start_loc_ptr, key_start_loc_ptr, seq_lens_ptr, block_table_ptr, taken_ptr, num_reqs,
                  stride_table, min_query_len, max_query_len, tiles, heads_at_once)  # fmt: skip
    k_places = Places(k_block, k_head, k_column)
    v_places = Places(v_block, v_head, v_column)
    outputs = Outputs(output_ptr, lse_ptr, sinks_ptr, stride_token, stride_head, stride_lse, stride_sink)
    # (a tuple of arguments that is given a name loses its constants)
    gl.warp_specialize([
        (_consume, (0, o_desc, shared, outputs, scale, softcap, C)),
        (_consume, (1, o_desc, shared, outputs, scale, softcap, C)),
        (produce, (q_desc, k_desc, v_desc, shared, batch, k_places, v_places, C)),
    ], [4, 1], [232, 40])  # fmt: skip
