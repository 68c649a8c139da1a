"""TRITON_MLA: attnreg's own Triton kernels for MLA in its latent form, behind the runtime's contract."""

from __future__ import annotations

from attnreg.kernels.mla.cache import write_latents as write_kv
from attnreg.kernels.mla.plans import LatentPlan, validate_spec
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCacheShape, paged_cache_shape

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "write_kv"]

CAPTURABLE = True


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache of latents."""
    validate_spec(spec)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> LatentPlan:
    """The launches of a batch. Raises `SpecError` for a layer other than MLA, `BatchError` without a cache."""
    return LatentPlan(spec, batch)


def forward(spec: AttentionSpec, plan: LatentPlan, call: Call) -> None:
    """Writes the attention of the batch's absorbed queries to the latents into ``output``, and into ``lse``."""
    plan.run(call)
