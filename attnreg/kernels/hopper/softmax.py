# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""Steps of the softmax that the kernels for SM 9.0 share; jitted functions of Triton cannot be called in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
