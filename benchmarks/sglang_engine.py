"""Measure SGLang's whole engine on a GPU with attnreg's kernels beside SGLang's own: triton, fa3 and attnreg.

python benchmarks/sglang_engine.py                  print a table
python benchmarks/sglang_engine.py --model llama    only this model: llama, gpt-oss, gemma-3
python benchmarks/sglang_engine.py --load 32k       only loads with this in their names
python benchmarks/sglang_engine.py --record         write benchmarks/results/sglang_engine.json

A record of the same machine and versions keeps its figures of what is not measured anew.

Each model is eight layers of its real widths with random weights. The engine runs in a process of its own for each
backend, with its own defaults: CUDA graphs, chunked prompts, the prefix cache. attnreg's backend gets pages of 64,
which its page of the guide advises. Every load runs twice, over an empty cache; the second run counts. "decode ms" is
the time of a step that decodes all requests: what the load takes, less what its first tokens take, by step. A backend
that SGLang refuses for a model has a problem instead of figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from engine_figures import Rows, engine_parser, installed, marks_of, merged, show, write
from measuring import machine, require_gpus

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {"llama": "Llama-3.1-8B", "gpt-oss": "gpt-oss-20b", "gemma-3": "gemma-3-27b-it"}
# what those files leave to transformers' defaults, which are another model's
WIDTHS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 14336},
    "gpt-oss": {"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
    "gemma-3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
}
LAYERS = 8
BACKENDS = ("triton", "fa3", "attnreg")
MINUTES = 9


@dataclass(frozen=True, kw_only=True)
class SglangLoad:
    """Requests that are given to the engine at once. shared: how many tokens every prompt begins with."""

    name: str
    requests: int
    prompt: int
    output: int
    shared: int = 0


LOADS = (
    SglangLoad(name="64 of 2k + 256", requests=64, prompt=2048, output=256),
    SglangLoad(name="8 of 32k + 128", requests=8, prompt=32768, output=128),
    SglangLoad(name="1 of 32k, first token", requests=1, prompt=32768, output=1),
    SglangLoad(name="64 of 8k shared + 128", requests=64, prompt=8192 + 256, output=128, shared=8192),
)
MARKS = (
    ("64 of 2k + 256", ("tokens/s",), "triton", 1.15),
    ("8 of 32k + 128", ("tokens/s",), "triton", 2.0),
    ("1 of 32k, first token", ("seconds",), "triton", 0.45),
    ("64 of 2k + 256", ("decode ms",), "fa3", 1),
    ("8 of 32k + 128", ("decode ms",), "fa3", 1),
)


def write_model(name: str, folder: Path) -> Path:
    """A config of eight layers: SGLang makes up the weights."""
    config = json.loads((ROOT / "examples" / "configs" / CONFIGS[name] / "config.json").read_text())
    config = config.get("text_config", config)
    config |= {"num_hidden_layers": LAYERS, "torch_dtype": "bfloat16", "vocab_size": 32768} | WIDTHS[name]
    config.pop("quantization_config", None)
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    # room for the longest load: positions have no part in what attention costs
    config["max_position_embeddings"] = 65536
    config.pop("rope_scaling", None)
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def child(spec: dict[str, Any]) -> None:
    """Run the loads in one engine, and print a line of JSON for each."""
    import random

    import sglang

    engine = sglang.Engine(
        model_path=spec["model"], load_format="dummy", skip_tokenizer_init=True, random_seed=0, context_length=40000,
        mem_fraction_static=0.8, max_running_requests=64, log_level="info", **spec["engine"],
    )  # fmt: skip
    draw = random.Random(0)

    def timed(load: SglangLoad, output: int) -> float:
        """The seconds that a load takes over an empty cache. output: the new tokens of each request."""
        prefix = [draw.randrange(3, 32000) for _ in range(load.shared)]
        prompts = [
            prefix + [draw.randrange(3, 32000) for _ in range(load.prompt - load.shared)] for _ in range(load.requests)
        ]
        engine.flush_cache()
        began = time.perf_counter()
        engine.generate(
            input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        )
        return time.perf_counter() - began

    def second(load: SglangLoad, output: int) -> float:
        """The seconds of a second run: the first one compiles."""
        timed(load, output)
        return timed(load, output)

    try:
        for load in _loads(spec["loads"]):
            seconds, first = (second(load, output) for output in (load.output, 1))
            steps = load.output - 1
            row = {
                "load": load.name, "seconds": round(seconds, 4),
                "tokens/s": round(load.requests * load.output / seconds, 1), "first tokens s": round(first, 4),
                "decode ms": round(1e3 * (seconds - first) / steps, 3) if steps else 0.0, "date": str(date.today()),
            }  # fmt: skip
            print("ROW " + json.dumps(row), flush=True)
    finally:
        engine.shutdown()


def _loads(word: str) -> tuple[SglangLoad, ...]:
    return tuple(load for load in LOADS if word in load.name)


def measure(name: str, backends: tuple[str, ...], loads: str, minutes: float, folder: Path) -> list[dict[str, Any]]:
    """The figures of one model with each backend. loads: a word of their names; minutes: for a backend."""
    model = write_model(name, folder)
    rows: list[dict[str, Any]] = []
    for backend in backends:
        ours = backend == "attnreg"
        options = {"attention_backend": "triton", "page_size": 64} if ours else {"attention_backend": backend}
        spec = {"model": str(model), "loads": loads, "engine": options}
        environment = os.environ | {"ATTNREG_SGLANG": "require" if ours else "0", "HF_HUB_OFFLINE": "1"}
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
        text = output.read_text(errors="replace")
        found = [json.loads(line[4:]) for line in text.splitlines() if line.startswith("ROW ")]
        served = "attnreg: its kernels serve the layers of this run" in text
        if ours != served:
            # a figure of another backend would be a wrong one
            found, problem = [], problem or f"attnreg's backend {'did not serve' if ours else 'served'} this run"
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
    options = engine_parser("sglang_engine", __doc__, CONFIGS, BACKENDS, MINUTES).parse_args()
    if options.child:
        child(options.child)
        return
    require_gpus("sglang_engine")
    models = (options.model,) if options.model else tuple(CONFIGS)
    backends = (options.backend,) if options.backend else BACKENDS
    facts = machine(sglang=installed("sglang_engine", "sglang"))
    print(facts, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        measured = (measure(name, backends, options.load, options.minutes, Path(folder)) for name in models)
        rows = [row for some in measured for row in some]
    if options.record:
        rows = merged(options.record, facts, rows)
    found = marks(rows)
    show(rows, found, ("tokens/s", "seconds", "first tokens s", "decode ms"), [load.name for load in LOADS])
    if options.record:
        write(options.record, facts, found, rows)


if __name__ == "__main__":
    main()
