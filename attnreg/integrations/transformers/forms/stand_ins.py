"""Stand-ins for keys and values: a cache gives them to a model, and only attnreg's attention function reads them.

A model may read a stand-in's shape, dtype and device, as of any tensor. Any other operation raises `UnclaimedError`,
because a stand-in has no values.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from attnreg.runtime.interface import UnclaimedError


class Behind(Protocol):
    """The object behind stand-ins. unread: the end of an error's sentence: what an operation reads, and the cure."""

    @property
    def unread(self) -> str: ...


class StandIn(Tensor):
    """All keys (part 0) or values (part 1) of a layer, [batch, KV heads, keys, size]."""

    behind: Behind
    part: int

    @staticmethod
    def __new__(cls, behind: Behind, part: int, new: Tensor, keys: int) -> StandIn:
        shape = (*new.shape[:2], keys, new.shape[3])
        made: StandIn = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=new.dtype, device=new.device)
        made.behind, made.part = behind, part
        return made

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        read = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, StandIn))
        raise UnclaimedError(f"{func} reads {read.behind.unread}", "")


def stand_ins(behind: Behind, key: Tensor, value: Tensor, keys: int) -> tuple[StandIn, StandIn]:
    """Stand-ins for all keys and values. key, value: the new ones, [batch, KV heads, new, size]."""
    return StandIn(behind, 0, key, keys), StandIn(behind, 1, value, keys)


def behind_of(key: Tensor, value: Tensor) -> Behind | None:
    """The object behind the keys and values of one call; None for plain tensors."""
    if key.__class__ is not StandIn or value.__class__ is not StandIn:
        return None
    assert isinstance(key, StandIn)
    assert isinstance(value, StandIn)
    return key.behind if value.behind is key.behind and (key.part, value.part) == (0, 1) else None
