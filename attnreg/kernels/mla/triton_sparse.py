"""TRITON_MLA_SPARSE: TRITON_MLA's kernels over the tokens that an indexer chose, behind the runtime's contract."""

from __future__ import annotations

from attnreg.kernels.mla.cache import write_latents as write_kv
from attnreg.kernels.mla.plans import LatentPlan, validate_spec
from attnreg.kernels.mla.sparse import SparsePlan, attend
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCacheShape, paged_cache_shape

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "write_kv"]

CAPTURABLE = True


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache of latents."""
    validate_spec(spec)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> SparsePlan:
    """The batch; its launches depend on the rows of a call. Raises `SpecError` and `BatchError`."""
    validate_spec(spec)
    return SparsePlan(batch)


def forward(spec: AttentionSpec, plan: SparsePlan, call: Call) -> None:
    """Writes the attention of each query to the latents that it chose into ``output``, and into ``lse``."""
    attend(spec, plan, call, LatentPlan)
