"""Runs of `attnreg tune`: kernels that crash, hang, raise and are wrong end no run; an interrupt loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.registries import tiny
from support.workers import tuning_benches
from support.workers.tuning_benches import Told

import attnreg
from attnreg import AttentionRequest, Platform
from attnreg.analysis.timings.ranking import ranked
from attnreg.analysis.timings.samples import Cell, read_samples
from attnreg.tuning import worker
from attnreg.tuning.command import not_timed
from attnreg.tuning.grid import PlannedCell, _usable, workloads_of
from attnreg.tuning.journal import Journal
from attnreg.tuning.run import LEAST_TURNS, TuningRun, new_samples, tune, without_few_turns

BACKENDS = ("SLOW", "FAST", "WRONG", "DIES", "HANGS", "RAISES", "EXITS", "LOST")
LAYER = AttentionRequest(head_size=64, num_heads=4, num_kv_heads=2)
HERE = Platform(platform="gpu", arch="g1", packages={"lib": "1"})


def planned(*backends: str, cells: int = 1) -> list[PlannedCell]:
    return [PlannedCell(Cell(LAYER, 1, 1, 64 + i), backends, ()) for i in range(cells)]


def run(path: Path, plan: list[PlannedCell], told: Told, seconds: float = 60.0) -> Journal:
    registry = tiny.load({name: tiny.row() for name in (*BACKENDS, "STALLS")})
    journal = Journal(path, new_samples(registry, HERE, plan, "a device"))
    # a busy machine takes seconds to start a process; the one that hangs is waited for in vain
    running = TuningRun(registry, HERE, "cpu", 60.0, tuning_benches.make)
    hung = [running.process(name) for name in ("HANGS", "STALLS") if name in plan[0].backends]
    for process in hung:
        if "STALLS" in plan[0].backends:
            # it has started, however busy the machine is
            process.ask(plan[0].cell)
            process.answer()
        process.timeout = 2.0
    try:
        tune(running, plan, journal, seconds=seconds, report=told)
    finally:
        assert not running.processes
    assert all(process.process.returncode == -signal.SIGKILL for process in hung)
    return journal


def test_what_fails_is_said_and_not_ranked_and_the_others_are_timed(tmp_path: Path) -> None:
    told = Told()
    journal = run(tmp_path / "s.jsonl", planned(*BACKENDS), told)
    problems = dict(told.problems)
    assert problems["LOST"] == "RuntimeError: CUDA error: the device is lost"
    assert problems["WRONG"].startswith("wrong: output[0, 0, 0] is 1")
    assert problems["DIES"] == "crashed: its process ended with signal 11 (SIGSEGV)"
    assert problems["HANGS"] == "no answer within 2 s: it hangs, or compiles for longer (--patience)"
    assert problems["RAISES"] == "RuntimeError: CUDA error: the launch timed out and was terminated"
    assert problems["EXITS"] == "crashed: its process ended with exit status 3"
    assert ranked(journal.samples, [0], BACKENDS) == ["FAST", "SLOW"]
    without_few_turns(journal.samples)
    journal.sign()
    found = read_samples(tmp_path / "s.jsonl")
    assert found.problems.keys() == {(0, name) for name in problems}
    assert all(len(turns) >= LEAST_TURNS for turns in found.turns.values())
    assert {name for _, name in found.turns} == {"FAST", "SLOW"}


def test_a_kernel_that_hangs_is_ended_and_the_run_goes_on_with_another_process(tmp_path: Path) -> None:
    """It hung between two turns: of that cell nothing of it is ranked, and the next cell has it whole."""
    told = Told()
    journal = run(tmp_path / "s.jsonl", planned("FAST", "STALLS", cells=2), told)
    assert told.problems == [("STALLS", "no answer within 2 s: it hangs, or compiles for longer (--patience)")]
    assert told.cells == [0, 1]
    assert len(journal.samples.turns[0, "FAST"]) >= LEAST_TURNS
    assert all(len(journal.samples.turns[1, name]) >= LEAST_TURNS for name in ("FAST", "STALLS"))
    without_few_turns(journal.samples)
    journal.sign()
    assert read_samples(tmp_path / "s.jsonl").problems == {
        (0, "STALLS"): "no answer within 2 s: it hangs, or compiles for longer (--patience)"
    }


def test_a_process_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hold one in the kernel of the system, where no signal reaches it."""
    monkeypatch.setattr("attnreg.machine.worker._ENDING", 0.1)
    process = worker.Process(tuning_benches.make, "HANGS", None, HERE, "cpu", timeout=60.0)
    # one that is stopped does not see that its pipe is closed
    process.process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as held:
        held.setattr("subprocess.Popen.kill", lambda self: None)
        process.ask(planned("HANGS")[0].cell)
        process.end()
        assert process.alive
    process.process.kill()
    process.process.wait()


