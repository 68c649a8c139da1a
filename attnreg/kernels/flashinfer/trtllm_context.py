"""FLASHINFER/trtllm-gen-context: NVIDIA's trtllm-gen kernels over the pages of a cache. Not run on Blackwell yet.

A batch is one call for all requests, prompts and tokens alike. The host may know only upper bounds of lengths, so each
plan reads them from the device once. Packed keys and values are copied to pages.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnreg.kernels.dense.pages import Pages
from attnreg.kernels.flashinfer import record
from attnreg.kernels.flashinfer.ragged import Ragged, caches, requests_of, rows_of, store, store_empty, workspace
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASHINFER/trtllm-gen-context"
kv_cache_shape = paged_cache_shape

_attend = record.TRTLLM_CONTEXT.load()


class PlannedContext(NamedTuple):
    """The requests of a batch that have queries and keys, and their pages."""

    requests: Ragged
    block_table: Tensor
    left: int
    copied: Pages | None
    slot_mapping: Tensor | None


def plan(spec: AttentionSpec, batch: BatchMetadata) -> PlannedContext:
    """The requests of a batch. Raises `BatchError` for causality by request."""
    batch, copied = Pages.of(batch)
    assert batch.block_table is not None
    requests = requests_of(batch, batch.seq_lens.tolist(), BACKEND)
    left, _ = spec.sides(requests.causal)
    table = batch.block_table[list(requests.active)].contiguous()
    return PlannedContext(requests, table, left, copied, batch.slot_mapping)


def forward(spec: AttentionSpec, plan: PlannedContext, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``. Raises `BatchError`.

    Source of the arguments' meanings: flashinfer/prefill.py.
    """
    requests, sinks, with_lse = plan.requests, call.params.sinks, call.lse is not None
    if not requests.num_reqs:
        store_empty(requests, call)
        return
    query, out = rows_of(requests, call)
    cache, layout = caches(spec, plan.copied, call, BACKEND)
    result = _attend(
        query=query,
        kv_cache=cache,
        workspace_buffer=workspace(query),
        block_tables=plan.block_table,
        seq_lens=requests.lengths,
        max_q_len=requests.max_query_len,
        max_kv_len=requests.max_key_len,
        bmm1_scale=spec.softmax_scale,
        bmm2_scale=1.0,
        batch_size=requests.num_reqs,
        cum_seq_lens_q=requests.query_starts,
        cum_seq_lens_kv=requests.key_starts,
        window_left=plan.left,
        out=out,
        kv_layout=layout,
        enable_pdl=False,
        sinks=None if sinks is None else sinks.float().contiguous(),
        causal=requests.causal,
        return_lse=with_lse,
        backend="trtllm-gen",
    )
    store(requests, call, out, result[1] if with_lse else None)
