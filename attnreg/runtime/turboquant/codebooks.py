"""Codebooks: the levels that codes of a rotated coordinate stand for.

A coordinate of a random unit vector is nearly normal; levels are in units of its standard deviation. The level of a
code c of ``bits`` bits is an odd polynomial of ``2 * c - 2**bits + 1``. Kernels compute the polynomial in registers; a
table would need a load for every element.

The coefficients are data, because kernels have them as constants. Computed at run time, their last bits would depend on
the processor. tools/codebooks.py made them by Lloyd's algorithm, and tests compare them with its result.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

# (bits, columns) -> the coefficients of x, x**3 and x**5, to ten significant digits
COEFFICIENTS = {
    (2, 16): (0.4450003033, 0.004956496484, 0.0),
    (2, 32): (0.445791382, 0.005636494798, 0.0),
    (2, 64): (0.4461348563, 0.00598408107, 0.0),
    (2, 128): (0.4462935087, 0.0061597183, 0.0),
    (2, 256): (0.4463695593, 0.006247989342, 0.0),
    (3, 16): (0.2328486953, 0.001063391189, 0.0),
    (3, 32): (0.2343432608, 0.00124832577, 0.0),
    (3, 64): (0.2350492904, 0.001346351956, 0.0),
    (3, 128): (0.2353918518, 0.001396762822, 0.0),
    (3, 256): (0.2355605565, 0.001422317864, 0.0),
    (4, 16): (0.1262397702, 1.999357106e-05, 5.958497891e-07),
    (4, 32): (0.1287466133, 1.865255247e-05, 7.469618791e-07),
    (4, 64): (0.1300284639, 1.754689412e-05, 8.322438669e-07),
    (4, 128): (0.1306758614, 1.688285508e-05, 8.774637871e-07),
    (4, 256): (0.1310010367, 1.652386789e-05, 9.007335977e-07),
}


class Codebook(NamedTuple):
    """The coefficients of x, x**3, x**5 in the levels, and the levels in ascending order."""

    coefficients: tuple[float, float, float]
    levels: tuple[float, ...]

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The ends of the codes' cells: halfway between two levels."""
        return tuple((low + high) / 2 for low, high in zip(self.levels, self.levels[1:], strict=False))


@functools.cache
def codebook(bits: int, columns: int) -> Codebook:
    """The codebook for coordinates of vectors of ``columns`` elements. Raises ValueError if there is none."""
    found = COEFFICIENTS.get((bits, columns))
    if found is None:
        known = ", ".join(f"{b} bits of {n}" for b, n in COEFFICIENTS)
        raise ValueError(
            f"there is no codebook for codes of {bits} bits of {columns} columns; there are: {known}. "
            "tools/codebooks.py makes others"
        )
    linear, cubic, fifth = found
    x = [2.0 * code - 2**bits + 1.0 for code in range(2**bits)]
    # only products: processors round powers differently
    return Codebook(found, tuple(n * (linear + n * n * (cubic + n * n * fifth)) for n in x))
