"""Measure vLLM's whole engine on a GPU with attnreg's kernels beside vLLM's own: TRITON_ATTN, FLASH_ATTN and attnreg.

python benchmarks/vllm_engine.py                  print a table
python benchmarks/vllm_engine.py --model llama    only this model: llama, gpt-oss, gemma-2
python benchmarks/vllm_engine.py --load 128k      only loads with this in their names
python benchmarks/vllm_engine.py --record         write benchmarks/results/vllm_engine.json

A record of the same machine and versions keeps its figures of what is not measured anew.

Each model is eight layers of its real widths with random weights. The engine runs in a process of its own for each
backend, with its own defaults: CUDA graphs (of as many tokens as requests that decode), torch.compile, chunked prefill.
The models run side by side where there are several GPUs, the backends of one model one after the other on the same GPU.
Every load runs twice; the second counts. "ms a token" is the mean of all requests, which wait for each other's prompts;
"decode ms" is the median of the steps after the request that begins last has its first token, which only decode: of 31
steps, one that waits 30 ms for the host makes the mean of an engine half as large again.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from engine_figures import Rows, engine_parser, installed, marks_of, merged, show, write
from measuring import machine, require_gpus

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {"llama": "Llama-3.1-8B", "gpt-oss": "gpt-oss-20b", "gemma-2": "gemma-2-9b"}
# what those files leave to transformers' defaults, which are another model's
WIDTHS = {
    "llama": {"intermediate_size": 14336},
    "gpt-oss": {"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
    "gemma-2": {"intermediate_size": 14336},
}
LAYERS = 8
BACKENDS = ("TRITON_ATTN", "FLASH_ATTN", "attnreg")
# no load has a larger batch that a graph could serve, and each takes time to capture
GRAPHS = [1, 2, 4, 8, *range(16, 65, 8)]
MINUTES = 9


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that are given to the engine at once."""

    name: str
    requests: int
    prompt: int
    output: int


LOADS = (
    Load(name="64 of 2k + 256", requests=64, prompt=2048, output=256),
    Load(name="8 of 32k + 128", requests=8, prompt=32768, output=128),
    Load(name="1 of 32k, first token", requests=1, prompt=32768, output=1),
    Load(name="1 of 128k + 32", requests=1, prompt=128 * 1024 - 64, output=32),
)
# attnreg's figure, the first that both have, as a multiple of a backend's: at least where the mark is above 1, else at
# most; a token's time holds some of other requests' prompts, and records before 2026-11-24 have no other
DECODE = ("decode ms", "ms a token")
MARKS = (
    ("64 of 2k + 256", ("tokens/s",), "TRITON_ATTN", 1.15),
    ("8 of 32k + 128", ("tokens/s",), "TRITON_ATTN", 2.5),
    ("1 of 32k, first token", ("first token s",), "TRITON_ATTN", 1 / 3),
    ("64 of 2k + 256", DECODE, "FLASH_ATTN", 1),
    ("1 of 128k + 32", DECODE, "FLASH_ATTN", 1),
)


def write_model(name: str, folder: Path) -> Path:
    """A config of eight layers: vLLM makes up the weights."""
    config = json.loads((ROOT / "examples" / "configs" / CONFIGS[name] / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "torch_dtype": "bfloat16", "vocab_size": 32768} | WIDTHS[name]
    config.pop("quantization_config", None)
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    # room for the longest load: positions have no part in what attention costs
    config["max_position_embeddings"] = 2 * LOADS[-1].prompt
    config.pop("rope_scaling", None)
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def child(spec: dict[str, Any]) -> None:
    """Run the loads in one engine, and print a line of JSON for each."""
    import random

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=spec["model"], load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=0.85, seed=0,
        max_model_len=LOADS[-1].prompt + 64, max_num_seqs=64, enable_prefix_caching=False,
        disable_log_stats=False, compilation_config={"cudagraph_capture_sizes": GRAPHS}, **spec["engine"],
    )  # fmt: skip
    spent = llm.collective_rpc(_watch_builders)[0]
    used = llm.collective_rpc(_backends)[0]
    ended = _watch_steps(llm.llm_engine)
    draw = random.Random(0)
    for load in _loads(spec["loads"]):
        row: dict[str, Any] = {}
        for _ in range(2):
            spent.clear()
            ended.clear()
            prompts = [
                {"prompt_token_ids": [draw.randrange(3, 32000) for _ in range(load.prompt)]}
                for _ in range(load.requests)
            ]
            sampling = SamplingParams(temperature=0, max_tokens=load.output, ignore_eos=True, detokenize=False)
            torch.cuda.synchronize()
            began = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            took = time.perf_counter() - began
            first = [output.metrics.first_token_ts - output.metrics.queued_ts for output in outputs]
            last = [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs]
            # what ends after it only decodes
            latest = max(output.metrics.first_token_ts for output in outputs)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            row = {
                "load": load.name, "seconds": round(took, 3), "tokens/s": round(tokens / took, 1),
                "first token s": round(statistics.mean(first), 4),
                "builder us": round(1e6 * statistics.median(spent), 1),
                "ms a token": round(1e3 * statistics.mean(last) / max(1, load.output - 1), 3),
                "decode ms": decode_ms(ended, latest), "backends": used, "date": str(date.today()),
            }  # fmt: skip
        print("ROW " + json.dumps(row), flush=True)


