"""Measure TRITON_ATTN and ROCM_ATTN on a GPU: each case beside its mark, its peers, and the machine's ceilings.

python benchmarks/attention.py                  print a table
python benchmarks/attention.py --case decode    only the cases with this word in their names
python benchmarks/attention.py --record         write benchmarks/results/attention.json too
python benchmarks/attention.py --backend FLASH_ATTN/FA3   that row's kernel module beside them; repeatable

A sample is one replay of a CUDA graph that holds one call, after the L2 cache was overwritten (256 MiB memset), between
two CUDA events. The figure is the median of the samples, and its spread are their 10th and 90th percentile. Data are
random, and each result is compared with float64 in the same run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from measuring import Figures, Peer, Peers, ceilings, machine, measured, parser_of, require_gpus, samples_us, spread
from peers import module_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from attnreg.kernels import rocm_attn, triton_attn
from attnreg.request import AttentionRequest
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache, LayerParams
from attnreg.runtime.lengths import prefix_sums


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call: every request has ``queries`` queries after ``context`` earlier keys.

    tokens: further requests before them, of one query each, the last of ``token_keys`` keys. shortest: the keys of the
    others lie evenly from so many up to theirs. each: the keys of each of the requests, in place of these. mark:
    microseconds on an H200; max_error: of ||out - ref|| / ||ref||.
    """

    name: str
    mark: float
    requests: int
    queries: int
    context: int
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    head_size_v: int | None = None
    kv_dtype: str = "auto"
    block_size: int | None = 16
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    max_error: float = 1e-2
    tokens: int = 0
    token_keys: int = 0
    shortest: int | None = None
    each: tuple[int, ...] = ()

    @property
    def keys(self) -> int:
        return self.context + self.queries

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The queries and the keys of each request."""
        if self.each:
            return [(self.queries, keys) for keys in self.each]
        step = 0.0 if self.shortest is None else (self.keys - self.shortest) / max(self.requests - 1, 1)
        each = [(self.queries, self.keys - round(i * step)) for i in range(self.requests)]
        return [(1, self.token_keys)] * self.tokens + each

    @property
    def values(self) -> int:
        """The size of a head's values."""
        return self.head_size_v or self.head_size

    @property
    def work(self) -> tuple[float, float]:
        """Bytes to move and floating-point operations to do, at least."""
        heads, kv_heads = self.heads
        tokens = self.requests * self.queries
        each = self.lengths
        seen = sum(keys if self.window is None else min(keys, queries + self.window - 1) for queries, keys in each)
        pairs = sum(self._visible(keys - queries + i, keys) for queries, keys in each for i in range(queries))
        element = 1 if self.kv_dtype.startswith("fp8") else 2
        both = self.head_size + self.values
        moved = seen * kv_heads * both * element + 2 * (tokens + self.tokens) * heads * both
        return moved, 2 * pairs * heads * both

    @property
    def request(self) -> AttentionRequest:
        """What a layer of this case asks for."""
        features = {"sinks": self.sinks, "sliding_window": self.window, "non_causal": not self.causal}
        return AttentionRequest(
            head_size=self.head_size, head_size_v=self.values, num_heads=self.heads[0], num_kv_heads=self.heads[1],
            dtype="bfloat16", kv_dtype=self.kv_dtype, block_size=self.block_size,
            features=frozenset(name for name, asked in features.items() if asked),
        )  # fmt: skip

    def _visible(self, position: int, keys: int) -> int:
        last = position if self.causal else keys - 1
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return last - first + 1


CASES = (
    Case(name="decode b64 8k", mark=505, requests=64, queries=1, context=8191),
    Case(name="decode b8 8k", mark=84, requests=8, queries=1, context=8191),
    Case(name="decode b1 8k", mark=22, requests=1, queries=1, context=8191),
    Case(name="decode b1 32k", mark=50, requests=1, queries=1, context=32767),
    Case(name="decode fp8 b64 8k", mark=390, requests=64, queries=1, context=8191, kv_dtype="fp8", max_error=3e-3),
    Case(name="16 queries b8 8k causal", mark=100, requests=8, queries=16, context=8192),
    Case(name="16 queries b8 8k non-causal", mark=100, requests=8, queries=16, context=8192, causal=False),
    Case(name="8 queries b1 32k non-causal", mark=65, requests=1, queries=8, context=32768, causal=False),
    Case(name="prefill 2k on 8k b8", mark=7600, requests=8, queries=2048, context=8192),
    Case(name="prefill 2k on 8k b8 pages 128", mark=6200, requests=8, queries=2048, context=8192, block_size=128),
    Case(name="prefill 4k b4 packed", mark=1200, requests=4, queries=4096, context=0, block_size=None),
    Case(
        name="gpt-oss window 128 prefill 4k b4", mark=280, requests=4, queries=4096, context=0, heads=(64, 8),
        head_size=64, window=128, sinks=True,
    ),
    Case(
        name="gpt-oss window 128 decode b64", mark=17, requests=64, queries=1, context=8191, heads=(64, 8),
        head_size=64, window=128, sinks=True,
    ),
)  # fmt: skip
# ROCM_ATTN may be a tenth slower than TRITON_ATTN; the marks are set from TRITON_ATTN's times in the same run
ROCM_CASES = tuple(
    Case(name=name, mark=math.inf, requests=requests, queries=queries, context=context)
    for name, requests, queries, context in (
        ("prefill 512 on 8k b8", 8, 512, 8192), ("prefill 512 on 32k b2", 2, 512, 32768),
        ("prefill 2k on 8k b8", 8, 2048, 8192), ("prefill 2k on 32k b2", 2, 2048, 32768),
        ("decode b64 8k", 64, 1, 8191), ("decode b1 32k", 1, 1, 32767),
    )
)  # fmt: skip


