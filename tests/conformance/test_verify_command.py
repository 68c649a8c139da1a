"""attnreg verify: what it prints, what it returns, and Triton's kernels in their interpreter."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.suite.examples import FULL

from attnreg import Platform, Registry
from attnreg.cli import main
from attnreg.conformance import verify
from attnreg.conformance.evidence import Evidence
from attnreg.version import __version__

CPU = ["--arch", "x86_64", "--size", "claims"]


@pytest.fixture(scope="module")
def sound() -> dict[str, Any]:
    """What a proof of CPU_ATTN finds, one case after the other."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["verify", "CPU_ATTN", *CPU, "--json"]) == 0
    return json.loads(out.getvalue())["CPU_ATTN"]  # type: ignore[no-any-return]


def test_a_proof_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "CPU_ATTN", *CPU]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("CPU_ATTN: proven; ")


def test_a_refutation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # TORCH_SDPA has no sinks: a row that claims them is refuted by its own module
    overlay = tmp_path / "bold.yaml"
    overlay.write_text("backends:\n  TORCH_SDPA: {capabilities: {add: {features: [sinks]}}}\n")
    assert main(["verify", "TORCH_SDPA", *CPU, "--overlay", str(overlay), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["TORCH_SDPA"]
    assert found["problems"]
    assert all("sinks" in problem for problem in found["problems"])


@pytest.mark.parametrize(("problems", "status", "verdict"), [([], 3, "NOT DECIDED"), (["wide: wrong"], 1, "REFUTED")])
def test_what_a_compiler_left_undecided_is_no_refutation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cpu: Platform, problems: list[str],
    status: int, verdict: str,
) -> None:  # fmt: skip
    why = "decode: RuntimeError: a pass failed"
    found = Evidence("CPU_ATTN", cpu, "claims", refused=4, problems=problems, undecided=[why])
    monkeypatch.setattr(verify, "verify", lambda *_, **__: [found])
    assert main(["verify", "CPU_ATTN", *CPU]) == status
    first = f"CPU_ATTN: {verdict}; 0 cases, 4 refusals, 1 not decided, worst error 0% of its bound"
    # as wide as a terminal
    assert capsys.readouterr().out.split() == " ".join((first, *problems, f"not decided: {why}")).split()
    assert main(["verify", "CPU_ATTN", *CPU, "--json"]) == status
    out = json.loads(capsys.readouterr().out)["CPU_ATTN"]
    assert (out["problems"], out["undecided"]) == (problems, [why])


def test_what_proves_nothing_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    overlay = tmp_path / "typo.yaml"
    overlay.write_text("backends:\n  TORCH_SDPA: {module: attnreg.kernels.torch_spda}\n")
    why = "cannot be run: ModuleNotFoundError: No module named 'attnreg.kernels.torch_spda'"
    assert main(["verify", "TORCH_SDPA", *CPU, "--overlay", str(overlay)]) == 1
    assert " ".join(capsys.readouterr().out.split()) == f"TORCH_SDPA: NOT VERIFIED; {why}"
    assert main(["verify", "TORCH_SDPA", *CPU, "--overlay", str(overlay), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["TORCH_SDPA"]
    assert (found["cases"], found["problems"]) == (0, [why])


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "CPU_PREFILL", *CPU]) == 2
    assert capsys.readouterr().err == (
        "attnreg: CPU_PREFILL cannot be verified: the row is knowledge only, attnreg has no kernel module for it\n"
        "  help: these can: CPU_ATTN, TORCH_MLA, TORCH_MLA_SPARSE, TORCH_PREFILL, TORCH_SDPA\n"
    )
    assert main(["verify", "CPU_ATTN", *CPU, "--device", "nonsense"]) == 2
    assert capsys.readouterr().err.startswith("attnreg: PyTorch cannot use the device 'nonsense' here: ")
    assert main(["verify", "--platform", "cuda"]) == 2
    assert "verify runs on one device; give one --arch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "where"),
    [
        ("TRITON_ATTN", ["--arch", "sm90"]),
        # the same kernels
        *([("ROCM_ATTN", ["--platform", "rocm", "--arch", "gfx942"])] if FULL else []),
    ],
)
def test_tritons_kernels_in_the_interpreter(default: Registry, backend: str, where: list[str]) -> None:
    # whether kernels are interpreted is decided where they are defined, so in a process of their own
    command = [sys.executable, "-m", "attnreg", "verify", backend, *where, "--device", "cpu", "--size", "claims"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)[backend]
    assert found["unproven"] == ["bfloat16"]
    assert found["cases"] >= 8
    assert found["for"] == " ".join(where[1::2] if len(where) > 2 else ["cuda", where[1]])
    assert found["claims"]["features"].keys() == default.backends[backend].variants[0].served


def test_cases_side_by_side_find_what_they_find_one_by_one(
    capsys: pytest.CaptureFixture[str], sound: dict[str, Any]
) -> None:
    assert main(["verify", "CPU_ATTN", *CPU, "--jobs", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": __version__, "CPU_ATTN": sound}


CRASHING = """
import os
from attnreg.kernels import cpu_attn
from attnreg.kernels.cpu_attn import forward, kv_cache_shape, write_kv

def plan(spec, batch):
    if spec.head_size == CRASH_AT:
        os.kill(os.getpid(), 11)
    return cpu_attn.plan(spec, batch)
"""


def test_a_case_that_crashes_its_process_is_refuted_and_the_others_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: dict[str, Any]
) -> None:
    proofs = {size: claim["cases"] for size, claim in sound["claims"]["head_size"].items()}
    size = min(proofs, key=proofs.__getitem__)
    (tmp_path / "crashing").mkdir()
    (tmp_path / "crashing" / "kernel.py").write_text(CRASHING.replace("CRASH_AT", size))
    monkeypatch.syspath_prepend(tmp_path)
    overlay = tmp_path / "crashing.yaml"
    overlay.write_text("backends:\n  CPU_ATTN: {module: crashing.kernel, contract: 1}\n")
    changed = ["--overlay", str(overlay), "--trust", "crashing", "--jobs", "2"]
    assert main(["verify", "CPU_ATTN", *CPU, *changed, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["CPU_ATTN"]
    assert found["cases"] == sound["cases"]
    assert all(problem.endswith(": its process ended with signal 11 (SIGSEGV)") for problem in found["problems"])
    assert len(found["problems"]) == proofs[size]
