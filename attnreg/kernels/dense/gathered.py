"""Paged attention as dense calls: which queries and keys go together, their masks, and the cache's reads and writes.

Backends whose kernels take whole tensors share this. A batch becomes a few `Piece`s, each one dense attention over
gathered keys. Nothing here reads device memory: the host's copies of the lengths decide the shapes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache, LayerParams

# float32 scores of one piece: 64 MiB
SCORES = 1 << 24


class Places(NamedTuple):
    """Where keys and values are: int64 blocks and offsets of the cache; without a cache, rows of key and value."""

    blocks: Tensor | None
    offsets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Queries of some requests and all keys that they see, as a dense rectangle.

    rows: [requests, queries] int64, their rows of query and output. places: of the keys, [requests, keys]. distance:
    [requests, queries, keys] float32, how far a query is from a key; None without ALiBi. visible: the same shape in
    bool; None where ``causal`` says it all: whether queries see just the keys up to their own, with as many queries as
    keys, or all of them.
    """

    rows: Tensor
    places: Places
    distance: Tensor | None
    visible: Tensor | None
    causal: bool


class Plan(NamedTuple):
    """The pieces of a batch, the rows of queries that see no key (int64), and what the cache gets (see `written`)."""

    pieces: list[Piece]
    empty: Tensor
    written: tuple[Tensor, Tensor, Tensor] | None


class _Part(NamedTuple):
    """Consecutive queries of a request, by position, and the keys that they see: all half-open."""

    request: int
    row: int
    queries: range
    keys: range


def plan(spec: AttentionSpec, batch: BatchMetadata, *, scores: bool) -> Plan:
    """The dense calls that make up a batch.

    scores: whether whole score matrices will be held, so that long prompts are cut. Short requests of equal query
    length share a call, unless the layer asks to be batch_invariant.
    """
    device = batch.seq_lens.device
    groups: defaultdict[tuple[int, ...], list[_Part]] = defaultdict(list)
    empty: list[Tensor] = []
    starts, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu.tolist()
    for request, length in enumerate(lengths):
        row, queries = starts[request], starts[request + 1] - starts[request]
        if not length:
            empty.append(torch.arange(row, row + queries))
            continue
        for part in _parts(spec, batch, _Part(request, row, range(length - queries, length), range(length)), scores):
            keys = len(part.keys)
            # a query length of its own, and keys within a factor of two: padding costs no more than the keys do
            key = (len(part.queries), keys.bit_length())
            alone = "batch_invariant" in spec.features or len(part.queries) * keys * spec.num_heads > SCORES // 16
            groups[(*key, request, part.row) if alone else key].append(part)
    none = torch.empty(0, dtype=torch.int64)
    return Plan(
        [_piece(spec, batch, parts) for parts in groups.values()],
        torch.cat([none, *empty]).to(device, non_blocking=True),
        written(spec, batch),
    )


