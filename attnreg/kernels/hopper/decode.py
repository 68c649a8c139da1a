# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index, assignment"
# ruff: noqa: N803, N806, RUF005 (constexprs are written in capitals, and Gluon unpacks no tuples)
"""The attention kernel for few queries over a cache of 8-bit floats, in Gluon: codes become operands in registers.

A program computes the rows of a request and a KV head over a share of its keys. Each of its four warps walks its own
keys, 16 or more at a time. So the loop needs no barrier and no shared memory, and every tensor has a first dimension of
warps. Products are computed transposed, as scores [keys, rows] and outputs [columns, rows]. The matrix unit takes tiles
of 16 by 8, and a group of up to 8 query heads fits the 8.

Codes are loaded in words of four. One conversion takes the same byte of two words, and gives a pair of float16, which
is a register of the operand. This decides the order of a head's columns in a product with keys, and of the output's
columns in a product with values. In that order loads are 16 bytes wide, and queries and outputs are addressed in it.

Arguments in capitals are constants.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from attnreg.kernels.hopper.memory import to_float16
from attnreg.kernels.hopper.programs import PAGE, WARPS, program_of
from attnreg.kernels.hopper.softmax import keys_of_rows, scale_of, scores, with_sink
from attnreg.kernels.triton.softmax import LN_2, LOG2_E, LOWEST

# how many codes a word holds
CODES = gl.constexpr(4)


class Decode(NamedTuple):
    """The constants of the kernel.

    rows: of a tile, a power of 2: ``group`` query heads of each query. pages: how many a warp loads at once. code:
    "e4m3" or "e5m2". left, right: how many keys a row sees before its own and after it, -1: all. The others are strides
    in elements: of queries and outputs, of the cache's keys and values, of scales by KV head, and of sinks.
    """

    kv_heads: int
    group: int
    rows: int
    size: int
    block_size: int
    pages: int
    code: str
    left: int
    right: int
    softcap: bool
    split: bool
    q_token: int
    q_head: int
    out_token: int
    out_head: int
    k_block: int
    k_token: int
    k_head: int
    v_block: int
    v_token: int
    v_head: int
    k_scale: int
    v_scale: int
    sink: int


@gluon.constexpr_function
def _widening(code):
    """The assembly that converts the bytes of two words to four pairs of float16."""
    pairs = "prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362; mov.b32 {a, b}, x; mov.b32 {c, d}, y;"
    to_halves = "; ".join(f"cvt.rn.f16x2.{code}x2 ${i}, {pair}" for i, pair in enumerate("abcd"))
    return f"{{ .reg .b32 x, y; .reg .b16 a, b, c, d; {pairs} {to_halves}; }}"


@gluon.constexpr_function
def _words_layout(words, pages, values, paired):
    """The layout of a tile's words [WARPS, pages, PAGE, words]; paired: the two halves of a pair belong to two keys."""
    registers = [[0, 0, 8, 0], *([0, 1 << i, 0, 0] for i in range(pages.bit_length() - 1))]
    warps = [[1, 0, 0, 0], [2, 0, 0, 0]]
    if values:
        lane = words // 8
        wide = [[0, 0, 0, 1 << i] for i in range(lane.bit_length() - 1)]
        key = [[0, 0, 1, 0]]
        registers = (key + wide if paired else wide + key) + registers
        lanes = [[0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 0, lane], [0, 0, 0, 2 * lane], [0, 0, 0, 4 * lane]]
    else:
        registers = [[0, 0, 0, 1], [0, 0, 0, 2], *([[0, 0, 0, 16]] if words > 16 else []), *registers]
        lanes = [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [WARPS.value, pages, PAGE.value, words])


