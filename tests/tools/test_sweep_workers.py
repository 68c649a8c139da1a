"""The sweep's processes name a class that ends one, and go on; a run that was cut is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers_sweep import record, sweep, workers
from transformers_sweep.endings import end
from transformers_sweep.record import Journal
from transformers_sweep.workers import Worker


@pytest.mark.slow("processes that import torch and transformers")
@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("signal", "killed by SIGSEGV"),
        ("exit", "ended its process with exit status 3"),
        ("memory", "killed by SIGKILL, as for want of memory"),
        ("hang", "took more than its time of the processor"),
    ],
)
def test_a_class_that_ends_its_process_is_named(family: str, said: str) -> None:
    worker = Worker(end, seconds=2)
    try:
        assert worker.rows("fine")[0]["outcomes"] == {"build": ["not built", "said"]}
        (row,) = worker.rows(family)
        assert (row["class"], row["outcomes"]) == (f"{family.title()}Model", {"build": ["died", said]})
        assert not worker.alive
    finally:
        worker.stop()


@pytest.mark.slow("processes that import torch and transformers")
def test_a_sweep_goes_on_after_a_class_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "Worker", lambda **more: Worker(end, **more))
    told: list[int] = []
    found = dict(workers.sweep(["one", "signal", "two"], 1, "cpu", lambda busy: told.append(len(busy))))
    outcomes = {family: rows[0]["outcomes"]["build"][0] for family, rows in found.items()}
    assert outcomes == {"one": "not built", "signal": "died", "two": "not built"}
    assert max(told) == 1


@pytest.mark.parametrize("said", ["0/7", "8/7", "3", "a/b", "3/7/9"])
def test_what_is_no_part_is_refused(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.main(["--part", said])
    assert "the third of seven is 3/7" in capsys.readouterr().err


def test_the_parts_are_the_whole() -> None:
    parts = [family for part in range(1, 8) for family in sweep.families(part, 7)]
    assert sorted(parts) == sweep.families()


def test_a_run_that_was_cut_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "JOURNALS", tmp_path)
    monkeypatch.setattr(sweep, "families", lambda *part: ["a", "b"])
    asked: list[list[str]] = []

    def swept(left: list[str], *more: Any) -> Any:
        asked.append(left)
        return ((family, end(family, lambda name: None)) for family in left)

    monkeypatch.setattr(sweep, "sweep", swept)
    Journal("cpu-1-of-1", sweep.versions()).begin()
    Journal("cpu-1-of-1", sweep.versions()).add("a", end("a", lambda name: None))
    with (tmp_path / "cpu-1-of-1.jsonl").open("a") as file:
        file.write('["b", [{"fam')
    # 1: the record has no such families
    assert sweep.main(["--check", "--resume"]) == 1
    assert asked.pop() == ["b"]
    assert capsys.readouterr().out.endswith("2 architectures are not as recorded: a, b\n")
    sweep.main([])
    assert asked.pop() == ["a", "b"]
    # what was found with other versions is of no use
    Journal("cpu-1-of-1", {"transformers": "0"}).begin()
    sweep.main(["--resume"])
    assert asked.pop() == ["a", "b"]
