"""HOPPER_MLA: attnreg's own kernel in Gluon for MLA in its latent form on SM 9.0, behind the runtime's contract."""

from __future__ import annotations

from attnreg.kernels.hopper.latents.plans import HopperLatentPlan, validate_spec
from attnreg.kernels.mla.cache import write_latents as write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCacheShape, paged_cache_shape

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "write_kv"]

CAPTURABLE = True


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache of latents."""
    validate_spec(spec)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> HopperLatentPlan:
    """The launches of a batch. Raises `SpecError` for another layer or GPU, `BatchError` without a cache."""
    return HopperLatentPlan(spec, batch)


def forward(spec: AttentionSpec, plan: HopperLatentPlan, call: Call) -> None:
    """Writes the attention of the batch's absorbed queries to the latents into ``output``, and into ``lse``."""
    plan.run(call)
