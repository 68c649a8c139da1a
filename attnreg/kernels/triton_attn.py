"""TRITON_ATTN: the Triton kernels behind the runtime's contract."""

from __future__ import annotations

from attnreg.kernels.triton.cache import Write, WriteTensors, bound_write
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.kernels.triton.plans import AttentionPlan
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, Repeated, paged_cache_shape
from attnreg.runtime.tensors import named

__all__ = ["CAPTURABLE", "KEYS_APART", "forward", "kv_cache_shape", "plan", "repeat", "run", "write_kv"]

kv_cache_shape = paged_cache_shape
# launches read the lengths on the device, so replays of a captured graph may have other lengths
CAPTURABLE = True
# launches read packed keys at key_start_loc
KEYS_APART = True


def plan(spec: AttentionSpec, batch: BatchMetadata) -> TritonPlan:
    """The launches for a batch, shared by all layers of this spec, and the slots of the new keys."""
    return TritonPlan(spec, batch)


class TritonPlan(AttentionPlan):
    """An attention plan with the slots of the batch's new keys and the first row of each request."""

    def __init__(self, spec: AttentionSpec, batch: BatchMetadata) -> None:
        super().__init__(spec, batch)
        self.slot_mapping, self.query_start_loc = batch.slot_mapping, batch.query_start_loc
        # the last write, kept because consecutive layers make calls of the same kind
        self.recent_write: tuple[object, Write | None] = (None, None)


def forward(spec: AttentionSpec, plan: TritonPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``."""
    plan.run(call)


def run(spec: AttentionSpec, plan: TritonPlan, call: Call) -> None:
    """Stores the call's new keys and values, and attends."""
    _, kv_cache, output, key, value, _, params, alike, _ = call
    if kv_cache is not None and key is not None and value is not None:
        if alike is None or plan.slot_mapping is None:
            write_kv(spec, plan, key, value, kv_cache, params=params)
        else:
            tensors = named(
                WriteTensors,
                (key, value, kv_cache.key, kv_cache.value, plan.slot_mapping, params.k_scale, params.v_scale),
            )
            known, write = plan.recent_write
            if write is None or known is not alike:
                write = bound_write(spec, alike, tensors)
                plan.recent_write = alike, write
            write(tensors)
    if output is not None:
        plan.run(call)


def repeat(spec: AttentionSpec, plan: TritonPlan, call: Call) -> Repeated:
    """A function that runs a call without a cache again, on other memory."""
    return plan.repeat(call)
