"""TORCH_SDPA/flash: PyTorch's own build of FlashAttention 2 over packed sequences, in one call."""

from __future__ import annotations

import torch

from attnreg.kernels.flash_attn.sequences import Sequences, aligned
from attnreg.kernels.sdpa import packed, record
from attnreg.kernels.sdpa.packed import kv_cache_shape, write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "TORCH_SDPA/flash"
_flash = record.FLASH.load()


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Sequences:
    """The sequences of a batch. Raises `BatchError` for a batch over a cache."""
    return packed.sequences(spec, batch, BACKEND)


def forward(spec: AttentionSpec, plan: Sequences, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``; queries are aligned to the last
    keys.
    """
    if plan.nothing(call):
        return
    query, (key, value) = call.query[: plan.num_tokens], plan.keys(call)
    query, key, value = aligned(query), aligned(key), aligned(value)
    output, lse = _flash(
        query=query, key=key, value=value, cum_seq_q=plan.query_starts, cum_seq_k=plan.key_starts,
        max_q=plan.max_query_len, max_k=plan.max_key_len, dropout_p=0.0, is_causal=plan.causal,
        return_debug_mask=False, scale=spec.softmax_scale, window_size_left=plan.left, window_size_right=plan.right,
    )[:2]  # fmt: skip
    # the kernel returns +inf for a row without a key
    packed.store(plan, call, output, lse.masked_fill(lse == torch.inf, -torch.inf) if call.lse is not None else None)
