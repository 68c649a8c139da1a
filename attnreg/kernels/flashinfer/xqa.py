"""FLASHINFER/XQA-rows: NVIDIA's XQA kernels for decoding, through FlashInfer.

The kernels take one query of each request. So the adapter makes every query of other batches a request of its own,
whose keys end before those of the later queries. Packed keys and values are copied to pages.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnreg.kernels.dense.pages import Pages
from attnreg.kernels.dense.rows import DenseRows
from attnreg.kernels.flashinfer import record
from attnreg.kernels.flashinfer.ragged import caches, workspace
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASHINFER/XQA-rows"
kv_cache_shape = paged_cache_shape

_decode = record.XQA.load()


class QueryRows(NamedTuple):
    """The queries of a batch as requests. A row without a key reads one key, and its output is set to zero."""

    rows: DenseRows
    seq_lens: Tensor
    block_table: Tensor
    left: int
    copied: Pages | None

    @property
    def slot_mapping(self) -> Tensor | None:
        return self.rows.slot_mapping


def plan(spec: AttentionSpec, batch: BatchMetadata) -> QueryRows:
    """The queries of a batch. Raises `BatchError` for causality by request."""
    if not isinstance(batch.causal, bool):
        raise BatchError([f"causal is by request; {BACKEND} has one mask for all requests"])
    batch, copied = Pages.of(batch)
    rows = DenseRows.of(batch, several=False)
    table = rows.block_table.masked_fill((rows.seq_lens == 0)[:, None], 0)
    return QueryRows(rows, rows.seq_lens.clamp(min=1), table, spec.sides(batch.causal)[0], copied)


def forward(spec: AttentionSpec, plan: QueryRows, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``. Raises `BatchError`.

    Source of the arguments' meanings: flashinfer/decode.py.
    """
    n, sinks = plan.rows.num_tokens, call.params.sinks
    if not n:
        return
    query, output = call.query[:n].contiguous(), call.output[:n]
    out = output if output.is_contiguous() else output.new_empty(output.shape)
    cache, layout = caches(spec, plan.copied, call, BACKEND)
    _decode(
        query=query,
        kv_cache=cache,
        workspace_buffer=workspace(query, "xqa"),
        block_tables=plan.block_table,
        seq_lens=plan.seq_lens,
        max_seq_len=plan.rows.max_key_len,
        bmm1_scale=spec.softmax_scale,
        bmm2_scale=1.0,
        window_left=plan.left,
        out=out,
        sinks=None if sinks is None else sinks.float().contiguous(),
        kv_layout=layout,
        enable_pdl=False,
    )
    plan.rows.store(call, out, None)
