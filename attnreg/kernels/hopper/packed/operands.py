# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, assignment"
# ruff: noqa: N803, N806, RUF005 (constexprs are written in capitals, and Gluon unpacks no tuples)
"""Packed codes as operands of the matrix units of SM 9.0, in the registers that they are loaded into.

A thread loads whole words, 8 codes of 4 bits or 4 of 8, and uses all codes of its words. The order of a head's columns
in a product follows from this. The order of a page's keys is such that a thread's two scales are adjacent. A pair of
float16 is a register of an operand. For keys it has the codes i and i + 4 of one word; for values, code i of the words
of two values. `attnreg.kernels.hopper.packed.planes` has the codes of 3 bits.

The levels of 4 bits are ``unit * x * ((x**2 + inner)**2 + outer)`` with x from -15/32 to 15/32: three instructions a
pair. Uniform codes keep their bits: read as float16, these bits are exact multiples of 2**-24 or of 2**-20.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnreg.kernels.hopper.decode import halves
from attnreg.kernels.hopper.memory import to_float16
from attnreg.kernels.hopper.packed.planes import keys_of_planes, place_of_code, values_of_planes
from attnreg.kernels.hopper.programs import PAGE, WARPS
from attnreg.kernels.packed.rotation import signs

# puts together the lower halves of two words, and their upper halves
_TWO = gl.constexpr("prmt.b32 x, $8, $9, 0x5410; prmt.b32 y, $8, $9, 0x7632;")


@gluon.constexpr_function
def _levels_of(pairs, inner, outer):
    """The assembly that computes levels from nibbles. pairs: (word, nibble, the operand for the pair of levels)."""
    # 64 + code is 64 with a nibble in the middle of its mantissa; a 16th of it, less 71.5 / 16, is (code - 7.5) / 16
    constants = {"m": 0x00F000F0, "e": 0x54005400, "r": 0x2C002C00, "c": 0xC478C478,
                 "p": inner * 0x10001, "q": outer * 0x10001}  # fmt: skip
    lines = [f"mov.b32 {name}, {value:#010x};" for name, value in constants.items()]
    for word, nibble, pair in pairs:
        shift = {0: "shl.b32 u, {}, 4;", 1: "mov.b32 u, {};", 2: "shr.u32 u, {}, 4;", 3: "shr.u32 u, {}, 8;"}[nibble]
        lines += [
            shift.format(word),
            "lop3.b32 u, u, m, e, 0xEA;",
            "fma.rn.f16x2 u, u, r, c;",
            "fma.rn.f16x2 t, u, u, p;",
            "fma.rn.f16x2 t, t, t, q;",
            f"mul.rn.f16x2 {pair}, u, t;",
        ]
    return " ".join(lines)


@gluon.constexpr_function
def _keys_levels(inner, outer):
    body = _levels_of([("$8", i, f"y{i}") for i in range(4)], inner, outer)
    apart = " ".join(f"mov.b32 {{${i}, ${i + 4}}}, y{i};" for i in range(4))
    return f"{{ .reg .b32 m, e, r, c, p, q, u, t, y<4>; {body} {apart} }}"


@gluon.constexpr_function
def _values_levels(inner, outer):
    body = _levels_of([("xy"[i // 4], i % 4, f"${i}") for i in range(8)], inner, outer)
    return f"{{ .reg .b32 m, e, r, c, p, q, u, t, x, y; {_TWO.value} {body} }}"


@gluon.constexpr_function
def _values_codes():
    lines = []
    for i in range(8):
        word = "xy"[i // 4]
        lines += [f"shr.u32 {word}, {word}, 8;"] if i % 4 == 2 else []
        lines.append(f"and.b32 ${i}, {word}, {'0x00F000F0' if i % 2 else '0x000F000F'};")
    return f"{{ .reg .b32 x, y; {_TWO.value} {' '.join(lines)} }}"


@gluon.constexpr_function
def unit_of_code(code, bits):
    """The factor that turns a code, read as a float16 with its bits, into its number; code: its place in a group."""
    return 2.0 ** (24 - (code % 2 * 4 if bits == 4 else place_of_code(code % 8)))


@gluon.constexpr_function
def keys_words(size, bits):
    """How many words a row of keys has; for codes of 3 bits, in each plane: one for each of four lanes."""
    return 4 if bits == 3 else size * bits // 32


@gluon.constexpr_function
def values_words(size, bits):
    """How many words a row of values has; for codes of 3 bits, in each plane: one for each of eight lanes."""
    return 8 if bits == 3 else size * bits // 32


@gluon.constexpr_function
def keys_layout(words, pages):
    """The layout of the words of keys [WARPS, pages, PAGE, words]."""
    near = min(words // 4, 4)
    wide = [[0, 0, 0, 1 << i] for i in range(near.bit_length() - 1)] + ([[0, 0, 0, 16]] if words > 16 else [])
    registers = [*wide, [0, 0, 1, 0], *([0, 1 << i, 0, 0] for i in range(pages.bit_length() - 1))]
    lanes = [[0, 0, 0, near], [0, 0, 0, 2 * near], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, pages, 16, words])


@gluon.constexpr_function
def values_layout(words, pages, paired):
    """The layout of the words of values [WARPS, pages, PAGE, words]; paired: adjacent registers belong to two keys."""
    lane = words // 8
    wide = [[0, 0, 0, 1 << i] for i in range(lane.bit_length() - 1)]
    key = [[0, 0, 2, 0]]
    registers = [*(key + wide if paired else wide + key), [0, 0, 1, 0]]
    registers += [[0, 1 << i, 0, 0] for i in range(pages.bit_length() - 1)]
    lanes = [[0, 0, 4, 0], [0, 0, 8, 0], [0, 0, 0, lane], [0, 0, 0, 2 * lane], [0, 0, 0, 4 * lane]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, pages, 16, words])


@gluon.constexpr_function
def numbers_layout(pages):
    """The layout of the scales of pages [WARPS, pages, PAGE // 2], two in a word."""
    registers = [[0, 1 << i, 0] for i in range(pages.bit_length() - 1)]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [4, pages, 8])


