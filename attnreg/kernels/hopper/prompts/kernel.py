# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index, assignment"
# ruff: noqa: N803, N806, RUF005 (constexprs are written in capitals, and Gluon unpacks no tuples)
"""The attention kernel for prompts on SM 9.0, in Gluon: wgmma fed by TMA, a warp that loads and warps that compute.

A block of threads stays on its multiprocessor and takes tiles until none is left. One of its warps (`loads`) finds
them. It looks up the request of a tile, and writes the facts of the tile to shared memory. It makes the copy engine
load the queries, and the keys and values block by block, some blocks ahead. Up to three warpgroups compute 64 rows each
(`_consume`). A row is one query of one head. Heads that share a KV head are rows of the same tile, so that their keys
are loaded once.

Keys are walked from the last block to the first. So blocks with hidden keys come first. Only the very first block can
hold keys past the request's end, whose memory may hold anything. Each step issues the products of a block with the
queries, and those of the previous block's weights with its values. The block's softmax overlaps with the latter.

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
from triton.language.extra.cuda import gdc_launch_dependents

from attnreg.kernels.hopper.prompts.loads import produce
from attnreg.kernels.hopper.prompts.outputs import columns, finish, output_layout, scaled, scaled_if_moved
from attnreg.kernels.hopper.prompts.scores import carried, hidden, hides, lane_sums, operand_of
from attnreg.kernels.hopper.prompts.shared import (
    AHEAD,
    FACTS,
    ROWS,
    Batch,
    Outputs,
    Places,
    Shared,
    columns_of,
    give_turn,
    is_in_groups,
    next_tile,
    part_of,
    parts_of,
    take_turn,
)
from attnreg.kernels.hopper.releases import reinterpret
from attnreg.kernels.hopper.softmax import scores
from attnreg.kernels.triton.softmax import LOWEST

# with ``lazy``, a row's maximum is updated only when the largest score exceeds it by more than this, as in
# FlashAttention 4. Weights are then up to 2**SLACK
SLACK = gl.constexpr(8.0)


@gluon.jit
def _queries(shared, at, PLACE: gl.constexpr, C: gl.constexpr):
    """Returns part PLACE of a tile's queries, in shared memory."""
    PARTS: gl.constexpr = parts_of(C.size, C.part)
    return columns(shared.q.index(at * PARTS + PLACE).reshape([ROWS, C.part]), C.size, C.part, PLACE)


