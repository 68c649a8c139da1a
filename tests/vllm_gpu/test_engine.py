"""attnreg's kernels in the whole engine of vLLM on a GPU, beside vLLM's own: the same tokens, as likely as there.

Each case runs the engine in two processes side by side: with vLLM's Triton backend, and with attnreg's in its place.
vLLM is whatever `import vllm` finds; `make test-vllm-gpu` runs this. What the processes print goes to files of the
folder $ENGINE_TEST_LOGS, if it is given, as they print it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
OURS = "attnreg.integrations.vllm"
# a log probability may differ by this much; two tokens nearer than twice that may change places. Logits have the dtype
# of the model: one in the last place of a logit between 4 and 8 is 0.03 in bfloat16, and 0.004 in float16
TOLERANCE = 2e-2
DTYPE = "float16"
GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
MINUTES = 5
# what the plug-in says first, and the name of the server's logs
DECIDES, SERVER = "attnreg: vllm-0.33.0+attnreg+every", "vllm serve"


def _missing() -> str:
    if not torch.cuda.is_available():
        return "needs a GPU that PyTorch can use"
    return "" if importlib.util.find_spec("vllm") else "needs vLLM in this environment"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is served, and how.

    lengths: of the prompts, in tokens; shared: how many of them every prompt begins with. counts: what vLLM has to have
    counted at least once, with both. output: the dtype that attention writes, if it is not the model's. gpus: how many
    it takes.
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
    output: str = ""
    gpus: int = 1


# the engine's functions are sent to its processes
SEVERAL = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
# vLLM's Triton kernels serve no ranks that share a cache; FlashAttention's do
RANKS = {
    "tensor_parallel_size": 2, "decode_context_parallel_size": 2, "attention_config": {"backend": "FLASH_ATTN"}
}  # fmt: skip
OLDER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
MANY = tuple(16 + 37 * i % 900 for i in range(200))
CASES = {
    "llama": Case(model="llama"),
    "bfloat16": Case(model="llama", engine={"dtype": "bfloat16"}, tolerance=8e-2),
    "qwen3": Case(model="qwen3"),
    "gpt-oss": Case(model="gpt-oss"),
    "gemma2": Case(model="gemma2", engine={"dtype": "bfloat16"}, tolerance=3e-2),
    "gemma3": Case(model="gemma3", engine={"dtype": "bfloat16"}, tolerance=3e-2),
    "bloom": Case(model="bloom", lengths=(1, 7, 64, 130, 600)),
    "whisper": Case(model="whisper", lengths=(3, 5, 9), audio=True, engine={"max_model_len": 448}),
    "fp8 cache": Case(model="llama", engine={"kv_cache_dtype": "fp8"}, tolerance=0.05),
    # a number may be rounded to the next in fp8, which is a sixteenth away
    "fp8 output": Case(
        model="llama-fp8", tolerance=0.08, output="torch.float8_e4m3fn",
        engine={"compilation_config": {"pass_config": {"fuse_attn_quant": True}, "custom_ops": ["+quant_fp8"]}},
    ),
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
    "an engine of several processes": Case(
        model="llama", environment=SEVERAL | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    ),
    "ranks that share a cache": Case(model="llama-one-kv-head", engine=RANKS, environment=SEVERAL, gpus=2),
    "ranks that share a cache, dealt 16 tokens at a time": Case(
        model="llama-one-kv-head", lengths=(3000, 3100, 3500, 2900, 40), shared=40, rounds=2, gpus=2,
        engine=RANKS | {"cp_kv_cache_interleave_size": 16, "max_num_batched_tokens": 512}, environment=SEVERAL,
    ),
    "ranks that share a cache, without graphs": Case(
        model="llama-one-kv-head", engine=RANKS | {"enforce_eager": True}, environment=SEVERAL, gpus=2
    ),
    "speculation by n-grams": Case(
        model="llama", max_tokens=96,
        engine={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        counts=("vllm:spec_decode_num_draft_tokens",),
    ),
    "the older model runner": Case(model="gemma3", engine={"dtype": "bfloat16"}, tolerance=3e-2, environment=OLDER),
    "the older model runner, draft": Case(
        model="llama", environment=OLDER,
        engine={"speculative_config": {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}},
        counts=("vllm:spec_decode_num_accepted_tokens",),
    ),
    "one step after the other": Case(model="qwen3", engine={"async_scheduling": False}),
}  # fmt: skip
# every model again, each layer launched as it comes
EAGER = ("llama", "qwen3", "gpt-oss", "gemma2", "gemma3", "bloom", "whisper", "fp8 cache", "draft")
CASES |= {
    f"{name} without graphs": replace(CASES[name], engine=CASES[name].engine | {"enforce_eager": True})
    for name in EAGER
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are written: a folder that all processes of a run share."""
    given = os.environ.get("ENGINE_TEST_MODELS")
    return Path(given) if given else tmp_path_factory.getbasetemp().parent / "models"


