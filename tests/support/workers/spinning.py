"""Benches for `attnreg tune` on a GPU, made in processes of their own: a sound kernel, and one that never ends."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _spin_kernel(flag_ptr):  # type: ignore[no-untyped-def]
    while tl.load(flag_ptr, volatile=True) == 0:
        pass


class Sound:
    """Adds numbers, and takes the device's time of it."""

    def __init__(self) -> None:
        self.memory = torch.zeros(1 << 20, device="cuda")

    def wrong(self) -> str:
        return ""

    def call(self) -> None:
        self.memory += 1

    def turn(self) -> list[float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.call()
        end.record()
        end.synchronize()
        return [begin.elapsed_time(end) * 1e3] * 3


class Spins(Sound):
    """Waits on the device for a number that nobody writes, from the third turn on."""

    turns = 0

    def call(self) -> None:
        self.turns += 1
        if self.turns < 3:
            super().call()
        else:
            flag = torch.zeros(1, dtype=torch.int32, device="cuda")
            _spin_kernel[(1,)](flag)


def make(cell: Any, backend: str, registry: Any, platform: Any, device: str) -> Sound:
    """The bench that a backend's name asks for."""
    return Spins() if backend == "SPINS" else Sound()
