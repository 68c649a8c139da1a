# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index, assignment"
# ruff: noqa: N803, N806, RUF005 (constexprs are written in capitals, and Gluon unpacks no tuples)
"""Outputs of the kernel in `kernel`: their parts of columns, and where a warpgroup stores its rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from attnreg.kernels.hopper.memory import STAGED
from attnreg.kernels.hopper.prompts.shared import ROWS, columns_of, parts_of
from attnreg.kernels.hopper.releases import reinterpret, store_box
from attnreg.kernels.hopper.softmax import with_sink
from attnreg.kernels.triton.softmax import LN_2, LOG2_E


@gluon.jit
def columns(memory, SIZE: gl.constexpr, PART: gl.constexpr, PLACE: gl.constexpr):
    """Returns the columns of memory [rows, PART] that part PLACE of a head has."""
    COLUMNS: gl.constexpr = columns_of(SIZE, PART, PLACE)
    return memory if COLUMNS == PART else memory.slice(0, COLUMNS, 1)


@gluon.constexpr_function
def output_layout(C, i):
    """The layout of part i of the output, [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns_of(C.size_v, C.part_v, i), 16])


@gluon.jit
def scaled(acc, factor, C: gl.constexpr):
    """Returns the parts of the output, each row times its factor."""
    found = ()
    for i in gl.static_range(parts_of(C.size_v, C.part_v)):
        of_rows = gl.convert_layout(factor, gl.SliceLayout(1, acc[i].type.layout))
        found = found + (acc[i] * of_rows[:, None],)
    return found


@gluon.constexpr_function
def _times_asm(count):
    """The assembly that multiplies numbers by factors; if the warp's flag is 0, it skips all products."""
    lines = ["{ .reg .pred p;", f"setp.ne.s32 p, ${3 * count}, 0;", "@!p bra PASSED;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return " ".join([*lines, "PASSED: }"])


@gluon.constexpr_function
def _times_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count + ["r"] * count)


@gluon.jit
def _times(x, factor, moved):
    LAYOUT: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    COUNT: gl.constexpr = min(64, x.shape[1] // 2)
    ASM: gl.constexpr = _times_asm(COUNT)
    CONSTRAINTS: gl.constexpr = _times_constraints(COUNT)
    factor, _ = gl.broadcast(gl.convert_layout(factor, LAYOUT)[:, None], x)
    moved, _ = gl.broadcast(gl.convert_layout(moved, LAYOUT)[:, None], x)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, factor, moved], dtype=gl.float32, is_pure=False, pack=COUNT)


@gluon.jit
def scaled_if_moved(acc, factor, C: gl.constexpr):
    """`scaled`, skipped by warps whose factors are all 1. It is assembly, because Gluon has no branch for one warp."""
    moved = gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.neu.f32 p, $2, 0f3F800000; setp.neu.or.f32 p, $3, 0f3F800000, p; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; mov.s32 $1, $0; }",
        "=r,=r,f,f", [factor], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
    found = ()
    for i in gl.static_range(parts_of(C.size_v, C.part_v)):
        found = found + (_times(acc[i], factor, moved),)
    return found


