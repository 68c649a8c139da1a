"""The work of `attnreg tune`: plans the grid, times it, and writes the samples and the overlay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from attnreg.analysis.timings.machines import impossible, of_the_future
from attnreg.analysis.timings.samples import SamplesError, read_samples
from attnreg.errors import Location, Problem, RegistryError, RequestError, counted, escaped
from attnreg.files import held, write_text
from attnreg.machine.probe import probe
from attnreg.progress import progress
from attnreg.tuning.grid import PlannedCell, Workload, grid
from attnreg.tuning.journal import Journal
from attnreg.tuning.overlay import overlay_text
from attnreg.tuning.run import TuningRun, estimate, new_samples, tune, without_few_turns

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.selection.question import Question
    from attnreg.tuning.device import Device

# seconds after which a kernel counts as hanging; some compile for a minute
_PATIENCE = 120.0


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A run of `attnreg tune`: the layers and workloads to time, the device, and the output file.

    patience: seconds in which a kernel must answer, its compilation included; None: 120, less in a short run. console:
    shows the progress; None: lines on standard error.
    """

    registry: Registry
    device: Device
    questions: Sequence[Question]
    workloads: Sequence[Workload]
    output: Path
    minutes: float
    patience: float | None = None
    console: Console | None = None

    @property
    def samples_file(self) -> Path:
        """The file of samples, beside the overlay."""
        return self.output.with_suffix(".samples.jsonl")

    @property
    def platform(self) -> Platform:
        """The platform of the device."""
        return self.device.platform

    def planned(self) -> list[PlannedCell]:
        """The grid. Raises `RequestError` if there is nothing to compare."""
        if not self.registry.imports:
            message = f"nothing of {self.registry.title} can be timed: "
            message += "it describes another engine, whose modules are not imported"
            raise RequestError(message, "leave --registry out to time attnreg's own backends")
        # probed in a child process, because an import may hang or crash
        rows = [row for row in self.registry.backends.values() if self.platform.platform in row.platforms]
        modules = {
            f"{row.name}/{v.name}" if v.name else row.name: v.module for row in rows for v in row.variants if v.module
        }
        reasons = probe(sorted(set(modules.values())))
        unfit = {name: why for name, module in modules.items() if (why := reasons[module])}
        cells = grid(self.questions, self.workloads, self.registry, self.platform, unfit)
        if not any(len(each.backends) > 1 for each in cells):
            refused = dict(r for each in cells for r in each.refused)
            why = "; ".join(f"{name}: {text}" for name, text in refused.items())
            raise RequestError("nothing to compare: for no layer do two backends load here", why)
        return [each for each in cells if len(each.backends) > 1]

    def dry_lines(self, planned: Sequence[PlannedCell]) -> Iterator[str]:
        """Lines on the cells that would run, and on the time they take."""
        seconds = estimate(planned, self.device.torch)
        limit = f", and at most {self.minutes:g} min" if seconds > self.minutes * 60 else ""
        where = f"{self.platform.platform} {self.platform.arch}"
        yield f"{counted(len(planned), 'cell')} on {where}, about {seconds / 60:.1f} min{limit}"
        for each in planned:
            yield f"  {each.cell.words}: {', '.join(each.backends)} · {each.cell.layer}"
        yield from not_timed(planned)

    def measure(self, planned: Sequence[PlannedCell]) -> list[str]:
        """Times the grid and writes both files. Returns lines on the files, and on backends without times.

        Raises `RequestError`, `SamplesError`, and `attnreg.files.FileError`. Another run that writes the same samples
        is an error, because the two runs would disturb each other's times. Earlier times in the file are kept.
        """
        with held(self.samples_file):
            return self._measured(planned)

    def _measured(self, planned: Sequence[PlannedCell]) -> list[str]:
        console = self.console or Console(stderr=True, highlight=False, markup=False)
        fresh = new_samples(self.registry, self.platform, planned, self.device.name)
        journal = Journal(self.samples_file, fresh)
        if journal.resumed:
            console.print(
                f"going on with {self.samples_file}: {counted(journal.resumed, 'turn')} there already", soft_wrap=True
            )
        # a hanging kernel must not use up all of the time
        timeout = min(_PATIENCE, 15 + 30 * self.minutes) if self.patience is None else self.patience
        run = TuningRun(self.registry, self.platform, self.device.torch, timeout)
        for line in not_timed(planned):
            console.print(escaped(line), soft_wrap=True)
        with _reporting(console, len(planned)) as report:
            try:
                begun = tune(run, planned, journal, seconds=self.minutes * 60, report=report)
            except KeyboardInterrupt:
                report.say(f"interrupted: what was timed is in {self.samples_file}; the same command goes on with it")
                raise
        without_few_turns(journal.samples)
        journal.sign()
        lines = [f"wrote {self.samples_file}"]
        if begun < len(planned):
            lines.append(
                f"{len(planned) - begun} of {counted(len(planned), 'cell')} left: run the same command again to go on"
            )
        return [*lines, *write_orders(self.samples_file, self.registry, self.output)]


def write_orders(file: Path, registry: Registry, output: Path) -> list[str]:
    """Writes the overlay that follows from a file of samples. Returns lines on it.

    Raises `SamplesError` for a file that no run can have written, and if no valid order follows. Raises `RequestError`
    for samples that the named machine cannot have taken, and for samples that rank nothing. Raises
    `attnreg.files.FileError`.
    """
    samples = read_samples(file)
    if why := impossible(samples, registry.vocabulary) or of_the_future(samples):
        raise RequestError(f"{file}: {why}", "such a file is written by `attnreg tune` alone")
    try:
        text = overlay_text(samples, registry, os.path.relpath(file, output.parent))
    except RegistryError as e:
        # the user has never seen this overlay, so its places do not help
        where = Location(str(file), 1, 1)
        raise SamplesError(
            Problem(where, f"no order follows from them: {p.message}", p.help) for p in e.problems
        ) from None
    except RequestError as e:
        raise RequestError(f"{file}: {e.message}", e.help) from None
    write_text(output, text)
    return [f"wrote {output}: see what moves with `attnreg diff {registry.base} {output}`"]


def not_timed(planned: Sequence[PlannedCell]) -> Iterator[str]:
    """A line for each backend without a cell, with the reason, such as a wrong version of its package."""
    used = {name for each in planned for name in each.backends}
    refused = {name: why for each in planned for name, why in each.refused}
    yield from (f"  not timed: {name}: {why}" for name, why in refused.items() if name not in used)


class _Lines:
    """Prints the progress of a run in lines."""

    def __init__(self, console: Console, advance: Any) -> None:
        self.console, self.advance = console, advance

    def cell(self, planned: PlannedCell, number: int) -> None:
        self.advance(number, f"{planned.cell.words} · {planned.cell.layer}")

    def say(self, text: str) -> None:
        self.console.print(escaped(text), soft_wrap=True)

    def problem(self, planned: PlannedCell, backend: str, text: str) -> None:
        where = f"{planned.cell.words} · {planned.cell.layer}"
        self.console.print(f"{backend}, {where}: {escaped(text)}", soft_wrap=True)


@contextmanager
def _reporting(console: Console, total: int) -> Iterator[_Lines]:
    """A bar on a terminal; elsewhere a line for each cell."""
    if not console.is_terminal:
        yield _Lines(console, lambda n, text: console.print(f"{n + 1}/{total} {text}", soft_wrap=True))
        return
    with progress(console, "starting", total) as report:
        yield _Lines(console, report)
