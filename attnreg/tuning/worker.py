"""A process for each backend, so that a hanging or crashing kernel does not end the run: its loop and its handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnreg.errors import in_a_line
from attnreg.loader import unloadable
from attnreg.machine.worker import Worker, WorkerError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from attnreg.analysis.timings.samples import Cell
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

    # (cell, backend, registry, platform, device) -> the bench
    Make = Callable[[Cell, str, Registry, Platform, str], Any]


# parts of error messages after which a process can no longer use its device
_LOST = ("CUDA error", "HIP error", "UR error", "No CUDA GPUs are available", "No HIP GPUs are available")


class ProblemError(Exception):
    """Raised for a backend that cannot be timed in a cell; the text says why."""


def lost(problem: str) -> bool:
    """Whether a problem means that the process has lost its device: an error of the device, or no device at all."""
    return any(words in problem for words in _LOST)


def make_bench(cell: Cell, backend: str, registry: Registry, platform: Platform, device: str) -> Any:
    """The bench of a cell by a backend."""
    import torch

    from attnreg.selection.selector import evaluate
    from attnreg.tuning.bench import Bench

    selection = evaluate(cell.request, platform, registry, backend, unloadable=unloadable)
    return Bench(cell, selection, torch.device(device))


class Benches:
    """The handler in the process of a backend: it prepares a cell, or times a turn of the prepared cell.

    over: the device is lost. After such an error this process can no longer run anything on the device.
    """

    def __init__(self, make: Make, backend: str, registry: Registry, platform: Platform, device: str) -> None:
        self._make = make
        self._about = backend, registry, platform, device
        self._bench: Any = None
        self.over = False

    def __call__(self, cell: Cell | None) -> Any:
        """For None the times of a turn. For a cell the reason why it cannot be timed, else ""."""
        try:
            answer = self._bench.turn() if cell is None else self._prepared(cell)
        # a kernel may raise anything
        except (Exception, SystemExit) as e:
            answer, self._bench = in_a_line(e), None
        self.over = isinstance(answer, str) and lost(answer)
        return answer

    def _prepared(self, cell: Cell) -> str:
        self._bench = None
        self._bench = self._make(cell, *self._about)
        if wrong := self._bench.wrong():
            return f"wrong: {wrong}"
        # warm-up: compilation and autotuning at the first calls must not be part of a sample
        self._bench.turn()
        return ""


class Process:
    """A process that times one backend. Raises `ProblemError` if it does not answer, or answers with a problem."""

    def __init__(self, *about: Any, timeout: float) -> None:
        """about: the arguments of `Benches`. timeout: seconds after which a kernel counts as hanging."""
        self.timeout = timeout
        try:
            self._worker = Worker(Benches, *about)
        except WorkerError as e:
            raise ProblemError(str(e)) from None

    def ask(self, cell: Cell | None) -> None:
        """Send a cell to prepare, or None for a turn of the prepared cell."""
        self._worker.ask(cell)

    def answer(self) -> list[float]:
        """The times of a turn; empty after a cell was prepared."""
        try:
            answer = self._worker.answer(self.timeout)
        except WorkerError as e:
            raise ProblemError(
                f"{e}: it hangs, or compiles for longer (--patience)" if e.late else f"crashed: {e}"
            ) from None
        if isinstance(answer, str) and answer:
            raise ProblemError(answer)
        return answer or []

    @property
    def alive(self) -> bool:
        return self._worker.alive

    @property
    def ending(self) -> str:
        """How it ended; "" while it runs."""
        return "" if self.alive else self._worker.ending

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._worker.process

    def end(self) -> None:
        """Kill the process, and wait a few seconds at most: a GPU driver may hold it."""
        self._worker.end()
