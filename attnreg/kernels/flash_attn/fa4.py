"""FLASH_ATTN/FA4: FlashAttention 4, compiled from Python by the CuTe DSL, behind the runtime's contract.

It reads packed keys and values, or pages of a cache in place, and computes sinks of every dtype in the kernel. A batch
is one launch without split keys, because the kernel for Hopper splits none. Proven on an H200, not on SM 10.x.
"""

from __future__ import annotations

from attnreg.kernels.flash_attn import record
from attnreg.kernels.flash_attn.sequences import Sequences, refuse_unaligned, store_rows
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASH_ATTN/FA4"
kv_cache_shape = paged_cache_shape
_attend = record.FA4.load()


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Sequences:
    """The sequences of a batch."""
    return Sequences.of(spec, batch)


def forward(spec: AttentionSpec, plan: Sequences, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``. Raises `BatchError`.

    Source of the arguments' meanings: flash_attn/cute/interface.py.
    """
    if plan.nothing(call):
        return
    key, value = plan.keys(call, spec.kv_layout)
    refuse_unaligned(BACKEND, query=call.query, key=key, value=value, output=call.output)
    left, right = (None if side < 0 else side for side in (plan.left, plan.right))
    lse = _attend(
        q=call.query, k=key, v=value, out=call.output, cu_seqlens_q=plan.query_starts, cu_seqlens_k=plan.key_starts,
        seqused_k=None if plan.block_table is None else plan.seq_lens, max_seqlen_q=plan.max_query_len,
        max_seqlen_k=plan.max_key_len, page_table=plan.block_table, softmax_scale=spec.softmax_scale,
        causal=plan.causal, softcap=spec.softcap or 0.0, window_size_left=left, window_size_right=right,
        learnable_sink=call.params.sinks, num_splits=1, return_lse=call.lse is not None,
    )[1]  # fmt: skip
    if call.lse is not None:
        store_rows(call.lse.mT, lse.mT, plan)
