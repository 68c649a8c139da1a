"""Measure transformers on a GPU: a decoded token and continuous batching, by its own attention and by attnreg's.

python benchmarks/serving.py                    print the figures
python benchmarks/serving.py --record           write benchmarks/results/serving.json too
python benchmarks/serving.py --only batching    a part alone; recorded, it leaves the other parts as they are
python benchmarks/serving.py --backend FLASH_ATTN/FA3    that backend beside attnreg's choice; repeatable

The model is a Llama of 8 layers with random weights in bfloat16. A decoded token is measured inside of ``generate``, in
rounds in which the implementations take turns; the figure is the median of tokens after the first. PyTorch's attention
makes a plan for each new length, which later rounds find: one row has lengths that are new, as in a server. A prompt is
one forward of the model over new tokens. Latents are measured alike, with the attention of DeepSeek-V3 in 4 layers:
eager and PyTorch's attention expand them for each token. Continuous batching is ``generate_batch`` over 64 prompts of
many lengths, after the same prompts once: the kernels for batches of all kinds are compiled then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from measuring import Figures, machine, parser_of, require_gpus
from transformers import (
    ContinuousBatchingConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

import attnreg.integrations.transformers as attention

LAYERS = 8
NEW, ROUNDS = 27, 4
# requests, tokens of context, the cache, whether the lengths are new; the names of transformers' own implementations
DECODES = ((1, 4096, None, False), (8, 1024, None, False), (8, 4096, None, False), (1, 4096, "static", False),
           (1, 3000, None, True))  # fmt: skip
# requests and tokens of prompts
PROMPTS = ((1, 4096), (4, 4096), (16, 1024))
# requests and tokens of context of a model with latents; eager holds the scores of 128 heads of a prompt
LATENTS = ((1, 4096), (4, 2048), (1, 8192))
OWN = ("eager", "sdpa")


def model_of() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=16384, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.eval().to("cuda", torch.bfloat16)


def latent_model() -> Any:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=128,
        num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, first_k_dense_replace=4, max_position_embeddings=16384, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    model: Any = DeepseekV3ForCausalLM(config)
    return model.eval().to("cuda", torch.bfloat16)


class Clock(StoppingCriteria):
    """Notes when each token is there; it stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def token_times(model: Any, ids: Any, cache: str | None) -> list[float]:
    """Milliseconds of each token after the second."""
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, cache_implementation=cache,
        disable_compile=True,
    )  # fmt: skip
    clock = Clock()
    more: dict[str, Any] = {"generation_config": greedy, "stopping_criteria": StoppingCriteriaList([clock])}
    model.generate(ids, attention_mask=torch.ones_like(ids), **more)
    torch.cuda.synchronize()
    return [1e3 * (b - a) for a, b in itertools.pairwise(clock.times[1:])]


def prompted(model: Any, requests: int, tokens: int, others: dict[str, str]) -> dict[str, float]:
    """Milliseconds of a forward over prompts, by each implementation; others: attnreg's under other names."""
    ids = torch.randint(3, 32000, (requests, tokens), device="cuda")
    times: dict[str, list[float]] = {name: [] for name in ("sdpa", "attnreg", *others)}
    for _ in range(2 * ROUNDS):
        for name, found in times.items():
            model.set_attn_implementation(name)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            found.append((time.perf_counter() - begin) * 1e3)
    return {others.get(name, name): round(statistics.median(found[2:]), 2) for name, found in times.items()}


def backends_of(model: Any, name: str = "attnreg") -> str:
    """The backends that ran a model's layers so far."""
    runs = [run for run in attention.runs(model, name=name) if run.calls]
    chosen = [run.selection.chosen for run in runs if run.selection is not None]
    return ", ".join(dict.fromkeys([*(c.title for c in chosen if c), *(f"dense: {r.dense}" for r in runs if r.dense)]))


