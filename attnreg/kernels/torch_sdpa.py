"""TORCH_SDPA: PyTorch's scaled_dot_product_attention over gathered keys and values.

Causal prompts and rectangles without a mask take PyTorch's fused kernels, whatever has a mask those that take one.
"""

from __future__ import annotations

from attnreg.kernels.dense import pieces
from attnreg.kernels.dense.attention import by_sdpa
from attnreg.kernels.dense.cache import write_kv
from attnreg.kernels.dense.pieces import DensePlan
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

kv_cache_shape = paged_cache_shape
forward = by_sdpa


def plan(spec: AttentionSpec, batch: BatchMetadata) -> DensePlan:
    """The dense calls of a batch; with ALiBi each piece has a bias per head, as large as its scores."""
    return pieces.plan(spec, batch, scores="alibi" in spec.features)
