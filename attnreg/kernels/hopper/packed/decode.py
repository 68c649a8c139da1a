# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index, assignment"
# ruff: noqa: N803, N806, RUF005 (constexprs are written in capitals, and Gluon unpacks no tuples)
"""The attention kernel for few queries over a packed cache, in Gluon: `attnreg.kernels.hopper.decode` for codes.

A program computes the rows of a request and a KV head over a share of its keys; each of its warps walks its own keys.
The scales of keys are factors of scores, and the scales of values are factors of weights. Weights become float16
relative to a power of 2; all scales so far are less than twice that power. Zeros of uniform values are summed apart.

Arguments in capitals are constants.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from attnreg.kernels.hopper.decode import blocks, finish, finish_without_keys, lane_sums
from attnreg.kernels.hopper.decode import load_queries as load_queries_of_8_bits
from attnreg.kernels.hopper.packed.operands import (
    keys_layout,
    keys_operands,
    keys_words,
    load_queries,
    numbers,
    numbers_layout,
    value_column,
    values_layout,
    values_operands,
    values_words,
)
from attnreg.kernels.hopper.packed.sums import in_units, weighed
from attnreg.kernels.hopper.programs import PAGE, WARPS, program_of
from attnreg.kernels.hopper.softmax import keys_of_rows, scale_of
from attnreg.kernels.hopper.softmax import scores as softcapped
from attnreg.kernels.triton.layout import UNIT
from attnreg.kernels.triton.softmax import LOWEST

# the bits of float32 1.0, the least scale, and the mask of a float32's exponent
_ONE, _LEAST, _EXPONENT = gl.constexpr(0x3F800000), gl.constexpr(2.0**-24), gl.constexpr(0x7F800000)


class PackedDecode(NamedTuple):
    """The constants of the kernel.

    rows: of a tile, a power of 2: ``group`` query heads of each query. size: the columns of a head's codes. unrotated:
    how many elements queries have that the kernel has to rotate, else 0. pages: how many a warp loads at once. late:
    the next loads wait until the registers of the previous ones are free. key_bits: 8 (float8_e4m3fn), 4 or 3.
    value_bits: 4 or 3. levels: values are levels as keys are; otherwise they are uniform. inner, outer: the bits of the
    coefficients of levels, and unit their factor. left, right: how many keys a row sees before its own and after it,
    -1: all. The others are strides: of queries and outputs, in bytes of the cache's blocks, of sinks.
    """

    kv_heads: int
    group: int
    rows: int
    size: int
    unrotated: int
    block_size: int
    pages: int
    late: bool
    key_bits: int
    value_bits: int
    levels: bool
    inner: int
    outer: int
    unit: float
    left: int
    right: int
    softcap: bool
    split: bool
    q_token: int
    q_head: int
    out_token: int
    out_head: int
    k_block: int
    v_block: int
    sink: int


@gluon.constexpr_function
def _word(size):
    """The type of a word of ``size`` bytes."""
    return {1: gl.int8, 2: gl.int16, 4: gl.int32}[size]


@gluon.jit
def _load_words(ptr, pages, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the words of the codes of pages [WARPS, pages, PAGE, WORDS]; pages: each page's first word."""
    PAGES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
    t = gl.arange(0, PAGE, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    x = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    begin = gl.convert_layout(pages, PAGES)
    return gl.load(ptr + begin[:, :, None, None] + t[None, None, :, None] * WORDS + x[None, None, None, :])


@gluon.jit
def _load_numbers(ptr, pages, LAYOUT: gl.constexpr):
    """Returns the float16 numbers of the keys of pages [WARPS, pages, PAGE // 2], two in a word."""
    t = gl.arange(0, PAGE // 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    begin = gl.convert_layout(pages, gl.SliceLayout(2, LAYOUT))
    return gl.load(ptr + begin[:, :, None] + t[None, None, :])


@gluon.jit
def _load_codes(
    ptr, block, row, WORDS: gl.constexpr, BITS: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Returns the words of the codes of pages, a tensor for each plane. WORDS: of a row in a plane. BLOCK: in bytes."""
    PLANES: gl.constexpr = 3 if BITS == 3 else 1
    BYTES: gl.constexpr = C.size * BITS // (8 * PLANES * WORDS)
    ptr = ptr.to(gl.pointer_type(_word(BYTES)), bitcast=True)
    pages = block * (BLOCK // BYTES) + row * WORDS
    words = ()
    for i in gl.static_range(PLANES):
        words = words + (_load_words(ptr + i * (C.block_size * WORDS), pages, WORDS, LAYOUT),)
    return words


@gluon.jit
def _load_keys(ptr, block, row, C: gl.constexpr):
    """Returns the words of pages of keys, and the keys' scales if they have some."""
    WORDS: gl.constexpr = keys_words(C.size, C.key_bits)
    words = _load_codes(ptr, block, row, WORDS, C.key_bits, C.k_block, keys_layout(WORDS, C.pages), C)
    scales = words[0]
    if C.key_bits < 8:
        first = block * (C.k_block // 4) + row // 2 + C.block_size * C.size * C.key_bits // 32
        scales = _load_numbers(ptr, first, numbers_layout(C.pages))
    return words, scales


@gluon.jit
def _load_values(ptr, block, row, C: gl.constexpr):
    """Returns the words of pages of values, the values' scales, and their zeros if they have some."""
    WORDS: gl.constexpr = values_words(C.size, C.value_bits)
    words = _load_codes(ptr, block, row, WORDS, C.value_bits, C.v_block, values_layout(WORDS, C.pages, False), C)
    first = block * (C.v_block // 4) + row // 2 + C.block_size * C.size * C.value_bits // 32
    scales = _load_numbers(ptr, first, numbers_layout(C.pages))
    zeros = scales
    if not C.levels:
        zeros = _load_numbers(ptr + C.block_size // 2, first, numbers_layout(C.pages))
    return words, scales, zeros


@gluon.jit
def _bounds(kv_len, context, C: gl.constexpr):
    """Returns the first key that some row sees, and the range [begin, end) of the keys that all rows see."""
    start = 0
    whole_from = 0
    whole_to = kv_len
    if C.left >= 0:
        start = gl.maximum(context - C.left, 0)
        whole_from = kv_len - 1 - C.left
    if C.right >= 0:
        whole_to = gl.minimum(kv_len, context + (C.right + 1))
    return start, whole_from, whole_to


@gluon.jit
def _seen(s, key, begin, end, C: gl.constexpr):
    """Returns scores [WARPS, keys, rows] with -inf for keys outside the rows' [begin, end); key: [WARPS, keys]."""
    visible = key[:, :, None] < end[None, None, :]
    if C.left >= 0:
        visible = visible & (key[:, :, None] >= begin[None, None, :])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _scores(k, k_scale, q, scale, softcap, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the scores [WARPS, keys, rows] of keys, as exponents of 2."""
    KEYS: gl.constexpr = C.pages * PAGE
    ROWS: gl.constexpr = C.rows
    s = gl.zeros([WARPS, KEYS, ROWS], gl.float32, LAYOUT)
    operands = keys_operands(k, LAYOUT, C)
    for i in gl.static_range(4):
        s = mma_v2(operands[i], q[i], s)
    if C.key_bits < 8:  # noqa: SIM108 (the compiler decides)
        s = s * (numbers(k_scale, LAYOUT, C) * scale)[:, :, None]
    else:
        s = s * scale
    return softcapped(s, 1.0, softcap, C.softcap)


@gluon.jit
def _parts_of_largest(scales, largest):
    """Returns scales [WARPS, keys] divided by a power of 2, that power, and the previous power divided by it.

    All scales so far are less than twice the power [WARPS]. Powers are divided by subtracting their bits.
    """
    most = gl.maximum(largest, gl.max(scales, 1)).to(gl.int32, bitcast=True) & _EXPONENT
    fewer = (largest.to(gl.int32, bitcast=True) - most + _ONE).to(gl.float32, bitcast=True)
    inverse = (2 * _ONE - most).to(gl.float32, bitcast=True)
    return scales * inverse[:, None], most.to(gl.float32, bitcast=True), fewer


@gluon.jit
def _weighted(zeros, p, weights, parts, largest, C: gl.constexpr):
    """Returns the weighted zeros of values [WARPS, keys, rows].

    The weight of a value's code is rounded. For a value near 0, code and zero cancel, and the rounding error would
    stay. So the part of the zero that a code may cancel is multiplied by the same rounded weight.
    """
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [parts], dtype=gl.float32, is_pure=True, pack=1
    )
    # 0 / 0 is NaN, and the minimum of NaN and a number is the number
    cancelled = gl.minimum(gl.maximum(zeros * inverse, (largest * (1.0 - 2**C.value_bits))[:, None]), 0.0)
    rest = zeros - parts * cancelled
    return p * rest[:, :, None] + weights.to(gl.float32) * cancelled[:, :, None]


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
def packed_decode_kernel(
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
    KEYS: gl.constexpr = C.pages * PAGE
    STEP: gl.constexpr = WARPS * KEYS
    ROWS: gl.constexpr = C.rows
    SLABS: gl.constexpr = C.size // 16
    LS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LB: gl.constexpr = gl.DotOperandLayout(1, LS, 2)
    LT: gl.constexpr = gl.BlockedLayout([1, C.pages], [1, 32], [WARPS, 1], [1, 0])
    program = program_of(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, slots, min_split, STEP, C, SHARES
    )  # fmt: skip
    kv_head, first_token, query_len, kv_len = program.kv_head, program.first_token, program.query_len, program.kv_len
    first_page, first, last = program.page, program.first, program.last
    if query_len == 0:
        return
    context = kv_len - query_len
    start, whole_from, whole_to = _bounds(kv_len, context, C)
    if C.split or SHARES is not None:  # noqa: SIM102 (the compiler decides the first, the device the second)
        if (first >= last) & (program.parts > 1):
            finish_without_keys(program, partial_lse_ptr, C)
            return

    scale, softcap = scale_of(softmax_scale, softcap, None, kv_head, C)
    if C.key_bits < 8:
        q = load_queries(query_ptr, first_token, query_len, kv_head, LS, C)
        scale *= C.unit
    else:
        q = load_queries_of_8_bits(query_ptr, first_token, query_len, kv_head, LB, C)

    # the keys [begin, end) that each row sees, and the keys of a step, both in the layout of scores
    LR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LS))
    begin, end = keys_of_rows(context, kv_len, LR, C)
    k_w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LS)))
    k_t = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, LS)))
    # a page's even keys come before its odd ones
    k_t = k_t // PAGE * PAGE + k_t % 8 * 2 + k_t // 8 % 2
    offs_n = k_w[:, None] * KEYS + k_t[None, :]

    row_max = gl.full([WARPS, ROWS], LOWEST, gl.float32, gl.SliceLayout(1, LS))
    row_sum = lane_sums(gl.zeros([WARPS, KEYS, ROWS], gl.float32, LS), C)
    row_zero = row_sum
    centre = row_sum
    LL: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    # the power of 2 that the scales of values are divided by
    largest = gl.full([WARPS], _LEAST, gl.float32, gl.SliceLayout(1, gl.SliceLayout(2, LS)))
    acc = ()
    for _ in gl.static_range(SLABS):
        acc = acc + (gl.zeros([WARPS, 16, ROWS], gl.float32, LS),)

    table_ptr = block_table_ptr + program.req.to(gl.int64) * stride_table
    k_ptr = key_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head.to(gl.int64) * stride_key_head * (UNIT // 4)
    v_ptr = value_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    v_ptr += kv_head.to(gl.int64) * stride_value_head * (UNIT // 4)
    last_page = (kv_len + PAGE - 1) // PAGE
    PAGES: gl.constexpr = WARPS * C.pages
    if first < last:
        page = first_page + first * PAGES
        block, at = blocks(table_ptr, page, last_page, LT, C)
        next_k = _load_keys(k_ptr, block, at, C)
        next_v = _load_values(v_ptr, block, at, C)
        block, at = blocks(table_ptr, page + PAGES, last_page, LT, C)
        for step in range(first, last):
            k, k_scale = next_k
            v, v_scale, v_zero = next_v
            # loads the next step's keys and values, and the blocks of the step after it, during this step's products
            if not C.late:
                next_k = _load_keys(k_ptr, block, at, C)
                next_v = _load_values(v_ptr, block, at, C)
            page = first_page + step * PAGES
            s = _scores(k, k_scale, q, scale, softcap, LS, C)
            if C.late:
                next_k = _load_keys(k_ptr, block, at, C)
            parts = numbers(v_scale, LS, C)
            zeros = numbers(v_zero, LS, C)
            key = page * PAGE
            if (key < whole_from) | (key + STEP > whole_to):
                s = _seen(s, key + offs_n, begin, end, C)
                # memory past the last key may hold NaN, and a weight of 0 times NaN is NaN
                exist = (key + offs_n >= start) & (key + offs_n < kv_len)
                parts = gl.where(exist, parts, 0.0)
                zeros = gl.where(exist, zeros, 0.0)
            new_max = gl.maximum(row_max, gl.max(s, 1))
            p = gl.exp2(s - new_max[:, None, :])
            alpha = gl.exp2(row_max - new_max)
            row_max = new_max
            alpha_l = gl.convert_layout(alpha, LL)[:, None, :]
            row_sum = row_sum * alpha_l + lane_sums(p, C)
            parts, largest, fewer = _parts_of_largest(parts, largest)
            alpha = alpha * gl.convert_layout(fewer, gl.SliceLayout(1, gl.SliceLayout(1, LS)))[:, None]
            weights = (p * parts[:, :, None]).to(gl.float16)
            if not C.levels:
                row_zero = row_zero * alpha_l + lane_sums(_weighted(zeros, p, weights, parts, largest, C), C)
            weights = gl.convert_layout(weights, LB)
            operands = values_operands(v, LS, C)
            acc, centre = weighed(acc, centre, operands, weights, alpha, LS, C)
            if C.late:
                next_v = _load_values(v_ptr, block, at, C)
            block, at = blocks(table_ptr, page + 2 * PAGES, last_page, LT, C)

    column = value_column(gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, LS))), C)
    finish(
        in_units(acc, centre, largest, LS, C), row_max, row_sum, None if C.levels else row_zero, column, program,
        output_ptr, lse_ptr, sinks_ptr, None, partial_ptr, partial_lse_ptr, stride_lse, LS, C, SHARES,
    )  # fmt: skip
