"""Tensors placed as an engine holds them: at odd addresses, strided, in any order, with guarded memory around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

# the largest number of an integer: a NaN in every floating format but fnuz ones, as an index far outside
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Place:
    """A way to place tensors of one kind: the order of all dimensions but the last, elements between, an offset.

    room: the sizes for which strides are made, so that tensors of other lengths have the same ones.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    offset: int
    room: tuple[int, ...]

    @classmethod
    def draw(cls, random: Random, room: tuple[int, ...], *, shuffle: bool = True) -> Place:
        """Any place of tensors up to these sizes."""
        order = list(range(len(room) - 1))
        if shuffle and random.random() < 0.4:
            random.shuffle(order)
        gaps = tuple(random.choice((0, 0, 0, 1, 8, 24)) for _ in order)
        return cls(tuple(order), gaps, random.choice((0, 0, 1, 3, 8)), room)

    def by(self, unit: int) -> Place:
        """The place with so many times the elements between and before, for tensors that are read by such words."""
        return replace(self, gaps=tuple(unit * gap for gap in self.gaps), offset=unit * self.offset)

    def strides(self) -> tuple[int, ...]:
        """The strides of a tensor: the last dimension is contiguous."""
        strides, reach = {len(self.room) - 1: 1}, self.room[-1]
        for dim in reversed(self.order):
            strides[dim] = reach + self.gaps[dim]
            reach = strides[dim] * self.room[dim]
        return tuple(strides[dim] for dim in range(len(self.room)))


@dataclass
class Memory:
    """The memory of placed tensors; `problems` names those around which something was written."""

    placed: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def place(self, name: str, tensor: Tensor, place: Place) -> Tensor:
        """A copy of a tensor at a place; guarded words are before, between and after its elements."""
        strides = place.strides()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1
        kind = _INTEGERS[tensor.itemsize]
        words = torch.full(
            (place.offset + max(reach, 0) + 64,), torch.iinfo(kind).max, dtype=kind, device=tensor.device
        )
        view = words.as_strided(tensor.shape, strides, place.offset)
        view.copy_(tensor.view(kind))
        self.placed.append((name, words, view))
        return view.view(tensor.dtype)

    def problems(self) -> Iterator[str]:
        """Sentences about the memory around tensors."""
        for name, words, view in self.placed:
            around = torch.ones_like(words, dtype=torch.bool)
            around.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
            if not bool((words[around] == torch.iinfo(words.dtype).max).all()):
                yield f"memory around {name} was written to"


def spread(tensor: Tensor, random: Random) -> Tensor:
    """The numbers of a one-dimensional tensor as a view with any stride; one number for all may be expanded."""
    if len(tensor) > 1 and bool((tensor == tensor[0]).all()):
        return tensor[:1].clone().expand(len(tensor))
    return torch.stack([tensor] * random.choice((1, 2, 3)), 1)[:, 0]


def halved(tensor: Tensor) -> Tensor:
    """Half of each number, in memory of its own with the same strides."""
    words = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return (words * 0.5).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