def decoded(
    model: Any, requests: int, context: int, cache: str | None, *, new: bool, others: dict[str, str]
) -> dict[str, float]:
    """Milliseconds a decoded token of each implementation that finds memory; new: of lengths for the first time."""
    ids = torch.randint(3, 32000, (requests, context), device="cuda")
    found: dict[str, list[float]] = {name: [] for name in (*OWN, "attnreg", *others)}
    for i in range(1 if new else ROUNDS + 1):
        for name in [*found]:
            model.set_attn_implementation(name)
            try:
                times = token_times(model, ids, cache)
            except torch.OutOfMemoryError:
                del found[name]
                torch.cuda.empty_cache()
                continue
            if i or new:
                found[name] += times
    return {others.get(name, name): round(statistics.median(times), 3) for name, times in found.items()}


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


def batched(model: Any, name: str, graphs: bool) -> float:
    """New tokens a second of continuous batching."""
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    settings: dict[str, Any] = {
        "auto_switch_to_flash": False, "use_cuda_graph": graphs, "page_size": 32, "block_size": 32,
        "num_blocks": 4096, "max_batch_tokens": 2048,
    }  # fmt: skip
    config = ContinuousBatchingConfig(**{k: v for k, v in settings.items() if k in known})
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    rate = 0.0
    with implementation(model, name):
        for _ in range(2):
            begin = time.perf_counter()
            found = model.generate_batch(
                inputs=prompts(), generation_config=greedy, continuous_batching_config=config,
                progress_bar=False,
            )  # fmt: skip
            took = time.perf_counter() - begin
            rate = sum(len(one.generated_tokens) for one in found.values()) / took
    return round(rate)


def marked(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its mark, and whether it is met."""
    own = [row[name] for name in (*OWN, "paged|eager") if name in row]
    ours = [value for name, value in row.items() if name.startswith("attnreg")]
    if not own or not ours:
        return row
    if row["unit"].startswith("ms"):
        return {**row, "mark": min(own), "met": ours[0] <= min(own)}
    return {**row, "mark": 2 * max(own), "met": ours[0] >= 2 * max(own)}


def main() -> None:
    parser = parser_of("serving", __doc__)
    parser.add_argument("--only", default="", help="prompts, decode, latents or batching")
    parser.add_argument("--backend", action="append", default=[], help="a backend or variant to measure; repeatable")
    options = parser.parse_args()
    require_gpus("serving")
    attention.register()
    others = {f"attnreg-{i}": title for i, title in enumerate(options.backend)}
    for name, title in others.items():
        attention.register(name, backend=title)
    model, figures = model_of(), Figures(options.record, machine(transformers=transformers.__version__))
    for requests, tokens in PROMPTS if options.only in "prompts" else ():
        with torch.inference_mode():
            times = prompted(model, requests, tokens, others)
        case = f"prompts b{requests} of {tokens}"
        figures.add(marked({"case": case, "unit": "ms", "chosen": backends_of(model), **times}))
    for requests, context, cache, new in DECODES if options.only in "decode" else ():
        what = f"{cache or 'dynamic'} cache" + (", new lengths" if new else "")
        times = decoded(model, requests, context, cache, new=new, others=others)
        figures.add(marked({"case": f"decode b{requests} at {context}, {what}", "unit": "ms a token", **times}))
    latents = latent_model() if options.only in "latents" else None
    for requests, context in LATENTS if latents is not None else ():
        times = decoded(latents, requests, context, None, new=False, others={})
        figures.add(marked({"case": f"latents decode b{requests} at {context}", "unit": "ms a token", **times}))
    del latents
    if options.only in "batching":
        row: dict[str, Any] = {"case": "continuous batching", "unit": "new tokens a second"}
        for name in ("attnreg", "attnreg, CUDA graphs", "paged|eager", "sdpa"):
            with contextlib.suppress(torch.OutOfMemoryError):
                row[name] = batched(model, name, "graphs" in name)
            gc.collect()
            torch.cuda.empty_cache()
            figures.add(marked(row))


if __name__ == "__main__":
    main()
