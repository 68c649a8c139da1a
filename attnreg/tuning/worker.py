"""A process for each backend, so that a kernel that hangs or crashes ends no run: what runs in it, and its handle."""

from __future__ import annotations

import os
import signal
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import TYPE_CHECKING, Any

from attnreg.errors import in_a_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnreg.analysis.timings.samples import Cell
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

    # a cell, a backend, and what makes its bench
    Make = Callable[[Cell, str, Registry, Platform, str], Any]


# seconds that a process has to end once it was killed
_ENDING = 10.0
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

    selection = evaluate(cell.request, platform, registry, backend, to_run=True)
    return Bench(cell, selection, torch.device(device))


def serve(pipe: Connection, make: Make, backend: str, registry: Registry, platform: Platform, device: str) -> None:
    """Answer what the other end of a pipe asks: to prepare a cell, or for a turn of samples of it."""
    # an interrupt is for the run, which ends its processes itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (run := parent_process()) is not None:
        Thread(target=_end_with, args=(run.sentinel,), daemon=True).start()
    bench: Any = None
    while True:
        try:
            cell = pipe.recv()
        # the run has ended, or was killed
        except (EOFError, OSError):
            return
        try:
            if cell is not None:
                bench = None
                bench = make(cell, backend, registry, platform, device)
                answer: Any = ("wrong: " + wrong) if (wrong := bench.wrong()) else ""
                # what is compiled or chosen at the first calls is no part of a sample
                answer = answer or (bench.turn() and "")
            else:
                answer = bench.turn()
        # a kernel may fail in any way
        except (Exception, SystemExit) as e:
            answer, bench = in_a_line(e), None
        try:
            pipe.send(answer)
        except OSError:
            return
        # after such an error nothing runs on the device in this process any more, whatever is asked
        if isinstance(answer, str) and lost(answer):
            return


def _end_with(run: int) -> None:
    """End this process with the run of a sentinel. A kernel that hangs would keep the device of a killed run."""
    wait([run])
    os._exit(1)


class Process:
    """A process that times one backend. Raises `ProblemError` where it does not answer, or answers with a problem."""

    def __init__(self, *about: Any, timeout: float) -> None:
        """about: the arguments of `serve` behind the pipe. timeout: seconds until a kernel is taken to hang."""
        context = get_context("spawn")
        self.timeout = timeout
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *about), daemon=True)
        try:
            self.process.start()
        except OSError as e:
            self.pipe.close()
            raise ProblemError(f"no process could be started: {e.strerror or e}") from None
        finally:
            theirs.close()

    def ask(self, cell: Cell | None) -> None:
        """Ask to prepare a cell; with None, for a turn of the one that is prepared."""
        try:
            self.pipe.send(cell)
        except OSError:
            raise ProblemError(self._ended()) from None

    def answer(self) -> list[float]:
        """The times of a turn; nothing for a cell that is prepared."""
        try:
            if not self.pipe.poll(self.timeout):
                self.end()
                raise ProblemError(
                    f"no answer within {self.timeout:.0f} s: it hangs, or compiles for longer (--patience)"
                )
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise ProblemError(self._ended()) from None
        if isinstance(answer, str) and answer:
            raise ProblemError(answer)
        return answer or []

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def _ended(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        how = (
            f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit status {code}"
        )
        return f"crashed: its process ended with {how}"

    def end(self) -> None:
        """End the process, whatever it does. One that its driver holds is not waited for long."""
        self.process.kill()
        self.process.join(_ENDING)
        self.pipe.close()
