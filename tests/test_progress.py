"""Progress is shown on terminals alone, after a moment, and leaves nothing behind."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from attnreg import progress as module
from attnreg.cli.output import error_terminal, guarded_streams
from attnreg.progress import progress


class Terminal(io.StringIO):
    """A stream that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, console: Console, *reports: tuple[int, str, int | None]) -> str:
    """What a console gets of a work that makes some reports; nothing waits for a clock."""
    display = module._Display(console, "begins", None)
    display.start()
    for report in reports:
        display.report(*report)
    display._bar[0].refresh()  # type: ignore[index]
    display.stop()
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_terminal_shows_how_much_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=Terminal(), force_terminal=True, width=80)
    text = shown(monkeypatch, console, (1, "[A]", None), (3, "B", 7))
    assert "begins" in text
    assert "3/7 B" in text


def test_a_stopped_display_does_not_start() -> None:
    console = Console(file=Terminal(), force_terminal=True, width=80)
    display = module._Display(console, "begins", 3)
    display.stop()
    display.start()
    display.report(1, "late", None)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


CONSOLES = [
    None,
    Console(file=io.StringIO()),
    Console(file=Terminal(), force_terminal=True, _environ={"TERM": "dumb"}),
]


@pytest.mark.parametrize("console", CONSOLES, ids=["none", "a pipe", "a dumb terminal"])
def test_nothing_is_shown_elsewhere(console: Console | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY", 0.0)
    with progress(console, "work") as report:
        report(1, "text")
        report(2, "text", 3)
    assert console is None or console.file.getvalue() == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(("out", "err"), [(True, False), (False, True), (False, False)])
def test_a_pipe_gets_no_console(out: bool, err: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal() if out else io.StringIO())
    monkeypatch.setattr(sys, "stderr", Terminal() if err else io.StringIO())
    with guarded_streams():
        assert error_terminal() is None


def test_the_console_for_progress_writes_escape_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", err)
    with guarded_streams():
        assert error_terminal(shown=False) is None
        console = error_terminal()
        assert console is not None
        console.file.write("\x1b[2K")
    assert err.getvalue() == "\x1b[2K"
