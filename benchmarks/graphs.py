"""Decodes in CUDA graphs: captured for lengths that nobody knows, as engines do, beside launches for these lengths.

python benchmarks/graphs.py                       HOPPER_ATTN, or TRITON_ATTN, and FlashAttention 3 where it loads
python benchmarks/graphs.py --kv-dtype fp8        over another cache
python benchmarks/graphs.py --record              write benchmarks/results/graphs.json too

A graph of an engine is captured once, for every length up to that of the model, here 128k keys. ``us`` is the time of
its replay, ``known`` that of a graph whose launches know the lengths, which only a benchmark has; both as in
attention.py, the median of the rounds. Every output is compared with float64.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from attention import Case, Data
from measuring import Figures, machine, parser_of, require_gpus, time_us
from peers import module_of

from attnreg.runtime.tensors import is_captured

# the longest request that a graph is captured for
LONGEST = 131072
ROUNDS = 3
OURS = ("HOPPER_ATTN", "TRITON_ATTN")
PEERS = ("FLASH_ATTN/FA3",)
BASE = Case(name="", mark=0, requests=1, queries=1, context=0)
# of so many requests with up to so many keys each: alike, evenly from the fewest up, or one long and the others of 2k
CASES = (
    *(
        replace(BASE, name=f"b{requests} {keys}", requests=requests, context=keys - 1)
        for requests, keys in ((1, 2048), (1, 8192), (1, 65536), (4, 8192), (8, 2048), (8, 8200), (16, 2048),
                               (32, 1024), (64, 1024), (64, 8192), (256, 1024))
    ),
    *(
        replace(BASE, name=f"b{requests} {shortest} to {keys}", requests=requests, context=keys - 1, shortest=shortest)
        for requests, shortest, keys in ((16, 500, 16384), (32, 500, 16384), (64, 100, 4096), (256, 100, 2048))
    ),
    *(
        replace(BASE, name=f"b{requests}, one of 64k, others of 2k", context=65535, tokens=requests - 1,
                token_keys=2048)
        for requests in (16, 64)
    ),
)  # fmt: skip


def measure(case: Case, title: str, module: Any) -> dict[str, Any]:
    """The row of a case and a backend."""
    torch.cuda.empty_cache()
    data = Data(case, module=module)
    known = data.plan
    bounds = torch.full((data.batch.num_reqs,), LONGEST, dtype=torch.int32)
    unknown = module.plan(data.spec, replace(data.batch, max_seq_len=LONGEST, seq_lens_cpu=bounds))
    times, errors = {}, []
    for name, plan in (("us", unknown), ("known", known)):
        data.plan = plan
        # a capture that nobody notices is of the launches for the lengths of the batch
        noticed = is_captured if plan is unknown else lambda query: False
        with patch("attnreg.kernels.triton.plans.is_captured", noticed):
            times[name] = round(statistics.median(time_us(data.forward, 20, captured=True) for _ in range(ROUNDS)), 1)
        errors.append(data.error())
    return {"case": case.name, "kv_dtype": case.kv_dtype, "backend": title, **times,
            "error": float(f"{max(errors):.2g}"), "correct": max(errors) <= case.max_error}  # fmt: skip


def main() -> None:
    parser = parser_of("graphs", __doc__)
    parser.add_argument("--case", default="", help="only the cases with this word in their names")
    parser.add_argument("--kv-dtype", default="auto", help="of the cache")
    options = parser.parse_args()
    require_gpus("graphs")
    figures = Figures(options.record, machine(), key=("case", "kv_dtype", "backend"))
    for case in CASES:
        if options.case not in case.name:
            continue
        if options.kv_dtype != "auto":
            case = replace(case, kv_dtype=options.kv_dtype, max_error=3e-3)
        found = {title: module_of(title, case.request) for title in (*OURS, *PEERS)}
        ours = next(title for title in OURS if not isinstance(found[title], str))
        for title in (ours, *PEERS):
            if isinstance(found[title], str):
                print(f"{case.name}: {title} refused: {found[title]}")
            else:
                figures.add(measure(case, title, found[title]))


if __name__ == "__main__":
    main()
