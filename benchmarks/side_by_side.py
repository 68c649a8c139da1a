"""Measure backends side by side on a GPU of SM 9.0: in turns, in one process, on the same numbers.

python benchmarks/side_by_side.py                    HOPPER_ATTN beside its peers that load here
python benchmarks/side_by_side.py --case head        only the cases with this word in their names
python benchmarks/side_by_side.py --backend FLASH_ATTN/FA4-Hopper   another peer; repeatable
python benchmarks/side_by_side.py --record           write benchmarks/results/side_by_side.json too

Rounds go through all peers; in each, a figure is the median as in attention.py, of a captured call where it may be
captured and engines would: not one of tokens and prompts. The figure of a case is the median of the rounds. Every
output is compared with float64. Two peers are no rows of the registry: cuDNN on dense copies of keys and values, and
FlashAttention 3 over an fp8 cache, whose queries are rounded to fp8 beforehand.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from attention import Case, Data
from attention import peers as dense_peers
from measuring import Figures, Peer, machine, parser_of, require_gpus, samples_us, spread, time_us
from peers import module_of

OURS, TWIN = "HOPPER_ATTN", "TRITON_ATTN"
FA3 = "FLASH_ATTN/FA3"
PEERS = (FA3, "TORCH_SDPA/cuDNN", "FLASHINFER/fa3", "FLASHINFER/fa2")
DENSE, NARROW = "cuDNN, dense copies", "FA3, fp8 queries"
ROUNDS = 3
# of the best peer's time, a step that verifies drafts
VERIFIES = 0.95

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
    replace(PROMPTS, name="prefill 1k b16 packed", mark=260, requests=16, queries=1024),
    replace(PAGED, name="prefill 1k b16", mark=math.inf, requests=16, queries=1024),
    ON_8K,
    replace(ON_8K, name="prefill 2k on 8k b8, pages of 128", mark=math.inf, block_size=128),
    replace(ON_8K, name="prefill 512 on 8k b8", mark=860, queries=512),
    GPT_OSS,
    replace(GPT_OSS, name="gpt-oss 4k b4 packed, window of 128", mark=160, window=128, block_size=None),
    replace(GPT_OSS, name="gpt-oss 4k b4, window of 128", mark=math.inf, window=128),
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
                                           (16, 1, 32768), (32, 1, 32768), (64, 1, 32768), (512, 1, 8192))
    ),
    MIXED,
    replace(MIXED, name="60 decodes at 8k, 2 prefills of 2k, fp8", mark=400, kv_dtype="fp8", max_error=3e-3),
    replace(MIXED, name="60 decodes at 8k, 2 prefills of 2k on 6k", mark=math.inf, context=6144),
    replace(MIXED, name="128 decodes at 2k, 1 prefill of 4k", mark=math.inf, tokens=128, token_keys=2048, requests=1,
            queries=4096),
    TOKENS,
    replace(TOKENS, name="decode b1 8k", mark=18, requests=1),
    replace(TOKENS, name="decode b1 1k", mark=9.5, requests=1, context=1023),
    replace(TOKENS, name="decode b64 8k, heads of 64", mark=240, head_size=64),
    replace(TOKENS, name="decode b16 4k, 32/32 heads of 80", mark=170, head_size=80, heads=(32, 32), requests=16,
            context=4095),
    replace(TOKENS, name="decode b64 8k, heads of 96", mark=392, head_size=96),
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


def _of_registry(case: Case, title: str) -> Peer | str:
    """A backend of the registry on a case, or why it does not serve it."""
    module = module_of(title, case.request)
    if isinstance(module, str):
        return module
    data = Data(case, module=module)
    return Peer(title, data.forward, lambda _: data.error())


def _on_dense_copies(case: Case) -> Peer | str:
    """cuDNN's kernel through torch, where all requests are alike and have neither window nor sinks."""
    if case.tokens or case.shortest is not None or case.sinks:
        return "requests differ, or have sinks"
    for peer in dense_peers(Data(case)):
        if peer.name == "sdpa cuDNN":
            return peer._replace(name=DENSE)
    return "an fp8 cache, or a window"


