"""TURBOQUANT: attention over a packed KV cache, by TRITON_ATTN's attention kernel.

Queries are rotated into the basis of rotated keys: by the attention kernel if it decodes, else by a launch before it.
The kernel decodes codes in registers, as it does 8-bit floats. Outputs over rotated values are rotated back. Keys and
values are never written to memory dequantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnreg.kernels.triton.plans import AttentionPlan
from attnreg.kernels.turboquant.rotations import rotate
from attnreg.kernels.turboquant.store import store
from attnreg.language.packed import Packed
from attnreg.runtime.interface import (
    NO_PARAMS,
    AttentionSpec,
    BatchError,
    BatchMetadata,
    Call,
    KVCache,
    LayerParams,
    SpecError,
    paged_cache_shape,
)
from attnreg.runtime.validation import debugging, refuse

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "write_kv"]

kv_cache_shape = paged_cache_shape
# launches read the lengths on the device, so replays of a captured graph may have other lengths
CAPTURABLE = True


class TurboquantPlan:
    """The attention of a batch in the basis of the codes, the slots of its new keys, and where its requests begin."""

    # the class that plans the batch in that basis
    planned: type[AttentionPlan] = AttentionPlan

    def __init__(self, spec: AttentionSpec, batch: BatchMetadata) -> None:
        """Raises `SpecError` for a cache that is not packed, `BatchError` without a cache."""
        packed = _packed(spec, batch)
        self.slot_mapping, self.query_start_loc = batch.slot_mapping, batch.query_start_loc
        # whether `write_kv` may check new rows: the host sees them, or may wait for the device
        self.reads = batch.on_host or debugging()
        self.columns = packed.keys.columns(spec.head_size) if packed.keys.code == "levels" else None
        self.columns_v = packed.values.columns(spec.head_size_v) if packed.values.code == "levels" else None
        self.fp8_keys, self.fp8_values = packed.keys.code == "fp8", packed.values.code == "fp8"
        in_codes = replace(
            spec, head_size=self.columns or spec.head_size, head_size_v=self.columns_v or spec.head_size_v
        )
        self.attention = self.planned(in_codes, batch, unrotated=spec.head_size if self.columns is not None else 0)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> TurboquantPlan:
    """The launches for a batch. Raises as `TurboquantPlan` does."""
    return TurboquantPlan(spec, batch)


def _packed(spec: AttentionSpec, batch: BatchMetadata) -> Packed:
    """The format of a layer's cache. Raises `SpecError` or `BatchError` if this module does not compute it."""
    if spec.packed is None:
        raise SpecError(f"kv_dtype is {spec.kv_dtype}, which is not a packed format; TURBOQUANT computes no others")
    if spec.dtype == torch.float32:
        raise SpecError("dtype is float32; TURBOQUANT computes in float16 and bfloat16")
    if batch.block_table is None:
        raise BatchError(["the batch has no block_table: TURBOQUANT reads a packed cache"])
    return spec.packed


def write_kv(
    spec: AttentionSpec, plan: TurboquantPlan, key: Tensor, value: Tensor, kv_cache: KVCache, *,
    params: LayerParams = NO_PARAMS,
) -> None:  # fmt: skip
    """Stores a batch's new keys and values in its slots.

    For rows in host memory, or with ``ATTNREG_DEBUG=1``, it raises `BatchError` for numbers that are not finite, before
    anything is stored. Otherwise such a row is marked, and queries that attend to it get NaN
    (`attnreg.runtime.turboquant.codec`).
    """
    if plan.slot_mapping is not None:
        if plan.reads:
            refuse([*_number_problems(spec, key, value, plan.slot_mapping)])
        store(spec, key, value, kv_cache, plan.slot_mapping)


def _number_problems(spec: AttentionSpec, key: Tensor, value: Tensor, slots: Tensor) -> Iterator[str]:
    """The problems of rows that have a slot and that the format cannot hold. Reads the device."""
    for name, rows in (("key", key), ("value", value)):
        count = min(len(rows), len(slots))
        odd = ~rows[:count].isfinite().flatten(1).all(1) & (slots[:count] >= 0)
        if bool(odd.any()):
            yield f"{name}[{int(odd.nonzero()[0])}] has a number that is not finite; {spec.kv_dtype} holds finite ones"


def forward(spec: AttentionSpec, plan: TurboquantPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``."""
    query, output, kv_cache = call.query, call.output, call.kv_cache
    # the layer has validated that a paged call has a cache
    assert kv_cache is not None
    turned, summed = query, output
    if plan.columns is not None and not plan.attention.rotates:
        turned = query.new_empty(*query.shape[:2], plan.columns)
        rotate(query, turned, plan.query_start_loc, spec.head_size, plan.columns, back=False)
    if plan.columns_v is not None:
        summed = output.new_empty(*output.shape[:2], plan.columns_v, dtype=torch.float32)
    key = kv_cache.key.view(torch.float8_e4m3fn) if plan.fp8_keys else kv_cache.key
    value = kv_cache.value.view(torch.float8_e4m3fn) if plan.fp8_values else kv_cache.value
    plan.attention.run(call._replace(query=turned, output=summed, kv_cache=KVCache(key, value)))
    if plan.columns_v is not None:
        rotate(summed, output, plan.query_start_loc, spec.head_size_v, plan.columns_v, back=True)
