"""ACME_ATTN: attention in plain PyTorch, request by request, behind attnreg's contract."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.runtime.interface import (
    NO_PARAMS,
    AttentionSpec,
    BatchMetadata,
    Call,
    KVCache,
    LayerParams,
    paged_cache_shape,
)

kv_cache_shape = paged_cache_shape


class Plan(NamedTuple):
    """What all layers of a spec share for one batch."""

    batch: BatchMetadata
    tile: int


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Plan:
    """The plan of a batch. The option `tile` of the row is the number of queries that are computed at once."""
    return Plan(batch, int(dict(spec.options)["tile"]))


def write_kv(
    spec: AttentionSpec, plan: Plan, key: Tensor, value: Tensor, kv_cache: KVCache, *, params: LayerParams = NO_PARAMS
) -> None:
    """Writes each row of key and value into its slot; a negative slot is nowhere."""
    slots = plan.batch.slot_mapping
    rows = (slots >= 0).nonzero().flatten()
    blocks, offsets = slots[rows] // spec.block_size, slots[rows] % spec.block_size
    kv_cache.key[blocks, offsets] = key[rows]
    kv_cache.value[blocks, offsets] = value[rows]


def forward(spec: AttentionSpec, plan: Plan, call: Call) -> None:
    """Writes the attention of each request's queries into the caller's output."""
    starts, lengths = plan.batch.query_start_loc_cpu.tolist(), plan.batch.seq_lens_cpu.tolist()
    for request, length in enumerate(lengths):
        key, value = _keys_and_values(spec, plan.batch, call, request, sum(lengths[:request]), length)
        begin, end = starts[request : request + 2]
        for first in range(begin, end, plan.tile):
            rows = slice(first, min(first + plan.tile, end))
            # the last query of a request stands at its last key
            positions = torch.arange(rows.start, rows.stop) - end + length
            call.output[rows] = _attend(spec, call.query[rows], key, value, positions).to(call.output.dtype)


def _keys_and_values(
    spec: AttentionSpec, batch: BatchMetadata, call: Call, request: int, packed_at: int, length: int
) -> tuple[Tensor, Tensor]:
    """The keys and values of a request, [length, num_kv_heads, head_size], from the cache or from packed ones."""
    if batch.block_table is None:
        return tuple(x[packed_at : packed_at + length] for x in call.packed)
    blocks = batch.block_table[request, : -(-length // spec.block_size)].long()
    return tuple(x[blocks].flatten(0, 1)[:length] for x in call.kv_cache)


def _attend(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """Causal attention of queries at some positions over keys from position 0 on, in float32."""
    group = spec.num_heads // spec.num_kv_heads
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    scores = spec.softmax_scale * torch.einsum("qhd,khd->hqk", query.float(), key)
    distance = positions[:, None] - torch.arange(key.shape[0])
    seen = distance >= 0 if spec.sliding_window is None else (distance >= 0) & (distance < spec.sliding_window)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)
