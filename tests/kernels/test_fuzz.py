"""The fuzzer of tests/gpu on a processor: a few small cases, planted faults that it must find, and its command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import ROOT
from support.layers import fuzz
from support.layers.altered import altered

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, make fuzz-gpu runs on it"),
]


def problems(backend: str, seed: str, *, plain: tuple[str, ...] = (), **faults: Any) -> Iterator[str | None]:
    """The problem of each step of a case, or None. faults: of the kernel module."""
    made = fuzz.stage(fuzz.Choices(seed, frozenset(plain)), backend, "cpu", fuzz.PROCESSOR)
    if faults:
        made.layer.module = made.other.module = altered(**faults)
    for number in range(fuzz.PROCESSOR.steps):
        yield made.step(number)


@pytest.mark.parametrize(
    ("backend", "seeds"),
    [
        ("TRITON_ATTN", range(2)),
        ("ROCM_ATTN", range(1)),
        ("TURBOQUANT", range(4)),
        ("TORCH_SDPA", range(8)),
        ("CPU_ATTN", range(12)),
    ],
)
def test_some_cases(backend: str, seeds: range) -> None:
    for seed in seeds:
        assert [*problems(backend, f"1:{seed}")] == [None] * fuzz.PROCESSOR.steps, seed


def beyond(batch: Any, output: Any, lse: Any, cache: Any) -> None:
    """Writes to the word after the last row of an output."""
    words = output.untyped_storage()
    flat = torch.empty(0, dtype=output.dtype).set_(words)  # type: ignore[call-overload]
    last = output.storage_offset() + sum((n - 1) * s for n, s in zip(output.shape, output.stride(), strict=True))
    if output.numel():
        flat[last + 1] = 1.0


FAULTS: dict[str, dict[str, Any]] = {
    "scores are scaled by a little more": {"spec": lambda spec: replace(spec, softmax_scale=1.05 * spec.softmax_scale)},
    "the word after the output is written": {"after": beyond},
    "the cache is written by a forward": {
        "after": lambda batch, output, lse, cache: cache is not None and cache.key.view(torch.uint8)[:1].fill_(0)
    },
    "the host's lengths are believed": {
        "batch": lambda batch: replace(batch, seq_lens=batch.seq_lens_cpu.to(batch.seq_lens.device))
    },
    "the last request is dropped": {
        "after": lambda batch, output, lse, cache: output[int(batch.query_start_loc[-2]) : batch.num_tokens].fill_(0)
    },
    "scales of the layer are those of another": {
        "params": lambda params: replace(params, k_scale=None if params.k_scale is None else params.k_scale * 2)
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    seeds = range(40)
    assert any(p for seed in seeds for p in problems("CPU_ATTN", f"2:{seed}", **FAULTS[fault]))


def test_a_case_is_the_same_each_time_and_choices_can_be_left_out() -> None:
    def choices(*plain: str) -> dict[str, Any]:
        made = fuzz.Choices("1:5", frozenset(plain))
        fuzz.stage(made, "CPU_ATTN", "cpu", fuzz.PROCESSOR)
        return made.made

    assert choices() == choices()
    some = next(iter(choices()))
    assert some not in choices(some)


@pytest.fixture
def command() -> ModuleType:
    """The command's module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("fuzz_command", ROOT / "tests" / "gpu" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_repeats_a_case() -> None:
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run([sys.executable, "tests/gpu/fuzz.py", "--device", "cpu", "--case", "CPU_ATTN:1:0"], cwd=ROOT)
    assert done.stdout.endswith("2 batches right; nothing wrong\n"), done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(("capability", "hopper"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_kernels_for_sm_90_are_tried_there(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, hopper: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert ("HOPPER_ATTN" in command.usual("cuda")) == hopper
    assert {"TRITON_ATTN", "TURBOQUANT", "TORCH_SDPA"} <= {*command.usual("cuda")}
    assert command.usual("cpu") == ["TRITON_ATTN", "ROCM_ATTN", "TURBOQUANT", "FLEX_ATTENTION"]


def test_a_worker_that_finds_something_or_ends_is_reported(
    command: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import sys
first = int(sys.argv[sys.argv.index("--first") + 1])
print("case", first, flush=True)
print("right 2", flush=True)
if first == 0:
    print("wrong output[0] is 1", flush=True)
    sys.exit(3)
if first == 1:
    sys.exit("CUDA error: misaligned address")
"""
    monkeypatch.setattr(command, "WORKER", [sys.executable, "-c", script])
    monkeypatch.setattr(command, "shrunk", lambda name, device: " --plain 'window'")
    # no worker asks for one
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.main(["--minutes", "0.2", "--seed", "s", "--jobs", "1", "--backends", "CPU_ATTN"]) == 1
    out = capsys.readouterr().out
    assert "CPU_ATTN:s:0: output[0] is 1\n  python tests/gpu/fuzz.py --case CPU_ATTN:s:0\n" in out
    assert "CPU_ATTN:s:1: ended its process (1): CUDA error: misaligned address" in out
    assert "seed s: 3 cases, 6 batches right, 2 wrong" in out
    assert "--case CPU_ATTN:s:0 --plain 'window'" in out


def test_runs_of_one_commit_are_added_up(command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('case 0', flush=True); print('right 2', flush=True)"
    monkeypatch.setattr(command, "WORKER", [sys.executable, "-c", script])
    record = tmp_path / "cpu.json"

    def fuzz_of(seed: str, commit: str) -> dict[str, Any]:
        options = ["--minutes", "0.5", "--seed", seed, "--jobs", "1", "--device", "cpu", "--backends", "CPU_ATTN"]
        assert command.main([*options, "--record", str(record), "--commit", commit]) == 0
        run: dict[str, Any] = json.loads(record.read_text())["runs"]["fuzz"]
        return run

    assert fuzz_of("a", "1")["seeds"] == ["a"]
    both = fuzz_of("b", "1")
    assert (both["cases"], both["batches"], both["minutes"], both["seeds"]) == (2, 4, 1.0, ["a", "b"])
    assert fuzz_of("c", "2")["cases"] == 1
