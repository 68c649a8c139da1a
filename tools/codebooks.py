"""Makes the table of attnreg/runtime/turboquant/codebooks.py: coefficients of levels, by Lloyd's algorithm.

    PYTHONPATH=. python tools/codebooks.py

A coordinate of a random unit vector of ``size`` elements has the density ``(1 - x**2) ** ((size - 3) / 2)``, up to a
constant factor. For large sizes it is nearly a normal density. Levels are in units of its standard deviation, ``size **
-0.5``.

Lloyd's algorithm moves each level to the mean of its cell, again and again. Here each step instead fits a polynomial to
these means, and moves the levels to its values.

The last bits of the result depend on the processor, so the table has numbers rounded to `DIGITS` digits.

Source: Zandieh et al., TurboQuant, arXiv:2504.19874, section 3.1; Max (1960) and Lloyd (1982).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# the significant digits of a coefficient: processors agree on twelve
DIGITS = 10
BITS, SIZES = (2, 3, 4), (16, 32, 64, 128, 256)
# bits -> coefficients of the polynomial; so few add at most 0.2 % to the error of free levels
_TERMS = {2: 2, 3: 2, 4: 3}
# Lloyd's algorithm ends after this number of steps at the latest
_STEPS = 3000
_POINTS = 1 << 16


class Solution(NamedTuple):
    """The levels of a code, and the polynomial that gives them.

    coefficients: those of x, x**3 and x**5.
    levels: in ascending order.
    error: the mean squared error of a coordinate, divided by its variance.
    """

    coefficients: tuple[float, float, float]
    levels: tuple[float, ...]
    error: float


@functools.cache
def polynomial(bits: int, size: int) -> Solution:
    """The levels with the least error among those that a polynomial gives, for vectors of ``size`` elements."""
    return _lloyd(bits, size, _TERMS[bits])


@functools.cache
def lloyd_max(bits: int, size: int) -> Solution:
    """The levels with the least error of all. The levels of `polynomial` are compared with them."""
    return _lloyd(bits, size, 2 ** (bits - 1))


def rounded(x: float) -> float:
    """A coefficient, rounded as in the table."""
    return float(f"{x:.{DIGITS}g}")


def _lloyd(bits: int, size: int, terms: int) -> Solution:
    points, mass, moment, power = _moments(size)
    x = 2.0 * torch.arange(2**bits, dtype=torch.float64) - 2**bits + 1
    # powers of numbers up to 1 keep the least squares well conditioned
    basis = torch.stack([(x / 2**bits) ** (2 * i + 1) for i in range(terms)], 1)  # [levels, terms]
    levels = x * 2.0 ** (1 - bits) * 1.5
    for _ in range(_STEPS):
        ends = torch.cat([points[:1], (levels[1:] + levels[:-1]) / 2, points[-1:]])
        cells = [_at(points, total, ends).diff() for total in (mass, moment, power)]
        weights, sums, squares = cells
        factors = torch.linalg.solve((basis * weights[:, None]).mT @ basis, basis.mT @ sums)
        before, levels = levels, basis @ factors
        if float((levels - before).abs().max()) < 1e-12:
            break
    error = float((squares - 2 * levels * sums + levels**2 * weights).sum())
    scaled = [float(factor) / 2.0 ** (bits * (2 * i + 1)) for i, factor in enumerate(factors)]
    first, third, fifth, *_ = [*scaled, 0.0, 0.0]
    return Solution((first, third, fifth), tuple(levels.tolist()), error)


def _moments(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points from the least to the largest coordinate, and the integrals of f, x * f and x**2 * f up to each point."""
    # the density past 12 standard deviations is negligible
    largest = min(size**0.5, 12.0)
    points = torch.linspace(-largest, largest, _POINTS + 1, dtype=torch.float64)
    density = (1 - points**2 / size).clamp(min=0) ** ((size - 3) / 2)

    def up_to(y: Tensor) -> Tensor:
        return torch.cat([y.new_zeros(1), ((y[1:] + y[:-1]) / 2).cumsum(0)])

    mass, moment, power = up_to(density), up_to(density * points), up_to(density * points**2)
    return points, mass / mass[-1], moment / mass[-1], power / mass[-1]


def _at(points: Tensor, totals: Tensor, ends: Tensor) -> Tensor:
    """An integral up to each of the ``ends``, interpolated between its values ``totals`` at the ``points``."""
    place = (ends - points[0]) / (points[1] - points[0])
    index = place.long().clamp(0, len(points) - 2)
    return torch.lerp(totals[index], totals[index + 1], place - index)


def main() -> None:
    """Print the rows of the table."""
    for bits in BITS:
        for size in SIZES:
            print(f"    ({bits}, {size}): {tuple(map(rounded, polynomial(bits, size).coefficients))},")


if __name__ == "__main__":
    main()
