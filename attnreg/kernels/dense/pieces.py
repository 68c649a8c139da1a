"""The pieces of a batch: dense rectangles of queries and keys, one call each, and their masks.

No function reads device memory: the host's lengths decide the shapes. Where these are upper bounds, the positions are
shifted on the device, so that a rectangle ends with a request's last query and last key.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.kernels.dense.cache import KeyPlaces, places, written
from attnreg.runtime.interface import AttentionSpec, BatchMetadata
from attnreg.runtime.masks import seen_by_position

# how many float32 scores a piece may have: 64 MiB
SCORES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class DensePiece:
    """A dense rectangle: queries of one or more requests, and all keys that they see.

    rows: [requests, queries] int64, the rows of the queries in query and output. places: of the keys, [requests, keys].
    distance: [requests, queries, keys] float32, between a query and a key; None without ALiBi. visible: [requests,
    queries, keys] bool; None if ``causal`` describes the mask. ``causal``: a causal mask over as many queries as keys;
    False: no mask. keyless: [requests, queries] bool, the queries that see no key; None if every query sees one.
    """

    rows: Tensor
    places: KeyPlaces
    distance: Tensor | None
    visible: Tensor | None
    causal: bool
    keyless: Tensor | None


class DensePlan(NamedTuple):
    """The pieces of a batch, the rows (int64) of queries that see no key, and the writes to the cache."""

    pieces: list[DensePiece]
    empty: Tensor
    written: tuple[Tensor, Tensor, Tensor] | None


class _KeySpan(NamedTuple):
    """Consecutive queries of a request and the keys that they see, as ranges of positions; row: the first query's."""

    request: int
    row: int
    queries: range
    keys: range


def plan(spec: AttentionSpec, batch: BatchMetadata, *, scores: bool) -> DensePlan:
    """The dense calls for a batch.

    scores: a call holds whole score matrices, so long prompts are cut. Short requests with equally many queries share a
    call, unless the layer is batch_invariant.
    """
    device = batch.seq_lens.device
    groups: defaultdict[tuple[int, ...], list[_KeySpan]] = defaultdict(list)
    empty: list[Tensor] = []
    starts, lengths = batch.host_starts.tolist(), batch.host_lens.tolist()
    for request, length in enumerate(lengths):
        row, queries = starts[request], starts[request + 1] - starts[request]
        if not length:
            empty.append(torch.arange(row, row + queries, device="cpu"))
            continue
        for span in _spans(spec, batch, _KeySpan(request, row, range(length - queries, length), range(length)), scores):
            keys = len(span.keys)
            # groups by query length, and by key counts within a factor of two: padding at most doubles the keys
            key = (len(span.queries), keys.bit_length())
            alone = "batch_invariant" in spec.features or len(span.queries) * keys * spec.num_heads > SCORES // 16
            groups[(*key, request, span.row) if alone else key].append(span)
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return DensePlan(
        [_piece(spec, batch, spans) for spans in groups.values()],
        torch.cat([none, *empty]).to(device, non_blocking=True),
        written(spec, batch),
    )


def _spans(spec: AttentionSpec, batch: BatchMetadata, whole: _KeySpan, scores: bool) -> list[_KeySpan]:
    """The spans of a request: cut to the keys that the queries see and, with ``scores``, to at most SCORES scores."""
    request, row, queries, keys = whole
    # a batch_invariant layer gathers the keys that any of its batches may need: fewer keys in a call give other bits
    anything = spec.features if "batch_invariant" in spec.features else frozenset()
    causal = False if "causal_by_request" in anything else batch.causal
    step = max(1, SCORES // (spec.num_heads * len(keys))) if scores else max(len(queries), 1)
    spans = []
    for first in range(queries.start, queries.stop, step):
        chunk = range(first, min(first + step, queries.stop))
        low, high = 0, keys.stop
        # a prefix range may show keys outside the window and after the query
        if batch.mm_prefix is None and "mm_prefix" not in anything:
            left, right = spec.sides(causal)
            low = max(0, chunk.start - left) if left >= 0 else 0
            high = min(high, chunk.stop + right) if right >= 0 else high
        spans.append(_KeySpan(request, row + first - queries.start, chunk, range(low, high)))
    return spans


def _piece(spec: AttentionSpec, batch: BatchMetadata, spans: list[_KeySpan]) -> DensePiece:
    device = batch.seq_lens.device
    queries, keys = len(spans[0].queries), max(len(s.keys) for s in spans)
    # one transfer for all numbers
    numbers = [(s.request, s.row, s.queries.start, s.keys.start, s.keys.stop) for s in spans]
    host = torch.tensor(numbers, device="cpu")
    request, row, query_at, first, stop = host.to(device, non_blocking=True).unsqueeze(-1).unbind(1)
    query_at = query_at + torch.arange(queries, device=device)
    key_at = first + torch.arange(keys, device=device)
    # padding repeats a request's last key: memory after it may hold NaN, which a mask does not remove
    place = torch.minimum(key_at, stop - 1)
    ragged = any(len(s.keys) < keys for s in spans)
    certain = batch.on_host or not batch.paged
    # the device may have fewer keys than the host's bound: at least as many as queries, or none for padding
    cross = spec.attn_type == "encoder_decoder"
    bounds = not certain and (cross or any(s.keys.stop > len(s.queries) for s in spans))
    masks = (batch.mm_prefix, batch.tree_mask, spec.chunk)
    special = any(x is not None for x in masks) or isinstance(batch.causal, Tensor)
    plain = not ragged and not bounds and not special and not _window_hides(spec, batch, spans)
    square = plain and batch.causal is True and queries == keys
    keyless = None if certain else (batch.seq_lens[request] == 0).expand_as(query_at)
    if bounds:
        more = (batch.seq_lens_cpu.to(device, non_blocking=True) - batch.seq_lens)[request]
        query_at, key_at, stop, place = query_at - more, key_at - more, stop - more, (place - more).clamp(min=0)
    visible = None
    if not square and not (plain and (queries == 1 or not batch.causal)):
        exists = (key_at < stop) & (key_at >= 0)
        visible = seen_by_position(spec, batch, request, query_at, key_at) & exists[:, None, :]
    distance = None
    if "alibi" in spec.features:
        distance = (query_at[:, :, None] - key_at[:, None, :]).abs().float()
    return DensePiece(
        row + torch.arange(queries, device=device),
        _existing(places(spec, batch, request, place), keyless),
        distance,
        visible,
        square,
        keyless,
    )


def _existing(places: KeyPlaces, keyless: Tensor | None) -> KeyPlaces:
    """Places in blocks that exist: the block table of a request without keys may hold anything."""
    if keyless is None or places.blocks is None:
        return places
    return KeyPlaces(places.blocks.masked_fill(keyless[:, :1], 0), places.offsets)


def _window_hides(spec: AttentionSpec, batch: BatchMetadata, spans: list[_KeySpan]) -> bool:
    """Whether any gathered key is outside the window of any query.

    It ignores the keys that causality hides among the queries' own tokens. It does count keys after the last query: a
    batch_invariant layer may gather some.
    """
    left, right = spec.sides(causal=False)
    return any(
        (left >= 0 and s.queries.stop - 1 - s.keys.start > left)
        or (s.keys.stop > s.queries.stop if batch.causal is True else 0 <= right < s.keys.stop - 1 - s.queries.start)
        for s in spans if s.queries
    )  # fmt: skip
