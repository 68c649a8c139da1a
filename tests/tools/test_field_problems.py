"""docs/field_problems.md shows what its commands print; the generator's own test holds that the page is fresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.pages.field_problems import PROBLEMS, missing, prepare, run


def parameters() -> list[Any]:
    out = []
    for number, problem in enumerate(PROBLEMS, 1):
        if "run_by" in problem:
            skip = pytest.mark.skip(reason=f"{problem['run_by']} runs it, which is part of make test")
            out.append(pytest.param(problem, id=str(number), marks=skip))
            continue
        slow = [pytest.mark.slow(reason=problem["slow"])] if "slow" in problem else []
        out.append(pytest.param(problem, id=str(number), marks=slow))
    return out


@pytest.mark.parametrize("problem", parameters())
def test_commands_print_what_the_page_shows(
    problem: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "needs" in problem:
        pytest.importorskip(problem["needs"], reason=f"{problem['needs']} is not installed")
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    for step in problem.get("shown", ()):
        status, printed = run(step)
        assert not missing(step, printed), printed
        assert status == step.get("status", 0), printed


def test_every_problem_has_a_verdict_that_its_entry_bears_out() -> None:
    """`yes` is shown and lacks nothing; whatever else lacks something that is named."""
    assert len(PROBLEMS) == 60
    for number, problem in enumerate(PROBLEMS, 1):
        assert problem["verdict"] in ("yes", "partly", "no"), number
        assert ("missing" in problem) == (problem["verdict"] != "yes"), number
        if problem["verdict"] == "yes":
            assert any(step["prints"] for step in problem.get("shown", ())), number


def test_a_line_that_is_not_printed_is_found() -> None:
    step = {"prints": ["a  b", "c"]}
    assert missing(step, "x a b\nc d\n") == []
    assert missing(step, "c\na b\n") == ["c"]
    assert missing(step, "c\n") == ["a  b", "c"]
