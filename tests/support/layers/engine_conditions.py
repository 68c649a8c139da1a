"""The conditions under which an engine runs kernels on a GPU. Run as a program, it tries the one that is named."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import attnreg
from attnreg import AttentionRequest, BatchMetadata, Platform
from attnreg.conformance.proof import attend, compare
from attnreg.conformance.trial import Trial
from attnreg.kernels import reference
from attnreg.loader import default_registry
from attnreg.machine.detect import detect_all
from attnreg.runtime.interface import BatchError, KVCache
from attnreg.runtime.layer import Attention
from support.layers.kernel_trials import Case, KernelLayer, trial_of

BASE = Case([1], [1], heads=(8, 2), head_size=64, dtype=torch.bfloat16)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window and sinks": {"window": 200, "features": frozenset({"sinks"})},
    "fp8": {"kv_dtype": "fp8", "features": frozenset({"per_head_quant_scales"})},
    "invariant": {"features": frozenset({"batch_invariant"})},
    "SPLIT": {"layout": "SPLIT"},
}


def placed(tensor: Tensor, *, odd: bool) -> Tensor:
    """A copy whose memory begins at a multiple of 16 bytes, or one element after it; with equal strides either way."""
    words = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    memory = words.new_zeros(words.numel() + 16)
    made = memory[int(odd) : int(odd) + words.numel()].view(words.shape).copy_(words)
    return made.view(tensor.dtype)


def right(trial: Trial, output: Tensor, lse: Tensor) -> None:
    torch.cuda.synchronize()
    problem = compare(trial, output, lse).problem
    assert problem is None, problem


def odd_addresses(variant: str) -> None:
    """Each pointer of a call is odd on its own, after others were and none was: code is shared only where it may be."""
    odds_of_calls = [[i in odd for i in range(5)] for odd in ((), (0,), (1,), (2,), (3,), (4,), range(5))]
    for lengths in (([1, 1], [700, 40]), ([1], [9000]), ([300, 17], [300, 90])):
        trial = trial_of(replace(BASE, queries=lengths[0], keys=lengths[1], **VARIANTS[variant]), "cuda")
        assert trial.cache is not None
        for query, key, value, cache_key, out in odds_of_calls:
            cache = KVCache(placed(trial.cache.key, odd=cache_key), placed(trial.cache.value, odd=not cache_key))
            now = replace(trial, query=placed(trial.query, odd=query), cache=cache)
            trial.layer.write_kv(placed(trial.key, odd=key), placed(trial.value, odd=value), cache, trial.batch)
            output = placed(torch.full_like(trial.query, torch.nan), odd=out)
            lse = torch.full((8, len(output)), torch.nan, device="cuda")
            trial.layer.attend(now.query, cache, trial.batch, output, lse=lse)
            right(now, output, lse)


def odd_strides() -> None:
    """Ranges, sinks, slopes and scales as views; heads that lie more than 2**31 elements apart."""
    features = frozenset({"sinks", "alibi", "mm_prefix", "per_head_quant_scales"})
    ranges = [[[2, 9], [600, 690]], [[0, 0], [60, 85]], [[0, 5], [0, 0]]]
    for lengths in (([1, 1, 1], [700, 90, 8]), ([100, 30, 5], [700, 90, 8])):
        case = replace(BASE, queries=lengths[0], keys=lengths[1], features=features, kv_dtype="fp8", ranges=ranges)
        trial = trial_of(case, "cuda")
        trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
        buffer = torch.full((7, 5, 2), 2**30, dtype=torch.int32, device="cuda")
        assert trial.batch.mm_prefix is not None
        buffer[:3, :2] = trial.batch.mm_prefix
        batch = replace(trial.batch, mm_prefix=buffer[:3, :2])
        right(trial, *attend(trial, batch, trial.query))
        params = trial.layer.params
        spread = {
            name: torch.stack([getattr(params, name)] * 3, 1)[:, 1]
            for name in ("sinks", "alibi_slopes", "k_scale", "v_scale")
        }
        for views in (spread, {"sinks": torch.full((1,), 0.7, device="cuda").expand(8)}):
            layer = KernelLayer(trial.layer.spec, replace(params, **views))
            right(replace(trial, layer=layer), *attend(replace(trial, layer=layer), batch, trial.query))
    # queries and keys with heads outermost, in memory of which only the ends are used
    trial = trial_of(replace(BASE, queries=[40], keys=[40], block_size=None, heads=(2, 2)), "cuda")
    far = []
    for x in (trial.query, trial.key, trial.value):
        memory = torch.empty(2**32 + 10**6, dtype=x.dtype, device="cuda")
        far.append(memory.as_strided(x.shape, (64, 2**32 - 64, 1)).copy_(x))
    trial.query, trial.key, trial.value = far
    output = torch.empty(2**32 + 10**6, dtype=torch.bfloat16, device="cuda").as_strided(far[0].shape, far[0].stride())
    lse = torch.full((2, len(output)), torch.nan, device="cuda")
    output.fill_(torch.nan)
    trial.layer.attend(far[0], None, trial.batch, output, key=far[1], value=far[2], lse=lse)
    right(trial, output, lse)


def _replays(case: Case, dummy: list[int], bound: int, steps: Iterator[tuple[list[int], list[int]]]) -> None:
    """A graph of a dummy batch, captured after a warm-up, is right for each of the steps; its batch is dropped."""
    most = Case([*dummy], [3000] * len(dummy))
    full = trial_of(replace(case, queries=most.queries, keys=most.keys), "cuda")
    requests, rows = len(dummy), 80
    batch, table = full.batch, full.batch.block_table
    assert table is not None
    query = torch.full((rows, *full.query.shape[1:]), torch.nan, dtype=full.query.dtype, device="cuda")
    output = torch.full_like(query, torch.nan)
    lse = torch.full((8, rows), torch.nan, device="cuda")
    full.layer.write_kv(full.key, full.value, full.cache, batch)
    planned = replace(batch, max_query_len=bound, max_seq_len=3000)
    run: Callable[[], None] = lambda: full.layer.attend(query, full.cache, planned, output, lse=lse)  # noqa: E731
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = _capture(run)
    # the engine keeps the tensors and drops the batch; others get the memory that is free then
    starts, lengths = planned.query_start_loc, planned.seq_lens
    planned.plans.clear()
    torch.cuda.synchronize()
    others = [torch.full((2**18,), 7.0, device="cuda") for _ in range(200)]
    for queries, keys in steps:
        step = trial_of(replace(case, queries=queries, keys=[max(k, 1) for k in keys]), "cuda")
        step.layer.write_kv(step.key, step.value, step.cache, step.batch)
        step.batch.seq_lens.copy_(torch.tensor(keys, dtype=torch.int32))
        blocks = step.batch.block_table
        assert blocks is not None
        for there, here in zip(full.cache, step.cache, strict=True):
            there[: len(here)] = here
        table.fill_(2**30)
        table[: len(blocks), : blocks.shape[1]] = blocks
        ends = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
        starts.copy_(ends)
        lengths.copy_(torch.tensor(keys, dtype=torch.int32))
        query.fill_(torch.nan)
        query[: len(step.query)] = step.query[:rows]
        output.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        step.layer = KernelLayer(step.layer.spec, full.layer.params)
        right(step, output, lse)
    assert len(steps_seen := [x for x in others if not (x == 7).all()]) == 0, f"{len(steps_seen)} tensors overwritten"
    assert requests == len(lengths)


# the lengths of the dummy batches that graphs of a variant are captured with, and the bound of their queries
DUMMIES: dict[str, list[tuple[list[int], int]]] = {
    "plain": [([1] * 8, 64), ([24, 2], 24), ([24] * 3, 24)],
    "plain, other bounds": [([1] * 8, 1), ([64, 1, 1, 1], 64), ([0] * 6, 40)],
    "window and sinks": [([1] * 8, 64), ([16] * 4, 16)],
    "fp8": [([1] * 8, 64), ([4] * 8, 4)],
    "invariant": [([1] * 8, 64)],
    "SPLIT": [([1] * 8, 64)],
}


def graphs(variant: str) -> None:
    """Graphs of dummy batches, of decodes, mixed batches and prompts, serve every length within their bounds."""
    draws = torch.Generator().manual_seed(3)

    def steps(requests: int, bound: int, count: int = 6) -> Iterator[tuple[list[int], list[int]]]:
        for _ in range(count):
            left, queries = 76, []
            for _ in range(requests):
                queries.append(int(torch.randint(0, min(bound, left) + 1, (), generator=draws)))
                left -= queries[-1]
            context = torch.randint(0, 2900, (requests,), generator=draws).tolist()
            # some requests are padding: a query without a key
            keys = [0 if q == 1 and c % 5 == 0 else min(3000, q + c) for q, c in zip(queries, context, strict=True)]
            yield queries, keys

    for dummy, bound in DUMMIES[variant]:
        case = replace(BASE, **VARIANTS[variant.partition(",")[0]])
        _replays(case, dummy, bound, steps(len(dummy), bound))


def streams() -> None:
    """One batch on two streams at once."""
    trial = trial_of(replace(BASE, queries=[1] * 4, keys=[8000, 6000, 9000, 50]), "cuda")
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    first, lse = attend(trial, trial.batch, trial.query)
    right(trial, first, lse)
    flipped = replace(trial, query=trial.query * -1)
    second, _ = attend(flipped, trial.batch, flipped.query)
    torch.cuda.synchronize()
    sides = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(200):
        outputs = [torch.empty_like(first) for _ in sides]
        torch.cuda.synchronize()
        for stream, query, output in zip(sides, (trial.query, flipped.query), outputs, strict=True):
            with torch.cuda.stream(stream):
                trial.layer.attend(query, trial.cache, trial.batch, output)
        torch.cuda.synchronize()
        for output, expected in zip(outputs, (first, second), strict=True):
            assert torch.equal(output[:4], expected[:4])


def layer_of(backend: str, features: set[str], platform: Platform | None = None, **given: Any) -> Attention:
    """A layer of a backend for this GPU, or for another platform."""
    registry = default_registry()
    here = platform or next(p for p in detect_all(registry.vocabulary) if p.platform in ("cuda", "rocm"))
    request = AttentionRequest(
        head_size=64, num_heads=8, num_kv_heads=2, dtype="bfloat16", block_size=16, features=frozenset(features)
    )
    return Attention.from_selection(attnreg.select(request, here, registry, backend), **given)


def _paged(queries: list[int], keys: list[int], device: str) -> tuple[BatchMetadata, Tensor, KVCache]:
    blocks = [-(-k // 16) for k in keys]
    table = torch.full((len(keys), max(blocks) + 40), 2**30, dtype=torch.int32)
    first = 0
    for row, n in zip(table, blocks, strict=True):
        row[:n] = torch.arange(first, first + n)
        first += n
    torch.manual_seed(5)
    cache = KVCache(*(torch.randn(first, 16, 2, 64).bfloat16().to(device) for _ in range(2)))
    query = torch.randn(sum(queries), 8, 64).bfloat16().to(device)
    return BatchMetadata.build(queries, keys, device=device, block_table=table.to(device)), query, cache


def bounds() -> None:
    """Upper bounds in host memory: every backend computes with the lengths on the device."""
    queries, keys = [1, 20, 3, 1], [700, 300, 40, 0]
    batch, query, cache = _paged(queries, keys, "cuda")
    loose = replace(batch, seq_lens_cpu=batch.seq_lens_cpu + 37, max_seq_len=737)
    for backend in ("TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"):
        for features in (set(), {"alibi"}, {"sliding_window"}):
            slopes = torch.linspace(0.1, 0.9, 8, device="cuda").bfloat16() if "alibi" in features else None
            window = 90 if "sliding_window" in features else None
            layer = layer_of(backend, features, alibi_slopes=slopes, sliding_window=window)
            exact = reference.attention(layer.spec, batch, query, cache, params=layer.params).output
            for known in (batch, loose):
                output = torch.full_like(query, torch.nan)
                layer.attend(query, cache, known, output)
                error = float((output.double() - exact).abs().max())
                assert error < 0.02, f"{backend} {features}: off by {error}"


def _capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def captures() -> None:
    """Backends that compute from the host's lengths refuse a capture; ROCM_ATTN's second pass follows the device."""
    batch, query, cache = _paged([1, 2], [40, 30], "cuda")
    for backend in ("FLEX_ATTENTION", "TORCH_SDPA"):
        layer, output = layer_of(backend, set()), torch.empty_like(query)
        layer.attend(query, cache, batch, output)
        with pytest.raises(BatchError, match="a CUDA graph is being captured"):
            _capture(lambda: (output.zero_(), layer.attend(query, cache, batch, output)))  # noqa: B023
    sinks = torch.linspace(-1, 1, 8, device="cuda")
    layer = layer_of("ROCM_ATTN", {"sinks"}, Platform(platform="rocm", arch="gfx942"), sinks=sinks)
    dummy = replace(batch, query_start_loc_cpu=torch.tensor([0, 1, 2], dtype=torch.int32), max_query_len=8)
    query = torch.cat([query, torch.full_like(query, torch.nan)])
    output = torch.full_like(query, 7.0)
    layer.attend(query, cache, dummy, output)
    graph = _capture(lambda: layer.attend(query, cache, dummy, output))
    output.fill_(7.0)
    graph.replay()
    exact = reference.attention(layer.spec, batch, query, cache, params=layer.params).output
    assert float((output[:3].double() - exact).abs().max()) < 0.02
    assert (output[3:] == 7).all()


def dropped_after_capture() -> None:
    """A layer keeps the tensors of a captured batch that `BatchMetadata.build` made."""
    layer = layer_of("TRITON_ATTN", set())
    batch, query, cache = _paged([1, 2], [4000, 3000], "cuda")
    output = torch.empty_like(query)
    layer.attend(query, cache, batch, output)
    expected = output.clone()
    graph = _capture(partial(layer.attend, query, cache, batch, output))
    del batch
    torch.cuda.synchronize()
    others = [
        torch.full((n,), 2**30, dtype=torch.int32, device="cuda") for n in (2, 3, 8, 128, 600) for _ in range(500)
    ]
    output.fill_(torch.nan)
    graph.replay()
    # a graph may have shared keys out otherwise, and so rounded otherwise
    torch.testing.assert_close(output.float(), expected.float(), rtol=0.016, atol=2e-3)
    assert all((x == 2**30).all() for x in others)


def other_device() -> None:
    """Tensors of the second GPU while the first is current."""
    if torch.cuda.device_count() < 2:
        return
    for backend in ("TRITON_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"):
        layer = layer_of(backend, set())
        batch, query, cache = _paged([1, 20], [5000, 300], "cuda:1")
        assert torch.cuda.current_device() == 0
        key = torch.randn(21, 2, 64, device="cuda:1").bfloat16()
        slots = torch.arange(21, device="cuda:1")
        writing = replace(batch, slot_mapping=slots)
        output = layer.forward(query, key, key, cache, writing)
        exact = reference.attention(layer.spec, batch, query, cache).output
        assert float((output.double() - exact).abs().max()) < 0.02


CONDITIONS: dict[str, Callable[[], None]] = {
    **{f"odd_addresses, {variant}": partial(odd_addresses, variant) for variant in ("plain", "fp8", "SPLIT")},
    **{f"graphs, {variant}": partial(graphs, variant) for variant in DUMMIES},
    **{f.__name__: f for f in (odd_strides, streams, bounds, captures, dropped_after_capture, other_device)},
}

if __name__ == "__main__":
    CONDITIONS[sys.argv[1]]()
