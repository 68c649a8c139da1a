"""Measure backends side by side on a GPU of SM 9.0: in turns, in one process, on the same numbers.

python benchmarks/side_by_side.py                    HOPPER_ATTN beside its peers that load here
python benchmarks/side_by_side.py --case head        only the cases with this word in their names
python benchmarks/side_by_side.py --backend FLASH_ATTN/FA4-Hopper   another peer; repeatable
python benchmarks/side_by_side.py --record           write benchmarks/results/side_by_side.json too

Rounds go through all backends; in each, a backend's figure is the median as in attention.py, of a captured call where
it may be captured and engines would: not one of tokens and prompts. The figure of a case is the median of the rounds.
Every output is compared with float64.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import torch
from attention import Case, Data
from measuring import Figures, machine, parser_of, require_gpus, time_us
from peers import module_of

OURS, TWIN = "HOPPER_ATTN", "TRITON_ATTN"
PEERS = ("FLASH_ATTN/FA3", "TORCH_SDPA/cuDNN", "FLASHINFER/fa3")
ROUNDS = 3

PROMPTS = Case(name="prefill 4k b4 packed", mark=790, requests=4, queries=4096, context=0, block_size=None)
PAGED = replace(PROMPTS, name="prefill 4k b4", mark=850, block_size=16)
ON_8K = replace(PAGED, name="prefill 2k on 8k b8", mark=3600, requests=8, queries=2048, context=8192)
TOKENS = replace(PAGED, name="decode b64 8k", mark=480, requests=64, queries=1, context=8191)
MIXED = replace(PAGED, name="60 decodes at 8k, 2 prefills of 2k", mark=580, requests=2, queries=2048, tokens=60,
                token_keys=8192)  # fmt: skip
GPT_OSS = replace(PAGED, name="gpt-oss 4k b4", mark=1180, heads=(64, 8), head_size=64, sinks=True)
CASES = (
    PROMPTS,
    PAGED,
    replace(PAGED, name="prefill 4k b4, not causal", mark=1600, causal=False),
    replace(PAGED, name="prefill 1k b16", mark=260, requests=16, queries=1024),
    ON_8K,
    replace(ON_8K, name="prefill 2k on 8k b8, pages of 128", mark=math.inf, block_size=128),
    replace(ON_8K, name="prefill 512 on 8k b8", mark=860, queries=512),
    GPT_OSS,
    replace(GPT_OSS, name="gpt-oss 4k b4, window of 128", mark=160, window=128),
    *(
        replace(PROMPTS, name=f"prefill 4k b4 packed, heads of {size}", mark=mark, head_size=size)
        for size, mark in ((64, 570), (80, math.inf), (96, 680), (192, math.inf), (256, math.inf))
    ),
    replace(PROMPTS, name="prefill 4k b4 packed, 16/4 heads of 256", mark=730, head_size=256, heads=(16, 4)),
    replace(PROMPTS, name="prefill 4k b4 packed, heads of 192, values of 128", mark=math.inf, head_size=192,
            head_size_v=128, heads=(32, 32)),
    *(
        replace(case, name=name, mark=mark, kv_dtype="fp8", max_error=3e-3)
        for name, case, mark in (
            ("prefill fp8 4k b4", PAGED, math.inf),
            ("prefill fp8 2k on 8k b8", ON_8K, 3700),
            ("prefill fp8 512 on 8k b8", replace(ON_8K, queries=512), math.inf),
            ("gpt-oss fp8 4k b4", GPT_OSS, math.inf),
        )
    ),
    *(
        replace(ON_8K, name=f"{queries} queries on {context // 1024}k b{requests}", mark=math.inf, requests=requests,
                queries=queries, context=context)
        for queries, requests, context in ((16, 8, 8192), (32, 1, 8192), (32, 8, 8192), (64, 1, 8192), (64, 8, 8192),
                                           (64, 1, 32768), (512, 1, 8192))
    ),
    MIXED,
    replace(MIXED, name="60 decodes at 8k, 2 prefills of 2k, fp8", mark=400, kv_dtype="fp8", max_error=3e-3),
    replace(MIXED, name="60 decodes at 8k, 2 prefills of 2k on 6k", mark=math.inf, context=6144),
    replace(MIXED, name="128 decodes at 2k, 1 prefill of 4k", mark=math.inf, tokens=128, token_keys=2048, requests=1,
            queries=4096),
    TOKENS,
    replace(TOKENS, name="decode b1 8k", mark=18, requests=1),
    replace(TOKENS, name="decode b64 8k, heads of 64", mark=240, head_size=64),
    replace(TOKENS, name="decode b8 8200", mark=math.inf, requests=8, context=8199),
    replace(TOKENS, name="decode b32, 500 to 16k", mark=math.inf, requests=32, context=16383, shortest=500),
    replace(TOKENS, name="decode b64, one of 64k, others of 2k", mark=math.inf, requests=1, context=65535, tokens=63,
            token_keys=2048),
    *(
        replace(TOKENS, name=f"decode fp8 b{requests} {keys // 1024}k", mark=mark, requests=requests, context=keys - 1,
                kv_dtype="fp8", max_error=3e-3)
        for requests, keys, mark in ((64, 8192, 260), (8, 8192, math.inf), (1, 8192, math.inf), (8, 131072, math.inf))
    ),
    replace(TOKENS, name="decode fp8 b4 8200", mark=math.inf, requests=4, context=8199, kv_dtype="fp8", max_error=3e-3),
    replace(TOKENS, name="decode fp8 b32, 500 to 16k", mark=math.inf, requests=32, context=16383, shortest=500,
            kv_dtype="fp8", max_error=3e-3),
    replace(TOKENS, name="decode fp8 b64 8k, 64/8 heads", mark=math.inf, heads=(64, 8), kv_dtype="fp8",
            max_error=3e-3),
    replace(TOKENS, name="decode fp8 b64 8k, 64/8 heads of 64", mark=math.inf, heads=(64, 8), head_size=64,
            kv_dtype="fp8", max_error=3e-3),
    replace(TOKENS, name="4 queries fp8 b64 8k", mark=math.inf, queries=4, context=8188, kv_dtype="fp8",
            max_error=3e-3),
    replace(ON_8K, name="prefill 2k on 8k b4, heads of 256", mark=math.inf, requests=4, head_size=256),
    replace(ON_8K, name="prefill 2k on 8k b4, 16/4 heads of 256", mark=1600, requests=4, head_size=256, heads=(16, 4)),
)  # fmt: skip


def measure(case: Case, backends: list[str]) -> dict[str, Any]:
    """The figures of a case by backend, or why there is none, and how HOPPER_ATTN's compares with the best peer's.

    errors: of each backend's output against float64, relative, on the rows that `Data.error` draws.
    """
    torch.cuda.empty_cache()
    found: dict[str, Any] = {}
    running, errors = {}, {}
    for title in backends:
        module = module_of(title, case.request)
        if isinstance(module, str):
            found[title] = f"refused: {module[:90]}"
            continue
        try:
            data = Data(case, module=module)
            mixed = case.tokens and case.queries > 1
            captured = case.block_size is not None and not mixed and getattr(module, "CAPTURABLE", False)
            time_us(data.forward, 3, captured=captured)
            error = errors[title] = data.error()
        except (RuntimeError, ValueError) as problem:
            found[title] = f"refused: {str(problem).splitlines()[0][:90]}"
            continue
        if error <= case.max_error:
            running[title] = data, captured
        else:
            found[title] = f"wrong: error {error:.2g}"
    rounds = [
        {title: time_us(data.forward, 20, captured=captured) for title, (data, captured) in running.items()}
        for _ in range(ROUNDS)
    ]
    found |= {title: round(statistics.median(times[title] for times in rounds), 1) for title in running}
    row: dict[str, Any] = {"case": case.name, "mark": case.mark if math.isfinite(case.mark) else None, "us": found}
    row["errors"] = {title: float(f"{error:.2g}") for title, error in errors.items()}
    peers = [found[title] for title in running if title not in (OURS, TWIN)]
    if OURS in running:
        row["met"] = found[OURS] <= case.mark
        # the best peer's kernel, attnreg's own for every GPU apart
        row["ratio"] = round(found[OURS] / min(peers), 3) if peers else None
    return row


def main() -> None:
    parser = parser_of("side_by_side", __doc__)
    parser.add_argument("--case", default="", help="only the cases with this word in their names")
    parser.add_argument("--backend", action="append", default=[], help="a further backend or variant; repeatable")
    options = parser.parse_args()
    require_gpus("side_by_side")
    figures = Figures(options.record, machine())
    backends = [*dict.fromkeys((OURS, TWIN, *PEERS, *options.backend))]
    for case in CASES:
        if options.case in case.name:
            figures.add(measure(case, backends))
    ratios = [row["ratio"] for row in figures.rows if row.get("ratio")]
    if ratios:
        mean, ahead = statistics.geometric_mean(ratios), sum(ratio < 1 for ratio in ratios)
        print(
            f"{OURS} takes {mean:.3f} of the best peer's time (geometric mean), and leads in {ahead} of {len(ratios)}"
        )


if __name__ == "__main__":
    main()