@gluon.jit
def _store_some(o, outputs, tile, first, queries, PLACE: gl.constexpr, C: gl.constexpr):
    """Stores a part of a warpgroup's first ``queries`` queries, from ``first`` on; the tile has no others."""
    LANES: gl.constexpr = C.part_v // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = (tile.row + first + rows // C.pack).to(gl.int64)
    offs = token * outputs.stride_token + (tile.head + rows % C.pack) * outputs.stride_head
    offs_d = PLACE * C.part_v + gl.arange(0, C.part_v, gl.SliceLayout(0, LAYOUT))
    exists = (rows // C.pack < queries)[:, None] & (offs_d < C.size_v)[None, :]
    # rows begin at multiples of 16 bytes, which the copy engine needs too
    target = gl.multiple_of(outputs.output + offs[:, None] + offs_d[None, :], [16, 16])
    gl.store(target, o.load(LAYOUT), mask=exists)


@gluon.jit
def _store_part(W: gl.constexpr, acc, row_max, total, tile, shared, outputs, STORED: gl.constexpr, C: gl.constexpr):
    """Stores the results of the rows of warpgroup W over a share of the keys, for TRITON_ATTN's merge."""
    LR: gl.constexpr = row_max.type.layout
    part, exists = _part_of_rows(W, tile, outputs, LR, C)
    sums = gl.where(total != 0, row_max + gl.log2(total), float("-inf"))
    gl.store(outputs.partial_lse + part, sums, mask=exists)
    for i in gl.static_range(parts_of(C.size_v, C.part_v)):
        o = reinterpret(shared.o.index(W * STORED + i), gl.float32, [ROWS, C.part_v // 2], STAGED)
        _store_columns(W, acc[i], o, i * C.part_v, tile, outputs, C)


@gluon.jit
def _part_of_rows(W: gl.constexpr, tile, outputs, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns where the part of each row of a warpgroup goes, and whether the row exists; [ROWS] in a layout."""
    rows = gl.arange(0, ROWS, LAYOUT)
    query = W * (ROWS // C.pack) + rows // C.pack
    part = tile.part + (query * (C.kv_heads * C.group) + tile.head + rows % C.pack) * outputs.splits
    return part.to(gl.int64), query < tile.queries


@gluon.jit
def _store_columns(W: gl.constexpr, x, memory, FIRST: gl.constexpr, tile, outputs, C: gl.constexpr):
    """Stores columns of parts, x [ROWS, columns], through shared memory that may be narrower."""
    if x.shape[1] > memory.shape[1]:
        HALF: gl.constexpr = x.shape[1] // 2
        left, right = gl.split(x.reshape([ROWS, 2, HALF]).permute([0, 2, 1]))
        _store_columns(W, left, memory, FIRST, tile, outputs, C)
        _store_columns(W, right, memory, FIRST + HALF, tile, outputs, C)
    else:
        LANES: gl.constexpr = x.shape[1] // 4
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
        staged = memory if x.shape[1] == memory.shape[1] else memory.slice(0, x.shape[1], 1)
        staged.store(x)
        part, exists = _part_of_rows(W, tile, outputs, gl.SliceLayout(1, LAYOUT), C)
        column = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
        # parts are in the run's own memory, so this alignment is certain
        target = gl.multiple_of(outputs.partial + part[:, None] * C.size_v + column[None, :], [16, 16])
        gl.store(target, staged.load(LAYOUT), mask=exists[:, None])


@gluon.jit
def finish(W: gl.constexpr, acc, row_max, total, tile, o_desc, shared, outputs, C: gl.constexpr):
    """Stores the rows of a warpgroup. acc: by parts; row_max and total, the sums of weights: [ROWS]."""
    PARTS: gl.constexpr = parts_of(C.size_v, C.part_v)
    STORED: gl.constexpr = parts_of(C.size, C.part) if C.output_in_query and C.part_v <= C.part else PARTS
    QUERIES: gl.constexpr = ROWS // C.pack
    rows = gl.arange(0, ROWS, row_max.type.layout)
    queries = tile.queries - W * QUERIES
    exists, token = rows // C.pack < queries, tile.row + W * QUERIES + rows // C.pack
    head = tile.head + rows % C.pack
    factor = gl.full([ROWS], 1.0, gl.float32, row_max.type.layout)
    if C.sinks and not C.split:
        sink = gl.load(outputs.sinks + head * outputs.stride_sink, mask=exists, other=0.0).to(gl.float32) * LOG2_E
        row_max, total, factor = with_sink(row_max, total, sink)
    # != 0 is true for NaN too, so that a sum of NaN stays NaN
    has_keys = total != 0
    total = gl.where(has_keys, total, 1.0)
    if C.lse and not C.split:
        lse = gl.where(has_keys, (row_max + gl.log2(total)) * LN_2, float("-inf"))
        gl.store(outputs.lse + head.to(gl.int64) * outputs.stride_lse + token, lse, mask=exists)
    factor = factor / total
    if C.v_scaled:
        factor *= gl.load(outputs.v_scale + tile.head // C.group * outputs.stride_v_scale)
    acc = scaled(acc, factor, C)
    if C.split:
        _store_part(W, acc, row_max, gl.where(has_keys, total, 0.0), tile, shared, outputs, STORED, C)
    else:
        tma.store_wait(0)
        for i in gl.static_range(PARTS):
            o = shared.o.index(W * STORED + i).reshape([ROWS, C.part_v])
            columns(o, C.size_v, C.part_v, i).store(acc[i].to(o_desc.dtype))
        fence_async_shared()
        for i in gl.static_range(PARTS):
            o = shared.o.index(W * STORED + i)
            if queries >= QUERIES:
                # the copy engine drops columns past the head
                store_box(o_desc, [tile.row + W * QUERIES, tile.head, i * C.part_v], o)
            else:
                _store_some(o.reshape([ROWS, C.part_v]), outputs, tile, W * QUERIES, queries, i, C)
    if C.output_in_query:
        # the copy engine will write the next queries into memory that these threads wrote and read
        fence_async_shared()
        tma.store_wait(0)
        mbarrier.arrive(shared.q_empty.index(W))
