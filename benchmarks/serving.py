"""Measure transformers on a GPU: a decoded token and continuous batching, by its own attention and by attnreg's.

python benchmarks/serving.py             print a table
python benchmarks/serving.py --record    write benchmarks/results/serving.json too

The model is a Llama of 8 layers with random weights in bfloat16. A decoded token is measured through ``generate``: the
time of many new tokens less that of one, in rounds in which the implementations take turns; the figure is the median.
Continuous batching is ``generate_batch`` over prompts of many lengths, after a round that compiles.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
import triton  # type: ignore[import-untyped]
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import attnreg.integrations.transformers as attention

RESULTS = Path(__file__).resolve().parent / "results" / "serving.json"
LAYERS = 8
NEW = 33
# requests and tokens of context; the names of transformers' own implementations
DECODES = ((1, 4096), (8, 1024), (8, 4096))
OWN = ("eager", "sdpa")


def model_of() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=16384, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.eval().to("cuda", torch.bfloat16)


def seconds(model: Any, ids: Any, new: int, cache: str | None) -> float:
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, cache_implementation=cache,
        disable_compile=True,
    )  # fmt: skip
    torch.cuda.synchronize()
    begin = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def decoded(model: Any, requests: int, context: int, cache: str | None, rounds: int = 5) -> dict[str, float]:
    """Milliseconds a decoded token of each implementation."""
    ids = torch.randint(3, 32000, (requests, context), device="cuda")
    names = (*OWN, "attnreg")
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name in names:
            model.set_attn_implementation(name)
            many, one = seconds(model, ids, NEW, cache), seconds(model, ids, 1, cache)
            if i:
                found[name].append((many - one) / (NEW - 1) * 1e3)
    return {name: round(statistics.median(times), 3) for name, times in found.items()}


def prompts(number: int = 64) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 1024, (number,), generator=generator).tolist()
    return [torch.randint(3, 32000, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """The model with an implementation for continuous batching."""
    if name.startswith("attnreg"):
        model.set_attn_implementation("attnreg")
        with attention.continuous_batching(model):
            yield
    else:
        model.set_attn_implementation(name)
        yield


def batched(model: Any, name: str, graphs: bool, rounds: int = 2) -> float:
    """New tokens a second of continuous batching: the best of some rounds, after one that compiles."""
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    settings: dict[str, Any] = {
        "auto_switch_to_flash": False, "use_cuda_graph": graphs, "page_size": 32, "block_size": 32,
        "num_blocks": 4096, "max_batch_tokens": 2048,
    }  # fmt: skip
    config = ContinuousBatchingConfig(**{k: v for k, v in settings.items() if k in known})
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    best = 0.0
    with implementation(model, name):
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            found = model.generate_batch(
                inputs=prompts(), generation_config=greedy, continuous_batching_config=config, progress_bar=False
            )
            took = time.perf_counter() - begin
            best = max(best, sum(len(one.generated_tokens) for one in found.values()) / took)
    return round(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help=f"write {RESULTS.name} (or another file)")
    parser.add_argument("--only", default="", help="decode or batching")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/serving.py measures a GPU, and torch sees none")
    machine = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "transformers": transformers.__version__, "date": date.today().isoformat(),
    }  # fmt: skip
    print(machine, flush=True)
    attention.register()
    model, rows = model_of(), []
    for requests, context in DECODES if options.only in "decode" else ():
        for cache in (None, "static") if requests == 1 else (None,):
            row = {"case": f"decode b{requests} at {context}, {cache or 'dynamic'} cache", "unit": "ms a token",
                   **decoded(model, requests, context, cache)}  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.only in "batching":
        row = {"case": "continuous batching", "unit": "new tokens a second"}
        for name in ("sdpa", "paged|eager", "attnreg", "attnreg, CUDA graphs"):
            with contextlib.suppress(torch.OutOfMemoryError):
                row[name] = batched(model, name, "graphs" in name)
            gc.collect()
            torch.cuda.empty_cache()
            print(json.dumps(row), flush=True)
        rows.append(row)
    if options.record:
        options.record.write_text(json.dumps({"machine": machine, "figures": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
