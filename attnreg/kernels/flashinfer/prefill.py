"""FLASHINFER_PREFILL: FlashInfer's ragged wrapper for prompts of MLA. Not run on Blackwell yet.

The wrapper plans with prefix sums in host memory, for FlashInfer's kernels ``fa2``. With them, no other kernels run
without waiting for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attnreg.kernels.flashinfer import record
from attnreg.kernels.flashinfer.ragged import (
    Ragged,
    arguments,
    ragged,
    store,
    store_empty,
    validate,
    workspace,
    write_kv,
)
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCacheShape, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASHINFER_PREFILL"
WIDTHS = ((192, 128),)

_Wrapper = record.load_wrapper()


class PrefillPlan(NamedTuple):
    """The requests of a batch, and the wrapper that has planned them; None if there are none."""

    ragged: Ragged
    wrapper: Any


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shapes of a cache of expanded keys. No prompt reads such a cache."""
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> PrefillPlan:
    """The requests of a batch, planned. Raises `SpecError`, `UnclaimedError` and `BatchError`."""
    validate(spec, WIDTHS, BACKEND)
    requests = ragged(batch, BACKEND)
    if not requests.num_reqs:
        return PrefillPlan(requests, None)
    wrapper = _Wrapper(float_workspace_buffer=workspace(batch.seq_lens), kv_layout="NHD", backend="fa2")
    wrapper.plan(
        qo_indptr=requests.host_queries,
        kv_indptr=requests.host_keys,
        num_qo_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_qk=spec.head_size,
        head_dim_vo=spec.head_size_v,
        causal=requests.causal,
        sm_scale=spec.softmax_scale,
        q_data_type=spec.dtype,
        kv_data_type=spec.dtype,
        o_data_type=spec.dtype,
    )
    return PrefillPlan(requests, wrapper)


def forward(spec: AttentionSpec, plan: PrefillPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``."""
    if plan.wrapper is None:
        store_empty(plan.ragged, call)
        return
    query, key, value, out = arguments(plan.ragged, call)
    result = plan.wrapper.run(q=query, k=key, v=value, out=out, return_lse=call.lse is not None)
    store(plan.ragged, call, out, result[1] if call.lse is not None else None)
