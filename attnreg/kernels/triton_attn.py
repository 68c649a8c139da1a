"""TRITON_ATTN: the Triton kernels behind the runtime's contract."""

from __future__ import annotations

from torch import Tensor

from attnreg.kernels.triton.cache import write_kv as _write_kv
from attnreg.kernels.triton.plans import AttentionPlan
from attnreg.runtime.interface import (
    NO_PARAMS,
    AttentionSpec,
    BatchMetadata,
    Call,
    KVCache,
    KVCacheShape,
    LayerParams,
    paged_cache_shape,
)


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache: keys and values as the spec's layout has them."""
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> TritonPlan:
    """The launches for a batch, which all layers of this spec share, and where their keys are written."""
    return TritonPlan(spec, batch)


class TritonPlan(AttentionPlan):
    """An attention plan that also knows the slots of the batch's new keys, and the rows that are no padding."""

    def __init__(self, spec: AttentionSpec, batch: BatchMetadata) -> None:
        super().__init__(spec, batch)
        self.slot_mapping, self.num_tokens = batch.slot_mapping, batch.num_tokens


def write_kv(
    spec: AttentionSpec,
    plan: TritonPlan,
    key: Tensor,
    value: Tensor,
    kv_cache: KVCache,
    *,
    params: LayerParams = NO_PARAMS,
) -> None:
    """Stores the batch's new keys and values in the cache."""
    if plan.slot_mapping is not None:
        _write_kv(
            key,
            value,
            kv_cache.key,
            kv_cache.value,
            plan.slot_mapping,
            layout=spec.kv_layout,
            k_scale=params.k_scale,
            v_scale=params.v_scale,
        )


def forward(spec: AttentionSpec, plan: TritonPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``."""
    plan.run(call)