@gluon.jit
def halves(words, CODE: gl.constexpr):
    """Returns the codes of words as float16: one tensor for each of the CODES codes of a word."""
    ASM: gl.constexpr = _widening(CODE)
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def _keys_operand(x, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns one column of each word [WARPS, pages, PAGE, words] as an operand [WARPS, keys, words], words reordered.

    Word 16a + 4b + 2c + d is at 16a + 8c + 2b + d, so that one load gives a lane its four words.
    """
    KEYS: gl.constexpr = C.pages * PAGE
    WORDS: gl.constexpr = C.size // CODES
    x = x.reshape([WARPS, KEYS, WORDS // 16, 4, 2, 2]).permute([0, 1, 2, 4, 3, 5]).reshape([WARPS, KEYS, WORDS])
    return gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _values_operand(x, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns one column of each word [WARPS, pages, PAGE, words] as an operand [WARPS, words, keys], words reordered.

    Word (words / 8) a + b is at 8b + a.
    """
    KEYS: gl.constexpr = C.pages * PAGE
    WORDS: gl.constexpr = C.size // CODES
    x = x.reshape([WARPS, KEYS, 8, WORDS // 8]).permute([0, 3, 2, 1]).reshape([WARPS, WORDS, KEYS])
    return gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def blocks(table_ptr, page, end, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns where the pages of each warp begin, from ``page`` on: the block, and the row in it, [WARPS, pages].

    Pages from ``end`` on are those of block 0; no row sees them.
    """
    w = gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))
    pages = page + w[:, None] * C.pages + gl.arange(0, C.pages, gl.SliceLayout(0, LAYOUT))[None, :]
    PER_BLOCK: gl.constexpr = C.block_size // PAGE
    block = gl.load(table_ptr + pages // PER_BLOCK, mask=pages < end, other=0).to(gl.int64)
    return block, (pages % PER_BLOCK * PAGE).to(gl.int64)


@gluon.jit
def _load_words(ptr, block, row, BLOCK: gl.constexpr, TOKEN: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the words of pages [WARPS, pages, PAGE, words]."""
    PAGES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
    t = gl.arange(0, PAGE, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    x = gl.arange(0, C.size // CODES, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    begin = gl.convert_layout(block * (BLOCK // CODES) + row * (TOKEN // CODES), PAGES)
    return gl.load(ptr + begin[:, :, None, None] + t[None, None, :, None] * (TOKEN // CODES) + x[None, None, None, :])


@gluon.jit
def _zero_past(words, key, end, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the words of values, 0 for keys from ``end`` on: their memory may be NaN, and 0 times NaN is NaN."""
    t = gl.arange(0, PAGE, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    p = gl.arange(0, C.pages, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    at = key + (w[:, None, None, None] * C.pages + p[None, :, None, None]) * PAGE + t[None, None, :, None]
    return gl.where(at < end, words, 0)


@gluon.jit
def lane_sums(p, C: gl.constexpr):
    """Returns each lane's own sums of the weights [WARPS, keys, rows]; 8 lanes add theirs up after the loop."""
    return gl.sum(p.reshape([WARPS, C.pages * 2, 8, C.rows]), 1)


@gluon.jit
def load_queries(query_ptr, first_token, query_len, kv_head, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the queries as operands [WARPS, words, rows], one for each code of a word, in `_keys_operand`'s order."""
    LW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    x = gl.arange(0, C.size // CODES, LW)
    word = x // 16 * 16 + x // 2 % 4 * 4 + x // 8 % 2 * 2 + x % 2
    r = gl.arange(0, C.rows, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    head = kv_head * C.group + r % C.group
    row = (first_token + r // C.group).to(gl.int64) * C.q_token + head.to(gl.int64) * C.q_head
    offs = row[None, None, :] + (word * CODES)[None, :, None] + w[:, None, None] * 0
    exists = (r // C.group < query_len)[None, None, :] & (offs >= 0)
    q = ()
    for i in gl.static_range(CODES):
        q = q + (to_float16(gl.load(query_ptr + offs + i, mask=exists, other=0.0)),)
    return q


@gluon.jit
def _parts_of(r, program, C: gl.constexpr):
    """Returns where the parts of rows r go: to the places from which TRITON_ATTN's merge reads them."""
    slot = r // C.group + program.slot
    head = program.kv_head * C.group + r % C.group
    return (slot * (C.kv_heads * C.group) + head) * program.apart + program.number


@gluon.jit
def finish_without_keys(program, partial_lse_ptr, C: gl.constexpr):
    """Stores that this program's part has no keys."""
    ROWS: gl.constexpr = C.rows
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    r = gl.arange(0, ROWS, LAYOUT)
    none = gl.full([ROWS], -float("inf"), gl.float32, LAYOUT)
    gl.store(partial_lse_ptr + _parts_of(r, program, C), none, mask=r // C.group < program.query_len)


@gluon.jit
def finish(
    acc, row_max, row_sum, row_zero, column, program, output_ptr, lse_ptr, sinks_ptr, v_scale_ptr, partial_ptr,
    partial_lse_ptr, stride_lse, LAYOUT: gl.constexpr, C: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Adds up the warps' results and stores them: as the output, or as a part for TRITON_ATTN's merge.

    acc: a tensor [WARPS, words, rows] for each code of a word. column [words]: the head's column of each word's first
    code. row_max [WARPS, rows]. row_sum: `lane_sums`. row_zero: `lane_sums` of what all columns share, or None.
    """
    if C.split if SHARES is None else program.parts > 1:
        _store(acc, row_max, row_sum, row_zero, column, program, output_ptr, lse_ptr, sinks_ptr, v_scale_ptr,
               partial_ptr, partial_lse_ptr, stride_lse, LAYOUT, C, True)  # fmt: skip
    else:
        _store(acc, row_max, row_sum, row_zero, column, program, output_ptr, lse_ptr, sinks_ptr, v_scale_ptr,
               partial_ptr, partial_lse_ptr, stride_lse, LAYOUT, C, False)  # fmt: skip


@gluon.jit
def _store(
    acc, row_max, row_sum, row_zero, column, program, output_ptr, lse_ptr, sinks_ptr, v_scale_ptr, partial_ptr,
    partial_lse_ptr, stride_lse, LAYOUT: gl.constexpr, C: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Stores the warps' results; PART: as a part. The other arguments are those of `finish`."""
    LAYOUT_O: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    LH: gl.constexpr = gl.SliceLayout(0, LAYOUT_O)
    ROWS: gl.constexpr = C.rows
    most = gl.max(row_max, 0)
    share_of = gl.exp2(row_max - gl.expand_dims(most, 0))
    total = gl.sum(gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, LAYOUT)) * share_of, 0)
    most = gl.convert_layout(most, LH)
    total = gl.convert_layout(total, LH)
    r = gl.arange(0, C.rows, LH)
    token = program.first_token + r // C.group
    head = program.kv_head * C.group + r % C.group
    exists = r // C.group < program.query_len
    factor = gl.full([ROWS], 1.0, gl.float32, LH)
    if not PART and sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head * C.sink, mask=exists, other=0.0).to(gl.float32) * LOG2_E
        most, total, factor = with_sink(most, total, sink)
    # != 0 is true for NaN too, so that a sum of NaN stays NaN
    has_keys = total != 0
    total = gl.where(has_keys, total, 1.0)
    factor = factor / total
    if v_scale_ptr is not None:
        factor *= gl.load(v_scale_ptr + program.kv_head * C.v_scale)
    if PART:
        part = _parts_of(r, program, C)
        target = partial_ptr + part[None, :] * C.size + column[:, None]
        stored = (exists & has_keys)[None, :] & (column >= 0)[:, None]
        gl.store(partial_lse_ptr + part, gl.where(has_keys, most + gl.log2(total), float("-inf")), mask=exists)
    else:
        offs = token.to(gl.int64) * C.out_token + head.to(gl.int64) * C.out_head
        target = output_ptr + offs[None, :] + column[:, None]
        stored = exists[None, :] & (column >= 0)[:, None]
        if lse_ptr is not None:
            lse = gl.where(has_keys, (most + gl.log2(total)) * LN_2, float("-inf"))
            gl.store(lse_ptr + head.to(gl.int64) * stride_lse + token, lse, mask=exists)
    for i in gl.static_range(len(acc)):
        o = gl.sum(acc[i] * share_of[:, None, :], 0)
        if row_zero is not None:
            zero = gl.sum(gl.convert_layout(gl.sum(row_zero, 1), gl.SliceLayout(1, LAYOUT)) * share_of, 0)
            o += gl.convert_layout(zero, LH)[None, :]
        o = o * factor[None, :]
        gl.store(target + i, o.to(target.dtype.element_ty), mask=stored)


@gluon.jit(
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
def decode_kernel(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, sinks_ptr, slopes_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    out_scale_ptr, query_start_loc_ptr, seq_lens_ptr, key_start_loc_ptr, causal_ptr, block_table_ptr, ranges_ptr,
    tree_ptr, partial_ptr, partial_lse_ptr,
    num_reqs, min_query_len, max_query_len, slots, num_ranges, min_split, head_size, programs_at_once,
    stride_table: gl.int64, stride_ranges, stride_range, stride_tree, stride_lse: gl.int64, stride_key_head,
    stride_value_head, softmax_scale, softcap, C: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Computes the requests that have from min_query_len to max_query_len queries; ignores the others.

    Grid and arguments are those of TRITON_ATTN's `_attention_kernel`; some arguments are unused.
    """
    if C.split or SHARES is not None:
        # the merge may start setting up now; it waits for the parts itself
        gdc_launch_dependents()
    # Triton 3.6 passes no string from a tuple to a function, so CODE is a constant of its own
    CODE: gl.constexpr = C.code
    WORDS: gl.constexpr = C.size // CODES
    KEYS: gl.constexpr = C.pages * PAGE
    STEP: gl.constexpr = WARPS * KEYS
    ROWS: gl.constexpr = C.rows
    LS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LB: gl.constexpr = gl.DotOperandLayout(1, LS, 2)
    LK: gl.constexpr = _words_layout(WORDS, C.pages, False, False)
    LV: gl.constexpr = _words_layout(WORDS, C.pages, True, False)
    LVP: gl.constexpr = _words_layout(WORDS, C.pages, True, True)
    LT: gl.constexpr = gl.BlockedLayout([1, C.pages], [1, 32], [WARPS, 1], [1, 0])
    program = program_of(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, slots, min_split, STEP, C, SHARES
    )  # fmt: skip
    kv_head, first_token, query_len, kv_len = program.kv_head, program.first_token, program.query_len, program.kv_len
    first_page, first, last = program.page, program.first, program.last
    if query_len == 0:
        return
    context = kv_len - query_len
    if C.split or SHARES is not None:  # noqa: SIM102 (the compiler decides the first, the device the second)
        if (first >= last) & (program.parts > 1):
            finish_without_keys(program, partial_lse_ptr, C)
            return

    q = load_queries(query_ptr, first_token, query_len, kv_head, LB, C)
    scale, softcap = scale_of(softmax_scale, softcap, k_scale_ptr, kv_head, C)
    unit = 1.0 if C.softcap else scale

    # the keys [begin, end) that each row sees, and the keys of a step, both in the layout of scores
    LR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LS))
    begin, end = keys_of_rows(context, kv_len, LR, C)
    k_w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LS)))
    k_t = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, LS)))
    offs_n = (k_w[:, None] * KEYS + k_t[None, :])[:, :, None]

    row_max = gl.full([WARPS, ROWS], LOWEST, gl.float32, gl.SliceLayout(1, LS))
    row_sum = lane_sums(gl.zeros([WARPS, KEYS, ROWS], gl.float32, LS), C)
    LL: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    acc = ()
    for _ in gl.static_range(CODES):
        acc = acc + (gl.zeros([WARPS, WORDS, ROWS], gl.float32, LS),)

    table_ptr = block_table_ptr + program.req.to(gl.int64) * stride_table
    k_ptr = key_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head.to(gl.int64) * (C.k_head // CODES)
    v_ptr = value_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head.to(gl.int64) * (C.v_head // CODES)
    last_page = (kv_len + PAGE - 1) // PAGE
    PAGES: gl.constexpr = WARPS * C.pages
    if first < last:
        page = first_page + first * PAGES
        block, at = blocks(table_ptr, page, last_page, LT, C)
        next_k = _load_words(k_ptr, block, at, C.k_block, C.k_token, LK, C)
        next_v = _load_words(v_ptr, block, at, C.v_block, C.v_token, LV, C)
        block, at = blocks(table_ptr, page + PAGES, last_page, LT, C)
        for step in range(first, last):
            k = next_k
            v = next_v
            # loads the next step's keys and values, and the blocks of the step after it, during this step's products
            next_k = _load_words(k_ptr, block, at, C.k_block, C.k_token, LK, C)
            next_v = _load_words(v_ptr, block, at, C.v_block, C.v_token, LV, C)
            page = first_page + step * PAGES
            block, at = blocks(table_ptr, page + 2 * PAGES, last_page, LT, C)
            s = gl.zeros([WARPS, KEYS, ROWS], gl.float32, LS)
            codes = halves(k, CODE)
            for i in gl.static_range(CODES):
                s = mma_v2(_keys_operand(codes[i], LS, C), q[i], s)
            s = scores(s, scale, softcap, C.softcap)
            key = page * PAGE
            visible = key + offs_n < end[None, None, :]
            if C.left >= 0:
                visible = visible & (key + offs_n >= begin[None, None, :])
            s = gl.where(visible, s, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(s, 1) * unit)
            p = gl.exp2(s * unit - new_max[:, None, :])
            alpha = gl.exp2(row_max - new_max)
            row_max = new_max
            row_sum = row_sum * gl.convert_layout(alpha, LL)[:, None, :] + lane_sums(p, C)
            weights = gl.convert_layout(p.to(gl.float16), LB)
            if key + STEP > kv_len:
                v = _zero_past(v, key, kv_len, LV, C)
            codes = halves(gl.convert_layout(v, LVP), CODE)
            added = ()
            for i in gl.static_range(CODES):
                so_far = acc[i] * alpha[:, None, :]
                added = added + (mma_v2(_values_operand(codes[i], LS, C), weights, so_far),)
            acc = added

    y = gl.arange(0, WORDS, gl.SliceLayout(1, gl.SliceLayout(0, LS)))
    column = (y % 8 * (WORDS // 8) + y // 8) * CODES
    finish(
        acc, row_max, row_sum, None, column, program, output_ptr, lse_ptr, sinks_ptr, v_scale_ptr, partial_ptr,
        partial_lse_ptr, stride_lse, LS, C, SHARES,
    )  # fmt: skip
