"""TORCH_SDPA/efficient: PyTorch's memory-efficient kernel over packed sequences, in one call.

The kernel has no grouped heads, so keys and values are repeated for each query head.
"""

from __future__ import annotations

from attnreg.kernels.flash_attn.sequences import Sequences, aligned
from attnreg.kernels.sdpa import packed, record
from attnreg.kernels.sdpa.packed import kv_cache_shape, write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "TORCH_SDPA/efficient"
# PyTorch's numbers for kinds of masks
_NO_MASK, _CAUSAL_TO_LAST_KEY = 0, 2
_efficient = record.EFFICIENT.load()


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Sequences:
    """The sequences of a batch. Raises `BatchError` for a batch over a cache."""
    return packed.sequences(spec, batch, BACKEND)


def forward(spec: AttentionSpec, plan: Sequences, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``; there is no LSE."""
    if plan.nothing(call):
        return
    query, (key, value) = call.query[: plan.num_tokens], plan.keys(call)
    group = spec.num_heads // spec.num_kv_heads
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    query, key, value = aligned(query), aligned(key), aligned(value)
    output = _efficient(
        query=query[None], key=key[None], value=value[None], bias=None, cu_seqlens_q=plan.query_starts,
        cu_seqlens_k=plan.key_starts, max_seqlen_q=plan.max_query_len, max_seqlen_k=plan.max_key_len, dropout_p=0.0,
        custom_mask_type=_CAUSAL_TO_LAST_KEY if plan.causal else _NO_MASK, scale=spec.softmax_scale, window_size=None,
    )[0]  # fmt: skip
    packed.store(plan, call, output[0])
