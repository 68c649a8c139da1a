# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Steps of the softmax that the kernels for SM 9.0 share; jitted functions of Triton cannot be called in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnreg.kernels.triton.softmax import LOG2_E


@gluon.jit
def keys_of_rows(context, kv_len, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the first key that each row sees, and the end of its keys [rows]."""
    ROWS: gl.constexpr = C.rows
    position = context + gl.arange(0, ROWS, LAYOUT) // C.group
    begin = position * 0
    end = position * 0 + kv_len
    if C.right >= 0:
        end = gl.minimum(end, position + (C.right + 1))
    if C.left >= 0:
        begin = gl.maximum(position - C.left, 0)
    return begin, end


@gluon.jit
def scale_of(softmax_scale, softcap, k_scale_ptr, kv_head, C: gl.constexpr):
    """Returns the factor of products and the softcap of scores, in powers of 2."""
    scale = softmax_scale * LOG2_E
    if C.softcap:
        # the argument of the hyperbolic tangent, which is made of powers of 2
        scale = softmax_scale / softcap * LOG2_E
        softcap = softcap * LOG2_E
    if k_scale_ptr is not None:
        scale *= gl.load(k_scale_ptr + kv_head * C.k_scale)
    return scale, softcap


@gluon.jit
def scores(s, scale, softcap, SOFTCAP: gl.constexpr):
    """Returns products as scores, exponents of 2, up to a factor still to be applied."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        s = softcap * (1.0 - 2.0 / (gl.exp2(s * (scale * 2.0)) + 1.0))
    return s


@gluon.jit
def with_sink(row_max, total, sink):
    """Returns the maxima and sums of rows with a score that has no value, an exponent of 2, and the others' factor."""
    new_max = gl.maximum(row_max, sink)
    factor = gl.exp2(row_max - new_max)
    # of a sink of +inf the difference is NaN
    total = total * factor + gl.where(sink == new_max, 1.0, gl.exp2(sink - new_max))
    return new_max, total, factor