def run(name: str, ours: bool, models: Path, folder: Path) -> dict[str, Any]:
    """The engine's answer to a case, with attnreg's backend or vLLM's own."""
    case = CASES[name]
    engine: dict[str, Any] = {
        "skip_tokenizer_init": not case.audio, "max_model_len": 4096, "seed": 0, "gpu_memory_utilization": 0.08,
        # given, so that vLLM does not measure what is free: others run on this GPU at the same time
        "kv_cache_memory_bytes": 2**30, "attention_config": {"backend": "TRITON_ATTN"}, "dtype": DTYPE,
    } | case.engine  # fmt: skip
    if not engine.get("enforce_eager"):
        engine["compilation_config"] = {"cudagraph_capture_sizes": GRAPHS} | engine.get("compilation_config", {})
    draft = engine.get("speculative_config", {})
    if "model" in draft:
        engine["speculative_config"] = draft | {"model": str(_model(draft["model"], models))}
    if ours:
        # vLLM looks names up before it loads plugins, so that Python cannot name attnreg's backend
        del engine["attention_config"]
    spec = {
        "model": str(_model(case.model, models)), "engine": engine, "lengths": case.lengths, "shared": case.shared,
        "rounds": case.rounds, "max_tokens": case.max_tokens, "audio": case.audio,
    }  # fmt: skip
    asked, answer = folder / f"spec-{ours}.json", folder / f"result-{ours}.json"
    asked.write_text(json.dumps(spec))
    log = _log(folder, name, ours)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py"), str(asked), str(answer)],
            stdout=output, stderr=output, env=_environment(folder, ours) | case.environment, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        try:
            ended = str(process.wait(timeout=MINUTES * 60))
        except subprocess.TimeoutExpired:
            ended = f"no end after {MINUTES} minutes"
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
        finally:
            _end(process)
    assert ended == "0", f"the engine ended with {ended}:\n{log.read_text()[-6000:]}"
    result: dict[str, Any] = json.loads(answer.read_text())
    result["output"] = log.read_text()
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a process and of those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment(folder: Path, ours: bool) -> dict[str, str]:
    """The variables of an engine's process: with attnreg an overlay that has its backend serve every layer."""
    overlay = folder / "every.yaml"
    overlay.write_text("extends: vllm-0.33.0+attnreg\nchoices: [{when: {attention: mha}, require: ATTNREG}]\n")
    return os.environ | {"ATTNREG_VLLM": str(overlay) if ours else "0"}


def _log(folder: Path, name: str, ours: bool) -> Path:
    """Where an engine's process prints: it can be read while it runs, and is there when a test was stopped."""
    given = os.environ.get("ENGINE_TEST_LOGS")
    return Path(given or folder) / f"{name.replace(' ', '-')}-{'attnreg' if ours else 'vllm'}.log"


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


@dataclass
class Comparison:
    """Of the answers to all requests of a case: what agreed, and what did not.

    tokens: so many agreed; ties: requests whose answers part at two tokens that are as likely as each other; largest:
    difference of a log probability.
    """

    tokens: int = 0
    ties: int = 0
    largest: float = 0.0
    problems: list[str] = field(default_factory=list)


def compare(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], case: Case) -> Comparison:
    """Answers are compared up to the first token that differs, which must be a tie: what follows has another prompt."""
    found = Comparison()
    for i, (left, right) in enumerate(zip(theirs, ours, strict=True)):
        said = _compare(left, right, case.tolerance, found)
        if said:
            found.problems.append(f"request {i} of {case.lengths[i % len(case.lengths)]} tokens: {said}")
    return found


def _compare(theirs: dict[str, Any], ours: dict[str, Any], tolerance: float, found: Comparison) -> str:
    for i, (left, right) in enumerate(zip(theirs["tokens"], ours["tokens"], strict=True)):
        one, two = theirs["logprobs"][i], ours["logprobs"][i]
        for token in one.keys() & two.keys():
            difference = abs(one[token] - two[token])
            found.largest = max(found.largest, difference)
            if difference > tolerance:
                return f"token {i}: log probability of {token} is {one[token]:.4f} and {two[token]:.4f}"
        if left != right:
            other = one.get(str(right))
            if other is None or one[str(left)] - other > 2 * tolerance:
                return f"token {i} is {left} and {right}, and they are no tie: {one} and {two}"
            found.ties += 1
            return ""
        found.tokens += 1
    return ""


def test_answers_may_part_at_a_tie_alone() -> None:
    def answer(*steps: dict[str, float]) -> dict[str, Any]:
        return {"tokens": [int(max(step, key=lambda t: step[t])) for step in steps], "logprobs": list(steps)}

    case = Case(model="", lengths=(3,))
    told = answer({"1": -1.0, "5": -2.0}, {"2": -1.0, "7": -1.01}, {"3": -0.5})
    assert compare([told], [told], case) == Comparison(tokens=3)
    tie = compare([told], [answer({"1": -1.0}, {"7": -1.0, "2": -1.01}, {"9": -0.5})], case)
    assert (tie.tokens, tie.ties, tie.problems) == (1, 1, [])
    for other in (answer({"1": -1.03}, {"2": -1.0}, {"3": -0.5}), answer({"5": -1.0}, {"2": -1.0}, {"3": -0.5})):
        assert compare([told], [other], case).problems


