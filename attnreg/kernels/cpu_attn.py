"""CPU_ATTN: attention on the CPU over gathered keys and values, with every feature of the contract.

It calls PyTorch's scaled_dot_product_attention where that has the features. For a softcap, sinks or the LSE it computes
whole float32 score matrices.
"""

from __future__ import annotations

from attnreg.kernels.dense import pieces
from attnreg.kernels.dense.attention import by_scores, by_sdpa
from attnreg.kernels.dense.cache import write_kv
from attnreg.kernels.dense.pieces import DensePlan
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, paged_cache_shape

__all__ = ["KEYS_APART", "forward", "kv_cache_shape", "plan", "write_kv"]

kv_cache_shape = paged_cache_shape
KEYS_APART = True
_BY_SCORES = frozenset({"lse", "sinks", "softcap"})


def plan(spec: AttentionSpec, batch: BatchMetadata) -> DensePlan:
    """The dense calls of a batch. If they need whole score matrices, they are cut to a size that fits in memory."""
    return pieces.plan(spec, batch, scores=not spec.features.isdisjoint({*_BY_SCORES, "alibi"}))


def forward(spec: AttentionSpec, plan: DensePlan, call: Call) -> None:
    """Computes attention by PyTorch's function, or over float32 scores if that function lacks a feature."""
    (by_sdpa if spec.features.isdisjoint(_BY_SCORES) else by_scores)(spec, plan, call)