KILLED_RUN = """
import os, signal
from support.workers import tuning_benches
from attnreg.tuning.worker import Process
if __name__ == "__main__":
    processes = [Process(tuning_benches.make, name, None, None, "cpu", timeout=60.0) for name in ("FAST", "HANGS")]
    for process in processes:
        process.ask(object())
    processes[0].answer()
    print("started", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kernel_that_hangs_ends_with_a_run_that_was_killed(tmp_path: Path) -> None:
    """Both processes hold the end of the pipe that is read here to its end."""
    script = tmp_path / "killed_run.py"
    script.write_text(KILLED_RUN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, env=environment, timeout=60, check=False)
    assert (found.stdout, found.returncode) == (b"started\n", -signal.SIGKILL)


def test_a_backend_that_crashes_again_and_again_is_given_up(tmp_path: Path) -> None:
    told = Told()
    run(tmp_path / "s.jsonl", planned("FAST", "SLOW", "EXITS", cells=5), told)
    assert [text.partition(":")[0] for _, text in told.problems] == [
        *["crashed"] * 3,
        *["crashed, hung or lost its device 3 times before, and is not tried again"] * 2,
    ]
    assert told.cells == [0, 1, 2, 3, 4]


def test_each_cell_after_a_lost_device_begins_in_another_process(tmp_path: Path) -> None:
    """An error of the device ends what a process can do; the first turn of each cell shows that it was another's."""
    told = Told()
    journal = run(tmp_path / "s.jsonl", planned("FAST", "LOST", cells=4), told)
    assert [text.partition(":")[0] for _, text in told.problems] == [
        *["RuntimeError"] * 3,
        "crashed, hung or lost its device 3 times before, and is not tried again",
    ]
    assert {name for _, name in journal.samples.turns} == {"FAST"}


def test_a_process_that_cannot_be_started_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **more: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("attnreg.machine.worker.subprocess.Popen", refused)
    told = Told()
    run(tmp_path / "s.jsonl", planned("FAST", "SLOW"), told)
    assert {text for _, text in told.problems} == {"no process could be started: Resource temporarily unavailable"}


def test_samples_say_the_version_of_attnreg_where_a_kernel_is_its_own(default: attnreg.Registry) -> None:
    own = new_samples(default, HERE, planned("TRITON_ATTN", "FLASH_ATTN/FA3"), "a device").machine["packages"]
    assert own == {"attnreg": attnreg.__version__, "lib": "1"}
    other = new_samples(tiny.load({"A": tiny.row(), "B": tiny.row()}), HERE, planned("A", "B"), "a device")
    assert other.machine["packages"] == {"lib": "1"}


def test_an_interrupt_loses_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    path, plan = tmp_path / "s.jsonl", planned("FAST", "SLOW", cells=3)
    with pytest.raises(KeyboardInterrupt):
        run(path, plan, Told(interrupts=1))
    assert {cell for cell, _ in read_samples(path, unfinished=True).turns} == {0}
    before = read_samples(path, unfinished=True).turns
    journal = run(path, plan, Told())
    assert journal.resumed == sum(map(len, before.values()))
    assert {cell for cell, _ in journal.samples.turns} == {0, 1, 2}
    assert journal.samples.turns[0, "FAST"] == before[0, "FAST"]


def test_the_time_is_bounded(tmp_path: Path) -> None:
    told = Told()
    journal = run(tmp_path / "s.jsonl", planned("FAST", "SLOW", cells=50), told, seconds=0.01)
    assert len(told.cells) < 50
    without_few_turns(journal.samples)
    assert all(len(turns) >= LEAST_TURNS for turns in journal.samples.turns.values())


