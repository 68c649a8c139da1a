# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""8-bit floats in any GPU's registers: converted exactly to float16, and rounded to nearest even from float32.

A kernel with a float8 pointer uses the hardware's conversions; with a uint8 pointer, it uses these integer conversions.
FORMAT is PyTorch's name of the type, without float8_. The fnuz formats of gfx942 differ in three ways: the exponent of
infinities holds numbers, the bits of -0 are the only NaN, and the bias is one larger.
"""

import triton
import triton.language as tl


@triton.jit
def fp8_to_float16(x, FORMAT: tl.constexpr):
    """8-bit floats (float8, or uint8 that holds their bits) as float16; exact, because every value fits."""
    if x.dtype != tl.uint8:
        y = x.to(tl.float16)
    elif FORMAT == "e5m2":
        y = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "e5m2fnuz":
        # half of the e5m2 value with the same bits; the bits of e5m2's infinities and NaN are numbers here
        bits = x.to(tl.uint16)
        is_last = (bits & 0x7C) == 0x7C
        last = ((bits & 3) + 4).to(tl.float16) * tl.where(bits < 0x80, 8192.0, -8192.0).to(tl.float16)
        y = tl.where(is_last, last, tl.where(is_last, 0, bits << 8).to(tl.uint16).to(tl.float16, bitcast=True) * 0.5)
    else:
        bits = x.to(tl.uint16)
        # the bias of the exponent is 7 or 8 here and 15 there: the same bits are 2**8 or 2**7 too small, subnormals too
        y = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        y *= 128.0 if FORMAT == "e4m3fnuz" else 256.0
    return y


@triton.jit
def float32_to_fp8_bits(x, FORMAT: tl.constexpr):
    """The bits of float32 numbers in a format, as uint8: rounded to nearest even, saturated at the largest finite one.

    NaN stays NaN.
    """
    IS_E4M3: tl.constexpr = FORMAT == "e4m3fn" if FORMAT != "e4m3fnuz" else True
    IS_FNUZ: tl.constexpr = FORMAT == "e4m3fnuz" if FORMAT != "e5m2fnuz" else True
    MANTISSA: tl.constexpr = 3 if IS_E4M3 else 2
    BIAS: tl.constexpr = (7 if IS_E4M3 else 15) + (1 if IS_FNUZ else 0)
    LARGEST: tl.constexpr = (240.0 if IS_FNUZ else 448.0) if IS_E4M3 else 57344.0
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    # added to a number, it leaves the rounded subnormal digits at the bottom of the sum
    MAGIC: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
    DROPPED: tl.constexpr = 23 - MANTISSA

    size = tl.minimum(tl.abs(x), LARGEST)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    bits = size.to(tl.uint32, bitcast=True)
    even = (bits >> DROPPED) & 1
    rounded = (bits + ((1 << (DROPPED - 1)) - 1) + even) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    subnormal = (size + MAGIC).to(tl.uint32, bitcast=True) & 0xF
    found = tl.where(size < SMALLEST_NORMAL, subnormal, normal)
    if IS_FNUZ:
        # the bits of -0 are NaN in this format
        sign = tl.where(found == 0, 0, sign)
    NAN: tl.constexpr = 0x80 if IS_FNUZ else 0x7F
    return tl.where(x == x, found | sign, NAN).to(tl.uint8)


@triton.jit
def stored_as(x, scale, ptr, FORMAT: tl.constexpr):
    """Numbers in the dtype that a pointer has: cast, or divided by a scale and rounded to 8 bits."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3fn" else 57344.0
    if DTYPE.primitive_bitwidth > 8:
        y = x.to(DTYPE)
    elif tl.uint8 == DTYPE:
        y = float32_to_fp8_bits(tl.div_rn(x.to(tl.float32), scale), FORMAT)
    else:
        y = tl.div_rn(x.to(tl.float32), scale)
        y = tl.clamp(y, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)
    return y
