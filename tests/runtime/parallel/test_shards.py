"""The arithmetic of shards: every token is on one rank, in a slot of its own."""

from __future__ import annotations

import pytest
import torch

from attnreg import SpecError
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
