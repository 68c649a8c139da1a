# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Steps of the softmax that the kernels for SM 9.0 share. Gluon cannot call Triton's jitted functions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnreg.kernels.triton.softmax import LOG2_E


@gluon.jit
def keys_of_rows(context, kv_len, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the first key that each row sees, and the end of the keys that it sees, [rows]."""
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
    """Returns the factor of products, and the softcap, both for scores that are exponents of 2."""
    scale = softmax_scale * LOG2_E
    if C.softcap:
        # the argument of tanh, which is computed from powers of 2
        scale = softmax_scale / softcap * LOG2_E
        softcap = softcap * LOG2_E
    if k_scale_ptr is not None:
        scale *= gl.load(k_scale_ptr + kv_head * C.k_scale)
    return scale, softcap


@gluon.jit
def scores(s, scale, softcap, SOFTCAP: gl.constexpr):
    """Returns products as scores, which are exponents of 2. Without a softcap, the caller still has to scale them."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        s = softcap * (1.0 - 2.0 / (gl.exp2(s * (scale * 2.0)) + 1.0))
    return s


@gluon.jit
def with_sink(row_max, total, sink):
    """Returns rows' maxima and sums with a sink (an exponent of 2) added, and the factor for the other weights."""
    new_max = gl.maximum(row_max, sink)
    factor = gl.exp2(row_max - new_max)
    # for a sink of +inf the difference would be NaN
    total = total * factor + gl.where(sink == new_max, 1.0, gl.exp2(sink - new_max))
    return new_max, total, factor
