"""Memory past 2**31 elements and requests of a million tokens: each is compared where it is used, and only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.kernel_trials import NOWHERE, Case, trial_of
from torch import Tensor

from attnreg.conformance.proof import attend, compare
from attnreg.conformance.trial import Trial
from attnreg.kernels import triton_attn
from attnreg.kernels.triton.cache import write_kv
from attnreg.runtime.interface import BatchMetadata, KVCache

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
    pytest.mark.filterwarnings("default"),
]

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
GIB = 2**30
PAST = 2**31 + 2**20
MILLION = 1_000_003


@pytest.fixture
def memory() -> Any:
    """Skips a test that needs more GiB than the GPU has free, and frees what it took."""

    def need(gib: float) -> None:
        free = torch.cuda.mem_get_info()[0] / GIB
        if free < gib:
            pytest.skip(f"needs {gib:.0f} GiB of memory on the GPU, of which {free:.0f} are free")

    yield need
    torch.cuda.empty_cache()


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of which every byte is 0x7F: in every floating format a NaN, or a number that no cache here holds."""
    made = torch.empty(*shape, dtype=dtype, device="cuda")
    made.view(torch.uint8).fill_(0x7F)
    return made


def check_far(case: Case, need: Callable[[float], None], module: Any = triton_attn) -> None:
    """Holds a case at the end of such a cache against float64; what it writes stays in its blocks."""
    need(24)
    trial = moved(trial_of(case, "cuda", module=module))
    assert trial.cache is not None
    assert all(x.numel() > 2**31 for x in trial.cache)
    used = sum(-(-k // (case.block_size or 1)) for k in case.keys) + 2
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    for x in trial.cache:
        assert bool((x[:-used].view(torch.uint8) == 0x7F).all())
    assert compare(trial, *attend(trial, trial.batch, trial.query)).problem is None


def moved(trial: Trial) -> Trial:
    """A trial whose blocks are the last of a cache with more than 2**31 elements of keys, and as many of values."""
    small, batch = trial.cache, trial.batch
    assert small is not None
    assert batch.block_table is not None
    assert batch.slot_mapping is not None
    assert trial.layer.spec.block_size is not None
    blocks = PAST // min(x[0].numel() for x in small)
    far = KVCache(*(poisoned((blocks, *x.shape[1:]), x.dtype) for x in small))
    for x, y in zip(small, far, strict=True):
        y.view(torch.uint8)[-len(x) :] = x.view(torch.uint8)
    first = blocks - len(small.key)
    table, slots = batch.block_table, batch.slot_mapping
    table[(table >= 0) & (table < NOWHERE)] += first
    slots[slots >= 0] += first * trial.layer.spec.block_size
    return replace(trial, cache=far)


BASE = Case([1], [1], heads=(8, 2), head_size=64, dtype=torch.bfloat16)
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1, 1, 4, 0], [200, 31, 77, 9]),
    "split": ([1, 2], [9000, 3000]),
    "prefill": ([300, 17], [700, 90]),
    "mixed": ([1, 300, 0, 16], [3000, 700, 50, 16]),
}
CACHES: dict[str, dict[str, Any]] = {
    "NHD": {},
    "HND": {"layout": "HND"},
    "SPLIT": {"layout": "SPLIT"},
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "SPLIT fp8": {"layout": "SPLIT", "kv_dtype": "fp8_e5m2"},
    "fp8 of 192 and 128": {"kv_dtype": "fp8_e4m3", "head_size": 192, "head_size_v": 128, "block_size": 48},
    "window, invariant": {"window": 150, "features": frozenset({"batch_invariant", "sinks"})},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_last_blocks_of_a_cache_past_2_to_the_31(lengths: str, cache: str, memory: Callable[[float], None]) -> None:
    check_far(replace(BASE, queries=LENGTHS[lengths][0], keys=LENGTHS[lengths][1], **CACHES[cache]), memory)


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("cache", ["NHD", "HND", "fp8"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_hopper_attn_over_such_a_cache(
    lengths: str, cache: str, size: int, memory: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnreg.kernels.hopper import attention as hopper_attn
    from attnreg.kernels.hopper.prompts import choices, widened

    # its kernels for prompts run however few tiles there are
    monkeypatch.setattr(choices, "SEVERAL", 0)
    monkeypatch.setattr(widened, "FEWEST_TILES", 0)
    queries, keys = LENGTHS[lengths]
    check_far(replace(BASE, queries=queries, keys=keys, head_size=size, **CACHES[cache]), memory, hopper_attn)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_slots_past_2_to_the_31(dtype: torch.dtype, memory: Callable[[float], None]) -> None:
    # so many tokens fit where a key has 8 elements
    memory(60 if dtype.itemsize == 1 else 90)
    block_size, size = 16, 8
    blocks = 2**31 // block_size + 5
    cache = [poisoned((blocks, block_size, 1, size), dtype) for _ in range(2)]
    slots = torch.tensor([2**31 - 1, 2**31, -1, 2**31 + 33, 5], device="cuda")
    key, value = (torch.randint(-8, 9, (5, 1, size), device="cuda").bfloat16() for _ in range(2))
    write_kv(key, value, cache[0], cache[1], slots)
    for given, stored in zip((key, value), cache, strict=True):
        flat = stored.view(torch.uint8).view(blocks * block_size, -1)
        rows = flat[slots[slots >= 0]].view(dtype).float()
        assert torch.equal(rows, given[slots >= 0].flatten(1).float())
        flat[slots[slots >= 0]] = 0x7F
        assert all(bool((part == 0x7F).all()) for part in flat.split(2**28))


def cached(case: Case) -> Trial:
    """The trial of one request: random keys in blocks of a random order, drawn where they are used."""
    (queries,), (keys,) = case.queries, case.keys
    trial = trial_of(replace(case, queries=[1], keys=[1]), "cuda")
    spec, block_size = trial.layer.spec, case.block_size or 1
    blocks = -(-keys // block_size)
    draw = torch.Generator("cuda").manual_seed(1)
    cache = trial.layer.new_kv_cache(blocks, "cuda")
    for x in cache:
        for some in x.split(2**12):
            some.copy_(torch.randn(some.shape, generator=draw, device="cuda").to(x.dtype))
    table = torch.randperm(blocks, generator=draw, device="cuda", dtype=torch.int32)[None]
    query = torch.randn(queries, spec.num_heads, spec.head_size, generator=draw, device="cuda").to(spec.dtype)
    batch = BatchMetadata.build([queries], [keys], device="cuda", block_table=table, causal=case.causal)
    return replace(trial, batch=batch, query=query, cache=cache, tokens=[(cache.key[:9], cache.value.float())])


LONG: dict[str, dict[str, Any]] = {
    "plain": {},
    "SPLIT": {"layout": "SPLIT"},
    "fp8": {"kv_dtype": "fp8"},
    "invariant": {"features": frozenset({"batch_invariant"})},
    "window": {"window": 300_000, "features": frozenset({"sinks"})},
    "alibi": {"features": frozenset({"alibi"})},
}


@pytest.mark.parametrize("queries", [1, 16, 70], ids=["decode", "draft", "last chunk"])
@pytest.mark.parametrize("layer", LONG)
def test_a_request_of_a_million_tokens(layer: str, queries: int, memory: Callable[[float], None]) -> None:
    memory(16)
    trial = cached(replace(BASE, queries=[queries], keys=[MILLION], head_size=128, **LONG[layer]))
    assert compare(trial, *attend(trial, trial.batch, trial.query)).problem is None


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "packed"])
def test_queries_past_2_to_the_31(paged: bool, memory: Callable[[float], None]) -> None:
    # 132,000 queries of 128 heads of 128: 2.2e9 elements, and as many of output
    memory(40)
    queries = 132_000
    case = replace(BASE, queries=[queries], keys=[queries], heads=(128, 2), head_size=128, window=64)
    trial = cached(case)
    assert trial.query.numel() > 2**31
    if not paged:
        key, value = (torch.randn(queries, 2, 128, device="cuda").bfloat16() for _ in range(2))
        whole = BatchMetadata.build([queries], device="cuda")
        packed = trial_of(replace(case, queries=[1], keys=[1], block_size=None), "cuda")
        trial = replace(packed, query=trial.query, key=key, value=value, batch=whole, tokens=[(key, value)])
    output, lse = attend(trial, trial.batch, trial.query)
    boundary = 2**31 // (128 * 128)
    for last in (70, boundary + 20, queries):
        # the rows before `last` are the queries of a request with so many keys
        rows = slice(last - 50, last)
        table = trial.batch.block_table
        part = BatchMetadata.build([50], [last], device="cuda", block_table=table)
        some = replace(trial, batch=part, query=trial.query[rows])
        if not paged:
            some = replace(some, key=trial.key[:last], value=trial.value[:last])
        assert compare(some, output[rows], lse[:, rows]).problem is None