def _of_fp8_queries(case: Case) -> Peer | str:
    """FlashAttention 3 over an fp8 cache. That queries are rounded, which an engine does each step, is not timed."""
    if not case.kv_dtype.startswith("fp8"):
        return "the cache is no fp8"
    module = module_of(FA3, replace(case, kv_dtype="auto").request)
    if isinstance(module, str):
        return module
    data = Data(case)
    k_scale, v_scale = data.params.k_scale, data.params.v_scale
    assert data.cache is not None
    assert k_scale is not None
    assert v_scale is not None
    scale = data.query.float().abs().amax() / torch.finfo(torch.float8_e4m3fn).max
    query = (data.query / scale).to(torch.float8_e4m3fn)
    scales = {"q_descale": scale, "k_descale": k_scale, "v_descale": v_scale}
    arguments = module.build.arguments(data.spec, module.build.plan(data.spec, data.batch))
    arguments |= {name: value.expand(len(case.lengths), case.heads[1]) for name, value in scales.items()}
    arguments |= {} if data.params.sinks is None else {"s_aux": data.params.sinks}
    key, value = (x.view(torch.float8_e4m3fn) for x in (data.cache.key, data.cache.value))
    call = partial(module.build.fwd, q=query, k=key, v=value, out=data.output, **arguments)
    return Peer(NARROW, call, lambda _: data.error())


def _ready(case: Case, backends: list[str]) -> Iterator[tuple[str, Peer | str]]:
    """The peers of a case, each run once, or why there is none; one is prepared when the last was looked at."""
    ways = {title: partial(_of_registry, case, title) for title in backends}
    ways |= {DENSE: partial(_on_dense_copies, case), NARROW: partial(_of_fp8_queries, case)}
    for title, prepare in ways.items():
        try:
            peer = prepare()
            if not isinstance(peer, str):
                time_us(peer.call, 3, captured=_captured(case, title))
            yield title, peer
        except (RuntimeError, ValueError) as problem:
            yield title, str(problem).splitlines()[0]


def _captured(case: Case, title: str) -> bool:
    mixed = case.tokens and case.queries > 1
    if case.block_size is None or mixed:
        return False
    return title in (DENSE, NARROW) or getattr(module_of(title, case.request), "CAPTURABLE", False)


def measure(case: Case, backends: list[str]) -> dict[str, Any]:
    """The figures of a case by peer, or why there is none, and how HOPPER_ATTN's compares with the best peer's.

    spread: the 10th and 90th percentile of the samples of all rounds. errors: of each output against float64, relative,
    on the rows that `Data.error` draws. ratio: to the best peer as exact as the case asks; ratio_rough: to the best of
    all, where that is another.
    """
    torch.cuda.empty_cache()
    found: dict[str, Any] = {}
    running: dict[str, Peer] = {}
    errors = {}
    for title, peer in _ready(case, backends):
        if isinstance(peer, str):
            found[title] = f"refused: {peer[:90]}"
            continue
        assert peer.error is not None
        error = errors[title] = peer.error(peer.call())
        if error <= case.max_error or title == NARROW:
            running[title] = peer
        else:
            found[title] = f"wrong: error {error:.2g}"
    rounds = [
        {title: samples_us(peer.call, 20, captured=_captured(case, title)) for title, peer in running.items()}
        for _ in range(ROUNDS)
    ]
    medians = {title: [statistics.median(times[title]) for times in rounds] for title in running}
    found |= {title: round(statistics.median(some), 1) for title, some in medians.items()}
    row: dict[str, Any] = {"case": case.name, "mark": case.mark if math.isfinite(case.mark) else None, "us": found}
    row["spread"] = {title: spread([us for times in rounds for us in times[title]]) for title in running}
    row["errors"] = {title: float(f"{error:.2g}") for title, error in errors.items()}
    return row | _compared(case, found, [title for title in running if title not in (OURS, TWIN)])


def _compared(case: Case, us: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    """How HOPPER_ATTN's time compares with those of peers, and whether it meets the mark."""
    if isinstance(us[OURS], str):
        return {}
    # the best peer's kernel, attnreg's own for every GPU apart
    exact = [us[title] for title in peers if title != NARROW]
    ratio = round(us[OURS] / min(exact), 3) if exact else None
    compared: dict[str, Any] = {"met": us[OURS] <= case.mark, "ratio": ratio}
    if NARROW in peers:
        compared["ratio_rough"] = round(us[OURS] / min(us[title] for title in peers), 3)
    if case.queries in (16, 32, 64) and case.requests <= 8:
        compared |= {"of_best": VERIFIES, "met": ratio is not None and ratio <= VERIFIES}
    return compared


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
    for name, of in (("ratio", "as exact"), ("ratio_rough", "over fp8, with fp8 queries too")):
        if ratios := [row[name] for row in figures.rows if row.get(name)]:
            mean, ahead = statistics.geometric_mean(ratios), sum(ratio < 1 for ratio in ratios)
            print(f"{OURS} takes {mean:.3f} of the time of the best peer {of}, and leads in {ahead} of {len(ratios)}")


if __name__ == "__main__":
    main()