def _loads(word: str) -> tuple[Load, ...]:
    return tuple(load for load in LOADS if word in load.name)


def _watch_builders(worker: Any) -> list[float]:
    """From now on, the seconds that each call of an attention metadata builder takes."""
    spent: list[float] = []
    for group in (group for groups in worker.model_runner.attn_groups for group in groups):
        for builder in group.metadata_builders:
            builder.build = _timed(builder.build, spent)
    return spent


def _watch_steps(engine: Any) -> list[float]:
    """From now on, when each step of an engine that gives tokens ends, as vLLM tells it."""
    ended: list[float] = []
    process = engine.output_processor.process_outputs

    def timed(outputs: Any, *, engine_core_timestamp: float, **others: Any) -> Any:
        if outputs:
            ended.append(engine_core_timestamp)
        return process(outputs, engine_core_timestamp=engine_core_timestamp, **others)

    engine.output_processor.process_outputs = timed
    return ended


def decode_ms(ended: list[float], latest: float) -> float:
    """The median ms between the ends of steps from a time on; 0 where there are fewer than two."""
    between = [after - before for before, after in itertools.pairwise(at for at in ended if at >= latest)]
    return round(1e3 * statistics.median(between), 3) if between else 0.0


def _timed(build: Any, spent: list[float]) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        built = build(*args, **kwargs)
        spent.append(time.perf_counter() - began)
        return built

    return timed


def _backends(worker: Any) -> list[str]:
    groups = (group for groups in worker.model_runner.attn_groups for group in groups)
    return sorted({f"{group.backend.__module__}.{group.backend.__qualname__}" for group in groups})


def measure(
    name: str, backends: tuple[str, ...], loads: str, minutes: float, device: str, folder: Path
) -> list[dict[str, Any]]:
    """The figures of one model with each backend, on this GPU. loads: a word of their names; minutes: for a backend."""
    model = write_model(name, folder)
    rows: list[dict[str, Any]] = []
    for backend in backends:
        ours = backend == "attnreg"
        spec = {"model": str(model), "loads": loads,
                "engine": {"attention_backend": "ATTNREG" if ours else backend}}  # fmt: skip
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": device, "ATTNREG_VLLM": "attnreg" if ours else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }  # fmt: skip
        output = folder / f"{name}-{backend}.log"
        problem = ""
        with output.open("w") as log:
            try:
                subprocess.run(
                    [sys.executable, __file__, "--child", json.dumps(spec)],
                    stdout=log, stderr=log, env=environment, timeout=minutes * 60, check=False, cwd=folder,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                problem = f"stopped after {minutes} minutes"
        text = output.read_text()
        found = [json.loads(line[4:]) for line in text.splitlines() if line.startswith("ROW ")]
        new = [{"model": name, "backend": backend, **row} for row in found]
        if len(found) < len(_loads(loads)):
            new.append({"model": name, "backend": backend, "load": "", "problem": problem or text[-1500:]})
        rows += new
        for row in new:
            print(json.dumps(row), flush=True)
    return rows


def marks(rows: Rows) -> Rows:
    """How attnreg stands against its marks, for every model whose figures are there."""
    return marks_of(rows, CONFIGS, MARKS)


def main() -> None:
    options = engine_parser("vllm_engine", __doc__, CONFIGS, BACKENDS, MINUTES).parse_args()
    if options.child:
        child(options.child)
        return
    require_gpus("vllm_engine")
    models = (options.model,) if options.model else tuple(CONFIGS)
    backends = (options.backend,) if options.backend else BACKENDS
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
    facts = machine(vllm=installed("vllm_engine", "vllm"))
    print(facts, flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(devices)) as pool:
        jobs = [
            pool.submit(measure, name, backends, options.load, options.minutes, devices[i % len(devices)], Path(folder))
            for i, name in enumerate(models)
        ]
        rows = [row for job in jobs for row in job.result()]
    if options.record:
        rows = merged(options.record, facts, rows)
    found = marks(rows)
    figures = ("tokens/s", "first token s", "ms a token", "decode ms", "builder us")
    show(rows, found, figures, [load.name for load in LOADS])
    if options.record:
        write(options.record, facts, found, rows)


if __name__ == "__main__":
    main()