@pytest.mark.parametrize(("decode", "prefill"), [([], []), ([(2, 65)], [(1, 32)])])
def test_workloads(decode: Any, prefill: Any) -> None:
    found = workloads_of(decode, prefill, "cpu")
    assert all(w.requests > 0 and w.queries > 0 for w in found)
    assert not decode or found == [(2, 1, 64), (1, 32, 0)]
    with pytest.raises(ValueError, match="one token says nothing"):
        workloads_of([(1, 1)], [], "cpu")
    for decode, prefill in (([(2**31, 64)], []), ([], [(1, 2**31)])):
        with pytest.raises(ValueError, match="less than 2,147,483,648 requests"):
            workloads_of(decode, prefill, "cpu")


def test_the_reason_is_that_of_the_backend_which_is_left_out() -> None:
    """A fallback of the registry lets its order decide, whose first candidate is another backend."""
    module = "attnreg.kernels.torch_sdpa"
    registry = tiny.load(
        {
            "A": tiny.row(module=module, capabilities={"head_sizes": [128]}),
            "B": tiny.row(module=module, capabilities={"kv_dtypes": "fp8"}),
            "C": tiny.row(module=module),
        },
        fallbacks=[{"when": {"arch": "g1"}, "only": ["kv_dtype", "head_size"], "because": "so it is"}],
    )
    names, refused = _usable(LAYER, registry, HERE, {})
    assert names == ("C",)
    assert dict(refused) == {"A": "head_size is 64; supported: 128", "B": "kv_dtype is auto; supported: fp8"}


def test_what_is_not_timed_is_said_with_the_reason() -> None:
    why = "needs package lib>=2"
    plan = [PlannedCell(Cell(LAYER, 1, 1, 64), ("FAST", "SLOW"), (("OLD", why),)), *planned("OLD", "FAST")]
    assert list(not_timed(plan[:1])) == [f"  not timed: OLD: {why}"]
    # it is timed for another layer
    assert list(not_timed(plan)) == []


def test_a_device_that_is_lost_ends_its_process_after_the_answer() -> None:
    benches = worker.Benches(tuning_benches.make, "RAISES", None, HERE, "cpu")  # type: ignore[arg-type]
    assert benches(Cell(LAYER, 1, 1, 64)) == "RuntimeError: CUDA error: the launch timed out and was terminated"
    assert benches.over


@pytest.mark.parametrize("moment", ["as it starts", "before a turn", "between two turns"])
def test_a_process_that_is_killed_is_named_and_the_others_are_timed(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = worker.Process.ask

    def ask(self: worker.Process, cell: Cell | None) -> None:
        """Kill the process of SLOW at a moment of the run."""
        if self is running.processes.get("SLOW"):
            if moment == "as it starts" or (moment == "before a turn" and cell is None):
                self.process.kill()
            if moment == "between two turns" and cell is None and len(journal.samples.turns.get((0, "SLOW"), ())) == 2:
                self.process.kill()
                self.process.wait()
        asked(self, cell)

    plan, told = planned("FAST", "ALIKE", "SLOW"), Told()
    registry = tiny.load({name: tiny.row() for name in ("FAST", "ALIKE", "SLOW")})
    journal = Journal(tmp_path / "s.jsonl", new_samples(registry, HERE, plan, "a device"))
    running = TuningRun(registry, HERE, "cpu", 60.0, tuning_benches.make)
    monkeypatch.setattr(worker.Process, "ask", ask)
    tune(running, plan, journal, seconds=60.0, report=told)
    assert told.problems == [("SLOW", "crashed: its process ended with signal 9 (SIGKILL)")]
    assert {name for _, name in journal.samples.turns} >= {"FAST", "ALIKE"}
    assert all(len(journal.samples.turns[0, name]) >= LEAST_TURNS for name in ("FAST", "ALIKE"))


def test_a_process_that_ends_after_its_last_turn_is_named(tmp_path: Path) -> None:
    plan, told = planned("FAST", "SLOW"), Told()
    registry = tiny.load({name: tiny.row() for name in ("FAST", "SLOW")})
    journal = Journal(tmp_path / "s.jsonl", new_samples(registry, HERE, plan, "a device"))
    running = TuningRun(registry, HERE, "cpu", 60.0, tuning_benches.make)
    end = running.end

    def killed() -> dict[str, str]:
        running.processes["SLOW"].process.kill()
        running.processes["SLOW"].process.wait()
        return end()

    running.end = killed  # type: ignore[method-assign]
    tune(running, plan, journal, seconds=60.0, report=told)
    assert told.said == ["SLOW: its process ended with signal 9 (SIGKILL) after its last turn"]
