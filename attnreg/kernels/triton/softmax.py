# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""The running softmax of a tile of rows: its state, and its updates by scores and by a sink."""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# the initial maximum: below every score, but finite, because -inf - -inf is NaN
LOWEST = tl.constexpr(-1.0e30)


class Softmax(NamedTuple):
    """The state of the rows after part of their keys, in float32; scores are exponents of 2.

    acc [BLOCK_M, BLOCK_DV] is the sum of the values, each with the weight 2 ** (score - row_max). The largest score is
    row_max [BLOCK_M]. The sum of the weights is row_sum [BLOCK_M], 0 for a row that has seen no key.
    """

    acc: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Returns the state before the first key."""
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    return Softmax(acc, row_max, row_sum)


@triton.jit
def with_scores(state, s, unit):
    """Returns the weights of a tile of scores, s * unit [BLOCK_M, BLOCK_N], and the state that includes them.

    acc is rescaled to the new maximum; the caller still has to add the tile's values.
    """
    new_max = tl.maximum(state.row_max, tl.max(s, 1) * unit)
    p = tl.exp2(tl.fma(s, unit, -new_max[:, None]))  # [BLOCK_M, BLOCK_N]
    alpha = tl.exp2(state.row_max - new_max)
    row_sum = state.row_sum * alpha + tl.sum(p, 1)
    return p, Softmax(state.acc * alpha[:, None], new_max, row_sum)


@triton.jit
def with_sink(state, sink):
    """Returns the state with one more score for each row, sink [BLOCK_M], that has no value."""
    new_max = tl.maximum(state.row_max, sink)
    alpha = tl.exp2(state.row_max - new_max)
    row_sum = state.row_sum * alpha + weight_of(sink, new_max)
    return Softmax(state.acc * alpha[:, None], new_max, row_sum)


@triton.jit
def weight_of(sink, row_max):
    """Returns the weight of a sink, which is at most row_max; both may be +inf, and inf - inf is NaN."""
    return tl.where(sink == row_max, 1.0, tl.exp2(sink - row_max))
