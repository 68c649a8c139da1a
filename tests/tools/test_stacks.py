"""The stacks: one table, a turn for each, what a run records, and what the page says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import ROOT
from support.registries.forged import file_of
from support.registries.forged import record as record_of

from attnreg import Registry
from attnreg.packages.kernel_code import kernel_digest
from attnreg.packages.records import RecordsError

VERSIONS = {"pydantic": "2.14.3", "torch": "9.1.0+cu130", "triton": "9.2.0"}
PROJECT = """
[project]
dependencies = ["pydantic>=2.7"]
[project.optional-dependencies]
kernels = ["torch>=9", "triton>=9,<9.3; platform_system == 'Linux'"]
"""
TABLE = """
env_list = ["ci", "mine"]
[env.ci]
description = "constraints.txt"
base_python = ["3.11"]
[env.mine]
description = "an engine"
base_python = ["3.12"]
deps = [{ replace = "ref", of = ["env_run_base", "deps"], extend = true }, "torch==9.1.0", "triton==9.2.0"]
"""


@pytest.fixture(scope="module")
def tools(gen_docs: ModuleType) -> Mapping[str, ModuleType]:
    """The modules of the tools, by name."""
    return {"stacks": gen_docs.docs.stacks.stacks, "page": gen_docs.docs.stacks}


@pytest.fixture
def checkout(tmp_path: Path, default: Registry) -> Path:
    """A checkout with a table of its own, and evidence of one GPU."""
    (tmp_path / "tox.toml").write_text(TABLE, encoding="utf-8")
    (tmp_path / "constraints.txt").write_text("# a comment\ntorch==9.0.0\ntriton==9.1.0\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    for name in ("tests/data/stacks", "tests/data/compiled", "registry/evidence"):
        (tmp_path / name).mkdir(parents=True)
    versions = {"attnreg": "0.1.0", "torch": "9.0.0+cu1", "triton": "9.2.0"}
    today = [
        record_of(name, kernel_digest(default, name), 7, versions=versions) for name in ("TRITON_ATTN", "TRITON_MLA")
    ]
    evidence = file_of("a GPU", "cuda", *today, record_of("HOPPER_ATTN", "0123456789abcdef", 5, versions=versions))
    (tmp_path / "registry/evidence/gpu.json").write_text(json.dumps(evidence), encoding="utf-8")
    return tmp_path


def record(checkout: Path, **changes: Any) -> None:
    """Write a record of the stack `mine`."""
    found = {
        "date": "2026-11-28", "python": "3.12.1", "versions": VERSIONS, "passed": 1234,
        "failed": ["tests/a.py::test_b"], "skipped": {"needs a GPU": 2, "needs | a browser": 3},
    }  # fmt: skip
    (checkout / "tests/data/stacks/mine.json").write_text(json.dumps(found | changes), encoding="utf-8")


# the table -----------------------------------------------------------------------------------------------------------


def test_each_python_is_in_a_stack(tools: Mapping[str, ModuleType]) -> None:
    table = tools["stacks"].stacks()
    assert [*table] == ["oldest", "ci", "vllm", "newest"]
    assert {python for row in table.values() for python in row["base_python"]} == {"3.11", "3.12", "3.13"}


def test_each_further_stack_has_its_turn(tools: Mapping[str, ModuleType]) -> None:
    names = ["oldest", "vllm", "newest"]
    turns = [tools["stacks"].in_turn(commits, names) for commits in range(6)]
    assert turns == names * 2


def test_a_stack_enters_ci_once_its_recorded_run_had_no_failure(
    tools: Mapping[str, ModuleType], checkout: Path
) -> None:
    proven = tools["stacks"].proven
    assert proven(["ci", "mine"], checkout) == []
    record(checkout)
    assert proven(["ci", "mine"], checkout) == []
    record(checkout, failed=[])
    assert proven(["ci", "mine"], checkout) == ["mine"]


@pytest.mark.parametrize(("stack", "says"), [("vlm", "no stack is called vlm; "), ("", "no stack is named; ")])
def test_an_unknown_stack_is_refused_with_those_there_are(stack: str, says: str) -> None:
    command = [sys.executable, ROOT / "tools/stacks.py", *filter(None, [stack])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{says}tox.toml has oldest, ci, vllm, newest" in done.stderr


# what is recorded ----------------------------------------------------------------------------------------------------


def test_a_run_is_counted(tools: Mapping[str, ModuleType], tmp_path: Path) -> None:
    """In a process of its own: a run of pytest within a run shares its plug-ins."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(3))\ndef test_good(n): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_without_fixture(broken): pass\n"
        "@pytest.mark.skip(reason='no GPU: none')\n@pytest.mark.parametrize('n', range(2))\ndef test_gpu(n): pass\n"
    )
    script = (
        "import json, pytest, stacks\n"
        "outcome = stacks.Outcome()\n"
        "pytest.main(['-q', '-p', 'no:cacheprovider', '-n', '2', 'test_it.py'], plugins=[outcome])\n"
        "print(json.dumps(outcome.counts))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "tools")}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "passed": 3,
        "failed": ["test_it.py::test_bad", "test_it.py::test_without_fixture"],
        "skipped": {"no GPU: none": 2},
    }


