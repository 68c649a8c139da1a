"""TORCH_SDPA/cuDNN: cuDNN's attention over packed sequences of one length, in one call.

PyTorch's operator over sequences of several lengths takes 70 ms a call on an H200. And cuDNN's causal mask aligns
queries to the first keys. So the kernel of TORCH_SDPA/flash runs two kinds of batches: those of several lengths, and
causal ones with more keys than queries.
"""

from __future__ import annotations

from attnreg.kernels.flash_attn.sequences import Sequences, aligned
from attnreg.kernels.sdpa import flash, packed, record
from attnreg.kernels.sdpa.packed import kv_cache_shape, write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "TORCH_SDPA/cuDNN"
_cudnn = record.CUDNN.load()


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Sequences:
    """The sequences of a batch. Raises `BatchError` for a batch over a cache."""
    return packed.sequences(spec, batch, BACKEND)


def forward(spec: AttentionSpec, plan: Sequences, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``; there is no LSE."""
    if not plan.uniform or (plan.causal and not plan.square):
        flash.forward(spec, plan, call)
        return
    if plan.nothing(call):
        return
    requests = plan.seq_lens.shape[0]
    query, (key, value) = call.query[: plan.num_tokens], plan.keys(call)
    query, key, value = aligned(query), aligned(key), aligned(value)
    q, k, v = (x.view(requests, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    output = _cudnn(
        query=q, key=k, value=v, attn_bias=None, compute_log_sumexp=False, is_causal=plan.causal,
        scale=spec.softmax_scale,
    )[0]  # fmt: skip
    packed.store(plan, call, output.transpose(1, 2).flatten(0, 1))
