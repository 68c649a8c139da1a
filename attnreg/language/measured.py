"""Measured: the measurement behind an order, as priorities.yaml holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.errors import Location


# a smaller difference can come from clocks and temperatures as well as from kernels
LEAST = 0.02


def is_faster(ratio: float, noise: float) -> bool:
    """Whether a ratio of times is above 1 by more than its noise and by more than `LEAST`; both are shares."""
    return ratio > max(1 + noise, 1 + LEAST)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement behind an order: how many times as fast ``of`` is as ``over``.

    ``noise`` is half of the 99.9 % interval as a share of the ratio. ``file`` has the samples, beside the data.
    ``device`` and ``date`` are what its first line says; "" where it cannot be read.
    """

    file: str
    ratio: float
    noise: float
    of: str
    over: str
    where: Location
    device: str = ""
    date: str = ""

    @property
    def text(self) -> str:
        """``FLASH_ATTN/FA3 is 1.31x as fast as TRITON_ATTN (± 1 %), measured 2026-11-22 on NVIDIA H200``."""
        percent = 100 * self.noise
        # a noise below half a percent must not be printed as 0
        shown = "< 0.1" if percent < 0.05 else f"{percent:.1f}" if percent < 0.95 else f"{percent:.0f}"
        faster = f"{self.of} is {self.ratio:.2f}x as fast as {self.over} (± {shown} %)"
        alike = f"{self.of} is as fast as {self.over}, as far as the noise tells (± {shown} %)"
        measured = f"measured {self.date} on {self.device}" if self.device else f"measured in {self.file}"
        return f"{faster if self.differs else alike}, {measured}"

    @property
    def differs(self) -> bool:
        """Whether ``of`` is faster by more than the noise."""
        return is_faster(self.ratio, self.noise)
