"""Workers of `attnreg verify`: those that end are named, and the others go on; a script needs no guard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.workers.calls import Broken, Unwilling, doubled

from attnreg.conformance.workers import Ended, Workers
from attnreg.machine.worker import Worker, WorkerError

KILLED = Ended("its process ended with signal 9 (SIGKILL)")


@pytest.mark.parametrize("jobs", [None, 1, 3])
def test_items_come_in_order_with_their_results(jobs: int | None) -> None:
    with Workers(jobs, {}) as workers:
        assert [*workers.map(doubled, range(10))] == [(i, 2 * i) for i in range(10)]
        # the processes are kept
        assert [*workers.map(doubled, [4])] == [(4, 8)]
    assert workers.ended == []


def test_an_item_that_ends_its_process_is_named_and_the_others_run() -> None:
    with Workers(2, {"die": (1, 4, 5)}) as workers:
        found = dict(workers.map(doubled, range(8)))
    assert found == {i: KILLED if i in (1, 4, 5) else 2 * i for i in range(8)}
    assert workers.ended == []


def test_processes_that_end_before_they_begin_are_named_and_replaced(tmp_path: Path) -> None:
    with Workers(1, Unwilling(tmp_path / "count", 2)) as workers:
        assert dict(workers.map(doubled, range(3))) == {0: 0, 1: 2, 2: 4}
    assert workers.ended == ["its process ended with signal 9 (SIGKILL) before it began"] * 2


def test_where_none_begins_the_run_ends_with_an_error_that_names_each(tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught, Workers(1, Unwilling(tmp_path / "count", 99)) as workers:
        list(workers.map(doubled, range(3)))
    assert str(caught.value) == "; ".join(["its process ended with signal 9 (SIGKILL)"] * 12)


def test_where_each_ends_by_itself_no_more_are_tried_than_three() -> None:
    with pytest.raises(WorkerError) as caught, Workers(1, Broken()) as workers:
        list(workers.map(doubled, range(3)))
    assert str(caught.value) == "; ".join(["its process ended with exit status 1"] * 3)


def test_a_process_that_ends_between_two_items_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with Workers(1, {}) as workers:
        items = workers.map(doubled, range(2))
        assert next(items) == (0, 0)
        assert next(items) == (1, 2)
        (idle,) = _settled(workers)
        idle.process.kill()
        idle.process.wait()
        assert dict(workers.map(doubled, [7])) == {7: 14}
        (idle,) = _settled(workers)
        idle.process.kill()
        idle.process.wait()
    assert workers.ended == ["its process ended with signal 9 (SIGKILL) between two cases"] * 2


def _settled(workers: Workers) -> list[Worker]:
    for thread in workers._threads:
        thread.join()
    return workers._idle


def test_what_cannot_be_sent_is_an_error_and_no_wait() -> None:
    with pytest.raises(Exception, match=r"pickle|local object"), Workers(1, {}) as workers:
        list(workers.map(doubled, [lambda: 1]))  # type: ignore[list-item]


def test_a_run_that_is_left_early_ends_its_processes() -> None:
    with Workers(2, {"seconds": 30.0, "die": (0,)}) as workers:
        pass
    with Workers(2, {"die": (0,)}) as workers:
        assert next(workers.map(doubled, range(100))) == (0, KILLED)
    assert not any(worker.alive for worker in (*workers._idle, *workers._busy))


SCRIPT = """
import attnreg
print("begun", flush=True)
(found,) = attnreg.verify(["CPU_ATTN"], size="claims", jobs=2)
print(found.proven, found.problems, found.ended)
"""


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("begun\nTrue [] []\n", 0), done.stderr