def test_the_records_of_this_checkout_are_of_stacks(tools: Mapping[str, ModuleType]) -> None:
    names = {file.stem for file in (ROOT / tools["stacks"].RECORDS).glob("*.json")}
    assert names <= tools["stacks"].stacks().keys()


# the page ------------------------------------------------------------------------------------------------------------


def lines(blocks: Mapping[str, str], name: str, stack: str) -> list[str]:
    return [" ".join(line.split()) for line in blocks[name].splitlines() if f"`{stack}`" in line or stack in line]


def test_the_page_says_what_was_proven(tools: Mapping[str, ModuleType], checkout: Path) -> None:
    record(checkout)
    blocks = tools["page"].stacks_blocks(checkout)
    versions, proven = lines(blocks, "stacks", "mine")
    assert versions == "| `mine` | an engine | 3.12.1 | 9.1.0 | 9.2.0 | — | — | — |"
    # two rows on a GPU, with the stack's Triton beside another torch
    proof = "1,234 passed, 1 failed, 5 skipped (2026-11-28) | not recorded | a GPU beside torch 9.0.0: 2 rows;"
    assert proven == f"| `mine` | {proof} a GPU beside torch 9.0.0: 1 rows of an earlier kernel |"
    assert lines(blocks, "gpus", "a GPU") == [
        "| a GPU | 9.0.0 | 9.2.0 | — | today's | 2 | 14 |",
        "| a GPU | 9.0.0 | 9.2.0 | — | earlier | 1 | 5 |",
    ]
    assert "- `tests/a.py::test_b`" in blocks["details"]
    assert "- 3: needs \\| a browser" in blocks["details"]
    assert "### ci\n\nNot recorded with the versions of the table: `make record-stack STACK=ci`." in blocks["details"]


def test_no_page_is_made_of_records_that_were_changed(tools: Mapping[str, ModuleType], checkout: Path) -> None:
    file = checkout / "registry/evidence/gpu.json"
    file.write_text(file.read_text().replace('"cases": 7, "refused"', '"cases": 1000000000, "refused"'))
    with pytest.raises(RecordsError, match="'TRITON_ATTN': it was changed after it was written"):
        tools["page"].stacks_blocks(checkout)


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {**VERSIONS, "triton": "9.1.0"}},
        {"versions": {name: version for name, version in VERSIONS.items() if name != "triton"}},
        {"python": "3.13.0"},
        # older than pyproject.toml allows
        {"versions": {**VERSIONS, "pydantic": "1.9"}},
    ],
)
def test_a_record_of_other_versions_proves_nothing(
    tools: Mapping[str, ModuleType], checkout: Path, changes: Mapping[str, Any]
) -> None:
    record(checkout, **changes)
    versions, proven = lines(tools["page"].stacks_blocks(checkout), "stacks", "mine")
    assert versions == "| `mine` | an engine | 3.12 | 9.1.0 | 9.2.0 | — | — | — |"
    assert proven.startswith("| `mine` | not recorded | not recorded |")


def test_a_stack_without_a_record_has_the_versions_that_it_states(
    tools: Mapping[str, ModuleType], checkout: Path
) -> None:
    versions, _ = lines(tools["page"].stacks_blocks(checkout), "stacks", "ci")
    assert versions == "| `ci` | constraints.txt | 3.11 | 9.0.0 | 9.1.0 | — | — | — |"
