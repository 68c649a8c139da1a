# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Helpers of the kernels for SM 9.0: layouts of shared memory, registers that threads share, and conversions of queries
to float16."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# stages float32 on its way to memory, so that a warp stores whole rows. From the layout of products a warp would store
# pieces of 8 rows at once; for the parts of split keys this took 8 to 12 us on an H200
STAGED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))


_ALL = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def to_float16(x):
    """Returns numbers as float16, saturated at its largest finite numbers; NaN stays NaN."""
    if x.dtype != gl.float16:
        x = gl.maximum(x.to(gl.float32), -65504.0, propagate_nan=_ALL)
        x = gl.minimum(x, 65504.0, propagate_nan=_ALL)
    return x.to(gl.float16)


@gluon.jit
def uniform(x):
    """Returns an int32 that is equal in all threads; the compiler knows nothing else about it.

    ptxas sees through the shuffle: it removes it, and computes what depends on the number in uniform registers.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def in_groups(rows, size):
    """The layout of a block of keys with ``rows`` rows and ``size`` columns of 16-bit numbers, as products read it.

    Copies write it as boxes [groups, parts of 64 columns, 8 rows, columns], each row swizzled by 16 bytes. Groups are
    evenly spaced, also from one box to the next, so that one copy loads all columns of a box.
    """
    columns, within = [[0, x] for x in (1, 2, 4, 8, 16, 32)], [[1, 8], [2, 16], [4, 32]]
    parts = [[0, x] for x in (64, 128) if x < size]
    groups = [[8 << x, 0] for x in range((rows // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(columns + within + parts + groups, alignment=1024)