def judge(name: str, case: Case, theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """Fails where answers differ; what was compared is appended to the file $ENGINE_TEST_RECORD, if it is given."""
    found = compare(theirs, ours, case)
    if record := os.environ.get("ENGINE_TEST_RECORD"):
        said = {
            "case": name, "requests": len(ours), "tokens": found.tokens, "ties": found.ties,
            "largest difference": round(found.largest, 4), "tolerance": case.tolerance, "problems": found.problems,
            "device": torch.cuda.get_device_name(), "date": str(date.today()),
        }  # fmt: skip
        with Path(record).open("a") as file:
            file.write(json.dumps(said) + "\n")
    differ = len(found.problems)
    assert not differ, f"{differ} of {len(ours)} requests differ:\n" + "\n".join(found.problems[:10])
    assert found.tokens > len(ours), "nearly all of them part at once: nothing was compared"


needs_vllm = pytest.mark.skipif(bool(_missing()), reason=_missing() or "unused")


@needs_vllm
@pytest.mark.parametrize("name", CASES)
def test_engine_serves_the_same(name: str, models: Path, tmp_path: Path) -> None:
    case = CASES[name]
    if torch.cuda.device_count() < case.gpus:
        pytest.skip(f"needs {case.gpus} GPUs")
    with ThreadPoolExecutor(2) as both:
        theirs, ours = both.map(lambda mine: run(name, mine, models, tmp_path), (False, True))
    assert not any(OURS in backend for backend in theirs["backends"].values())
    assert all(OURS in backend for backend in ours["backends"].values()), ours["backends"]
    assert ours["outputs"] == [case.output or f"torch.{case.engine.get('dtype', DTYPE)}"]
    assert DECIDES in ours["output"]
    assert DECIDES not in theirs["output"]
    judge(name, case, theirs["requests"], ours["requests"])
    for counter in case.counts:
        assert theirs["counts"].get(counter, 0) > 0, f"{counter}: the case does not do what it is for"
        assert ours["counts"].get(counter, 0) > 0, f"{counter}: the case does not do what it is for"


@contextmanager
def serving(folder: Path, models: Path, ours: bool) -> Iterator[str]:
    """The address of `vllm serve`, which is stopped in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"--max-model-len": "4096", "--kv-cache-memory-bytes": str(2**30), "--port": str(port),
               "--host": "127.0.0.1", "--served-model-name": "tiny", "--seed": "0",
               "--gpu-memory-utilization": "0.08", "--dtype": DTYPE}  # fmt: skip
    options |= {} if ours else {"--attention-backend": "TRITON_ATTN"}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(_model("llama", models))]
    log = _log(folder, SERVER, ours)
    environment = _environment(folder, ours) | {
        "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *(word for option in options.items() for word in option)],
            stdout=output, stderr=output, env=environment, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + MINUTES * 60
            while not _answers(f"{address}/health"):
                assert process.poll() is None, f"the server ended:\n{log.read_text()[-6000:]}"
                assert time.monotonic() < deadline, f"no server after {MINUTES} minutes:\n{log.read_text()[-6000:]}"
                time.sleep(0.5)
            yield address
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
        finally:
            _end(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def complete(address: str, ids: list[int]) -> dict[str, Any]:
    """What /v1/completions gives for a prompt of token ids, as `child.py` writes an answer."""
    body = {"model": "tiny", "prompt": ids, "temperature": 0, "max_tokens": 24, "logprobs": 5, "ignore_eos": True,
            "return_token_ids": True, "return_tokens_as_token_ids": True}  # fmt: skip
    asked = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        choice = json.loads(answer.read())["choices"][0]
    scores = [
        {re.sub(r"\D", "", token): value for token, value in step.items()}
        for step in choice["logprobs"]["top_logprobs"]
    ]
    return {"tokens": choice["token_ids"], "logprobs": scores}


@needs_vllm
def test_server_serves_the_same(models: Path, tmp_path: Path) -> None:
    """`vllm serve`, whose engine is a process of its own that loads the plugin for itself."""
    case = Case(model="llama", lengths=(5, 70, 700, 2000))
    prompts = [[3 + (7 * i + 11 * n) % 1000 for i in range(n)] for n in case.lengths]

    def ask(ours: bool) -> list[dict[str, Any]]:
        with serving(tmp_path, models, ours) as address, ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: complete(address, ids), prompts))

    with ThreadPoolExecutor(2) as both:
        theirs, ours = both.map(ask, (False, True))
    judge(SERVER, case, theirs, ours)
    said = _log(tmp_path, SERVER, True).read_text()
    assert DECIDES in said
    assert "attnreg: ATTNREG for target layers" in said
    assert "EngineCore" in said