@gluon.jit
def _held_queries(shared, at, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the first parts of a tile's queries, in registers."""
    HELD: gl.constexpr = C.held
    held = ()
    for i in gl.static_range(0, HELD):
        held = held + (_queries(shared, at, i, C).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
    return held


@gluon.jit
def _multiply_keys(held, shared, at, stage, nothing, C: gl.constexpr):
    """Issues the products of a tile's queries with a block of keys, one commit for each part of the head."""
    PARTS: gl.constexpr = parts_of(C.size, C.part)
    s = nothing
    for i in gl.static_range(PARTS):
        k = part_of(shared.k, shared.k_rest, stage, i, C.size, C.part, C)
        if i < C.held:
            s = warpgroup_mma(held[i], k.permute([1, 0]), s, use_acc=i > 0, is_async=True)
        else:
            s = warpgroup_mma(_queries(shared, at, i, C), k.permute([1, 0]), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _multiply_values(weights, shared, stage, acc, C: gl.constexpr):
    """Issues the products of weights with a block of values, added to acc, which has a tensor for each part."""
    PARTS: gl.constexpr = parts_of(C.size_v, C.part_v)
    found = ()
    for i in gl.static_range(PARTS):
        v = part_of(shared.v, shared.v_rest, stage, i, C.size_v, C.part_v, C)
        operand = gl.convert_layout(weights, gl.DotOperandLayout(0, output_layout(C, i), 2))
        found = found + (warpgroup_mma(operand, v, acc[i], is_async=True),)
    return found


@gluon.jit
def _no_output(C: gl.constexpr):
    """Returns zeros [ROWS, columns] for each part of the output."""
    acc = ()
    for i in gl.static_range(parts_of(C.size_v, C.part_v)):
        acc = acc + (gl.zeros([ROWS, columns_of(C.size_v, C.part_v, i)], gl.float32, output_layout(C, i)),)
    return acc


@gluon.jit
def _awaited(acc, C: gl.constexpr):
    """Waits for the products of the parts of the output, and for all others under way; returns the parts."""
    found = ()
    for i in gl.static_range(parts_of(C.size_v, C.part_v)):
        found = found + (warpgroup_mma_wait(0, [acc[i]]),)
    return found


@gluon.jit
def _clear_past(shared, stage, keys, C: gl.constexpr):
    """Zeroes the values of a block from its row ``keys`` on: a weight of 0 times NaN would be NaN.

    Each warpgroup does so; the rows before stay unchanged.
    """
    if is_in_groups(C.in_groups, C.size_v, C.part_v):
        _clear_groups(shared.v.index(stage), keys, C)
    else:
        for i in gl.static_range(parts_of(C.size_v, C.part_v)):
            _clear_rows(part_of(shared.v, shared.v_rest, stage, i, C.size_v, C.part_v, C), keys, C)
    fence_async_shared()


@gluon.jit
def _clear_rows(memory, keys, C: gl.constexpr):
    """Zeroes the rows from ``keys`` on of memory [keys of a block, columns]."""
    LANES: gl.constexpr = memory.shape[1] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    for x in gl.static_range(C.block_n // 16):
        if keys < x * 16 + 16:
            rows = x * 16 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
            some = memory.slice(x * 16, 16, 0)
            some.store(gl.where((rows < keys)[:, None], some.load(LAYOUT), 0.0))


@gluon.jit
def _clear_groups(memory, keys, C: gl.constexpr):
    """Zeroes the rows from ``keys`` on of memory [groups of 8 rows, parts of 64 columns, rows, columns]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 4, 8], [1, 2, 2, 1], [3, 2, 1, 0])
    of_rows = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    rows = of_rows[None, :][:, None, :][:, :, :, None]
    for x in gl.static_range(C.block_n // 8):
        if keys < x * 8 + 8:
            some = memory.slice(x, 1, 0)
            some.store(gl.where(x * 8 + rows < keys, some.load(LAYOUT), 0.0))


@gluon.jit
def _compute(
    W: gl.constexpr, tile, taken, used, o_desc, shared, outputs, scale, softcap, C: gl.constexpr
):  # fmt: skip
    """Computes the rows of warpgroup W of a tile; returns ``used`` after it. taken, used: tiles and blocks before."""
    BLOCK_N: gl.constexpr = C.block_n
    PARTS_V: gl.constexpr = parts_of(C.size_v, C.part_v)
    QUERIES: gl.constexpr = ROWS // C.pack
    DTYPE: gl.constexpr = o_desc.dtype
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LP: gl.constexpr = gl.DotOperandLayout(0, output_layout(C, 0), 2)
    LR: gl.constexpr = gl.SliceLayout(1, LS)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, LS)
    rows = gl.arange(0, ROWS, LR)
    first = tile.position + W * QUERIES
    position = first + rows // C.pack
    at = taken % C.q_stages * C.groups + W
    factor = scale
    if C.k_scaled:
        factor *= gl.load(outputs.k_scale + tile.head // C.group * outputs.stride_k_scale)
    unit = 1.0 if C.softcap else factor
    mbarrier.wait(shared.q_full.index(at), (taken // C.q_stages) & 1)
    held = _held_queries(shared, at, LS, C)

    stage = used % C.stages
    phase = (used // C.stages) & 1
    key = tile.begin + (tile.blocks - 1) * BLOCK_N
    if key + BLOCK_N > tile.keys:
        mbarrier.wait(shared.v_full.index(stage), phase)
        _clear_past(shared, stage, tile.keys - key, C)
    mbarrier.wait(shared.k_full.index(stage), phase)
    take_turn(W, C)
    s = _multiply_keys(held, shared, at, stage, nothing, C)
    give_turn(W, C)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(shared.k_empty.index(stage))
    s = hidden(scores(s, factor, softcap, C.softcap), key, position, tile.keys, C)
    row_max = gl.maximum(gl.max(s, 1) * unit, LOWEST)
    p = gl.exp2(s * unit - row_max[:, None])
    row_sum = lane_sums(p, C)
    weights = carried(p, DTYPE, LP)
    acc = _no_output(C)
    for _ in range(1, tile.blocks):
        stage_v = stage
        phase_v = phase
        used += 1
        stage = used % C.stages
        phase = (used // C.stages) & 1
        key -= BLOCK_N
        mbarrier.wait(shared.k_full.index(stage), phase)
        take_turn(W, C)
        s = _multiply_keys(held, shared, at, stage, nothing, C)
        mbarrier.wait(shared.v_full.index(stage_v), phase_v)
        acc = _multiply_values(operand_of(weights, DTYPE, LP), shared, stage_v, acc, C)
        give_turn(W, C)
        s = warpgroup_mma_wait(PARTS_V, [s])
        mbarrier.arrive(shared.k_empty.index(stage))
        s = scores(s, factor, softcap, C.softcap)
        if hides(key, first, tile.keys, C):
            s = hidden(s, key, position, tile.keys, C)
        new_max = gl.maximum(row_max, gl.max(s, 1) * unit)
        if C.lazy:
            new_max = gl.where(new_max > row_max + SLACK, new_max, row_max)
        p = gl.exp2(s * unit - new_max[:, None])
        alpha = gl.exp2(row_max - new_max)
        row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        row_sum += lane_sums(p, C)
        row_max = new_max
        acc = _awaited(acc, C)
        mbarrier.arrive(shared.v_empty.index(stage_v))
        if C.lazy:  # noqa: SIM108 (the compiler decides)
            acc = scaled_if_moved(acc, alpha, C)
        else:
            acc = scaled(acc, alpha, C)
        weights = carried(p, DTYPE, LP)
    if not C.output_in_query:
        mbarrier.arrive(shared.q_empty.index(at))
    mbarrier.wait(shared.v_full.index(stage), phase)
    acc = _awaited(_multiply_values(operand_of(weights, DTYPE, LP), shared, stage, acc, C), C)
    mbarrier.arrive(shared.v_empty.index(stage))
    finish(W, acc, row_max, gl.convert_layout(gl.sum(row_sum, 1), LR), tile, o_desc, shared, outputs, C)
    return used + 1


@gluon.jit
def _pass_by(W: gl.constexpr, tile, taken, used, shared, C: gl.constexpr):
    """`_compute` for a warpgroup without rows: it frees the memory that was loaded for it."""
    at = taken % C.q_stages * C.groups + W
    mbarrier.wait(shared.q_full.index(at), (taken // C.q_stages) & 1)
    mbarrier.arrive(shared.q_empty.index(at))
    for _ in range(tile.blocks):
        stage = used % C.stages
        phase = (used // C.stages) & 1
        take_turn(W, C)
        give_turn(W, C)
        mbarrier.wait(shared.k_full.index(stage), phase)
        mbarrier.arrive(shared.k_empty.index(stage))
        mbarrier.wait(shared.v_full.index(stage), phase)
        mbarrier.arrive(shared.v_empty.index(stage))
        used += 1
    return used


@gluon.jit
def _consume(W: gl.constexpr, o_desc, shared, outputs, scale, softcap, C: gl.constexpr):
    """Computes the rows of warpgroup W of every tile."""
    taken = 0
    used = 0
    if C.groups - 1 == W:
        give_turn(W, C)
    tile = next_tile(shared, taken, 4)
    while tile.blocks > 0:
        if C.mixed:
            if tile.queries > W * (ROWS // C.pack):
                used = _compute(W, tile, taken, used, o_desc, shared, outputs, scale, softcap, C)
            else:
                used = _pass_by(W, tile, taken, used, shared, C)
        else:
            used = _compute(W, tile, taken, used, o_desc, shared, outputs, scale, softcap, C)
        taken += 1
        tile = next_tile(shared, taken, 4)
    tma.store_wait(0)
    if W == 0:
        take_turn(W, C)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Returns COUNT barriers, each for ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(
    do_not_specialize=[
        "num_reqs", "stride_table", "min_query_len", "max_query_len", "tiles", "heads_at_once", "of_prompts",
        "k_block", "k_head", "k_column", "v_block", "v_head", "v_column", "stride_token", "stride_head", "stride_lse",
        "stride_sink", "stride_k_scale", "stride_v_scale", "splits", "slots", "scale", "softcap",
    ],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "key_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "taken_ptr", "output_ptr",
        "lse_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "partial_ptr", "partial_lse_ptr",
    ],
)  # fmt: skip
def prefill_kernel(
    q_desc, k_desc, v_desc, o_desc, k_rest_desc, v_rest_desc, query_start_loc_ptr, key_start_loc_ptr, seq_lens_ptr,
    block_table_ptr, taken_ptr, output_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, partial_ptr, partial_lse_ptr,
    num_reqs, stride_table: gl.int64, min_query_len, max_query_len, tiles, heads_at_once, of_prompts, k_block, k_head,
    k_column, v_block, v_head, v_column, stride_token: gl.int64, stride_head: gl.int64, stride_lse: gl.int64,
    stride_sink, stride_k_scale, stride_v_scale, splits, slots, scale, softcap, C: gl.constexpr,
):  # fmt: skip
    """Computes the requests that have from min_query_len to max_query_len queries; ignores the others.

    Strides are 64-bit arguments: the compiler would widen 32-bit ones at the kernel's beginning, and spill them.
    """
    if C.split:
        # the merge may start setting up now; it waits for the parts itself
        gdc_launch_dependents()
    DTYPE: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = parts_of(C.size, C.part)
    PARTS_V: gl.constexpr = parts_of(C.size_v, C.part_v)
    WHOLE: gl.constexpr = C.size // C.part
    WHOLE_V: gl.constexpr = C.size_v // C.part_v
    q = gl.allocate_shared_memory(DTYPE, [C.q_stages * C.groups * PARTS, ROWS // C.pack, C.pack, C.part], q_desc.layout)
    if C.output_in_query:
        o = q
        if C.part_v > C.part:
            # the queries' memory, as wider parts
            o = reinterpret(q, DTYPE, [C.groups * PARTS_V, ROWS // C.pack, C.pack, C.part_v], o_desc.layout)
    else:
        o = gl.allocate_shared_memory(DTYPE, [C.groups * PARTS_V, ROWS // C.pack, C.pack, C.part_v], o_desc.layout)
    if is_in_groups(C.in_groups, C.size, C.part):
        k = gl.allocate_shared_memory(DTYPE, [C.stages, C.block_n // 8, C.size // 64, 8, 64], k_desc.layout)
    else:
        k = gl.allocate_shared_memory(DTYPE, [C.stages * WHOLE, C.block_n, C.part], k_desc.layout)
    if is_in_groups(C.in_groups, C.size_v, C.part_v):
        v = gl.allocate_shared_memory(DTYPE, [C.stages, C.block_n // 8, C.size_v // 64, 8, 64], v_desc.layout)
    else:
        v = gl.allocate_shared_memory(DTYPE, [C.stages * WHOLE_V, C.block_n, C.part_v], v_desc.layout)
    if C.size > WHOLE * C.part:
        k_rest_of = k_rest_desc
        k_rest = gl.allocate_shared_memory(DTYPE, [C.stages, C.block_n, C.size - WHOLE * C.part], k_rest_desc.layout)
    else:
        k_rest_of = k_desc
        k_rest = k
    if C.size_v > WHOLE_V * C.part_v:
        v_rest_of = v_rest_desc
        v_rest = gl.allocate_shared_memory(
            DTYPE, [C.stages, C.block_n, C.size_v - WHOLE_V * C.part_v], v_rest_desc.layout
        )
    else:
        v_rest_of = v_desc
        v_rest = v
    shared = Shared(
        q,
        k,
        v,
        k_rest,
        v_rest,
        o,
        gl.allocate_shared_memory(gl.int32, [AHEAD, FACTS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        _barriers(C.q_stages * C.groups, 1), _barriers(C.q_stages * C.groups, 1), _barriers(C.stages, 1),
        _barriers(C.stages, C.groups), _barriers(C.stages, 1), _barriers(C.stages, C.groups), _barriers(AHEAD, 1),
        _barriers(AHEAD, C.groups),
    )  # fmt: skip
    fence_async_shared()
    batch = Batch(query_start_loc_ptr, key_start_loc_ptr, seq_lens_ptr, block_table_ptr, taken_ptr, num_reqs,
                  stride_table, min_query_len, max_query_len, tiles, heads_at_once, of_prompts, splits,
                  slots)  # fmt: skip
    k_places = Places(k_block, k_head, k_column)
    v_places = Places(v_block, v_head, v_column)
    outputs = Outputs(output_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, partial_ptr, partial_lse_ptr,
                      stride_token, stride_head, stride_lse, stride_sink, stride_k_scale, stride_v_scale,
                      splits)  # fmt: skip
    # the tuples are literals here: in a variable, their constants would become tensors
    if C.groups == 1:
        gl.warp_specialize([
            (_consume, (0, o_desc, shared, outputs, scale, softcap, C)),
            (produce, (q_desc, k_desc, v_desc, k_rest_of, v_rest_of, shared, batch, k_places, v_places, C)),
        ], [1], [C.loading])  # fmt: skip
    elif C.groups == 2:
        gl.warp_specialize([
            (_consume, (0, o_desc, shared, outputs, scale, softcap, C)),
            (_consume, (1, o_desc, shared, outputs, scale, softcap, C)),
            (produce, (q_desc, k_desc, v_desc, k_rest_of, v_rest_of, shared, batch, k_places, v_places, C)),
        ], [4, 1], [C.registers, C.loading])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, o_desc, shared, outputs, scale, softcap, C)),
            (_consume, (1, o_desc, shared, outputs, scale, softcap, C)),
            (_consume, (2, o_desc, shared, outputs, scale, softcap, C)),
            (produce, (q_desc, k_desc, v_desc, k_rest_of, v_rest_of, shared, batch, k_places, v_places, C)),
        ], [4, 4, 1], [C.registers, C.registers, C.loading])  # fmt: skip
