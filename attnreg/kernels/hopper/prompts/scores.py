# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Scores of the kernel in `kernel`: masked with -inf, and their weights summed and converted."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnreg.kernels.hopper.prompts.shared import ROWS
from attnreg.kernels.hopper.releases import SEPARATES


@gluon.jit
def hidden(s, key, position, keys, C: gl.constexpr):
    """Returns scores of the keys from ``key`` on, with -inf where the row at a position does not see the key."""
    BLOCK_N: gl.constexpr = C.block_n
    offs_n = key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
    if C.right >= 0:
        end = gl.minimum(position + (C.right + 1), keys)
        visible = offs_n[None, :] < end[:, None]
    else:
        visible = (offs_n < keys)[None, :] & (position > -2147483647)[:, None]
    if C.left >= 0:
        visible = visible & (offs_n[None, :] >= (position - C.left)[:, None])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def hides(key, first, keys, C: gl.constexpr):
    """Returns whether some row of a warpgroup does not see one of the keys of the block from ``key`` on.

    Not for the first block, which is always masked. first: the position of the warpgroup's first row.
    """
    hides = False
    if C.right >= 0:
        hides = key + C.block_n > gl.minimum(keys, first + (C.right + 1))
    if C.left >= 0:
        hides = hides | (key < first + (ROWS // C.pack - 1 - C.left))
    return hides


@gluon.jit
def lane_sums(p, C: gl.constexpr):
    """Returns the sums of a lane's own weights, [ROWS, 4]; the four lanes of a row add theirs up after the loop."""
    return gl.sum(gl.sum(p.reshape([ROWS, C.block_n // 8, 4, 2]), 3), 1)


@gluon.constexpr_function
def _conversion(dtype):
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def carried(p, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns weights [ROWS, keys] in the dtype of products, in the form in which a loop carries them on.

    That is the layout of operands, or if Triton `SEPARATES` 16-bit numbers: int32 [ROWS, keys / 2], two weights in a
    word. Otherwise joining them again takes 8 % of the time with heads of 64 on an H200.
    """
    if SEPARATES:
        even, odd = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
        ASM: gl.constexpr = _conversion(DTYPE)
        weights = gl.inline_asm_elementwise(ASM, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    else:
        weights = gl.convert_layout(p.to(DTYPE), LAYOUT)
    return weights


@gluon.jit
def operand_of(weights, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the weights of `carried` as an operand [ROWS, keys] in the layout."""
    if SEPARATES:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [weights], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        both = gl.join(even, odd).reshape([weights.shape[0], weights.shape[1] * 2]).to(DTYPE, bitcast=True)
        weights = gl.convert_layout(both, LAYOUT)
    return weights