@gluon.jit
def keys_operands(words, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns keys as four operands [WARPS, keys, columns]; words: a tensor for each plane."""
    if C.key_bits == 3:
        found = keys_of_planes(words, LAYOUT, C)
    elif C.key_bits == 4:
        found = _keys_of_4_bits(words[0], LAYOUT, C)
    else:
        found = _keys_of_8_bits(words[0], LAYOUT, C)
    return found


@gluon.jit
def _keys_of_4_bits(words, LAYOUT: gl.constexpr, C: gl.constexpr):
    WORDS: gl.constexpr = C.size // 8
    ASM: gl.constexpr = _keys_levels(C.inner, C.outer)
    codes = gl.inline_asm_elementwise(
        ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    found = ()
    for i in gl.static_range(4):
        x = gl.join(codes[i].to(gl.float16, bitcast=True), codes[i + 4].to(gl.float16, bitcast=True))
        x = x.reshape([WARPS, C.pages, 8, 2, 4, WORDS // 8, 2, 2]).permute([0, 1, 3, 2, 5, 6, 4, 7])
        x = x.reshape([WARPS, C.pages * PAGE, 2 * WORDS])
        found = found + (gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2)),)
    return found


@gluon.jit
def _keys_of_8_bits(words, LAYOUT: gl.constexpr, C: gl.constexpr):
    """As `_keys_of_4_bits`; the order of words is that of `attnreg.kernels.hopper.decode`."""
    WORDS: gl.constexpr = C.size // 4
    codes = halves(words, "e4m3")
    found = ()
    for i in gl.static_range(4):
        x = codes[i].reshape([WARPS, C.pages, 8, 2, WORDS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4, 6, 5, 7])
        x = x.reshape([WARPS, C.pages * PAGE, WORDS])
        found = found + (gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2)),)
    return found


@gluon.jit
def _sums(x, BIT: gl.constexpr, C: gl.constexpr):
    """Returns rows [WARPS, rows, columns] of sums and differences of the columns whose numbers differ in bit BIT."""
    x = x.reshape([WARPS, C.rows, C.size >> (BIT + 1), 2, 1 << BIT]).permute([0, 1, 2, 4, 3])
    low, high = gl.split(x)
    x = gl.join(low + high, low - high).permute([0, 1, 2, 4, 3])
    return x.reshape([WARPS, C.rows, C.size])


@gluon.constexpr_function
def _rows_layout(rows, size, first):
    """The layout of rows [WARPS, rows, columns], where four threads share a row. first: the lower of the two bits of a
    column's number that select the thread."""
    bits = [1 << i for i in range(size.bit_length() - 1)]
    apart = bits[first : first + 2]
    registers = [[0, 0, bit] for bit in bits if bit not in apart] + ([[0, 8, 0]] if rows > 8 else [])
    lanes = [*([0, 0, bit] for bit in apart), [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [4, rows, size])


@gluon.jit
def load_queries(query_ptr, first_token, query_len, kv_head, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the queries, rotated if they are not yet, as operands [WARPS, columns, rows] in the order of keys."""
    LOW: gl.constexpr = C.size.bit_length() - 5
    LAYOUT_L: gl.constexpr = _rows_layout(C.rows, C.size, LOW)
    d = gl.arange(0, C.size, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT_L)))
    r = gl.arange(0, C.rows, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT_L)))
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT_L)))
    head = kv_head * C.group + r % C.group
    row = (first_token + r // C.group).to(gl.int64) * C.q_token + head.to(gl.int64) * C.q_head
    offs = row[None, :, None] + d[None, None, :] + w[:, None, None] * 0
    exists = (r // C.group < query_len)[None, :, None] & (offs >= 0)
    if C.unrotated > 0 and C.unrotated < C.size:
        exists = exists & (d < C.unrotated)[None, None, :]
    x = gl.load(query_ptr + offs, mask=exists, other=0.0).to(gl.float32)
    if C.unrotated > 0:
        x = x * signs(d)[None, None, :]
        for bit in gl.static_range(C.size.bit_length() - 1):
            if bit != LOW and bit != LOW + 1:
                x = _sums(x, bit, C)
    x = gl.convert_layout(x, _rows_layout(C.rows, C.size, LOW + 2))
    if C.unrotated > 0:
        x = _sums(_sums(x, LOW, C), LOW + 1, C) * (1.0 / C.size**0.5)
    x = to_float16(x)
    if C.key_bits == 4:
        # the bits of a column's number, from the lowest: two of the code, one of the pair, the rest the word of a
        # lane, and two of the lane
        x = x.reshape([WARPS, C.rows, 4, C.size // 64, 2, 2, 2, 2])
    else:
        # in the order that `keys_of_planes` describes
        x = x.reshape([WARPS, C.rows, 4, 2, 2, C.size // 64, 2, 2]).permute([0, 1, 2, 5, 4, 3, 6, 7])
    even, odd = gl.split(x)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    q = ()
    for i in gl.static_range(4):
        some = (first, second, third, fourth)[i].permute([0, 3, 4, 2, 5, 1]).reshape([WARPS, C.size // 4, C.rows])
        q = q + (gl.convert_layout(some, gl.DotOperandLayout(1, LAYOUT, 2)),)
    return q


@gluon.jit
def values_operands(words, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns values as operands [WARPS, 16, keys], in the order of `value_column`; words: a tensor for each plane."""
    PAIRED: gl.constexpr = values_layout(values_words(C.size, C.value_bits), C.pages, True)
    if C.value_bits == 3:
        codes = values_of_planes(words, PAIRED, C)
    else:
        codes = _values_of_4_bits(gl.convert_layout(words[0], PAIRED), C)
    found = ()
    for i in gl.static_range(C.size // 16):
        x = codes[i]
        if len(codes) > C.size // 16:
            # these words are fewer or smaller, so two codes of each fill the 16 rows of a product
            x = gl.join(x, codes[i + C.size // 16])
        x = x.reshape([WARPS, C.pages, 8, 2, 8, 2]).permute([0, 5, 4, 1, 3, 2])
        x = x.reshape([WARPS, 16, C.pages * PAGE])
        found = found + (gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2)),)
    return found


@gluon.jit
def _values_of_4_bits(words, C: gl.constexpr):
    ASM: gl.constexpr = _values_levels(C.inner, C.outer) if C.levels else _values_codes()
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def value_column(y, C: gl.constexpr):
    """Returns the head's column at row y of the first operand of values; each next operand has the next column."""
    return (y % 8 * 2 + y // 8) * 8 if C.size == 128 else y % 8 * 8 + y // 8 * 4


@gluon.jit
def numbers(words, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the float16 numbers in words as float32 [WARPS, keys], in the order of keys in products."""
    low = words.to(gl.int16).to(gl.float16, bitcast=True)
    high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    x = gl.join(low, high).permute([0, 1, 3, 2]).reshape([WARPS, C.pages * PAGE])
    return gl.convert_layout(x, gl.SliceLayout(2, LAYOUT)).to(gl.float32)
