# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index, assignment"
# ruff: noqa: N803, N806, RUF005 (constexprs are written in capitals, and Gluon unpacks no tuples)
"""Sums of the codes of values, by the matrix units of SM 9.0: a tensor [WARPS, 16, rows] for each 16 columns of a head.

Levels lie on both sides of 0. Uniform codes are never negative, and a value is the small difference between its code
and its zero. The matrix units truncate towards 0 when they add, by an amount that grows with the sum. With 32k keys the
error became three times the rounding of outputs. So in each step each thread subtracts the middle of its sums, which
then stay near 0, and adds it again at the end. This takes 2 to 3 % more time. In every eighth step alone, behind a
branch, it takes 7 to 10 %.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from attnreg.kernels.hopper.packed.operands import unit_of_code
from attnreg.kernels.hopper.programs import WARPS

# in windows with fewer keys, the truncation makes no difference
_FEW_KEYS = gl.constexpr(8192)


@gluon.jit
def _units_of_rows(i, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the units [1, 16, 1] of the uniform codes in the rows of a product: FIRST for 8 rows, SECOND for 8."""
    FIRST: gl.constexpr = unit_of_code(i, C.value_bits)
    SECOND: gl.constexpr = unit_of_code(i + C.size // 16, C.value_bits)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return gl.where(row < 8, FIRST, SECOND)[None, :, None]


@gluon.constexpr_function
def _centres(levels, left):
    """Whether sums are centred: sums of uniform codes, unless the window is short."""
    return not levels and not 0 <= left < _FEW_KEYS.value


@gluon.jit
def _of_rows(centre, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the centre [WARPS, 8, rows], repeated for both halves of a product: [WARPS, 16, rows]."""
    both = gl.expand_dims(centre, 1).broadcast_to([WARPS, 2, 8, C.rows])
    return gl.convert_layout(both.reshape([WARPS, 16, C.rows]), LAYOUT)


@gluon.jit
def _middle(acc, centre, C: gl.constexpr):
    """Returns the middle of the two sums that a thread has of a row, in units of codes."""
    UNIT: gl.constexpr = 1.0 / (1.0 / unit_of_code(0, C.value_bits) + 1.0 / unit_of_code(C.size // 16, C.value_bits))
    return gl.convert_layout(gl.sum(acc.reshape([WARPS, 2, 8, C.rows]), 1) * UNIT, centre.type.layout)


@gluon.jit
def weighed(acc, centre, values, weights, alpha, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the sums after a step, with its weighted codes added, and the centre.

    alpha [WARPS, rows]: the factor of the sums so far. centre [WARPS, 8, rows]: what was subtracted so far, in codes.
    """
    CENTRES: gl.constexpr = _centres(C.levels, C.left)
    middle = centre
    if CENTRES:
        middle = _middle(acc[0] * alpha[:, None, :], centre, C)
        centre = centre * gl.convert_layout(alpha, gl.SliceLayout(1, centre.type.layout))[:, None, :] + middle
    added = ()
    for i in gl.static_range(len(acc)):
        before = acc[i] * alpha[:, None, :]
        if CENTRES:
            before -= _of_rows(middle, LAYOUT, C) * (1.0 / _units_of_rows(i, LAYOUT, C))
        added = added + (mma_v2(values[i], weights, before),)
    return added, centre


@gluon.jit
def in_units(acc, centre, largest, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the sums of values, from the sums of codes whose weights were divided by the largest scale's power."""
    units = gl.convert_layout(largest, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    sums = ()
    for i in gl.static_range(len(acc)):
        if C.levels:
            sums = sums + (acc[i] * (units * C.unit),)
        elif _centres(C.levels, C.left):
            sums = sums + ((acc[i] * _units_of_rows(i, LAYOUT, C) + _of_rows(centre, LAYOUT, C)) * units,)
        else:
            sums = sums + (acc[i] * (units * _units_of_rows(i, LAYOUT, C)),)
    return sums
