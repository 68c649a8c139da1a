"""Decodes in CUDA graphs: captured for lengths that nobody knows, as engines do, beside launches for these lengths.

python benchmarks/graphs.py                    attention over bfloat16 and fp8, over packed codes, and over latents
python benchmarks/graphs.py --over fp8         over the caches alone with this word in their names
python benchmarks/graphs.py --case "one of"    only the cases with this word in their names
python benchmarks/graphs.py --record           write benchmarks/results/graphs.json too

A graph of an engine is captured once, for every length up to that of the model, here 128k keys. ``us`` is the time of
its replay, ``known`` that of a graph whose launches know the lengths, which only a benchmark has; both as in
attention.py, the median of the rounds. Each is attnreg's fastest backend that runs here; FlashAttention 3 beside it,
where it loads, has a schedule made on the device. Outputs are compared with float64.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import attention
import mla_decode
import torch
import turboquant
from kernel_case import Place
from measuring import Figures, machine, parser_of, require_gpus, samples_us, spread
from peers import module_of

from attnreg.kernels import reference
from attnreg.request import AttentionRequest
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call
from attnreg.runtime.tensors import is_captured

# the longest request that a graph is captured for
LONGEST = 131072
ROUNDS = 3
# where plans ask whether a call is captured
PLACE = "attnreg.kernels.triton.planned.batches.is_captured"


@dataclass(frozen=True)
class Made:
    """A layer and a batch with their tensors. run: of a plan. error: of the last output, relative, against float64."""

    spec: AttentionSpec
    batch: BatchMetadata
    run: Callable[[Any], None]
    error: Callable[[], float]
    max_error: float = 1e-2


@dataclass(frozen=True)
class Over:
    """A cache to decode over: the backends of attnreg, of which the first that runs here is timed, and the peers.

    mixed: makes a batch of `MIXED`; None for a cache over which prompts are computed by another layer.
    """

    name: str
    request: AttentionRequest
    make: Callable[[Sequence[int], ModuleType], Made]
    ours: Sequence[str]
    peers: Sequence[str] = ()
    mixed: Callable[[Mapping[str, int], ModuleType], Made] | None = None


def _attention(kv_dtype: str) -> Over:
    base = attention.Case(
        name="", mark=0, requests=1, queries=1, context=0, kv_dtype=kv_dtype,
        max_error=1e-2 if kv_dtype == "auto" else 3e-3,
    )  # fmt: skip

    def make(lengths: Sequence[int], module: ModuleType) -> Made:
        return made(replace(base, requests=len(lengths), each=tuple(lengths)), module)

    def mixed(case: Mapping[str, int], module: ModuleType) -> Made:
        return made(replace(base, **case), module)  # type: ignore[arg-type]

    def made(case: attention.Case, module: ModuleType) -> Made:
        data = attention.Data(case, module=module)

        def run(plan: Any) -> None:
            data.plan = plan
            data.forward()

        return Made(data.spec, data.batch, run, data.error, base.max_error)

    name = "bfloat16" if kv_dtype == "auto" else kv_dtype
    return Over(name, base.request, make, ("HOPPER_ATTN", "TRITON_ATTN"), ("FLASH_ATTN/FA3",), mixed)


def _packed(preset: str) -> Over:
    place = Place()

    def make(lengths: Sequence[int], module: ModuleType) -> Made:
        torch.manual_seed(0)
        spec = turboquant.spec_of(place, preset)
        cache, batch, _ = turboquant.filled(place, spec, len(lengths), -(-max(lengths) // 16) * 16)
        table = batch.block_table
        assert table is not None
        batch = BatchMetadata.build([1] * len(lengths), lengths, device="cuda", block_table=table)
        query = torch.randn(len(lengths), spec.num_heads, spec.head_size, device="cuda", dtype=spec.dtype)
        output, lse = torch.full_like(query, math.nan), torch.empty(spec.num_heads, len(lengths), device="cuda")

        def error() -> float:
            worst = 0.0
            for i in {0, len(lengths) - 1}:
                one = BatchMetadata.build([1], [lengths[i]], device="cuda", block_table=table[i : i + 1])
                exact = reference.attention(spec, one, query[i : i + 1], cache).output[0]
                worst = max(worst, float((output[i].double() - exact).norm() / exact.norm()))
            return worst

        def run(plan: Any) -> None:
            module.forward(spec, plan, Call(query, cache, output, lse=lse))

        return Made(spec, batch, run, error)

    request = AttentionRequest(
        head_size=turboquant.SIZE, num_heads=turboquant.HEADS, num_kv_heads=turboquant.KV_HEADS, dtype="bfloat16",
        kv_dtype=preset, block_size=turboquant.BLOCK,
    )  # fmt: skip
    return Over(preset, request, make, ("TURBOQUANT/Hopper", "TURBOQUANT/Triton"))


def _latents(heads: int, kv_dtype: str) -> Over:
    def make(lengths: Sequence[int], module: ModuleType) -> Made:
        made = mla_decode.Tensors(Place(), len(lengths), heads, max(lengths), kv_dtype)
        batch = BatchMetadata.build([1] * len(lengths), lengths, device="cuda", block_table=made.table)

        def error() -> float:
            chosen = {0, len(lengths) - 1}
            return max(made.error(torch.arange(lengths[i], device="cuda"), request=i) for i in chosen)

        def run(plan: Any) -> None:
            module.forward(made.spec, plan, made.call())

        return Made(made.spec, batch, run, error)

    name = f"latents of {heads} heads" + ("" if kv_dtype == "auto" else f", {kv_dtype}")
    request = AttentionRequest(
        attention="mla", head_size=576, head_size_v=512, num_heads=heads, num_kv_heads=1, dtype="bfloat16",
        kv_dtype=kv_dtype, block_size=mla_decode.BLOCK,
    )  # fmt: skip
    return Over(name, request, make, ("HOPPER_MLA", "TRITON_MLA"))


CACHES = (
    _attention("auto"), _attention("fp8"), _packed("turboquant_4bit_nc"), _packed("turboquant_3bit_nc"),
    _latents(128, "auto"), _latents(16, "auto"), _latents(128, "fp8"),
)  # fmt: skip


def _between(requests: int, shortest: int, longest: int) -> list[int]:
    """Lengths evenly from the shortest to the longest, in any order."""
    return _in_any_order([longest - round(i * (longest - shortest) / (requests - 1)) for i in range(requests)])


def _in_any_order(lengths: Sequence[int]) -> list[int]:
    return random.Random(0).sample(lengths, len(lengths))


# the keys of each request: alike, evenly from the fewest up, or one long and the others of 2k
CASES = {
    **{
        f"{requests} of {keys}": [keys] * requests
        for requests, keys in ((1, 2048), (1, 8192), (1, 65536), (4, 8192), (8, 2048), (8, 8200), (16, 2048),
                               (32, 1024), (64, 1024), (64, 8192), (256, 1024))
    },
    **{
        f"{requests}, {shortest} to {keys}": _between(requests, shortest, keys)
        for requests, shortest, keys in ((16, 500, 16384), (32, 500, 16384), (64, 100, 4096), (256, 100, 2048))
    },
    **{f"{n}, one of 64k, others of 2k": _in_any_order([2048] * (n - 1) + [65536]) for n in (16, 64)},
}  # fmt: skip
# requests of one query beside prompts: fields of attention.Case
MIXED = {
    "60 of 8k, 2 prompts of 2k": {"tokens": 60, "token_keys": 8192, "requests": 2, "queries": 2048},
    "60 of 8k, 2 prompts of 2k on 6k": {
        "tokens": 60, "token_keys": 8192, "requests": 2, "queries": 2048, "context": 6144
    },
    "128 of 2k, 1 prompt of 4k": {"tokens": 128, "token_keys": 2048, "requests": 1, "queries": 4096},
    "8 of 8k, 1 prompt of 512": {"tokens": 8, "token_keys": 8192, "requests": 1, "queries": 512},
}  # fmt: skip


def measure(case: str, over: Over, title: str, module: ModuleType) -> dict[str, Any]:
    """The row of a case, a cache and a backend. spread: the 10th and 90th percentile of the samples of all rounds."""
    torch.cuda.empty_cache()
    if case in CASES:
        made = over.make(CASES[case], module)
    else:
        assert over.mixed is not None
        made = over.mixed(MIXED[case], module)
    bounds = torch.full((made.batch.num_reqs,), LONGEST, dtype=torch.int32)
    unknown = module.plan(made.spec, replace(made.batch, max_seq_len=LONGEST, seq_lens_cpu=bounds))
    times, spreads, errors = {}, {}, []
    for name, plan in (("us", unknown), ("known", module.plan(made.spec, made.batch))):
        # a capture that nobody notices is of the launches for the lengths of the batch
        noticed = is_captured if plan is unknown else lambda query: False
        with patch(PLACE, noticed):
            rounds = [samples_us(partial(made.run, plan), 20, captured=True) for _ in range(ROUNDS)]
        times[name] = round(statistics.median(map(statistics.median, rounds)), 1)
        spreads[name] = spread([us for some in rounds for us in some])
        errors.append(made.error())
    return {"case": case, "over": over.name, "backend": title, **times, "spread": spreads,
            "error": float(f"{max(errors):.2g}"), "correct": max(errors) <= made.max_error}  # fmt: skip


def main() -> None:
    parser = parser_of("graphs", __doc__)
    parser.add_argument("--case", default="", help="only the cases with this word in their names")
    parser.add_argument("--over", default="", help="only the caches with this word in their names")
    options = parser.parse_args()
    require_gpus("graphs")
    figures = Figures(options.record, machine(), key=("case", "over", "backend"))
    for over in (over for over in CACHES if options.over in over.name):
        found = {title: module_of(title, over.request) for title in (*over.ours, *over.peers)}
        ours = next((title for title in over.ours if not isinstance(found[title], str)), over.ours[-1])
        for title in (ours, *over.peers):
            module = found[title]
            if isinstance(module, str):
                print(f"{over.name}: {title} refused: {module}")
                continue
            for case in (case for case in (*CASES, *(MIXED if over.mixed else ())) if options.case in case):
                figures.add(measure(case, over, title, module))


if __name__ == "__main__":
    main()