def _parts(spec: AttentionSpec, batch: BatchMetadata, whole: _Part, scores: bool) -> list[_Part]:
    """A request cut to the keys that its queries see, and where scores are held to what fits."""
    request, row, queries, keys = whole
    step = max(1, SCORES // (spec.num_heads * len(keys))) if scores else max(len(queries), 1)
    parts = []
    for first in range(queries.start, queries.stop, step):
        some = range(first, min(first + step, queries.stop))
        low, high = 0, keys.stop
        # a prefix range reaches across window and causality
        if batch.mm_prefix is None:
            if spec.sliding_window is not None:
                low = max(0, some.start - spec.sliding_window + 1)
            if batch.causal:
                high = some.stop
            elif spec.sliding_window is not None:
                high = min(high, some.stop + spec.sliding_window - 1)
        parts.append(_Part(request, row + first - queries.start, some, range(low, high)))
    return parts


def _piece(spec: AttentionSpec, batch: BatchMetadata, parts: list[_Part]) -> Piece:
    device = batch.seq_lens.device
    queries, keys = len(parts[0].queries), max(len(p.keys) for p in parts)
    # one transfer for all that the host knows
    known = torch.tensor([(p.request, p.row, p.queries.start, p.keys.start, p.keys.stop) for p in parts])
    request, row, query_at, first, stop = known.to(device, non_blocking=True).unsqueeze(-1).unbind(1)
    query_at = query_at + torch.arange(queries, device=device)
    key_at = first + torch.arange(keys, device=device)
    # keys past a request's own repeat its last: what lies behind it may be NaN, which no mask undoes
    place = torch.minimum(key_at, stop - 1)
    distance = query_at[:, :, None] - key_at[:, None, :]
    ragged = any(len(p.keys) < keys for p in parts)
    plain = not ragged and batch.mm_prefix is None and not _window_bites(spec, parts)
    square = plain and batch.causal and queries == keys
    visible = None
    if not square and not (plain and (queries == 1 or not batch.causal)):
        visible = _visible(spec, batch, request, query_at, key_at, distance) & (key_at < stop)[:, None, :]
    return Piece(
        row + torch.arange(queries, device=device),
        places(spec, batch, request, place),
        distance.abs().float() if "alibi" in spec.features else None,
        visible,
        square,
    )


def places(spec: AttentionSpec, batch: BatchMetadata, request: Tensor, position: Tensor) -> Places:
    """Where the keys at some positions of some requests are; int64 tensors that broadcast."""
    if batch.block_table is None:
        starts = batch.query_start_loc if batch.key_start_loc is None else batch.key_start_loc
        return Places(None, position + starts[request])
    assert spec.block_size is not None
    return Places(batch.block_table[request, position // spec.block_size].long(), position % spec.block_size)


def _window_bites(spec: AttentionSpec, parts: list[_Part]) -> bool:
    """Whether some key that is gathered is further than the window from some query."""
    w = spec.sliding_window
    return w is not None and any(
        max(p.queries.stop - 1 - p.keys.start, p.keys.stop - 1 - p.queries.start) >= w for p in parts if p.queries
    )


def _visible(
    spec: AttentionSpec, batch: BatchMetadata, request: Tensor, query_at: Tensor, key_at: Tensor, distance: Tensor
) -> Tensor:
    visible = torch.ones_like(distance, dtype=torch.bool)
    if batch.causal:
        visible &= distance >= 0
    if spec.sliding_window is not None:
        visible &= distance.abs() < spec.sliding_window
    if batch.mm_prefix is not None:
        # [requests, 1, ranges] against [requests, positions, 1]
        begin, end = batch.mm_prefix[request[:, 0]].unsqueeze(1).unbind(-1)
        query_in = (query_at[..., None] >= begin) & (query_at[..., None] < end)
        key_in = (key_at[..., None] >= begin) & (key_at[..., None] < end)
        visible |= (query_in[:, :, None, :] & key_in[:, None, :, :]).any(-1)
    return visible


def fill_empty(empty: Tensor, call: Call) -> None:
    """Write what rows without a key get: zero, and the LSE of the sink alone."""
    if not empty.numel():
        return
    lse, sinks = call.lse, call.params.sinks
    # not by indexing with a number, which is copied to the device while the host waits
    call.output.index_fill_(0, empty, 0)
    if lse is not None and sinks is None:
        lse.index_fill_(1, empty, -torch.inf)
    elif lse is not None and sinks is not None:
        lse.index_copy_(1, empty, sinks.float()[:, None].expand(-1, empty.numel()))


def gather(spec: AttentionSpec, places: Places, call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values, dequantised to ``spec.dtype``: [..., num_kv_heads, head_size] and [..., head_size_v]."""
    if places.blocks is None:
        key, value = call.packed
        return key[places.offsets], value[places.offsets]
    assert call.kv_cache is not None
    found = []
    for cache, scale in zip(call.kv_cache, (call.params.k_scale, call.params.v_scale), strict=True):
        tokens = _tokens_first(spec, cache)
        if tokens.stride(0) == tokens.shape[1] * tokens.stride(1):
            # one index is twice as fast as two
            slots = places.blocks * tokens.shape[1] + places.offsets
            x = tokens.flatten(0, 1).index_select(0, slots.flatten()).view(*slots.shape, *tokens.shape[2:])
        else:
            x = tokens[places.blocks, places.offsets]
        x = x.view(cache.dtype)
        if scale is not None:
            x = x.float() * scale[:, None]
        found.append(x.to(spec.dtype))
    return found[0], found[1]


def _tokens_first(spec: AttentionSpec, cache: Tensor) -> Tensor:
    """A cache as [num_blocks, block_size, num_kv_heads, head_size], 8-bit floats as bytes, which can be indexed."""
    cache = cache.view(torch.uint8) if spec.quantised else cache
    return cache if spec.kv_layout == "NHD" else cache.transpose(1, 2)


def written(spec: AttentionSpec, batch: BatchMetadata) -> tuple[Tensor, Tensor, Tensor] | None:
    """Row of key and value, block and offset of each write, [num_keys] int64 each; a row of -1 is no write."""
    slots = batch.slot_mapping
    if slots is None or spec.block_size is None or not slots.numel():
        return None
    # a row that is not to be written writes what the first one does, again: dropping it would need a synchronisation
    wanted = slots >= 0
    rows = torch.where(wanted, torch.arange(len(slots), device=slots.device), wanted.int().argmax())
    slots = slots[rows]
    return (
        torch.where(slots >= 0, rows, -1),
        slots.clamp(min=0) // spec.block_size,
        slots.clamp(min=0) % spec.block_size,
    )


def write_kv(
    spec: AttentionSpec,
    written: tuple[Tensor, Tensor, Tensor] | None,
    key: Tensor,
    value: Tensor,
    kv_cache: KVCache,
    *,
    params: LayerParams,
) -> None:
    """Put each row of key and value into its slot, as the cache stores them."""
    if written is None:
        return
    rows, blocks, offsets = written
    for x, cache, scale in ((key, kv_cache.key, params.k_scale), (value, kv_cache.value, params.v_scale)):
        stored = _quantised(x, scale, cache.dtype).view(torch.uint8) if spec.quantised else x.to(cache.dtype)
        tokens = _tokens_first(spec, cache)
        # where no row at all is to be written, slot 0 gets what it holds
        chosen = torch.where(rows[:, None, None] >= 0, stored[rows], tokens[blocks, offsets])
        tokens[blocks, offsets] = chosen


def _quantised(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x.float() if scale is None else x.float() / scale[:, None]
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)
