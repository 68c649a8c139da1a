"""Families in processes of their own: each class within limits, and a class that ends its process is named."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from transformers_sweep.record import Row, no_row

# of one class: of the processor; of the clock, which runs faster on a busy machine; and of memory
PROCESSOR_SECONDS, SECONDS, BYTES = 120, 900, 10 << 30
# memory of a process that has built many models is not given back
FAMILIES = 30
_SAID = {
    signal.SIGPROF: "took more than its time of the processor",
    signal.SIGALRM: "took more than its time",
    signal.SIGKILL: "killed by SIGKILL, as for want of memory",
}
# a family, and what is called with the name of each of its classes -> its rows
SweepOne = Callable[[str, Callable[[str], None]], list[Row]]
_START = multiprocessing.get_context("spawn")


class Worker:
    """A process that sweeps one family after another. family, name: the family and the class that it is at.

    one: what sweeps a family; `compare.sweep_family`, if none is given.
    """

    def __init__(self, one: SweepOne | None = None, seconds: float = PROCESSOR_SECONDS, device: str = "cpu") -> None:
        self.pipe, theirs = _START.Pipe()
        self._process = _START.Process(target=_work, args=(theirs, one, seconds, device), daemon=True)
        self._process.start()
        theirs.close()
        self.family = self.name = ""
        self.done = 0
        self.since = 0.0

    def ask(self, family: str) -> None:
        """Begins a family; `answer` has what comes of it."""
        self.family, self.name, self.since = family, "", time.monotonic()
        # a process that is gone says so where its answer is read
        with suppress(BrokenPipeError):
            self.pipe.send(family)

    def answer(self) -> list[Row] | None:
        """The rows of the family, a row of the class that ended the process, or None: another class has begun."""
        try:
            said: list[Row] | str = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            self.done = FAMILIES
            return [no_row(self.family, self.name, "died", _cause(self._process.exitcode or 0))]
        if isinstance(said, str):
            self.name = said
            return None
        self.done += 1
        return said

    def rows(self, family: str) -> list[Row]:
        """The rows of a family, waited for."""
        self.ask(family)
        while (rows := self.answer()) is None:
            pass
        return rows

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join()


def sweep(
    asked: Sequence[str], count: int, device: str, tell: Callable[[list[Worker]], None]
) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each family, in the order in which they end; ``tell`` is called every second with the workers."""
    waiting, busy = deque(asked), list[Worker]()
    try:
        while waiting or busy:
            while waiting and len(busy) < count:
                busy.append(Worker(device=device))
                busy[-1].ask(waiting.popleft())
            ready = wait([worker.pipe for worker in busy], timeout=1)
            for worker in [worker for worker in busy if worker.pipe in ready]:
                rows = worker.answer()
                if rows is None:
                    continue
                yield worker.family, rows
                if waiting and worker.done < FAMILIES:
                    worker.ask(waiting.popleft())
                else:
                    busy.remove(worker)
                    worker.stop()
            tell(busy)
    finally:
        for worker in busy:
            worker.stop()


def _of_transformers(device: str) -> SweepOne:
    """What sweeps a family of transformers on a device."""
    # here and not in the process that asks: they take seconds to import
    import torch
    import transformers

    from transformers_sweep.compare import sweep_family

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    torch.set_default_device(device)
    # the rounding of convolutions, amplified, is no difference of attention
    torch.backends.cudnn.allow_tf32 = False
    return sweep_family


def _work(pipe: Connection, given: SweepOne | None, seconds: float, device: str) -> None:
    """What a process does: a family is asked, the name of each of its classes and then their rows are answered."""
    one = given or _of_transformers(device)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))

    def begin(name: str) -> None:
        pipe.send(name)
        # their signals end a process, in whatever code it hangs
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)

    with suppress(EOFError):
        while True:
            rows = one(pipe.recv(), begin)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send(rows)


def _cause(code: int) -> str:
    if code >= 0:
        return f"ended its process with exit status {code}"
    number = signal.Signals(-code)
    return _SAID.get(number, f"killed by {number.name}")
