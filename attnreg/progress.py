"""Progress on a terminal, for work that takes seconds: a bar, which pulses while the amount of work is not known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

# called with the amount of work that is done and a text on it; and with the whole amount, if that is known now
Report = Callable[..., None]
# seconds before anything is shown: a short command shows nothing
_DELAY = 0.5


@contextmanager
def progress(console: Console | None, what: str, total: int | None = None) -> Iterator[Report]:
    """Shows progress inside the block, and clears it at its end. Nothing is shown without a terminal.

    The block calls ``report(done, text)``, or ``report(done, text, total)`` once it knows the whole amount.

    - console: a console on standard error; None to show nothing.
    - what: the work in words, until the first report.
    - total: the whole amount; with None the bar pulses.
    """
    if console is None or not console.is_terminal or console.is_dumb_terminal:
        yield lambda done, text, total=None: None
        return
    display = _Display(console, what, total)
    timer = threading.Timer(_DELAY, display.start)
    timer.daemon = True
    timer.start()
    try:
        yield display.report
    finally:
        timer.cancel()
        display.stop()


class _Display:
    """The display of one work. It may be started by another thread, and not after it was stopped."""

    def __init__(self, console: Console, what: str, total: int | None) -> None:
        self._console, self._state = console, (0, what, total)
        self._lock = threading.Lock()
        self._bar: tuple[Progress, TaskID] | None = None
        self._stopped = False

    def start(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._stopped:
                return
            text = TextColumn("{task.description}", markup=False)
            bar = Progress(BarColumn(20), TimeElapsedColumn(), text, console=self._console, transient=True)
            self._bar = bar, bar.add_task("", total=None)
            self._update()
            bar.start()

    def report(self, done: int, text: str, total: int | None = None) -> None:
        with self._lock:
            self._state = done, text, total if total is not None else self._state[2]
            self._update()

    def _update(self) -> None:
        if self._bar is not None:
            (bar, task), (done, text, total) = self._bar, self._state
            count = "" if total is None else f"{done}/{total} "
            bar.update(task, completed=done, description=f"{count}{text}", total=total)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._bar is not None:
                self._bar[0].stop()
