"""The shards of a KV cache over ranks: which rank has which token of a request, and in which slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from attnreg.runtime.spec import SpecError

_Positions = TypeVar("_Positions", int, Tensor)


@dataclass(frozen=True, slots=True)
class Shards:
    """The tokens of each request, dealt out to ``world_size`` ranks in turn, ``interleave`` of them at a time.

    The token at position p is on rank ``p // interleave % world_size``. A rank keeps its keys of a request in the order
    of their positions. All ranks have the same block table. On each rank, block i of a request holds block_size keys:
    those that the rank has of the ``block_size * world_size`` positions from ``i * block_size * world_size`` on.
    Raises `SpecError`.
    """

    rank: int
    world_size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("world_size", 1), ("interleave", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise SpecError(f"{name} is {value!r}; expected an integer of at least {least}")
        if self.rank >= self.world_size:
            raise SpecError(f"rank is {self.rank}; expected less than world_size, {self.world_size}")

    def validate_block_size(self, block_size: int | None) -> int:
        """The block size. Raises `SpecError` if a block would not hold the same range of positions on every rank."""
        if block_size is None or block_size % self.interleave:
            raise SpecError(
                f"interleave is {self.interleave} and block_size is {block_size}; the first must divide the second"
            )
        return block_size

    @property
    def _turn(self) -> int:
        """How many positions it takes until the first rank gets tokens again."""
        return self.interleave * self.world_size

    def has(self, positions: Tensor) -> Tensor:
        """Whether this rank has the tokens at these positions."""
        return positions // self.interleave % self.world_size == self.rank

    def before(self, positions: _Positions) -> _Positions:
        """How many keys of a request this rank has before each position; this is also the place of its next key."""
        begun = positions % self._turn - self.rank * self.interleave
        if isinstance(begun, Tensor):
            return positions // self._turn * self.interleave + begun.clamp(0, self.interleave)
        return positions // self._turn * self.interleave + min(max(begun, 0), self.interleave)

    def slots(self, positions: Tensor, requests: Tensor, block_table: Tensor, block_size: int) -> Tensor:
        """The slots of tokens in this rank's cache; -1 for tokens of other ranks and for padding."""
        places, width = self.before(positions.clamp(min=0)), block_table.shape[1]
        columns = places // block_size
        slots = block_table[requests, columns.clamp(max=max(width - 1, 0))].long() * block_size + places % block_size
        # a graph's padding has position -1, or one past the blocks of the table
        return torch.where(self.has(positions) & (positions >= 0) & (columns < width), slots, -1)
