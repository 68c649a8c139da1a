"""TORCH_SDPA: PyTorch's scaled_dot_product_attention over gathered keys and values.

Any of PyTorch's fused kernels may run a piece without a mask, causal or not. A piece with a mask needs a kernel that
takes masks.
"""

from __future__ import annotations

from attnreg.kernels.dense import pieces
from attnreg.kernels.dense.attention import by_sdpa
from attnreg.kernels.dense.cache import write_kv
from attnreg.kernels.dense.pieces import DensePlan
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, paged_cache_shape

__all__ = ["KEYS_APART", "REPEATABLE", "forward", "kv_cache_shape", "plan", "write_kv"]

kv_cache_shape = paged_cache_shape
KEYS_APART = True
# cuDNN's kernel is not repeatable for decodes with a mask (seen on an H100)
REPEATABLE = False
forward = by_sdpa


def plan(spec: AttentionSpec, batch: BatchMetadata) -> DensePlan:
    """The dense calls of a batch. With ALiBi, each piece has a bias for every head, as large as its scores."""
    return pieces.plan(spec, batch, scores="alibi" in spec.features)
