"""Ranking: sorts backends by speed, as far as the noise of their times allows.

Backends are timed in turns, one after the other, so a slow phase of the machine slows all of them. A turn's time is its
median. For two backends the logarithms of the ratios of their times, one for each turn, give a mean and Student's 99.9
% interval. With several cells the mean over the cells is taken first. A backend is faster if 1 is outside the interval,
and if the ratio differs from 1 by at least 2 %: clocks and temperatures can cause a smaller difference. The interval is
wide because many pairs are compared, each again after every turn.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from attnreg.analysis.timings.samples import Samples
from attnreg.language.measured import is_faster

# the 99.95 % quantiles of Student's distribution with 1, 2, ... degrees of freedom
_STUDENT = (
    636.6, 31.60, 12.92, 8.610, 6.869, 5.959, 5.408, 5.041, 4.781, 4.587, 4.437, 4.318, 4.221, 4.140, 4.073, 4.015,
    3.965, 3.922, 3.883, 3.850, 3.819, 3.792, 3.768, 3.745, 3.725, 3.707, 3.690, 3.674, 3.659, 3.646,
)  # fmt: skip


class Compared(NamedTuple):
    """The ratio of speed of two backends, and half of the interval as a share of the ratio."""

    ratio: float
    noise: float

    @property
    def differs(self) -> bool:
        """Whether it is faster by more than the noise."""
        return is_faster(self.ratio, self.noise)


def compared(samples: Samples, cells: Sequence[int], fast: str, slow: str) -> Compared:
    """The ratio of ``fast`` to ``slow`` over some cells; both have turns in each cell.

    No condition can distinguish windows. If the layers with one window contradict the mean, the noise includes the
    difference.
    """
    whole = _over(samples, cells, fast, slow)
    parts = [_over(samples, group, fast, slow) for group in _windows(samples, cells)]
    against = [part.ratio / whole.ratio for part in parts if _opposite(part, whole)]
    return Compared(whole.ratio, max([whole.noise, *(max(apart, 1 / apart) - 1 for apart in against)]))


def _windows(samples: Samples, cells: Sequence[int]) -> list[list[int]]:
    """The cells grouped by the numbers of their layers, for features with several numbers."""
    groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for cell in cells:
        groups.setdefault(samples.cells[cell].numbers, []).append(cell)
    several = Counter(tuple(name for name, _ in numbers) for numbers in groups)
    return [group for numbers, group in groups.items() if several[tuple(name for name, _ in numbers)] > 1]


def _opposite(one: Compared, other: Compared) -> bool:
    """Whether one contradicts the other by more than its noise."""
    return is_faster(one.ratio if other.ratio < 1 else 1 / one.ratio, one.noise)


def _over(samples: Samples, cells: Sequence[int], fast: str, slow: str) -> Compared:
    pairs = [(samples.turns[cell, fast], samples.turns[cell, slow]) for cell in cells]
    turns = min(min(len(a), len(b)) for a, b in pairs)
    logs = [
        statistics.fmean(math.log(statistics.median(b[i]) / statistics.median(a[i])) for a, b in pairs)
        for i in range(turns)
    ]
    mean = statistics.fmean(logs)
    if turns < 2:
        return Compared(math.exp(mean), math.inf)
    half = _STUDENT[min(turns - 1, len(_STUDENT)) - 1] * statistics.stdev(logs) / math.sqrt(turns)
    return Compared(math.exp(mean), math.expm1(min(half, 50.0)))


def rankable(samples: Samples, cells: Sequence[int], names: Sequence[str]) -> list[str]:
    """The backends with turns in each of the cells and without a problem; empty if a cell's window is unknown."""
    if not all(samples.cells[cell].bounded for cell in cells):
        return []
    return [
        name
        for name in names
        if all((cell, name) in samples.turns and (cell, name) not in samples.problems for cell in cells)
    ]


def ranked(samples: Samples, cells: Sequence[int], names: Sequence[str]) -> list[str]:
    """The rankable backends, the fastest first. Equal ones, within the noise, keep the order of ``names``."""
    left, out = rankable(samples, cells, names), []
    while left:
        unbeaten = [
            name
            for name in left
            if not any(compared(samples, cells, other, name).differs for other in left if other != name)
        ]
        # if three backends beat each other in a circle, they keep their order
        out.append((unbeaten or left)[0])
        left.remove(out[-1])
    return out
