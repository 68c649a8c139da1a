# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Packed keys and values as operands of matrix units: codes become numbers two by two, in 16-bit arithmetic.

Codes are taken out of a word in pairs, 16 bits apart, and put into the mantissas of two floats at once. There is no
conversion, and every instruction serves two elements. A pair has the columns i and i + 4 of a group of 8.

The columns of a tile have an order of their own (`column_of`). In that order, a thread of a matrix unit that takes one
element of a word takes all of them. So codes become operands in the registers that they are loaded into. Queries are
loaded, and outputs stored, in that order too.

A product with keys takes columns in fours from a thread, so the two columns of a pair stay adjacent. A product with
values takes one column from a thread, so groups stay adjacent instead. For values this works only for codes of 4 bits,
with one or two warps on a tile of 128 columns. Other tiles of values go through shared memory, and a thread stores the
columns of a word next to each other.

Codes of 3 bits lie in three planes of bytes. A word of 4 bytes has those of four groups, which instructions that select
bytes put together. Four threads share a key, and each takes neighbouring groups.

The scales of keys are not applied to their tile, because they are factors of the scores.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# the bits of float16 1 and 1024 in both halves of a word: codes are added to their mantissas
_ONES, _1024S = tl.constexpr(0x3C003C00), tl.constexpr(0x64006400)


@triton.jit
def level_of(x, LAYOUT: tl.constexpr):
    """Returns the levels of codes; x: twice the codes, less the largest code."""
    square = x * x
    factor = LAYOUT.cubic * square + LAYOUT.linear
    if LAYOUT.bits == 4:
        factor = (LAYOUT.fifth * square + LAYOUT.cubic) * square + LAYOUT.linear
    return x * factor


@triton.jit
def numbers_at(page_ptr, LAYOUT: tl.constexpr):
    """Returns pointers to the scales of pages, which follow the codes; the zeros follow the scales."""
    CODES: tl.constexpr = LAYOUT.block_size * LAYOUT.columns * LAYOUT.bits // 8
    return (page_ptr + CODES).to(tl.pointer_type(tl.float16))


@triton.jit
def column_of(LAYOUT: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr):
    """Returns the column at each place of a tile, [BLOCK]. SUMMED: products sum over columns, as for keys."""
    place = tl.arange(0, BLOCK)
    GROUPS: tl.constexpr = BLOCK // 8
    if LAYOUT.code == "levels" or LAYOUT.code == "uniform":
        if SUMMED and LAYOUT.bits < 4 and GROUPS >= 4:
            # each of four threads takes neighbouring groups, two columns of each in turn
            SHARE: tl.constexpr = GROUPS // 4
            turn = place // 16 * 2 + place % 4 // 2
            group = place % 16 // 4 * SHARE + turn % SHARE
            column = group * 8 + turn // SHARE + place % 2 * 4
        elif SUMMED:
            column = place % (2 * GROUPS) // 2 * 8 + place // (2 * GROUPS) + place % 2 * 4
        elif LAYOUT.together:
            column = place // 8 * 8 + place % 8 // 2 + place % 2 * 4
        else:
            column = place % GROUPS * 8 + place // GROUPS
    else:
        column = place
    return column


