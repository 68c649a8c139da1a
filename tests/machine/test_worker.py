"""Workers: they answer, and one that ends at whatever moment is named with its signal; nothing waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.workers.calls import Handler, fails

from attnreg.machine import worker
from attnreg.machine.worker import Worker, WorkerError

# more than a pipe holds
BALLAST = bytes(4 << 20)


def test_it_answers_what_it_is_asked() -> None:
    found = Worker(Handler, 3)
    for request in (1, [2], "three"):
        found.ask(request)
    assert [found.answer() for _ in range(3)] == [3, [2, 2, 2], "three"]
    found.ask("large")
    assert found.answer() == bytes(1 << 20)
    found.end()
    assert not found.alive


def test_what_a_kernel_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    found = Worker(Handler, 1)
    found.ask("print")
    assert found.answer() == "print"
    found.end()
    assert capfd.readouterr().out == ""


def test_large_arguments_and_requests_are_taken() -> None:
    found = Worker(Handler, 2, BALLAST)
    found.ask([BALLAST])
    assert found.answer() == [BALLAST, BALLAST]
    found.end()


@pytest.mark.parametrize(
    ("request_", "how"), [("die", "signal 11 (SIGSEGV)"), ("exit", "exit status 3")], ids=["signal", "status"]
)
def test_one_that_ends_in_a_request_is_named(request_: str, how: str) -> None:
    found = Worker(Handler, 1)
    found.ask(request_)
    with pytest.raises(WorkerError, match=r"^its process ended with ") as caught:
        found.answer()
    assert str(caught.value) == f"its process ended with {how}"
    found.end()


@pytest.mark.parametrize("moment", ["started", "ready", "idle"])
def test_one_that_is_killed_at_a_moment_is_named(moment: str) -> None:
    found = Worker(Handler, 1, BALLAST)
    if moment != "started":
        found.wait_until_ready()
    if moment == "idle":
        found.ask(7)
        assert found.answer() == 7
    found.process.kill()
    found.ask([BALLAST])
    with pytest.raises(WorkerError, match=r"^its process ended with signal 9 \(SIGKILL\)$"):
        found.answer()
    found.end()


def test_one_that_never_reads_does_not_hold_up_the_run() -> None:
    """It is stopped while it is sent more than its pipe holds: that is sent in a thread, and the wait has an end."""
    found = Worker(Handler, 1)
    found.wait_until_ready()
    os.kill(found.process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    found.ask([BALLAST])
    with pytest.raises(WorkerError, match=r"^no answer within 1 s$") as caught:
        found.answer(1.0)
    assert caught.value.late
    assert time.monotonic() - begun < 30
    assert not found.alive


def test_one_whose_start_raises_ends_with_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    found = Worker(fails, BALLAST)
    with pytest.raises(WorkerError, match=r"^its process ended with exit status 1$"):
        found.wait_until_ready()
    assert "ZeroDivisionError: after 4194304 bytes" in capfd.readouterr().err


def test_one_that_is_over_ends_after_its_answer() -> None:
    found = Worker(Handler, 1)
    found.ask("over")
    assert found.answer() == "over"
    found.ask(1)
    with pytest.raises(WorkerError, match=r"^its process ended with exit status 0$"):
        found.answer()


def test_no_module_is_taken_from_the_directory_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pickle", "queue", "signal", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w'); raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    found = Worker(Handler, 5)
    found.ask(1)
    assert found.answer() == 5
    found.end()
    assert not (tmp_path / "ran").exists()


ABANDONED = """
import os, signal
from support.workers.calls import Handler
from attnreg.machine.worker import Worker
workers = [Worker(Handler, 1) for _ in range(2)]
for each in workers:
    each.ask("process")
print(*[each.answer() for each in workers], flush=True)
workers[0].ask("hang")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_those_of_a_run_that_was_killed_end_too() -> None:
    """One of them does nothing, one hangs; both hold the end of the pipe that is read here to its end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", ABANDONED]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    numbers = [int(number) for number in done.stdout.split()]
    assert len(numbers) == 2
    until = time.monotonic() + 30
    while any(Path(f"/proc/{number}").exists() for number in numbers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{number}").exists() for number in numbers)


def test_without_an_interpreter_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.sys, "executable", "")
    with pytest.raises(WorkerError, match=r"^no process could be started: sys.executable is empty$"):
        Worker(Handler, 1)
