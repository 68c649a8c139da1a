"""How far a sweep is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from transformers_sweep.workers import Worker

EVERY = 5.0


def say(text: str) -> None:
    """Prints a line at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Progress:
    """A context that shows progress where `tell` is called. done: how many of ``total`` families have ended."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        self._begun = self._last = time.monotonic()
        self._bar: Bar | None = None
        if sys.stdout.isatty():
            columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
            self._bar = Bar(*columns, console=Console(), transient=True)
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def tell(self, busy: list[Worker], unlike: int) -> None:
        """Shows what the workers are at, and how many families were unlike the record."""
        now = time.monotonic()
        at = ", ".join(f"{w.name or w.family} {now - w.since:.0f} s" for w in busy)
        if self._bar:
            self._bar.update(self._task, completed=self.done, description=f"{unlike} unlike the record · {at}")
        elif now - self._last >= EVERY:
            self._last = now
            passed = int(now - self._begun)
            say(f"{self.done}/{self.total} · {passed // 60}:{passed % 60:02} · {unlike} unlike the record · at {at}")
