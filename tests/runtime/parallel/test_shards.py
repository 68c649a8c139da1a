"""The arithmetic of shards: every token is on one rank, in a slot of its own."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from attnreg import BatchMetadata, SpecError
from attnreg.runtime.parallel.batch import shard
from attnreg.runtime.parallel.shards import Shards


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_every_token_is_on_one_rank_in_a_slot_of_its_own(world: int, interleave: int) -> None:
    positions = torch.arange(61)
    table = torch.tensor([[5, 0, 9, 2, 8, 1, 4, 7, 3, 6, 11, 10, 12, 13, 15, 14]])
    owners = torch.zeros(61, dtype=torch.int)
    for rank in range(world):
        shards = Shards(rank, world, interleave)
        has = shards.has(positions)
        assert torch.equal(has, positions // interleave % world == rank)
        owners += has
        # the keys before a position are those that the rank has of them
        before = torch.cat([torch.zeros(1, dtype=torch.int64), has.cumsum(0)])
        assert torch.equal(shards.before(torch.arange(62)), before)
        assert [shards.before(n) for n in range(62)] == before.tolist()
        slots = shards.slots(positions, torch.zeros_like(positions), table, 4)
        own = torch.arange(int(has.sum()))
        assert torch.equal(slots[has], table[0, own // 4] * 4 + own % 4)
        assert (slots[~has] == -1).all()
    assert (owners == 1).all()
    # a block of every rank covers the same positions
    block = positions // (4 * world)
    for rank in range(world):
        shards = Shards(rank, world, interleave)
        slots = shards.slots(positions, torch.zeros_like(positions), table, 4)
        assert torch.equal(slots[slots >= 0] // 4, table[0, block][slots >= 0])


def test_padding_has_no_slot() -> None:
    slots = Shards(0, 2).slots(torch.tensor([-1, 0, 40]), torch.tensor([0, 0, 0]), torch.tensor([[3]]), 4)
    assert slots.tolist() == [-1, 12, -1]


@pytest.mark.parametrize("by_query", [True, False])
def test_rows_past_the_queries_of_the_device_are_padding(by_query: bool) -> None:
    # the host counts 3 + 3 queries, as when a graph was captured; the device has 1 + 2, of 7 and 19 keys
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    batch = replace(
        BatchMetadata.build([3, 3], [9, 20], block_table=table),
        query_start_loc=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([7, 19], dtype=torch.int32),
    )
    with mock.patch.object(BatchMetadata, "on_host", False):
        parts = [
            shard(batch, table, Shards(rank, 2), 4, left=left, by_query=by_query, slot_mapping=None)
            for left in (-1, 2)
            for rank in range(2)
        ]
    for part in parts:
        assert part.tokens == 6
        assert part.context.slot_mapping is not None
        # a key past the last request's would be written where another request may have its own
        assert (part.context.slot_mapping[3:] == -1).all()
        assert part.context.seq_lens[3:].sum() == 0
        assert part.window is None or part.window.batch.seq_lens[3:].sum() == 0
    assert [part.context.slot_mapping[:3].tolist() for part in parts[:2]] == [[3, -1, 21], [-1, 20, -1]]  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((2, 2), "rank is 2; expected less than world_size, 2"),
        ((-1, 2), "rank is -1; expected an integer of at least 0"),
        ((0, 0), "world_size is 0; expected an integer of at least 1"),
        ((0, 2, 0), "interleave is 0; expected an integer of at least 1"),
        ((0, 2, True), "interleave is True; expected an integer"),
        ((0, 2, 1.0), "interleave is 1.0; expected an integer"),
    ],
)
def test_what_is_no_shard_is_refused(arguments: tuple[int, ...], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        Shards(*arguments)


@pytest.mark.parametrize("block_size", [None, 3, 16])
def test_an_interleave_that_does_not_divide_blocks_is_refused(block_size: int | None) -> None:
    shards = Shards(0, 2, 8)
    if block_size == 16:
        assert shards.validate_block_size(block_size) == 16
        return
    with pytest.raises(SpecError, match=f"interleave is 8 and block_size is {block_size}; the first must divide"):
        shards.validate_block_size(block_size)
