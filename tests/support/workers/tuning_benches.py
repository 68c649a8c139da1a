"""Benches for runs of `attnreg tune` in tests, made in processes of their own: sound ones, and every way to fail."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnreg.tuning.grid import PlannedCell


class Told:
    """Keeps what is told of a run; may interrupt it at a cell."""

    def __init__(self, interrupts: float = math.inf) -> None:
        self.cells: list[int] = []
        self.problems: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.interrupts = interrupts

    def cell(self, planned: PlannedCell, number: int) -> None:
        if number == self.interrupts:
            raise KeyboardInterrupt
        self.cells.append(number)

    def problem(self, planned: PlannedCell, backend: str, text: str) -> None:
        self.problems.append((backend, text))

    def say(self, text: str) -> None:
        self.said.append(text)


class FakeBench:
    """Sleeps as long as its backend's name says, in milliseconds: ``A/2``."""

    def __init__(self, milliseconds: float, wrong: str = "") -> None:
        self.milliseconds, self.error = milliseconds, wrong

    def wrong(self) -> str:
        return self.error

    def turn(self) -> list[float]:
        return [self.milliseconds * 1e3 + (time.perf_counter_ns() % 97) for _ in range(3)]


class Dies(FakeBench):
    """Ends its process at the third turn."""

    turns = 0

    def turn(self) -> list[float]:
        self.turns += 1
        if self.turns == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().turn()


class Lost(FakeBench):
    """Its device is gone after the first turn: whatever its process runs then fails alike, as after a sticky error."""

    gone = False

    def turn(self) -> list[float]:
        if Lost.gone:
            raise RuntimeError("CUDA error: the device is lost")
        Lost.gone = True
        return super().turn()


class Hangs(FakeBench):
    def turn(self) -> list[float]:
        time.sleep(600)
        return []


class Stalls(FakeBench):
    """Hangs at the third turn of the shortest cell, and is sound in others."""

    def __init__(self, keys: int) -> None:
        super().__init__(0.1)
        self.left = 3 if keys == 64 else 1000

    def turn(self) -> list[float]:
        self.left -= 1
        while not self.left:
            time.sleep(600)
        return super().turn()


def make(cell: Any, backend: str, registry: Any, platform: Any, device: str) -> FakeBench:
    """The bench that a backend's name asks for."""
    kinds: dict[str, Any] = {
        "FAST": lambda: FakeBench(1),
        "SLOW": lambda: FakeBench(2),
        "ALIKE": lambda: FakeBench(1.001),
        "WRONG": lambda: FakeBench(0.1, "output[0, 0, 0] is 1, exactly 2; 9 times what rounding explains"),
        "DIES": lambda: Dies(0.1),
        "HANGS": lambda: Hangs(0.1),
        "STALLS": lambda: Stalls(cell.context),
        "LOST": lambda: Lost(0.1),
    }
    if backend == "RAISES":
        raise RuntimeError("CUDA error: the launch timed out and was terminated\nand much more")
    if backend == "EXITS":
        os._exit(3)
    return kinds[backend]()  # type: ignore[no-any-return]
