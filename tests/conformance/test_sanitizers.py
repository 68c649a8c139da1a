"""The runs of sanitizers: what they find, what is recorded of them, and what a machine without one is told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import ROOT
from support.registries.forged import file_of
from support.registries.forged import record as evidence_of

from attnreg.conformance.evidence import save_run
from attnreg.packages.records import read_records

CLEAN = """========= COMPUTE-SANITIZER
5 passed in 3.21s
compiled {"_attention_kernel": 3, "_write_kv_kernel": 1}
========= ERROR SUMMARY: 0 errors
"""
# what compute-sanitizer 2025.3.1 printed
BAD_STORE = """========= Invalid __global__ write of size 4 bytes
=========     at _attention_kernel+0xc0 in attention.py:18
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7fab6ec00000 is out of bounds
"""
RACE = """========= Error: Race reported between Write access at _merge_splits_kernel+0x70 in splits.py:35
=========     and Write access at _merge_splits_kernel+0x70 in splits.py:35 [127 hazards]
"""
ELSEWHERE = """========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::roll_cuda_kernel<c10::BFloat16>(const T1 *, T1 *, long, long)+0x660
"""


@pytest.fixture
def sanitize() -> ModuleType:
    """The command's module."""
    spec = importlib.util.spec_from_file_location("sanitize_command", ROOT / "tests" / "gpu" / "sanitize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tool(sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for compute-sanitizer: it finds what is planted, and else prints the file beside it."""
    made = tmp_path / "compute-sanitizer"
    made.write_text(
        '#!/bin/sh\ncase "$*" in --version) echo "Version 2025.3.1.0 (build)"; exit 0;; *planted*) exit 99;; esac\n'
        f"cat {tmp_path}/says\ngrep -q '^=.* at ' {tmp_path}/says && exit 99\nexit 0\n"
    )
    made.chmod(0o755)
    (tmp_path / "says").write_text(CLEAN)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(made))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    return tmp_path


def test_a_clean_run_is_recorded_beside_the_evidence(sanitize: ModuleType, tool: Path) -> None:
    record = tool / "record"
    record.mkdir()
    file = record / "nvidia_h200.json"
    before = file_of("NVIDIA H200", "cuda", evidence_of("TRITON_ATTN", None))
    file.write_text(json.dumps(before))
    assert sanitize.main(["--record", str(record), "--commit", "c0ffee"]) == 0
    data = json.loads(file.read_text())
    assert data["backends"] == before["backends"]
    assert read_records(file).problems == ()
    assert list(data["runs"]) == ["initcheck", "memcheck", "racecheck"]
    shards = len(sanitize.SELECTION)
    one = data["runs"]["memcheck"]
    assert one["kernels"] == {"_attention_kernel": 3 * shards, "_write_kv_kernel": shards}
    assert (one["tests"], one["errors"], one["commit"]) == (5 * shards, 0, "c0ffee")
    assert one["versions"]["compute-sanitizer"] == "2025.3.1.0"
    assert one["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        (CLEAN + BAD_STORE, "{shards} errors in _attention_kernel"),
        (CLEAN + RACE, "{races} errors in _merge_splits_kernel"),
        (CLEAN.replace("passed", "failed") + "FAILED tests/gpu/x.py::test_y", "FAILED tests/gpu/x.py::test_y"),
        (CLEAN.replace("5 passed", "5 skipped"), ""),
        ("Segmentation fault", ""),
    ],
)
def test_what_is_not_clean_is_said_and_not_recorded(
    sanitize: ModuleType, tool: Path, capsys: pytest.CaptureFixture[str], says: str, problem: str
) -> None:
    (tool / "says").write_text(says)
    assert sanitize.main(["--tools", "memcheck", "--record", str(tool / "record.json")]) == 1
    shards = len(sanitize.SELECTION)
    assert problem.format(shards=shards, races=2 * shards) in capsys.readouterr().out
    assert not (tool / "record.json").exists()


def test_errors_of_kernels_that_are_not_attnregs_are_counted_apart(
    sanitize: ModuleType, tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tool / "says").write_text(CLEAN + ELSEWHERE)
    assert sanitize.main(["--tools", "initcheck"]) == 0
    assert f'"errors": 0, "errors_of_others": {len(sanitize.SELECTION)}' in capsys.readouterr().out


def test_races_are_looked_for_where_the_tool_knows_how_warps_meet(sanitize: ModuleType, tool: Path) -> None:
    said = CLEAN.replace('"_write_kv_kernel": 1', '"prefill_kernel": 2')
    (tool / "says").write_text(said)
    (tool / "compute-sanitizer").write_text(
        f'#!/bin/sh\necho "$*" >> {tool}/calls\ncase "$*" in --version) echo "Version 1";; *planted*) exit 99;; esac\n'
        f"cat {tool}/says\n"
    )
    record = tool / "record.json"
    assert sanitize.main(["--tools", "memcheck,racecheck", "--record", str(record), "--commit", "c0ffee"]) == 0
    runs, shards = json.loads(record.read_text())["runs"], len(sanitize.SELECTION)
    assert runs["memcheck"]["kernels"] == {"_attention_kernel": 3 * shards, "prefill_kernel": 2 * shards}
    assert runs["racecheck"]["kernels"] == {"_attention_kernel": 3 * shards}
    calls = [line.split() for line in (tool / "calls").read_text().splitlines() if "pytest" in line]
    for call in calls:
        asked = {word.removeprefix("kne=") for word in call if word.startswith("kne=")}
        assert asked == (set(sanitize.seen_by("racecheck")) if "racecheck" in call else set())
    assert "prefill_kernel" not in sanitize.seen_by("racecheck")


def test_a_tool_that_finds_nothing_proves_nothing(
    sanitize: ModuleType, tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tool / "compute-sanitizer").write_text("#!/bin/sh\nexit 0\n")
    assert sanitize.main(["--tools", "racecheck"]) == 2
    assert "racecheck: does not find the fault of tests/gpu/planted.py here" in capsys.readouterr().out


def test_a_machine_without_a_sanitizer_is_told_where_it_comes_from(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sanitize, "glob", lambda pattern: [])
    assert sanitize.main([]) == 2
    assert "compute-sanitizer is not on this machine" in capsys.readouterr().out


def test_a_sanitizer_of_a_toolkit_is_found(
    sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "bin" / "compute-sanitizer"
    made.parent.mkdir()
    made.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.find_sanitizer() == str(made)


RECORDS = sorted((ROOT / "registry" / "evidence").glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_are_well_formed(path: Path) -> None:
    data = json.loads(path.read_text())
    assert {"device", "platform", "backends"} <= data.keys() <= {"device", "platform", "backends", "runs"}
    for name, run in data.get("runs", {}).items():
        assert {"attnreg", "torch", "triton"} <= run["versions"].keys(), name
        assert len(run["commit"]) == 40, name
        assert run["errors"] == 0, name
        assert all(isinstance(run[count], int) and run[count] > 0 for count in run.keys() & {"tests", "cases"}), name
        assert all(count > 0 for count in run.get("kernels", {}).values()), name


def test_a_run_replaces_the_one_before(tmp_path: Path) -> None:
    for errors in (3, 0):
        save_run("memcheck", {"errors": errors}, tmp_path, torch.device("cpu"), {"compute-sanitizer": "1"})
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert data["runs"]["memcheck"]["errors"] == 0
    assert data["backends"] == {}
