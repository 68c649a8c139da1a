"""A process for each backend, so that a kernel that hangs or crashes ends no run: what runs in it, and its handle."""

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

    # a cell, a backend, and what makes its bench
    Make = Callable[[Cell, str, Registry, Platform, str], Any]


# how errors begin after which a process can use its device no more
_LOST = ("CUDA error", "HIP error", "UR error", "No CUDA GPUs are available", "No HIP GPUs are available")


class ProblemError(Exception):
    """Raised for a backend that cannot be timed in a cell; the text says why."""


def lost(problem: str) -> bool:
    """Whether a problem is an error of the device, which ends its context, or the device itself is gone."""
    return any(words in problem for words in _LOST)


def make_bench(cell: Cell, backend: str, registry: Registry, platform: Platform, device: str) -> Any:
    """The bench of a cell by a backend."""
    import torch

    from attnreg.selection.selector import evaluate
    from attnreg.tuning.bench import Bench

    selection = evaluate(cell.request, platform, registry, backend, unloadable=unloadable)
    return Bench(cell, selection, torch.device(device))


class Benches:
    """What runs in the process of a backend: it prepares a cell, or gives a turn of samples of the one prepared.

    over: the device is lost. After such an error nothing runs on it in this process any more, whatever is asked.
    """

    def __init__(self, make: Make, backend: str, registry: Registry, platform: Platform, device: str) -> None:
        self._make = make
        self._about = backend, registry, platform, device
        self._bench: Any = None
        self.over = False

    def __call__(self, cell: Cell | None) -> Any:
        """The times of a turn; of a cell, why it cannot be timed, "" where it can."""
        try:
            answer = self._bench.turn() if cell is None else self._prepared(cell)
        # a kernel may fail in any way
        except (Exception, SystemExit) as e:
            answer, self._bench = in_a_line(e), None
        self.over = isinstance(answer, str) and lost(answer)
        return answer

    def _prepared(self, cell: Cell) -> str:
        self._bench = None
        self._bench = self._make(cell, *self._about)
        if wrong := self._bench.wrong():
            return f"wrong: {wrong}"
        # what is compiled or chosen at the first calls is no part of a sample
        self._bench.turn()
        return ""


class Process:
    """A process that times one backend. Raises `ProblemError` where it does not answer, or answers with a problem."""

    def __init__(self, *about: Any, timeout: float) -> None:
        """about: the arguments of `Benches`. timeout: seconds until a kernel is taken to hang."""
        self.timeout = timeout
        try:
            self._worker = Worker(Benches, *about)
        except WorkerError as e:
            raise ProblemError(str(e)) from None

    def ask(self, cell: Cell | None) -> None:
        """Ask to prepare a cell; with None, for a turn of the one that is prepared."""
        self._worker.ask(cell)

    def answer(self) -> list[float]:
        """The times of a turn; nothing for a cell that is prepared."""
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
        """End the process, whatever it does. One that its driver holds is not waited for long."""
        self._worker.end()
