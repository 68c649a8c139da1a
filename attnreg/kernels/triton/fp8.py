# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""8-bit floats in any GPU's registers: exact to float16, and from float32 rounded to nearest even.

A kernel that is given a float8 pointer uses the hardware's conversions; given uint8, it uses these integers.
"""

import triton
import triton.language as tl


@triton.jit
def fp8_to_float16(x, IS_E5M2: tl.constexpr):
    """A tile of 8-bit floats (float8, or uint8 that holds their bits) as float16; exact, because every value fits."""
    if x.dtype != tl.uint8:
        y = x.to(tl.float16)
    elif IS_E5M2:
        y = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        bits = x.to(tl.uint16)
        # the exponent's bias is 7 here and 15 there: the same bits, 2**8 too small, subnormal numbers included
        y = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return y


@triton.jit
def float32_to_fp8_bits(x, IS_E5M2: tl.constexpr):
    """The bits of a float32 tile in e4m3 or e5m2, as uint8: nearest even, saturated at the largest finite number."""
    MANTISSA: tl.constexpr = 2 if IS_E5M2 else 3
    BIAS: tl.constexpr = 15 if IS_E5M2 else 7
    LARGEST: tl.constexpr = 57344.0 if IS_E5M2 else 448.0
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    # adding it leaves exactly the subnormal digits, rounded, at the bottom of the sum
    MAGIC: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
    DROPPED: tl.constexpr = 23 - MANTISSA

    size = tl.minimum(tl.abs(x), LARGEST)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    bits = size.to(tl.uint32, bitcast=True)
    even = (bits >> DROPPED) & 1
    rounded = (bits + ((1 << (DROPPED - 1)) - 1) + even) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    subnormal = (size + MAGIC).to(tl.uint32, bitcast=True) & 0xF
    return (tl.where(size < SMALLEST_NORMAL, subnormal, normal) | sign).to(tl.uint8)
