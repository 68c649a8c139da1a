"""The paged cache in PyTorch: locating, gathering and writing keys and values."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnreg.runtime import latents
from attnreg.runtime.interface import NO_PARAMS, AttentionSpec, BatchMetadata, Call, KVCache, LayerParams


class KeyPlaces(NamedTuple):
    """The places of keys and values: int64 blocks and offsets in the cache; without a cache, rows of key and value."""

    blocks: Tensor | None
    offsets: Tensor


def places(spec: AttentionSpec, batch: BatchMetadata, request: Tensor, position: Tensor) -> KeyPlaces:
    """The places of the keys at the given requests and positions; int64 tensors that broadcast."""
    if batch.block_table is None:
        starts = batch.query_start_loc if batch.key_start_loc is None else batch.key_start_loc
        return KeyPlaces(None, position + starts[request])
    assert spec.block_size is not None
    return KeyPlaces(batch.block_table[request, position // spec.block_size].long(), position % spec.block_size)


def gather(spec: AttentionSpec, places: KeyPlaces, call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values, dequantised to ``spec.dtype``: [..., num_kv_heads, head_size] and [..., head_size_v]."""
    if places.blocks is None:
        key, value = call.packed
        return key[places.offsets], value[places.offsets]
    assert call.kv_cache is not None
    key = _gather(spec, places.blocks, places.offsets, call.kv_cache.key, call.params.k_scale)
    if spec.latent:
        return key, key[..., : spec.head_size_v]
    return key, _gather(spec, places.blocks, places.offsets, call.kv_cache.value, call.params.v_scale)


def _gather(spec: AttentionSpec, blocks: Tensor, offsets: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
    tokens = _tokens_first(spec, cache)
    if tokens.stride(0) == tokens.shape[1] * tokens.stride(1):
        # one index is twice as fast as two
        slots = blocks * tokens.shape[1] + offsets
        x = tokens.flatten(0, 1).index_select(0, slots.flatten()).view(*slots.shape, *tokens.shape[2:])
    else:
        x = tokens[blocks, offsets]
    x = latents.unpacked(x) if spec.kv_dtype == "fp8_ds_mla" else x.view(cache.dtype)
    if scale is not None:
        x = x.float() * scale[:, None]
    return x.to(spec.dtype)


def _tokens_first(spec: AttentionSpec, cache: Tensor) -> Tensor:
    """A cache as [num_blocks, block_size, num_kv_heads, head_size], 8-bit floats as bytes: PyTorch can index bytes."""
    cache = cache.view(torch.uint8) if spec.quantised else cache
    return cache if spec.kv_layout == "NHD" else cache.transpose(1, 2)


def written(spec: AttentionSpec, batch: BatchMetadata) -> tuple[Tensor, Tensor, Tensor] | None:
    """Row of key and value, block and offset of each write to the cache: [num_keys] int64 each. Row -1: no write."""
    slots = batch.slot_mapping
    if slots is None or spec.block_size is None or not slots.numel():
        return None
    # a row without a slot repeats the first write: dropping the row would wait for the device
    has_slot = slots >= 0
    rows = torch.where(has_slot, torch.arange(len(slots), device=slots.device), has_slot.int().argmax())
    slots = slots[rows]
    return (
        torch.where(slots >= 0, rows, -1),
        slots.clamp(min=0) // spec.block_size,
        slots.clamp(min=0) % spec.block_size,
    )


class PlanWithWrites(Protocol):
    """A plan with the writes of its batch, as `written` returns them."""

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor] | None: ...


def write_kv(
    spec: AttentionSpec,
    plan: PlanWithWrites,
    key: Tensor,
    value: Tensor,
    kv_cache: KVCache,
    *,
    params: LayerParams = NO_PARAMS,
) -> None:
    """Writes each row of key and value into its slot, quantised if the cache is."""
    # a cache without blocks has no slots; validation has refused batches that name one
    if plan.written is None or not kv_cache.key.shape[0]:
        return
    rows, blocks, offsets = plan.written
    scaled = spec.kv_dtype == "fp8_ds_mla"
    if spec.latent:
        # the two parts of a latent lie side by side
        key = latents.packed(key, value) if scaled else torch.cat([key, value], -1)
    pairs = ((key, kv_cache.key, params.k_scale), (value, kv_cache.value, params.v_scale))
    for x, cache, scale in pairs[:1] if spec.latent else pairs:
        plain = scaled or not spec.quantised
        stored = x.to(cache.dtype) if plain else _quantised(x, scale, cache.dtype).view(torch.uint8)
        tokens = _tokens_first(spec, cache)
        # if no row has a slot, slot 0 is written with its own content
        chosen = torch.where(rows[:, None, None] >= 0, stored[rows], tokens[blocks, offsets])
        tokens[blocks, offsets] = chosen


def _quantised(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x.float() if scale is None else x.float() / scale[:, None]
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)
