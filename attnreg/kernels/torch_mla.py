"""TORCH_MLA: MLA in its latent form by PyTorch's own operations, over gathered latents, on any device.

It computes whole float32 score matrices, piece by piece. It serves where no other kernel does, and is slow.
"""

from __future__ import annotations

from attnreg.kernels.dense import pieces
from attnreg.kernels.dense.attention import by_scores
from attnreg.kernels.dense.cache import write_kv
from attnreg.kernels.dense.pieces import DensePlan
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, SpecError, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

kv_cache_shape = paged_cache_shape
forward = by_scores


def plan(spec: AttentionSpec, batch: BatchMetadata) -> DensePlan:
    """The dense calls of a batch. Raises `SpecError` for a layer other than MLA, `BatchError` without a cache."""
    if not spec.latent:
        raise SpecError("the layer is not MLA in its latent form; TORCH_MLA computes nothing else")
    if batch.block_table is None:
        raise BatchError(["the batch has no block_table: MLA in its latent form reads the cache"])
    return pieces.plan(spec, batch, scores=True)
