# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""What the kernels for SM 9.0 have in common: layouts of shared memory, registers that threads share, and how queries
become float16."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# float32 on its way to memory: rows are stored whole so. From the layout of products a warp would store 8 rows at once,
# which for the parts of split keys took 8 to 12 us on an H200
STAGED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))


_ALL = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def to_float16(x):
    """Returns numbers as float16, those beyond it as its largest; NaN stays NaN."""
    if x.dtype != gl.float16:
        x = gl.maximum(x.to(gl.float32), -65504.0, propagate_nan=_ALL)
        x = gl.minimum(x, 65504.0, propagate_nan=_ALL)
    return x.to(gl.float16)


@gluon.jit
def uniform(x):
    """Returns an int32 that all threads have alike, of which the compiler knows nothing but that.

    ptxas sees through it, and computes what depends on it in registers that threads share; no exchange remains.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def in_groups(rows, size):
    """The layout of a block of keys of so many rows and columns, as products read it.

    Of 16-bit numbers, in memory as copies of boxes [groups, parts of 64 columns, 8 rows, columns] write it, 16 bytes of
    each row swizzled: groups are evenly spaced, whatever those of a box, so that one copy brings all columns.
    """
    columns, within = [[0, x] for x in (1, 2, 4, 8, 16, 32)], [[1, 8], [2, 16], [4, 32]]
    parts = [[0, x] for x in (64, 128) if x < size]
    groups = [[8 << x, 0] for x in range((rows // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(columns + within + parts + groups, alignment=1024)
