"""ROCM_AITER_UNIFIED_ATTN: aiter's unified Triton kernel behind the runtime's contract. Not run on AMD hardware yet.

The kernel is causal and reads a paged cache. In cross-attention a query sees all keys of its request. So each query
becomes a request of its own, because a request's last query sees every key. Packed keys are copied to blocks first.
Encoders, which are not causal, run aiter's FlashAttention instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnreg.kernels.aiter import common
from attnreg.kernels.aiter import packed as aiter_packed
from attnreg.kernels.aiter import unified as aiter_unified
from attnreg.kernels.aiter.packed import RowLengths
from attnreg.kernels.aiter.unified import Paged
from attnreg.kernels.dense.pages import Pages
from attnreg.kernels.dense.rows import DenseRows
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchMetadata,
    Call,
    KVCacheShape,
    UnclaimedError,
)

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "ROCM_AITER_UNIFIED_ATTN"


@dataclass(frozen=True, slots=True, eq=False)
class UnifiedPlan:
    """One call for a batch: over packed keys, or over a cache.

    empty: whether a row of queries sees no key, bool. copied: the pages that packed keys are copied to.
    """

    num_tokens: int
    work: RowLengths | Paged
    empty: Tensor | None = None
    slot_mapping: Tensor | None = None
    copied: Pages | None = None


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache: keys and values as the spec's layout has them."""
    return common.kv_cache_shape(spec, num_blocks, BACKEND)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> UnifiedPlan:
    """The one call of a batch. Raises `UnclaimedError` for a decoder's batch that is not causal."""
    if spec.attn_type in ("encoder", "encoder_only"):
        lengths = RowLengths(
            batch.query_start_loc, batch.query_start_loc, batch.max_query_len, batch.max_seq_len, batch.causal is True
        )
        return UnifiedPlan(batch.num_tokens, lengths)
    batch, copied = Pages.of(batch)
    if copied is None:
        common.validate_cache(spec, BACKEND)
    assert batch.block_table is not None
    if spec.attn_type != "encoder_decoder":
        common.refuse_padding(batch, BACKEND)
    if not batch.causal and spec.attn_type != "encoder_decoder":
        raise UnclaimedError("non_causal: aiter's unified kernel is causal only", BACKEND)
    # aiter's ALiBi counts from a request's first query. The softmax removes the difference, unless there is a sink
    alone = not batch.causal or ({"alibi", "sinks"} <= spec.features and batch.max_query_len > 1)
    work = Paged(batch.query_start_loc, batch.seq_lens, batch.block_table, batch.max_query_len, batch.max_seq_len)
    empty = None
    if alone:
        rows = DenseRows.of(batch, several=False)
        starts = torch.arange(rows.requests + 1, dtype=torch.int32, device=batch.seq_lens.device)
        work, empty = Paged(starts, rows.seq_lens, rows.block_table, 1, rows.max_key_len), rows.empty
    return UnifiedPlan(batch.num_tokens, work, empty, batch.slot_mapping, copied)


def forward(spec: AttentionSpec, plan: UnifiedPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``; there is no LSE."""
    query, output = call.query[: plan.num_tokens], call.output[: plan.num_tokens]
    if not plan.num_tokens:
        return
    if isinstance(plan.work, RowLengths):
        aiter_packed.attend(spec, plan.work, query, *call.packed, output, call.params)
        return
    kv_cache = call.kv_cache
    if plan.copied is not None:
        kv_cache = plan.copied.filled(call.packed)
    assert kv_cache is not None
    aiter_unified.attend(spec, plan.work, query, kv_cache, output, call.params, packed=plan.copied is not None)
    if plan.empty is not None:
        output.masked_fill_(plan.empty[:, None, None], 0)
