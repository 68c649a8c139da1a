"""attnreg's kernels in the whole engine of vLLM on a GPU, beside vLLM's own: the same tokens, as likely as there.

Each case runs the engine in processes of its own: with vLLM's Triton backend, and with attnreg's in its place. vLLM is
whatever `import vllm` finds; `make test-vllm-gpu` runs this.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OURS = "attnreg.integrations.vllm"
# a log probability may differ by this much; two tokens nearer than twice that may change places
TOLERANCE = 2e-2
MINUTES = 5


def _missing() -> str:
    if not torch.cuda.is_available():
        return "needs a GPU that PyTorch can use"
    return "" if importlib.util.find_spec("vllm") else "needs vLLM in this environment"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is served, and how.

    lengths: of the prompts, in tokens; shared: how many of them every prompt begins with. counts: what vLLM has to have
    counted at least once, with both.
    """

    model: str
    lengths: tuple[int, ...] = (1, 7, 64, 130, 600, 1500)
    shared: int = 0
    rounds: int = 1
    max_tokens: int = 32
    audio: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    counts: tuple[str, ...] = ()


MANY = tuple(16 + 37 * i % 900 for i in range(200))
CASES = {
    "llama": Case(model="llama"),
    "llama without graphs": Case(model="llama", engine={"enforce_eager": True}),
    "qwen3": Case(model="qwen3"),
    "gpt-oss": Case(model="gpt-oss"),
    "gpt-oss without graphs": Case(model="gpt-oss", engine={"enforce_eager": True}),
    "gemma2": Case(model="gemma2"),
    "gemma3": Case(model="gemma3"),
    "bloom": Case(model="bloom", lengths=(1, 7, 64, 130, 600)),
    "whisper": Case(model="whisper", lengths=(3, 5, 9), audio=True, engine={"max_model_len": 448}),
    "fp8 cache": Case(model="llama", engine={"kv_cache_dtype": "fp8"}, tolerance=0.1),
    "draft": Case(
        model="llama",
        engine={"speculative_config": {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}},
        counts=("vllm:spec_decode_num_accepted_tokens",),
    ),
    "chunks and shared prefixes": Case(
        model="llama", lengths=(3000, 3100, 3500, 2900, 40), shared=40, rounds=2,
        engine={"max_num_batched_tokens": 512, "enable_prefix_caching": True, "max_num_seqs": 64},
        counts=("vllm:prefix_cache_hits",),
    ),
    "200 requests and little memory": Case(
        model="qwen3", lengths=MANY, max_tokens=64, engine={"num_gpu_blocks_override": 2000},
        counts=("vllm:num_preemptions",),
    ),
    "every decision checked": Case(model="gpt-oss", environment={"ATTNREG_DEBUG": "1"}),
}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are written: a folder that all processes of a run share."""
    given = os.environ.get("ATTNREG_TEST_MODELS")
    return Path(given) if given else tmp_path_factory.getbasetemp().parent / "models"


def run(case: Case, ours: bool, models: Path, folder: Path) -> dict[str, Any]:
    """The engine's answer, with attnreg's backend or vLLM's own."""
    engine: dict[str, Any] = {
        "skip_tokenizer_init": not case.audio, "max_model_len": 4096, "seed": 0, "gpu_memory_utilization": 0.08,
        # given, so that vLLM does not measure what is free: others run on this GPU at the same time
        "kv_cache_memory_bytes": 2**30, "attention_config": {"backend": "TRITON_ATTN"},
    } | case.engine  # fmt: skip
    draft = engine.get("speculative_config")
    if draft:
        engine["speculative_config"] = draft | {"model": str(_model(draft["model"], models))}
    environment = {"ATTNREG_VLLM": "0"} | case.environment
    if ours:
        # vLLM looks names up before it loads plugins, so that Python cannot name attnreg's backend
        del engine["attention_config"]
        overlay = folder / "every.yaml"
        overlay.write_text("extends: vllm-0.33.0+attnreg\nchoices: [{when: {attention: mha}, require: ATTNREG}]\n")
        environment |= {"ATTNREG_VLLM": str(overlay)}
    spec = {
        "model": str(_model(case.model, models)), "engine": engine, "lengths": case.lengths, "shared": case.shared,
        "rounds": case.rounds, "max_tokens": case.max_tokens, "audio": case.audio,
    }  # fmt: skip
    asked, answer = folder / f"spec-{ours}.json", folder / f"result-{ours}.json"
    asked.write_text(json.dumps(spec))
    done = subprocess.run(
        [sys.executable, str(HERE / "child.py"), str(asked), str(answer)],
        capture_output=True, text=True, timeout=MINUTES * 60, env=os.environ | environment, cwd=folder, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"the engine ended with {done.returncode}:\n{output[-4000:]}"
    result: dict[str, Any] = json.loads(answer.read_text())
    result["output"] = output
    return result


@functools.cache
def _model(name: str, models: Path) -> Path:
    # several processes may want the same model: one writes it
    lock = models / f"{name}.lock"
    models.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)
        subprocess.run(
            [sys.executable, "-c", "import sys, pathlib, models; models.write(sys.argv[1], pathlib.Path(sys.argv[2]))",
             name, str(models)], check=True, cwd=HERE, capture_output=True, env=os.environ | {"PYTHONPATH": str(HERE)},
        )  # fmt: skip
    return models / name


def difference(theirs: dict[str, Any], ours: dict[str, Any], tolerance: float) -> str:
    """What the two answers to one request do not agree on, or nothing.

    They are compared up to the first token that differs, which has to be a tie: both tokens as likely as each other,
    within twice the tolerance. What follows has another prompt.
    """
    for i, (left, right) in enumerate(zip(theirs["tokens"], ours["tokens"], strict=True)):
        one, two = theirs["logprobs"][i], ours["logprobs"][i]
        for token in one.keys() & two.keys():
            if abs(one[token] - two[token]) > tolerance:
                return f"token {i}: log probability of {token} is {one[token]:.4f} and {two[token]:.4f}"
        if left != right:
            other = one.get(str(right))
            if other is None or one[str(left)] - other > 2 * tolerance:
                return f"token {i} is {left} and {right}, and they are no tie: {one} and {two}"
            return ""
    return ""


@pytest.mark.skipif(bool(_missing()), reason=_missing() or "unused")
@pytest.mark.parametrize("name", CASES)
def test_engine_serves_the_same(name: str, models: Path, tmp_path: Path) -> None:
    case = CASES[name]
    theirs, ours = (run(case, mine, models, tmp_path) for mine in (False, True))
    assert not any(OURS in backend for backend in theirs["backends"].values())
    assert all(OURS in backend for backend in ours["backends"].values()), ours["backends"]
    for i, (left, right) in enumerate(zip(theirs["requests"], ours["requests"], strict=True)):
        assert not difference(left, right, case.tolerance), (
            f"request {i} of {case.lengths[i % len(case.lengths)]} tokens"
        )
    for counter in case.counts:
        assert theirs["counts"].get(counter, 0) > 0, f"{counter}: the case does not do what it is for"
        assert ours["counts"].get(counter, 0) > 0, f"{counter}: the case does not do what it is for"