@triton.jit
def _in_places(codes, LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, SUMMED: tl.constexpr):
    """Returns the codes as a tile [BLOCK_N, 8 * GROUPS] in the order of `column_of`; codes: from `_floats`."""
    if SUMMED and LAYOUT.bits < 4 and GROUPS >= 8:
        codes = tl.reshape(codes, [BLOCK_N, 4, GROUPS // 8, 2, 2, 2, 2])
        codes = tl.permute(codes, (0, 4, 5, 2, 1, 3, 6))
    elif SUMMED and LAYOUT.bits < 4 and GROUPS == 4:
        codes = tl.permute(codes, (0, 2, 1, 3, 4))
    elif SUMMED:
        codes = tl.permute(codes, (0, 2, 3, 1, 4))
    elif not LAYOUT.together:
        codes = tl.permute(codes, (0, 4, 2, 3, 1))
    return tl.reshape(codes, [BLOCK_N, 8 * GROUPS])


@triton.jit
def _rows_of_pages(cache_ptr, block, start, stop, LAYOUT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the page of each of BLOCK_N keys, or one for all, and their rows in it; past `stop`, the last key's."""
    key = start + tl.arange(0, BLOCK_N)
    if not WHOLE:
        key = tl.minimum(key, stop - 1)
    # unsigned, because then a remainder by a power of 2 only masks bits
    row = (key.to(tl.uint32) % LAYOUT.block_size).to(tl.int32)
    return cache_ptr + block * LAYOUT.stride_block, row


@triton.jit
def load_scales(
    cache_ptr, block, start, stop, LAYOUT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Returns the scales [BLOCK_N] float32 of packed keys or values, one for each row."""
    page_ptr, row = _rows_of_pages(cache_ptr, block, start, stop, LAYOUT, WHOLE, BLOCK_N)
    return tl.load(numbers_at(page_ptr, LAYOUT) + row).to(tl.float32)


@triton.jit
def _load_words(pointers, exist, MASKED: tl.constexpr, SHAPE: tl.constexpr):
    """Returns words as 32 bits, in a tile of this shape; with MASKED, 0 for words that do not exist."""
    words = tl.load(pointers, mask=exist, other=0) if MASKED else tl.load(pointers)
    words = words.to(tl.uint32)
    if len(words.shape) == 4:
        words = tl.reshape(tl.permute(words, (1, 0, 2, 3)), SHAPE)
    return words


@triton.jit
def _at(words, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Returns part PLACE of words, where a part has BITS bits."""
    return (words >> (PLACE * BITS)) & (2**BITS - 1)


@triton.jit
def _halves(first, second, third, PLACE: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns group PLACE of 8 codes from words of several groups: four codes in each half of the result.

    second, third: the words of the other planes of codes of 3 bits. Other bits may lie above the codes of a half.
    """
    if LAYOUT.bits == 4:
        return first
    if LAYOUT.bits == 2:
        number = _at(first, PLACE, 16)
        return number | (number << 8)
    if LAYOUT.lop3:
        # puts the bytes of a group together; the upper half of the result is the same, shifted by half a byte
        TWO: tl.constexpr = 0x40 + 0x11 * PLACE
        THREE: tl.constexpr = 0x410 + 0x100 * PLACE
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 low, high;
                prmt.b32 low, $1, $2, $4;
                prmt.b32 low, low, $3, $5;
                shl.b32 high, low, 4;
                lop3.b32 $0, low, high, 0xffff, 0xe4;
            }""",
            "=r,r,r,r,r,r",
            [first, second, third, tl.full([], TWO, tl.uint32), tl.full([], THREE, tl.uint32)],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    number = _at(first, PLACE, 8) | (_at(second, PLACE, 8) << 8) | (_at(third, PLACE, 8) << 16)
    return (number & 0xFFFF) | ((number << 4) & 0xFFFF0000)


@triton.jit
def _load_pairs(
    cache_ptr, block, start, stop, first_column,
    LAYOUT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Returns groups of 8 codes [BLOCK_N, BLOCK // 8]: the first four in the lower half of a word, then the others.

    One load takes words of several groups, with 4 bytes if rows are multiples of 4.
    """
    WORD: tl.constexpr = LAYOUT.bits & -LAYOUT.bits
    GROUPS: tl.constexpr = LAYOUT.columns // 8
    # how many groups one load takes: a divisor of the groups of a row and of a tile
    MOST: tl.constexpr = 4 // WORD
    ROW: tl.constexpr = GROUPS & -GROUPS
    TILE: tl.constexpr = max(BLOCK // 32, 1) if SUMMED else BLOCK // 8
    TOGETHER: tl.constexpr = min(MOST, ROW, TILE)
    page_ptr, row = _rows_of_pages(cache_ptr, block, start, stop, LAYOUT, WHOLE, BLOCK_N)
    if TOGETHER * WORD == 4:
        page_ptr = page_ptr.to(tl.pointer_type(tl.uint32))
    elif TOGETHER * WORD == 2:
        page_ptr = page_ptr.to(tl.pointer_type(tl.uint16))
    COUNT: tl.constexpr = BLOCK // 8 // TOGETHER
    pointers = page_ptr + row * (GROUPS // TOGETHER)
    first_word = first_column // 8 // TOGETHER
    if SUMMED:
        offs_w = first_word + tl.arange(0, COUNT)[None, :]
        pointers = pointers[:, None] + offs_w
    else:
        # with more than two dimensions, Triton copies rows to shared memory in their order, 16 bytes at a time. Codes
        # that do not fill whole words go through it as numbers. If two threads share a row, they store 16 bytes at
        # once. So a row has two parts: any version of Triton gives the parts to different threads, before the rows
        PARTS: tl.constexpr = 2 if LAYOUT.bits < 4 and COUNT >= 4 else 1
        SIZE: tl.constexpr = COUNT // PARTS // PARTS
        half = tl.arange(0, PARTS)[:, None, None, None] * (COUNT // PARTS)
        # not a product, from which the compiler would deduce that the words are contiguous
        quarter = tl.where(tl.arange(0, PARTS) == 1, SIZE, 0)[None, None, :, None]
        offs_w = first_word + half + quarter + tl.arange(0, SIZE)[None, None, None, :]
        pointers = pointers[None, :, None, None] + offs_w
    exist = offs_w < GROUPS // TOGETHER
    MASKED: tl.constexpr = GROUPS % (BLOCK // 8) != 0
    SHAPE: tl.constexpr = (BLOCK_N, COUNT)
    first = _load_words(pointers, exist, MASKED, SHAPE)
    second, third = first, first
    if LAYOUT.bits == 3:
        PLANE: tl.constexpr = LAYOUT.block_size * (GROUPS // TOGETHER)
        second = _load_words(pointers + PLANE, exist, MASKED, SHAPE)
        third = _load_words(pointers + 2 * PLANE, exist, MASKED, SHAPE)
    groups = _halves(first, second, third, 0, LAYOUT)
    if TOGETHER == 2:
        groups = tl.join(groups, _halves(first, second, third, 1, LAYOUT))
    elif TOGETHER == 4:
        even = tl.join(groups, _halves(first, second, third, 2, LAYOUT))
        odd = tl.join(_halves(first, second, third, 1, LAYOUT), _halves(first, second, third, 3, LAYOUT))
        groups = tl.join(even, odd)
    return tl.reshape(groups, [BLOCK_N, BLOCK // 8])


@triton.jit
def _pair(words, INDEX: tl.constexpr, AT: tl.constexpr, BASE: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns the codes INDEX and INDEX + 4 of groups in both halves of words, shifted to bit AT and added to BASE."""
    MASK: tl.constexpr = ((2**LAYOUT.bits - 1) << AT) * 0x10001
    if INDEX * LAYOUT.bits >= AT:  # noqa: SIM108 (the compiler decides)
        words = words >> (INDEX * LAYOUT.bits - AT)
    else:
        words = words << (AT - INDEX * LAYOUT.bits)
    if LAYOUT.lop3:
        # by assembly: with two constants, ptxas would take two instructions
        words = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xea;",
            "=r,r,r,r",
            [words, tl.full([], MASK, tl.uint32), tl.full([], BASE, tl.uint32)],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        words = (words & MASK) | BASE
    return words


@triton.jit
def _floats(words, AT: tl.constexpr, BASE: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns the 8 codes of groups [BLOCK_N, GROUPS] as float16 [BLOCK_N, GROUPS, 2, 2, 2].

    Code 2i + j + 4k of a group is at i, j, k.
    """
    first, second = _pair(words, 0, AT, BASE, LAYOUT), _pair(words, 1, AT, BASE, LAYOUT)
    third, fourth = _pair(words, 2, AT, BASE, LAYOUT), _pair(words, 3, AT, BASE, LAYOUT)
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    low, high = (pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16)
    return tl.join(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))


@triton.jit
def load_levels(
    cache_ptr, block, start, stop, first_column,
    LAYOUT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Returns the levels [BLOCK_N, BLOCK] of codes, without their scales, as float16 in the order of `column_of`."""
    BITS: tl.constexpr = LAYOUT.bits
    words = _load_pairs(cache_ptr, block, start, stop, first_column, LAYOUT, WHOLE, BLOCK_N, BLOCK, SUMMED)
    # the float16 is 1 + code / 2**BITS. Less MIDDLE, it is (twice the code, less the largest code) / UNIT
    UNIT: tl.constexpr = 2.0 ** (BITS + 1)
    MIDDLE: tl.constexpr = 1.0 + (2.0**BITS - 1.0) / UNIT
    x = _floats(words, 10 - BITS, _ONES, LAYOUT) - tl.full([], MIDDLE, tl.float16)
    square = x * x
    LINEAR: tl.constexpr = LAYOUT.linear * UNIT
    CUBIC: tl.constexpr = LAYOUT.cubic * UNIT**3
    FIFTH: tl.constexpr = LAYOUT.fifth * UNIT**5
    factor = square * tl.full([], CUBIC, tl.float16) + tl.full([], LINEAR, tl.float16)
    if BITS == 4:
        factor = square * tl.full([], FIFTH, tl.float16) + tl.full([], CUBIC, tl.float16)
        factor = factor * square + tl.full([], LINEAR, tl.float16)
    return _in_places(x * factor, LAYOUT, BLOCK_N, BLOCK // 8, SUMMED)


@triton.jit
def half_as(x, DTYPE: tl.constexpr):
    """Returns float16 as another type; through float32, because Triton 3.9 cannot convert it to bfloat16 on Turing."""
    if tl.bfloat16 == DTYPE:
        x = x.to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def _rounded_once(codes, scale, zero):
    """Returns codes * scale + zero in float16, rounded only once: the sum may be much smaller than its parts."""
    if INTERPRETED:
        # the interpreter's float16 would round twice
        return (codes.to(tl.float32) * scale.to(tl.float32) + zero.to(tl.float32)).to(tl.float16)
    scale, codes = tl.broadcast(scale, codes)
    zero, codes = tl.broadcast(zero, codes)
    return tl.fma(codes, scale, zero)


@triton.jit
def load_scaled(
    cache_ptr, block, start, stop, first_column,
    LAYOUT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns the numbers of codes [BLOCK_N, BLOCK], levels or uniform codes, in the order of `column_of`."""
    GROUPS: tl.constexpr = BLOCK // 8
    if LAYOUT.code == "levels":
        levels = load_levels(cache_ptr, block, start, stop, first_column, LAYOUT, WHOLE, BLOCK_N, BLOCK, SUMMED)
        scale = load_scales(cache_ptr, block, start, stop, LAYOUT, WHOLE, BLOCK_N)
        # rounded once in both cases: the product of two float16 numbers is exact in float32
        WIDE: tl.constexpr = tl.float16 if tl.float16 == DTYPE else tl.float32
        tile = levels.to(WIDE) * scale.to(WIDE)[:, None]
    else:
        words = _load_pairs(cache_ptr, block, start, stop, first_column, LAYOUT, WHOLE, BLOCK_N, BLOCK, SUMMED)
        codes = _floats(words, 0, _1024S, LAYOUT) - tl.full([], 1024.0, tl.float16)
        page_ptr, row = _rows_of_pages(cache_ptr, block, start, stop, LAYOUT, WHOLE, BLOCK_N)
        scale_ptr = numbers_at(page_ptr, LAYOUT) + row
        NUMBERS: tl.constexpr = (LAYOUT.columns + LAYOUT.group - 1) // LAYOUT.group
        if NUMBERS == 1:
            scale, zero = tl.load(scale_ptr)[:, None], tl.load(scale_ptr + LAYOUT.block_size)[:, None]
        else:
            group = tl.minimum((first_column + tl.arange(0, GROUPS) * 8) // LAYOUT.group, NUMBERS - 1)
            pointers = scale_ptr[:, None] + (group * LAYOUT.block_size)[None, :]
            scale, zero = tl.load(pointers), tl.load(pointers + NUMBERS * LAYOUT.block_size)  # [BLOCK_N, GROUPS]
        numbers = _rounded_once(codes, scale[:, :, None, None, None], zero[:, :, None, None, None])
        tile = _in_places(numbers, LAYOUT, BLOCK_N, GROUPS, SUMMED)
    return half_as(tile, DTYPE)


@triton.jit
def words_at(page_ptr, LAYOUT: tl.constexpr):
    """Returns pointers to the words of pages' codes. A word has the largest power of 2 of bytes that divides `bits`."""
    if LAYOUT.bits == 4:
        words = page_ptr.to(tl.pointer_type(tl.uint32))
    elif LAYOUT.bits == 2:
        words = page_ptr.to(tl.pointer_type(tl.uint16))
    else:
        words = page_ptr
    return words
