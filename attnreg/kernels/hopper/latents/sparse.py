# mypy: disable-error-code="import-untyped"
"""HOPPER_MLA_SPARSE: HOPPER_MLA's kernel over the tokens that an indexer chose, behind the runtime's contract."""

from __future__ import annotations

from dataclasses import replace

from attnreg.kernels.hopper.latents.plans import HopperLatentPlan, validate_spec
from attnreg.kernels.hopper.target import require
from attnreg.kernels.mla.cache import write_latents as write_kv
from attnreg.kernels.mla.sparse import SparsePlan, attend
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCacheShape, paged_cache_shape

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "write_kv"]

CAPTURABLE = True


def _validate(spec: AttentionSpec) -> None:
    """Raises `SpecError` for a layer that the kernel does not compute. The kernel reads the cache token by token."""
    validate_spec(replace(spec, block_size=1))


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache of latents."""
    _validate(spec)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> SparsePlan:
    """The batch; its launches depend on the rows of a call. Raises `SpecError` and `BatchError`."""
    _validate(spec)
    require(batch.query_start_loc.device)
    return SparsePlan(batch)


def forward(spec: AttentionSpec, plan: SparsePlan, call: Call) -> None:
    """Writes the attention of each query to the latents that it chose into ``output``, and into ``lse``."""
    attend(spec, plan, call, HopperLatentPlan)
