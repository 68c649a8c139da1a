"""Measure SGLang's whole engine on a GPU with attnreg's kernels beside SGLang's own: triton, fa3 and attnreg.

python benchmarks/sglang_engine.py                  print a table
python benchmarks/sglang_engine.py --model llama    only this model: llama, gpt-oss, gemma-3
python benchmarks/sglang_engine.py --load 32k       only loads with this in their names
python benchmarks/sglang_engine.py --record         write benchmarks/results/sglang_engine.json
python benchmarks/sglang_engine.py --together       start the engines of a model at once; each is measured alone
python benchmarks/sglang_engine.py --arguments '{"moe_runner_backend": "triton"}'    more arguments of every engine

A record of the same machine, versions and arguments keeps its figures of what is not measured anew. It is written
after each engine.

Each model is eight layers of its real widths with random weights. The engine runs in a process of its own for each
backend, with its own defaults: CUDA graphs, chunked prompts, the prefix cache. attnreg's backend gets pages of 64,
which its page of the guide advises. Every load runs over an empty cache, and first once unmeasured with two new tokens.
Short loads run up to five times, and the median counts. "decode ms" is the time of a step that decodes all requests:
what the load takes, less what its first tokens take, by step. A backend that SGLang refuses for a model has a problem
instead of figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from engine_figures import Rows, engine_parser, installed, marks_of, merged, show, write
from measuring import machine, require_gpus

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {"llama": "Llama-3.1-8B", "gpt-oss": "gpt-oss-20b", "gemma-3": "gemma-3-27b-it"}
# what those files leave to transformers' defaults, which are another model's
WIDTHS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 14336},
    "gpt-oss": {"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
    "gemma-3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "intermediate_size": 21504},
}
LAYERS = 8
# of the KV pool: room for the largest load, and for engines beside each other
TOKENS = 320_000
# a load is measured again, until its runs have taken SECONDS together, or until there are RUNS of them
SECONDS, RUNS = 2.0, 5
BACKENDS = ("triton", "attnreg", "fa3")
MINUTES = 9
READY = "READY"


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
    """Start an engine, wait for a line of input, run the loads, and print a line of JSON for each."""
    import random

    import sglang

    engine = sglang.Engine(
        model_path=spec["model"], load_format="dummy", skip_tokenizer_init=True, random_seed=0, context_length=40000,
        mem_fraction_static=0.5, max_total_tokens=TOKENS, max_running_requests=64, log_level="info", **spec["engine"],
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

    def median(load: SglangLoad, output: int) -> float:
        """The median of the seconds of some runs: of one where it is long."""
        runs: list[float] = []
        while len(runs) < RUNS and sum(runs) < SECONDS:
            runs.append(timed(load, output))
        return statistics.median(runs)

    try:
        print(READY, flush=True)
        sys.stdin.readline()
        for load in _loads(spec["loads"]):
            timed(load, min(2, load.output))
            first = median(load, 1)
            seconds = median(load, load.output) if load.output > 1 else first
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


class EngineRun(NamedTuple):
    """A process with one engine, which waits for a line of input once it has started. Its output goes to a log."""

    model: str
    backend: str
    loads: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls, name: str, backend: str, loads: str, model: Path, arguments: dict[str, Any], folder: Path
    ) -> EngineRun:
        """Starts an engine over a model's folder. loads: a word of their names."""
        ours = backend == "attnreg"
        options = {"attention_backend": "triton", "page_size": 64} if ours else {"attention_backend": backend}
        spec = {"model": str(model), "loads": loads, "engine": options | arguments}
        environment = os.environ | {"ATTNREG_SGLANG": "require" if ours else "0", "HF_HUB_OFFLINE": "1"}
        path = folder / f"{name}-{backend}.log"
        with path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps(spec)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True,
            )  # fmt: skip
        return cls(name, backend, loads, process, path)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for_start(self, seconds: float) -> None:
        """Waits until the engine has started or failed, for ``seconds`` at most."""
        until = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until and READY not in self.text():
            time.sleep(0.2)

    def rows(self, seconds: float) -> Rows:
        """Lets the engine run its loads for ``seconds`` at most; returns their figures, and a problem if one lacks."""
        problem = ""
        try:
            self.process.communicate(b"\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            problem = f"stopped after {seconds:g} seconds"
        self.end()
        text = self.text()
        found = [json.loads(line[4:]) for line in text.splitlines() if line.startswith("ROW ")]
        ours, served = self.backend == "attnreg", "attnreg: its kernels serve the layers of this run" in text
        if ours != served:
            # a figure of another backend would be a wrong one
            found, problem = [], problem or f"attnreg's backend {'did not serve' if ours else 'served'} this run"
        new = [{"model": self.model, "backend": self.backend, **row} for row in found]
        if len(found) < len(_loads(self.loads)):
            problem = f"{problem}\n{text[-1500:]}".strip()
            new.append({"model": self.model, "backend": self.backend, "load": "", "problem": problem})
        return new

    def end(self) -> None:
        """Ends the process and all that it has started: an engine has processes of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure(models: Iterable[str], options: argparse.Namespace, folder: Path) -> Iterator[Rows]:
    """The rows of each engine. Of the engines of a model one is measured at a time, also if they start together."""
    backends = (options.backend,) if options.backend else BACKENDS
    for name in models:
        model = write_model(name, folder)
        for group in [backends] if options.together else [(one,) for one in backends]:
            runs = [EngineRun.start(name, one, options.load, model, options.arguments, folder) for one in group]
            try:
                for run in runs:
                    run.wait_for_start(60 * options.minutes)
                for run in runs:
                    rows = run.rows(60 * options.minutes)
                    for row in rows:
                        print(json.dumps(row), flush=True)
                    yield rows
            finally:
                for run in runs:
                    run.end()


def marks(rows: Rows) -> Rows:
    """How attnreg stands against its marks, for every model whose figures are there."""
    return marks_of(rows, CONFIGS, MARKS)


def main() -> None:
    parser = engine_parser("sglang_engine", __doc__, CONFIGS, BACKENDS, MINUTES)
    parser.add_argument("--together", action="store_true", help="start the engines of a model at once")
    parser.add_argument("--arguments", type=json.loads, default={}, metavar="JSON", help="more of every engine's")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    require_gpus("sglang_engine")
    models = (options.model,) if options.model else tuple(CONFIGS)
    versions = {name: installed("sglang_engine", name) for name in ("sglang", "sglang-kernel")}
    facts = machine(**versions, arguments=options.arguments)
    print(facts, flush=True)
    # ends the engines too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: Rows = []
    every: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        for some in measure(models, options, Path(folder)):
            rows += some
            every = merged(options.record, facts, rows) if options.record else rows
            if options.record:
                write(options.record, facts, marks(every), every)
    show(every, marks(every), ("tokens/s", "seconds", "first tokens s", "decode ms"), [load.name for load in LOADS])


if __name__ == "__main__":
    main()
