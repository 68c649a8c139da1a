"""CPU_ATTN: every word of the vocabulary, on the processor, over gathered keys and values.

PyTorch's scaled_dot_product_attention where it has the words, and float32 scores held whole where it has not: for a
softcap, sinks, and the LSE.
"""

from __future__ import annotations

from attnreg.kernels.dense import pieces
from attnreg.kernels.dense.attention import by_scores, by_sdpa
from attnreg.kernels.dense.cache import write_kv
from attnreg.kernels.dense.pieces import DensePlan
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

kv_cache_shape = paged_cache_shape
_BY_SCORES = frozenset({"lse", "sinks", "softcap"})


def plan(spec: AttentionSpec, batch: BatchMetadata) -> DensePlan:
    """The dense calls of a batch, small enough to hold the scores where they are needed."""
    return pieces.plan(spec, batch, scores=not spec.features.isdisjoint({*_BY_SCORES, "alibi"}))


def forward(spec: AttentionSpec, plan: DensePlan, call: Call) -> None:
    """Attention as the contract says, in float32 where PyTorch's function does not do it."""
    (by_sdpa if spec.features.isdisjoint(_BY_SCORES) else by_scores)(spec, plan, call)
