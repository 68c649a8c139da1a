"""The state of a layer without softmax attention: what a request keeps there in place of keys and values.

A state has one or two arrays. Their sizes follow from the layer's dimensions, and do not grow with the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# kind of state -> the dimensions that its arrays follow from
NEEDED: Mapping[str, tuple[str, ...]] = {
    "mamba1": ("channels", "state_size", "kernel"),
    "mamba2": ("channels", "groups", "heads", "head_size", "state_size", "kernel"),
    "gdn": ("key_heads", "heads", "key_size", "head_size", "kernel"),
    "kda": ("heads", "head_size", "kernel"),
    "linear_attention": ("heads", "head_size"),
    "short_conv": ("channels", "kernel"),
}
# all dimensions, in elements or tokens
DIMENSIONS = (
    "heads",
    "key_heads",
    "head_size",
    "key_size",
    "channels",
    "groups",
    "state_size",
    "kernel",
    "chunk",
)
# kinds whose recurrent array is in float32 unless the run says otherwise
_FLOAT32 = ("kda",)


class StateDims(NamedTuple):
    """The dimensions of a layer's state, in elements, and the ranks of tensor parallelism that share it.

    ``kind`` is a key of `NEEDED`; dimensions that it does not need are None. ``channels`` are those of the input of the
    convolution. ``kernel`` is the length of its kernel in tokens. ``key_heads`` and ``key_size`` are those of the keys,
    where the values have others. ``dtype`` is the dtype of the recurrent array that the config names, ``model_dtype``
    the one in which the model computes. ``chunk`` is the number of tokens that the layer computes at a time.
    """

    kind: str
    heads: int | None = None
    key_heads: int | None = None
    head_size: int | None = None
    key_size: int | None = None
    channels: int | None = None
    groups: int | None = None
    state_size: int | None = None
    kernel: int | None = None
    chunk: int | None = None
    dtype: str | None = None
    model_dtype: str = "bfloat16"
    ranks: int = 1

    def shared_out(self, ranks: int) -> StateDims | None:
        """The same state over ``ranks`` ranks; None if it does not divide."""
        shared = self._replace(ranks=ranks)
        if self.kind == "mamba2" and self.groups != 1 and (self.groups or 0) % ranks:
            return None
        return shared if all(whole % ranks == 0 for whole in _divided(shared)) else None


class StateArray(NamedTuple):
    """One array of a state on one rank: ``conv``, the convolution's last inputs, or ``recurrent``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def arrays(state: StateDims, dtype: str = "", proposed: int = 0, *, named: bool = True) -> tuple[StateArray, ...]:
    """The arrays of a state on one rank, as an engine keeps them for one request.

    dtype: the dtype in which the engine computes, by default the model's. proposed: the number of a draft's tokens that
    the convolution keeps in addition. named: whether the recurrent array has the dtype that the config names, if any.
    """
    dtype = dtype or state.model_dtype
    recurrent = (state.dtype if named else None) or ("float32" if state.kind in _FLOAT32 else dtype)
    return tuple(
        StateArray(name, shape, dtype if name == "conv" else recurrent) for name, shape in _shapes(state, proposed)
    )


def state_bytes(parts: tuple[StateArray, ...], bits: Mapping[str, float]) -> int:
    """The bytes of a state with these arrays. bits: dtype -> the bits of a value. Raises KeyError for another dtype."""
    return sum(round(math.prod(part.shape) * bits[part.dtype] / 8) for part in parts)


def _shapes(state: StateDims, proposed: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    ranks, width = state.ranks, (state.kernel or 1) - 1 + proposed
    heads, channels = (state.heads or 0) // ranks, (state.channels or 0) // ranks
    size = state.head_size or 0
    match state.kind:
        case "mamba1":
            yield "conv", (width, channels)
            yield "recurrent", (channels, state.state_size or 0)
        case "mamba2":
            yield "conv", (width, _convolved(state) // ranks)
            yield "recurrent", (heads, size, state.state_size or 0)
        case "gdn":
            yield "conv", (width, _convolved(state) // ranks)
            yield "recurrent", (heads, size, state.key_size or 0)
        case "kda":
            yield "conv", (width, _convolved(state) // ranks)
            yield "recurrent", (heads, size, size)
        case "linear_attention":
            yield "recurrent", (heads, size, size)
        case "short_conv":
            yield "conv", (width, channels)


def _convolved(state: StateDims) -> int:
    """The channels of the convolution on all ranks together."""
    heads, size = state.heads or 0, state.head_size or 0
    if state.kind == "mamba2":
        # a single group stands on every rank
        groups = max(state.groups or 0, state.ranks) if state.groups == 1 else state.groups or 0
        return (state.channels or 0) + 2 * groups * (state.state_size or 0)
    if state.kind == "gdn":
        return 2 * (state.key_size or 0) * (state.key_heads or 0) + heads * size
    return 3 * heads * size


def _divided(state: StateDims) -> Iterator[int]:
    """The sizes that the ranks must divide."""
    if state.kind in ("mamba1", "short_conv"):
        yield state.channels or 0
    else:
        yield state.heads or 0
    if state.kind in ("mamba2", "gdn", "kda"):
        yield _convolved(state)
