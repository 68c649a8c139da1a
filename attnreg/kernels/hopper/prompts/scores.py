# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Scores of the kernel in `kernel`: hidden where a row sees no key, and their weights summed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnreg.kernels.hopper.prompts.shared import ROWS


@gluon.jit
def hidden(s, key, position, keys, C: gl.constexpr):
    """Returns scores of the keys from ``key`` on, -inf where a row at a position does not see one."""
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
    """Returns whether a warpgroup has a row that does not see one of the keys from ``key`` on, but for the first block.

    first: the position of its first row.
    """
    hides = False
    if C.right >= 0:
        hides = key + C.block_n > gl.minimum(keys, first + (C.right + 1))
    if C.left >= 0:
        hides = hides | (key < first + (ROWS // C.pack - 1 - C.left))
    return hides


@gluon.jit
def lane_sums(p, C: gl.constexpr):
    """Returns the sums of the weights that a lane holds itself, [ROWS, 4]; the lanes of a row meet after the loop."""
    return gl.sum(gl.sum(p.reshape([ROWS, C.block_n // 8, 4, 2]), 3), 1)
