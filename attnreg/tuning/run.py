"""tune(): times backends in turns, cell after cell, until the ranking is clear of noise or the time is over."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from attnreg.analysis.timings.ranking import compared, ranked
from attnreg.analysis.timings.samples import Samples, is_own, kernel_hash
from attnreg.contract import OWN_PACKAGE
from attnreg.tuning.worker import ProblemError, Process, lost, make_bench
from attnreg.version import __version__

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.tuning.grid import PlannedCell
    from attnreg.tuning.journal import Journal
    from attnreg.tuning.worker import Make

LEAST_TURNS, MOST_TURNS = 6, 24
# a ratio with at most this noise needs no more turns
_FINE = 0.01
_MOST_DEATHS = 3
_GIVEN_UP = "crashed, hung or lost its device"
# seconds until the first sample of a cell, and seconds of a turn, for the estimate of a dry run
PREPARING = {"cuda": 4.0, "cpu": 0.6}
TURN = {"cuda": 0.02, "cpu": 0.05}


class TuningReport(Protocol):
    """The receiver of a run's progress."""

    def cell(self, planned: PlannedCell, number: int) -> None: ...

    def problem(self, planned: PlannedCell, backend: str, text: str) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass
class TuningRun:
    """The backends to time; each has a process of its own, which starts when it is first needed."""

    registry: Registry
    platform: Platform
    device: str
    timeout: float
    make: Make = make_bench
    processes: dict[str, Process] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)

    def process(self, backend: str) -> Process:
        """The process of a backend. Raises `ProblemError` if the backend's processes have ended too often."""
        if self.deaths[backend] >= _MOST_DEATHS:
            raise ProblemError(f"{_GIVEN_UP} {_MOST_DEATHS} times before, and is not tried again")
        known = self.processes.get(backend)
        if known is None or not known.alive:
            about = (self.make, backend, self.registry, self.platform, self.device)
            known = self.processes[backend] = Process(*about, timeout=self.timeout)
        return known

    def answer(self, backend: str) -> list[float]:
        """The answer of a backend's process. A process that ended or lost its device is counted, and later replaced."""
        process = self.processes[backend]
        try:
            return process.answer()
        except ProblemError as e:
            if not process.alive or lost(str(e)):
                self.deaths[backend] += 1
                self.processes.pop(backend).end()
            raise

    def end(self) -> dict[str, str]:
        """End the processes. Returns backend -> how its process ended, for processes that ended by themselves."""
        ended = {name: process.ending for name, process in self.processes.items() if not process.alive}
        for process in self.processes.values():
            process.end()
        self.processes.clear()
        return ended


def tune(
    run: TuningRun, planned: Sequence[PlannedCell], journal: Journal, *, seconds: float, report: TuningReport
) -> int:
    """Times the cells until they are done or the seconds are over. Returns the number of cells that were begun.

    It skips cells that the journal has in full. It passes on the errors of `Journal`, and ends every process.
    """
    deadline = time.monotonic() + seconds
    try:
        for number, each in enumerate(planned):
            left = deadline - time.monotonic()
            if left <= 0:
                return number
            report.cell(each, number)
            _cell(run, each, journal, deadline, left / (len(planned) - number), report)
        return len(planned)
    finally:
        for backend, how in run.end().items():
            report.say(f"{backend}: its process ended with {how} after its last turn")
        journal.close()


def _cell(
    run: TuningRun, planned: PlannedCell, journal: Journal, deadline: float, share: float, report: TuningReport
) -> None:
    """Time the backends of one cell. share: the seconds that its turns may take."""
    index, samples = journal.index(planned.cell), journal.samples

    def fails(backend: str, error: ProblemError) -> None:
        journal.add({"problem": str(error), "of": index, "backend": backend})
        report.problem(planned, backend, str(error))

    names = [b for b in planned.backends if (index, b) not in samples.problems]
    if all(len(samples.turns.get((index, b), ())) >= LEAST_TURNS for b in names):
        return
    ready: list[str] = []
    for begun in (True, False):
        for backend in names if begun else [*ready]:
            try:
                if begun:
                    run.process(backend).ask(planned.cell)
                    ready.append(backend)
                else:
                    run.answer(backend)
            except ProblemError as e:
                fails(backend, e)
                ready = [b for b in ready if b != backend]
    start = time.monotonic()
    for turn in range(MOST_TURNS):
        now = time.monotonic()
        enough = turn >= LEAST_TURNS and (now - start > share or _decided(samples, index, ready))
        if not ready or now > deadline or enough:
            return
        # random order, so that no backend always follows the same one
        for backend in random.sample(ready, len(ready)):
            try:
                run.processes[backend].ask(None)
                journal.add({"us": run.answer(backend), "of": index, "backend": backend})
            except ProblemError as e:
                fails(backend, e)
                ready.remove(backend)


def _decided(samples: Samples, index: int, names: Sequence[str]) -> bool:
    """Whether more turns would not change the ranking of a cell."""
    order = ranked(samples, [index], names)
    pairs = [compared(samples, [index], a, b) for a, b in pairwise(order)]
    return all(pair.differs or pair.noise < _FINE for pair in pairs)


def without_few_turns(samples: Samples) -> Samples:
    """The samples without backends that have too few turns to know their noise; a later run times them again."""
    samples.turns = {key: turns for key, turns in samples.turns.items() if len(turns) >= LEAST_TURNS}
    return samples


def new_samples(registry: Registry, platform: Platform, planned: Sequence[PlannedCell], device: str) -> Samples:
    """New samples of this machine, still empty.

    attnreg's version is among the packages if one of the kernels is attnreg's own.
    """
    names = sorted({name for each in planned for name in each.backends})
    own = {OWN_PACKAGE: __version__} if any(is_own(registry, name) for name in names) else {}
    machine = {
        "platform": platform.platform,
        "arch": platform.arch,
        "device": device,
        "packages": {**own, **dict(platform.packages or ())},
    }
    hashes = {name: kernel_hash(registry, name) for name in names}
    return Samples(machine, registry.title, hashes, date.today().isoformat())


def estimate(planned: Sequence[PlannedCell], device: str) -> float:
    """A rough estimate of the seconds that a run takes; kernels that must be compiled first take longer."""
    kind = "cpu" if device.startswith("cpu") else "cuda"
    return sum(PREPARING[kind] + LEAST_TURNS * len(each.backends) * TURN[kind] for each in planned)