class Data:
    """Random inputs of a case on the GPU."""

    def __init__(self, case: Case, *, module: Any = triton_attn, layout: Any = "NHD") -> None:
        torch.manual_seed(0)
        heads, kv_heads = case.heads
        self.case, self.module = case, module
        features = {"sliding_window"} if case.window else set()
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_size=case.head_size, head_size_v=case.values,
            dtype=torch.bfloat16, softmax_scale=case.head_size**-0.5, kv_dtype=case.kv_dtype,
            block_size=case.block_size, sliding_window=case.window,
            features=frozenset(features | ({"sinks"} if case.sinks else set())), kv_layout=layout,
        )  # fmt: skip
        query_lens, key_lens = map(list, zip(*case.lengths, strict=True))
        tokens, keys = sum(query_lens), sum(key_lens)
        # where each request's queries and keys begin
        self.query_starts, self.key_starts = (prefix_sums(lengths) for lengths in (query_lens, key_lens))
        self.query = _random(tokens, heads, case.head_size)
        self.key, self.value = _random(keys, kv_heads, case.head_size), _random(keys, kv_heads, case.values)
        self.output = self.query.new_full((tokens, heads, case.values), math.nan)
        scale = torch.tensor([0.01], device="cuda").expand(kv_heads) if self.spec.quantised else None
        sinks = torch.randn(heads, device="cuda").bfloat16() if case.sinks else None
        self.params = LayerParams(sinks=sinks, k_scale=scale, v_scale=scale)
        table = slots = None
        self.cache: KVCache | None = None
        if case.block_size is not None:
            blocks = [-(-n // case.block_size) for n in key_lens]
            order = torch.randperm(sum(blocks), device="cuda").int()
            mine = [order[first:last] for first, last in pairwise(prefix_sums(blocks))]
            table = torch.nn.utils.rnn.pad_sequence(mine, batch_first=True)
            at = torch.arange(max(key_lens), device="cuda")
            slots = torch.cat(
                [some[at[:n] // case.block_size].long() * case.block_size + at[:n] % case.block_size
                 for some, n in zip(mine, key_lens, strict=True)]
            )  # fmt: skip
            shape = module.kv_cache_shape(self.spec, sum(blocks))
            self.cache = KVCache(
                torch.zeros(shape.key, dtype=shape.dtype, device="cuda"),
                torch.zeros(shape.value, dtype=shape.dtype, device="cuda"),
            )
        self.batch = BatchMetadata.build(
            query_lens, key_lens, device="cuda", block_table=table, slot_mapping=slots, causal=case.causal,
        )  # fmt: skip
        self.plan = module.plan(self.spec, self.batch)
        if self.cache is not None:
            module.write_kv(self.spec, self.plan, self.key, self.value, self.cache, params=self.params)

    def forward(self) -> None:
        """One call of the backend."""
        key, value = (self.key, self.value) if self.cache is None else (None, None)
        call = Call(self.query, self.cache, self.output, key, value, params=self.params)
        self.module.forward(self.spec, self.plan, call)

    def error(self, output: Tensor | None = None) -> float:
        """The relative error of the output, or of another, against float64, on random rows of up to three requests."""
        output = self.output if output is None else output
        wrong, right, requests = 0.0, 0.0, len(self.case.lengths)
        for request in {0, requests // 2, requests - 1}:
            queries, _ = self.case.lengths[request]
            rows = torch.randint(queries, (min(queries, 64),), device="cuda")
            ours = output[self.query_starts[request] + rows].double()
            exact = self._exact(request, rows)
            wrong += float((ours - exact).square().sum())
            right += float(exact.square().sum())
        return math.sqrt(wrong / right)

    def _exact(self, request: int, rows: Tensor) -> Tensor:
        case = self.case
        queries, keys = case.lengths[request]
        first = self.key_starts[request]
        key, value = (self._stored(x[first : first + keys]) for x in (self.key, self.value))
        query = (
            self.query[self.query_starts[request] + rows].double().view(len(rows), case.heads[1], -1, case.head_size)
        )
        scores = torch.einsum("rhgd,khd->hgrk", query, key) * self.spec.softmax_scale
        distance = (keys - queries + rows)[:, None] - torch.arange(keys, device="cuda")
        hidden = distance < 0 if case.causal else torch.zeros_like(distance, dtype=torch.bool)
        if case.window is not None:
            hidden |= distance.abs() >= case.window
        scores = scores.masked_fill(hidden, -math.inf)
        if self.params.sinks is not None:
            sinks = self.params.sinks.double().view(case.heads[1], -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1)[..., :keys]
        return torch.einsum("hgrk,khd->rhgd", weights, value).flatten(1, 2)

    def _stored(self, x: Tensor) -> Tensor:
        """x as it is read from the cache: rounded to fp8 where the cache is quantised."""
        if not self.spec.quantised:
            return x.double()
        return (x.float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).double() * float(torch.tensor(0.01))

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values for torch's own attention: [requests, heads, tokens, head_size]."""
        requests = self.case.requests
        q, k, v = (x.view(requests, -1, *x.shape[1:]).transpose(1, 2) for x in (self.query, self.key, self.value))
        return q.contiguous(), k.contiguous(), v.contiguous()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def peers(data: Data) -> Peers:
    """torch's own attention on the same numbers in dense tensors, without the cost of paging."""
    case = data.case
    if data.spec.quantised or case.window is not None:
        return
    q, k, v = data.dense()
    causal = case.causal and case.queries > 1
    square = case.context == 0
    bias = causal_lower_right(case.queries, case.keys) if causal and not square else None

    def error(output: Tensor) -> float:
        return data.error(output.transpose(1, 2).flatten(0, 1))

    for name, backend in (("sdpa flash", SDPBackend.FLASH_ATTENTION), ("sdpa cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def sdpa(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=bias, is_causal=causal and square, enable_gqa=True
                )

        yield Peer(name, sdpa, error)
    # flex is compiled for each shape, which takes longer than measuring it: not for every batch size
    if case.queries > 16 or case.requests == 64:
        yield Peer("flex", _flex(q, k, v, causal, case.context), error)


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool, context: int) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i + context >= j, None, None, q.shape[2], k.shape[2], device="cuda")
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def backend_samples(case: Case, title: str) -> list[float] | str:
    """The times of a backend of the registry on a case, or why there is none: it refused, or its output is wrong."""
    module = module_of(title, case.request)
    if isinstance(module, str):
        return f"refused: {module[:90]}"
    try:
        data = Data(case, module=module)
        # of packed keys some read as many as the host counted
        captured = case.block_size is not None and getattr(module, "CAPTURABLE", False)
        samples = samples_us(data.forward, captured=captured)
        error = data.error()
    except (RuntimeError, ValueError) as problem:
        return f"refused: {str(problem).splitlines()[0][:90]}"
    return samples if error <= case.max_error else f"wrong: error {error:.2g}"


def measure(
    case: Case, limits: dict[str, float], with_peers: bool, backends: Sequence[str] = (), **how: Any
) -> dict[str, Any]:
    """The figures of one case: time and its spread, error, floor, and the peers' times.

    backends: those of the registry that are measured beside it. how: further arguments of `Data`.
    """
    # no case gets fragments of the last one's memory
    torch.cuda.empty_cache()
    data = Data(case, **how)
    samples = samples_us(data.forward)
    moved, operations = case.work
    floor = max(moved / limits["read GB/s"] / 1e3, operations / limits["bf16 matmul TFLOP/s"] / 1e6)
    others = peers(data) if with_peers else ()
    row = measured(case.name, samples, case.mark, floor, data.error(), case.max_error, others)
    for title in backends:
        found = backend_samples(case, title)
        row["peers"][title] = found if isinstance(found, str) else round(statistics.median(found), 1)
        if not isinstance(found, str):
            row["peer_spreads"][title] = spread(found)
    return row


def measure_rocm(case: Case, limits: dict[str, float]) -> dict[str, Any]:
    """The figures of ROCM_ATTN in the plain layout; its peers are TRITON_ATTN and itself in AMD's layout."""
    triton = measure(case, limits, with_peers=False)
    mark = round(1.1 * triton["us"], 1)
    row = measure(replace(case, name=f"ROCM_ATTN {case.name}", mark=mark), limits, with_peers=False, module=rocm_attn)
    split = measure(case, limits, with_peers=False, module=rocm_attn, layout="SPLIT")
    row["correct"] &= split["correct"]
    others = {"TRITON_ATTN": triton, "ROCM_ATTN in the layout SPLIT": split}
    row["peers"] = {name: other["us"] for name, other in others.items()}
    return {**row, "peer_spreads": {name: other["spread"] for name, other in others.items()}}


def main() -> None:
    parser = parser_of("attention", __doc__)
    parser.add_argument("--case", default="", help="only the cases with this word in their names")
    parser.add_argument("--no-peers", action="store_true", help="leave torch's own attention out")
    parser.add_argument("--backend", action="append", default=[], help="a backend or variant to measure; repeatable")
    options = parser.parse_args()
    require_gpus("attention")
    limits = ceilings()
    figures = Figures(options.record, machine(), ceilings=limits)
    for case in CASES:
        if options.case in case.name:
            figures.add(measure(case, limits, not options.no_peers, options.backend))
    for case in ROCM_CASES:
        if options.case in f"ROCM_ATTN {case.name}":
            figures.add(measure_rocm(case, limits))
    figures.show()


if __name__ == "__main__":
    main()
