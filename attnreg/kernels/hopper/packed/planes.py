# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, assignment"
# ruff: noqa: N803, N806, RUF005 (constexprs are written in capitals, and Gluon unpacks no tuples)
"""Codes of 3 bits as operands of the matrix units of SM 9.0, in the registers that they are loaded into.

The three bytes of a group of 8 codes lie in three planes. Four threads share the groups of a key, and eight those of a
value. A thread loads the bytes of its groups from each plane. A pair of float16 is a register of an operand. It has the
same code of two groups, which belong to one key, or to two values. So each half of a word gets the bytes of one of the
two groups: for the codes 0 to 2 the bytes of the first two planes, for the others those of the last two.

The levels of 3 bits are ``unit * x * (x**2 + inner)`` with x from -7/16 to 7/16: three instructions a pair. Uniform
codes keep their bits, which are then read as float16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnreg.kernels.hopper.programs import PAGE, WARPS


@gluon.constexpr_function
def place_of_code(code):
    """The lowest bit of a uniform code in its half of a word."""
    return code % 3 * 3 + (code >= 3)


@gluon.constexpr_function
def _pairs_of(outputs, low, high, levels, inner):
    """The assembly that computes pairs for the 8 codes in the words a, b and c, one word of each plane.

    low, high: which bytes of the words the lower and the upper half of a pair come from.
    """
    chosen = f"0x{4 + high}{high}{4 + low}{low}"
    # code -> the instruction that makes the word with this code and the next ones. Levels then lie at bit 1, 4 or 7, so
    # three constants suffice
    words = {
        0: f"prmt.b32 x, a, b, {chosen};" + (" shl.b32 x, x, 1;" if levels else ""),
        3: f"prmt.b32 x, b, c, {chosen};",
        6: "shr.u32 x, x, 9;",
    }
    lines = []
    for code, output in enumerate(outputs):
        place = code % 3 * 3 + 1 if levels else place_of_code(code)
        mask = (7 << place) * 0x10001
        lines.append(words.get(code, ""))
        if levels:
            # puts a code into the mantissa of a power of 2 where it counts eighths, and subtracts that power and 7/16
            power = (22 - place << 10) * 0x10001
            middle = {1: 0xD407, 4: 0xC838, 7: 0xBDC0}[place] * 0x10001
            lines += [
                f"mov.b32 t, {power:#010x}; lop3.b32 u, x, {mask:#010x}, t, 0xEA;",
                f"mov.b32 t, {middle:#010x}; add.rn.f16x2 u, u, t;",
                f"mov.b32 t, {inner * 0x10001:#010x}; fma.rn.f16x2 t, u, u, t;",
                f"mul.rn.f16x2 {output}, u, t;",
            ]
        else:
            lines.append(f"and.b32 {output}, x, {mask:#010x};")
    return " ".join(lines)


@gluon.constexpr_function
def _pairs_of_keys(size, inner):
    """The assembly for the words of a key. It writes the lower halves of all pairs first, then the upper halves.

    A thread has four groups of a row of 128 columns, and two of a row of 64.
    """
    count = size // 8
    pairs = [f"y{i}" for i in range(count)]
    if size == 128:
        word = "mov.b32 {}, ${};"
        body = _pairs_of(pairs[:8], 0, 2, True, inner) + _pairs_of(pairs[8:], 1, 3, True, inner)
    else:
        word = "mov.b32 {0}, {{${1}, ${1}}};"
        body = _pairs_of(pairs, 0, 1, True, inner)
    words = " ".join(word.format(name, 2 * count + i) for i, name in enumerate("abc"))
    apart = " ".join(f"mov.b32 {{${i}, ${i + count}}}, {pair};" for i, pair in enumerate(pairs))
    return f"{{ .reg .b32 a, b, c, x, u, t, y<{count}>; {words} {body} {apart} }}"


@gluon.constexpr_function
def _pairs_of_values(size, levels, inner):
    """The assembly for words of values: two values of two groups each (128 columns), or four of one group (64)."""
    words = " ".join(f"mov.b32 {name}, ${16 + i};" for i, name in enumerate("abc"))
    pairs = [f"${i}" for i in range(16)]
    if size == 128:
        body = _pairs_of(pairs[:8], 0, 2, levels, inner) + _pairs_of(pairs[8:], 1, 3, levels, inner)
    else:
        body = _pairs_of(pairs[::2], 0, 1, levels, inner) + _pairs_of(pairs[1::2], 2, 3, levels, inner)
    return f"{{ .reg .b32 a, b, c, x, u, t; {words} {body} }}"


@gluon.constexpr_function
def _constraints(kind, count, words):
    """The constraints of the assembly: ``count`` outputs of a kind, and the three words as inputs."""
    return ",".join([f"={kind}"] * count + [words] * 3)


@gluon.constexpr_function
def _repeated(dtype, count):
    return (dtype,) * count


@gluon.jit
def keys_of_planes(words, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns keys as four operands [WARPS, keys, columns]; words: a tensor for each plane.

    The bits of a column's number, from the lowest: two select the operand, some the product in it. Then one selects the
    half of the product, one the half of a pair, and two the lane.
    """
    ASM: gl.constexpr = _pairs_of_keys(C.size, C.inner)
    CONSTRAINTS: gl.constexpr = _constraints("h", C.size // 4, "r" if C.size == 128 else "h")
    TYPES: gl.constexpr = _repeated(gl.int16, C.size // 4)
    codes = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [words[0], words[1], words[2]], dtype=TYPES, is_pure=True, pack=1
    )
    found = ()
    for i in gl.static_range(4):
        x = _columns_of_product(codes, i, C)
        if C.size == 128:
            x = gl.join(x, _columns_of_product(codes, i + 4, C))
        x = x.reshape([WARPS, C.pages, 8, 2, 4, 2, 2, C.size // 64]).permute([0, 1, 3, 2, 7, 6, 4, 5])
        x = x.reshape([WARPS, C.pages * PAGE, C.size // 4])
        found = found + (gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2)),)
    return found


@gluon.jit
def _columns_of_product(codes, FIRST: gl.constexpr, C: gl.constexpr):
    """Returns the columns of a product [WARPS, pages, PAGE, lanes, 2, 2]; the last two: pair, half of the product."""
    SECOND: gl.constexpr = FIRST + C.size // 16
    UPPER: gl.constexpr = C.size // 8
    first = gl.join(codes[FIRST].to(gl.float16, bitcast=True), codes[FIRST + UPPER].to(gl.float16, bitcast=True))
    second = gl.join(codes[SECOND].to(gl.float16, bitcast=True), codes[SECOND + UPPER].to(gl.float16, bitcast=True))
    return gl.join(first, second)


@gluon.jit
def values_of_planes(words, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns a tensor of values for each code of a thread's groups, in the layout of the words."""
    ASM: gl.constexpr = _pairs_of_values(C.size, C.levels, C.inner)
    CONSTRAINTS: gl.constexpr = _constraints("r", 16, "r")
    TYPES: gl.constexpr = _repeated(gl.float16, C.size // 8)
    first, second, third = words
    first, second = gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [first, second, gl.convert_layout(third, LAYOUT)], dtype=TYPES, is_pure=True,
        pack=256 // C.size,
    )  # fmt: skip
