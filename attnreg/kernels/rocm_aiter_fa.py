"""ROCM_AITER_FA: aiter's FlashAttention and paged attention behind the runtime's contract. Not run on AMD hardware yet.

Requests with one query read the cache in place. For other requests, keys and values are gathered and dequantised first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from attnreg.kernels.aiter import common, record
from attnreg.kernels.aiter import packed as aiter_packed
from attnreg.kernels.aiter import unified as aiter_unified
from attnreg.kernels.aiter.packed import RowLengths
from attnreg.kernels.aiter.unified import Paged
from attnreg.kernels.dense.cache import KeyPlaces, gather
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchMetadata,
    Call,
    KVCache,
    KVCacheShape,
    LayerParams,
)

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "ROCM_AITER_FA"
# the most gathered keys of one call; a single request may have more
KEYS = 1 << 16
# keys per partition of the workspace: paged_attention_v1 assumes this number, and does not take it as an argument
PARTITION = 256
# the most query heads per KV head that paged_attention_v1 is compiled for
LARGEST_GROUP = 16

_paged_attention = record.PAGED_ATTENTION_V1.load()


@dataclass(frozen=True, slots=True, eq=False)
class GatheredPrompts:
    """Consecutive requests, and the places of their keys to gather; None: keys and values are packed already."""

    rows: slice
    lengths: RowLengths
    places: KeyPlaces | None


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """Consecutive requests with one query each."""

    rows: slice
    paged: Paged


@dataclass(frozen=True, slots=True, eq=False)
class FlashPlan:
    """The calls of a batch, in the order of its rows."""

    work: tuple[GatheredPrompts | Decodes, ...]
    slot_mapping: Tensor | None


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache: keys and values as the spec's layout has them."""
    return common.kv_cache_shape(spec, num_blocks, BACKEND)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> FlashPlan:
    """The calls of a batch: one without a cache, else one for each run of requests with one query, or with more."""
    if batch.paged:
        common.validate_cache(spec, BACKEND)
        return FlashPlan(tuple(_runs(spec, batch)), batch.slot_mapping)
    starts = batch.query_start_loc if batch.key_start_loc is None else batch.key_start_loc
    lengths = RowLengths(batch.query_start_loc, starts, batch.max_query_len, batch.max_seq_len, batch.causal is True)
    return FlashPlan((GatheredPrompts(slice(0, batch.num_tokens), lengths, None),), None)


def _runs(spec: AttentionSpec, batch: BatchMetadata) -> Iterator[GatheredPrompts | Decodes]:
    common.refuse_padding(batch, BACKEND)
    queries, keys = batch.host_starts.diff().tolist(), batch.host_lens.tolist()
    for single, group in groupby((i for i, q in enumerate(queries) if q), lambda i: queries[i] == 1):
        requests, total = list[int](), 0
        for i in group:
            # a gap between decodes is a request without a query, which the kernel would read as one with a query
            cut = requests and (i != requests[-1] + 1 if single else total + keys[i] > KEYS)
            if cut:
                yield _decodes(batch, requests) if single else _prompts(spec, batch, requests)
                requests, total = [], 0
            requests.append(i)
            total += keys[i]
        yield _decodes(batch, requests) if single else _prompts(spec, batch, requests)


def _decodes(batch: BatchMetadata, requests: list[int]) -> Decodes:
    assert batch.block_table is not None
    some, device = slice(requests[0], requests[-1] + 1), batch.seq_lens.device
    first = int(batch.host_starts[some.start])
    paged = Paged(
        torch.arange(len(requests) + 1, dtype=torch.int32, device=device),
        batch.seq_lens[some],
        batch.block_table[some],
        1,
        int(batch.host_lens[some].max()),
    )
    return Decodes(slice(first, first + len(requests)), paged)


def _prompts(spec: AttentionSpec, batch: BatchMetadata, requests: list[int]) -> GatheredPrompts:
    device, starts = batch.seq_lens.device, batch.host_starts
    queries, keys = starts.diff()[requests], batch.host_lens[requests]
    request = torch.tensor(requests).to(device, non_blocking=True)
    # the host may know only upper bounds
    keys_there = batch.seq_lens[request]
    key_starts = common.starts_of(keys_there)
    lengths = RowLengths(
        common.int32(torch.cat([queries.new_zeros(1), queries.cumsum(0)]), device),
        key_starts,
        int(queries.max()),
        int(keys.max()),
        batch.causal is True,
    )
    rows = slice(int(starts[requests[0]]), int(starts[requests[-1] + 1]))
    found = common.packed_places(spec, batch, request, keys_there, key_starts, int(keys.sum()))
    return GatheredPrompts(rows, lengths, found)


def forward(spec: AttentionSpec, plan: FlashPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``; there is no LSE."""
    for work in plan.work:
        q, out = call.query[work.rows], call.output[work.rows]
        if isinstance(work, Decodes):
            assert call.kv_cache is not None
            _decode(spec, work.paged, q, call.kv_cache, out, call.params)
            continue
        k, v = call.packed if work.places is None else gather(spec, work.places, call)
        aiter_packed.attend(spec, work.lengths, q, k, v, out, call.params)


def _decode(
    spec: AttentionSpec, paged: Paged, query: Tensor, kv_cache: KVCache, output: Tensor, params: LayerParams
) -> None:
    """Writes the attention of one query per request. The query sees all keys in its window, causal or not.

    Source of the arguments' meanings: aiter/ops/attention.py and csrc/cpp_itfs/pa/pa_v1.py.
    """
    if (
        params.sinks is not None
        or spec.sliding_window is not None
        or spec.num_heads // spec.num_kv_heads > LARGEST_GROUP
        # paged_attention_v1 reads any 16-bit cache in the query's format
        or (spec.cache_dtype != spec.dtype and not spec.quantised)
    ):
        aiter_unified.attend(spec, paged, query, kv_cache, output, params)
        return
    requests = query.shape[0]
    partitions = -(-paged.max_seq_len // PARTITION)
    # an output, a maximum and a sum for each partition of each row
    rows = requests * spec.num_heads * partitions
    workspace = torch.empty(
        rows * (spec.head_size * spec.dtype.itemsize + 2 * 4), dtype=torch.uint8, device=query.device
    )
    common.into(
        output,
        lambda out: _paged_attention(
            out=out,
            workspace_buffer=workspace,
            # the kernel assumes the stride of the heads
            query=query.contiguous(),
            key_cache=kv_cache.key,
            value_cache=kv_cache.value,
            scale=spec.softmax_scale,
            block_tables=paged.block_table.contiguous(),
            cu_query_lens=None,
            context_lens=paged.seq_lens,
            max_context_len=paged.max_seq_len,
            alibi_slopes=common.float32(params.alibi_slopes),
            kv_cache_dtype="fp8" if spec.quantised else "auto",
            kv_cache_layout=spec.kv_layout,
            logits_soft_cap=spec.softcap or 0.0,
            k_scale=common.one_scale(params.k_scale, query),
            v_scale=common.one_scale(params.v_scale, query),
        ),
    )
