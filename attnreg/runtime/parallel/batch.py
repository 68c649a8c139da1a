"""The batch of a step as one rank computes it: its shard of the context, and the new keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.runtime.batch import BatchMetadata
from attnreg.runtime.parallel.shards import Shards
from attnreg.runtime.tensors import is_captured


@dataclass(frozen=True, slots=True)
class Window:
    """The keys of a shard that each query's window reaches. They are copied into ``num_blocks`` blocks.

    batch: the batch over these copies. blocks, offsets: where each key is in the cache, [num_blocks * block_size].
    """

    batch: BatchMetadata
    blocks: Tensor
    offsets: Tensor
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """A batch on one rank; `attnreg.runtime.parallel.attention.ContextParallel.shard` makes it.

    context: the rank's shard of the keys before this step, and the slots of the new keys that are the rank's own.
    window: None if queries see the whole context. step: all new keys, in a cache of ``step_blocks`` blocks. begins: the
    host knows that no request has a key before this step, on any rank. kind: `ContextParallel.kind` of the layers that
    may use it.
    """

    tokens: int
    context: BatchMetadata
    window: Window | None
    step: BatchMetadata
    step_blocks: int
    begins: bool = False
    kind: tuple[object, ...] = ()


class _RankRows(NamedTuple):
    """For each query of a batch: its request, its place in this step's queries, and its position, -1 of padding."""

    request: Tensor
    place: Tensor
    position: Tensor


def shard(
    batch: BatchMetadata,
    table: Tensor,
    shards: Shards,
    block_size: int,
    *,
    left: int,
    by_query: bool,
    slot_mapping: Tensor | None,
) -> ShardedBatch:
    """The batch of a rank, computed on the device without waiting for it.

    batch: the valid batch of all ranks, with the block table that they share. left: how many keys a query sees
    before its own, -1 for all. by_query: queries of a request attend to its context one by one. slot_mapping: the slots
    of the new keys in the rank's cache, -1 for keys of other ranks; None: their positions decide.
    """
    starts = batch.query_start_loc
    row = torch.arange(batch.num_tokens, device=starts.device, dtype=starts.dtype)
    request = torch.searchsorted(starts[1:], row, right=True).clamp(max=max(batch.num_reqs - 1, 0))
    contexts, place = (batch.seq_lens - starts.diff()).clamp(min=0), row - starts[request]
    # the host may count more queries than the device: rows past the device's are padding too
    has_place = (batch.seq_lens[request] > 0) & (row < starts[-1])
    rows = _RankRows(request, place, torch.where(has_place, contexts[request] + place, -1))
    slots = shards.slots(rows.position, request, table, block_size) if slot_mapping is None else slot_mapping
    # the host may know only upper bounds
    host = (batch.host_lens.cpu() - batch.host_starts.cpu().diff()).clamp(min=0)
    context = _context(batch, table, shards, contexts, host, rows, slots, windowed=left >= 0, by_query=by_query)
    window = _window(batch, table, shards, block_size, contexts, rows, left) if left >= 0 else None
    # a replay of a captured graph may have keys before this step
    begins = not (host.any() or is_captured(starts))
    return ShardedBatch(batch.num_tokens, context, window, *_step(batch, block_size, rows), begins)


def _context(
    batch: BatchMetadata,
    table: Tensor,
    shards: Shards,
    contexts: Tensor,
    host: Tensor,
    rows: _RankRows,
    slots: Tensor,
    *,
    windowed: bool,
    by_query: bool,
) -> BatchMetadata:
    """The rank's part of the context, by request or by query, with the slots of the new keys."""
    lens, bounds = shards.before(contexts), shards.before(host)
    if windowed:
        # a window's keys are copied, so only the slots are used; blocks before a window may have been freed
        lens, bounds = torch.zeros_like(lens), torch.zeros_like(bounds)
    starts, host_starts, most = batch.query_start_loc, batch.query_start_loc_cpu, batch.max_query_len
    if by_query and most > 1:
        count, most = batch.num_tokens, 1
        lens, table = torch.where(rows.position >= 0, lens[rows.request], 0), table[rows.request]
        bounds = bounds.repeat_interleave(batch.host_starts.cpu().diff(), output_size=count)
        starts, host_starts = _one_each(count, starts.device), _one_each(count)
    return BatchMetadata(
        query_start_loc=starts, seq_lens=lens, max_query_len=most, max_seq_len=shards.before(batch.max_seq_len),
        query_start_loc_cpu=host_starts, seq_lens_cpu=bounds, block_table=table, slot_mapping=slots, causal=by_query,
    )  # fmt: skip


def _step(batch: BatchMetadata, block_size: int, rows: _RankRows) -> tuple[BatchMetadata, int]:
    """The new keys alone, each request in blocks of its own, one request's behind another's, and how many blocks."""
    device, queries = rows.request.device, batch.query_start_loc.diff()
    # an upper bound: the full blocks, and one more for each request
    blocks, each = batch.num_tokens // block_size + batch.num_reqs, max(1, -(-batch.max_query_len // block_size))
    used = (queries + block_size - 1) // block_size
    first = used.cumsum(0) - used
    table = first[:, None] + torch.arange(each, device=device)
    step = BatchMetadata(
        query_start_loc=batch.query_start_loc,
        # padding has queries, but sees no key
        seq_lens=torch.minimum(batch.seq_lens, queries),
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_query_len,
        query_start_loc_cpu=batch.query_start_loc_cpu,
        seq_lens_cpu=torch.minimum(batch.host_lens.cpu(), batch.host_starts.cpu().diff()),
        block_table=table.clamp(max=max(blocks - 1, 0)).to(torch.int32),
        slot_mapping=first[rows.request] * block_size + rows.place,
        causal=batch.causal,
        tree_mask=batch.tree_mask,
    )
    return step, blocks


def _window(
    batch: BatchMetadata, table: Tensor, shards: Shards, block_size: int, contexts: Tensor, rows: _RankRows, left: int
) -> Window:
    """The part of the context within ``left`` keys of each query, with equally many blocks for every query."""
    count, device = batch.num_tokens, table.device
    first = shards.before((rows.position - left).clamp(min=0))
    lens = torch.where(rows.position >= 0, shards.before(contexts)[rows.request] - first, 0).clamp(min=0)
    # of any ``left`` consecutive positions, one rank has at most this many
    turn = shards.world_size * shards.interleave
    most = min(shards.interleave * (-(-left // turn) + 1), shards.before(batch.max_seq_len))
    each = max(1, -(-most // block_size))
    key = first[:, None] + torch.arange(each * block_size, device=device)
    columns = (key // block_size).clamp(max=table.shape[1] - 1)
    # entries past a query's keys name a block that exists; its content is not used
    blocks = torch.where(key < (first + lens)[:, None], table[rows.request[:, None], columns], 0)
    windows = BatchMetadata(
        query_start_loc=_one_each(count, device), seq_lens=lens, max_query_len=1, max_seq_len=most,
        query_start_loc_cpu=_one_each(count), seq_lens_cpu=torch.full((count,), most, dtype=torch.int32, device="cpu"),
        block_table=torch.arange(count * each, device=device, dtype=torch.int32).view(count, each),
    )  # fmt: skip
    return Window(windows, blocks.flatten(), (key % block_size).flatten(), count * each)


def _one_each(count: int, device: torch.device | str = "cpu") -> Tensor:
    """The prefix sums of requests with one query each."""
    return torch.arange(count + 1, device=device, dtype=torch.int32)
