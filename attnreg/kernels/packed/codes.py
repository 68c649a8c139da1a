# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Packed keys and values as operands of matrix units: codes become numbers two by two, in arithmetic of 16 bits.

Codes are taken out of a word in pairs, 16 bits apart, and are put into the mantissas of two floats at once: no
conversion, and every instruction serves two elements. A pair is of the columns i and i + 4 of a group of 8.

The columns of a tile have an order of their own (`column_of`), with which the thread of a matrix unit that takes one
element of a word takes all of them, so that codes become operands in the registers that they are loaded into; queries
are loaded, and outputs stored, in that order too. The products of a key take their columns in fours from a thread, so
pairs stay beside each other; those of values have a column a thread, so the groups do. Of values that holds where one
or two warps share a tile of 128 columns. Other tiles of values go through shared memory, into which a thread stores
the columns of a word beside each other.

The scales of keys stay out of their tile: they are factors of the scores.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# the bits of 1 and of 1024 as float16 in both halves of a word: codes are added to their mantissas
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
def words_at(page_ptr, LAYOUT: tl.constexpr):
    """Returns pointers to the words of the codes of pages: a word has the largest power of 2 of bytes in `bits`."""
    if LAYOUT.bits == 4:
        words = page_ptr.to(tl.pointer_type(tl.uint32))
    elif LAYOUT.bits == 2:
        words = page_ptr.to(tl.pointer_type(tl.uint16))
    else:
        words = page_ptr
    return words


@triton.jit
def numbers_at(page_ptr, LAYOUT: tl.constexpr):
    """Returns pointers to the scales of pages, which are behind the codes; the zeros are behind the scales."""
    CODES: tl.constexpr = LAYOUT.block_size * LAYOUT.columns * LAYOUT.bits // 8
    return (page_ptr + CODES).to(tl.pointer_type(tl.float16))


@triton.jit
def column_of(LAYOUT: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr):
    """Returns the columns [BLOCK] at the places of a tile: SUMMED over in a product, as those of keys, or of values."""
    place = tl.arange(0, BLOCK)
    GROUPS: tl.constexpr = BLOCK // 8
    if LAYOUT.code == "levels" or LAYOUT.code == "uniform":
        if SUMMED:
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
    """Returns a tile [BLOCK_N, 8 * GROUPS] in the order of `column_of`; codes: as `_floats` returns them."""
    if SUMMED:
        codes = tl.permute(codes, (0, 2, 3, 1, 4))
    elif not LAYOUT.together:
        codes = tl.permute(codes, (0, 4, 2, 3, 1))
    return tl.reshape(codes, [BLOCK_N, 8 * GROUPS])


@triton.jit
def _rows_of_pages(cache_ptr, block, start, stop, LAYOUT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the page of each of BLOCK_N keys, or of all, and their rows there; the last key again past `stop`."""
    key = start + tl.arange(0, BLOCK_N)
    if not WHOLE:
        key = tl.minimum(key, stop - 1)
    # without a sign, a part of the number
    row = (key.to(tl.uint32) % LAYOUT.block_size).to(tl.int32)
    return cache_ptr + block * LAYOUT.stride_block, row


@triton.jit
def load_scales(
    cache_ptr, block, start, stop, LAYOUT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Returns the scales [BLOCK_N] float32 of packed keys or values, one for a row."""
    page_ptr, row = _rows_of_pages(cache_ptr, block, start, stop, LAYOUT, WHOLE, BLOCK_N)
    return tl.load(numbers_at(page_ptr, LAYOUT) + row).to(tl.float32)


@triton.jit
def _load_pairs(
    cache_ptr, block, start, stop, first_column,
    LAYOUT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns groups of 8 codes [BLOCK_N, BLOCK // 8]: the first four in the lower half of a word, then the others."""
    WORDS: tl.constexpr = LAYOUT.bits // (LAYOUT.bits & -LAYOUT.bits)
    WORD_BITS: tl.constexpr = 8 * (LAYOUT.bits & -LAYOUT.bits)
    GROUPS: tl.constexpr = LAYOUT.columns // 8
    page_ptr, row = _rows_of_pages(cache_ptr, block, start, stop, LAYOUT, WHOLE, BLOCK_N)
    offs_g = first_column // 8 + tl.arange(0, BLOCK // 8)
    pointers = (words_at(page_ptr, LAYOUT) + row * GROUPS)[:, None] + offs_g[None, :]
    if GROUPS % (BLOCK // 8) == 0:
        number = tl.load(pointers).to(tl.uint32)
        for word in tl.static_range(1, WORDS):
            number |= tl.load(pointers + word * LAYOUT.block_size * GROUPS).to(tl.uint32) << (word * WORD_BITS)
    else:
        exist = (offs_g < GROUPS)[None, :]
        number = tl.load(pointers, mask=exist, other=0).to(tl.uint32)
        for word in tl.static_range(1, WORDS):
            more = tl.load(pointers + word * LAYOUT.block_size * GROUPS, mask=exist, other=0).to(tl.uint32)
            number |= more << (word * WORD_BITS)
    if LAYOUT.bits < 4:
        HALF: tl.constexpr = 4 * LAYOUT.bits
        number = (number & (2**HALF - 1)) | ((number >> HALF) << 16)
    return number


@triton.jit
def _pair(words, INDEX: tl.constexpr, AT: tl.constexpr, BASE: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns the codes INDEX and INDEX + 4 of groups in both halves of words, from the bit AT on, added to BASE."""
    MASK: tl.constexpr = ((2**LAYOUT.bits - 1) << AT) * 0x10001
    if INDEX * LAYOUT.bits >= AT:  # noqa: SIM108 (the compiler decides)
        words = words >> (INDEX * LAYOUT.bits - AT)
    else:
        words = words << (AT - INDEX * LAYOUT.bits)
    if LAYOUT.lop3:
        # of two constants ptxas makes two instructions
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

    Of a group, code 2i + j + 4k is at i, j, k.
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
    words = _load_pairs(cache_ptr, block, start, stop, first_column, LAYOUT, WHOLE, BLOCK_N, BLOCK)
    # 1 + code / 2**BITS, of which the middle is taken: twice the code less the largest one, as a part of UNIT
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
def _rounded_once(codes, scale, zero):
    """Returns codes * scale + zero in float16, of which the sum alone is rounded: it may be small beside its parts."""
    if INTERPRETED:
        # its float16 would be rounded twice
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
    """Returns what codes stand for [BLOCK_N, BLOCK], in the order of `column_of`: levels, or uniform codes."""
    GROUPS: tl.constexpr = BLOCK // 8
    if LAYOUT.code == "levels":
        levels = load_levels(cache_ptr, block, start, stop, first_column, LAYOUT, WHOLE, BLOCK_N, BLOCK, SUMMED)
        scale = load_scales(cache_ptr, block, start, stop, LAYOUT, WHOLE, BLOCK_N)
        # a product of two float16 is rounded once either way
        WIDE: tl.constexpr = tl.float16 if tl.float16 == DTYPE else tl.float32
        tile = levels.to(WIDE) * scale.to(WIDE)[:, None]
    else:
        words = _load_pairs(cache_ptr, block, start, stop, first_column, LAYOUT, WHOLE, BLOCK_N, BLOCK)
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
    return tile.to(DTYPE)
