"""What a mask function of transformers means: causal or not, with or without a window, and ranges of keys.

A function made of transformers' own parts (causal, bidirectional, sliding windows, their unions and intersections) is
read from those parts, and the reading is held against the function itself, once for each combination. Every other
function is held against the whole mask, element by element, each time that a mask is made of it: one that depends on
the batch, on what its module holds or on tensors means what it says there and then, and nothing is remembered of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as theirs

from attnreg.runtime.masks import Band, together

MaskFunction = Callable[..., Tensor]


class Ranged(NamedTuple):
    """A band, and the ranges of keys that see each other whatever it says: [batch, ranges, 2] int32, half-open."""

    band: Band
    ranges: Tensor


# functions made of transformers' own parts ---------------------------------------------------------------------------


class Reach(NamedTuple):
    """Keys from ``before`` positions before a query to ``after`` behind it; None: without end."""

    before: int | None
    after: int | None

    def within(self, other: Reach) -> Reach:
        """The intersection of two reaches."""
        return Reach(_least(self.before, other.before), _least(self.after, other.after))

    @property
    def band(self) -> Band | None:
        """The reach as a band of the kernels' contract; None for one that it does not have."""
        if self.after == 0:
            return Band(True, None if self.before is None else self.before + 1)
        if self.after == self.before:
            return Band(False, None if self.before is None else self.before + 1)
        return None


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _inner(maker: str, name: str) -> CodeType | None:
    """The code of the function ``name`` that one of transformers' makers returns; None where there is none such."""
    made_by = getattr(theirs, maker, None)
    codes = made_by.__code__.co_consts if isinstance(made_by, FunctionType) else ()
    return next((c for c in codes if isinstance(c, CodeType) and c.co_name == name), None)


_CAUSAL = theirs.causal_mask_function.__code__
_BIDIRECTIONAL = theirs.bidirectional_mask_function.__code__
_WINDOW = _inner("sliding_window_overlay", "inner_mask")
_WINDOW_BOTH = _inner("sliding_window_bidirectional_overlay", "inner_mask")
_AND = _inner("and_masks", "and_mask")
# the parts and numbers of a function -> its band
_bands: dict[Hashable, Band | None] = {}
# far from both ends, and no multiple of anything
_FAR = 3 * (1 << 20) + 12_345
_NEAR = 64


def known_band(function: MaskFunction) -> Band | None:
    """The band of a function that is made of transformers' own parts alone; None for every other."""
    reach = _reach(function)
    if reach is None:
        return None
    key = _parts(function)
    if key not in _bands:
        band = reach.band
        _bands[key] = band if band is not None and _agrees(function, band, reach) else None
    return _bands[key]


def _held(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _reach(function: Any) -> Reach | None:
    if not isinstance(function, FunctionType):
        return None
    code, held = function.__code__, _held(function)
    if code is _CAUSAL:
        return Reach(None, 0)
    if code is _BIDIRECTIONAL:
        return Reach(None, None)
    if code in (_WINDOW, _WINDOW_BOTH) and len(held) == 1 and type(held[0]) is int and held[0] > 0:
        return Reach(held[0] - 1, None) if code is _WINDOW else Reach(held[0], held[0])
    if code is _AND and len(held) == 1 and isinstance(held[0], tuple) and held[0]:
        whole = Reach(None, None)
        for part in map(_reach, held[0]):
            if part is None:
                return None
            whole = whole.within(part)
        return whole
    return None


def _parts(function: Any) -> Hashable:
    """What a function of known parts is made of, as something to compare."""
    held = (tuple(map(_parts, h)) if isinstance(h, tuple) else h for h in _held(function))
    return (function.__code__, *held)


def _agrees(function: MaskFunction, band: Band, reach: Reach) -> bool:
    """Whether the function says what was read from its parts, at its edges and around them."""
    zero = torch.zeros((), dtype=torch.long)
    with torch.device("cpu"):
        for at in (0, 1, 63, _FAR):
            query = torch.tensor(at)
            edges = [at, *(at + step for step in (-(reach.before or 0), reach.after or 0))]
            keys = torch.cat([torch.arange(edge - _NEAR, edge + _NEAR) for edge in edges])
            keys = keys[keys >= 0]
            if not torch.equal(function(zero, zero, query, keys).expand(keys.shape), band.sees(query, keys)):
                return False
    return True


# every other function ------------------------------------------------------------------------------------------------


def fitted(seen: Tensor, padding: Tensor | None, begin: int) -> Band | Ranged | None:
    """The band, or the causal band with ranges, that a mask is at every element; None where it is neither.

    seen: [batch, queries, keys] bool in host memory. padding: [batch, keys] bool, the keys that are tokens, None for
    all; rows and columns of padding are not looked at. begin: the position of the first query among the keys.
    """
    queries_in, keys_in = seen.shape[1:]
    if begin < 0 or begin + queries_in > keys_in:
        return None
    keys = torch.arange(keys_in, dtype=torch.int32)
    queries = keys[begin : begin + queries_in]
    tokens = torch.ones((), dtype=torch.bool)
    if padding is not None:
        tokens = padding[:, None, :] & padding[:, begin:][:, :queries_in, None]
        seen = seen & tokens
    # a window shows where it cuts: it is as wide as the furthest sight
    first = torch.where(seen, keys, keys_in).amin(-1)
    furthest = int((queries - first).clamp(min=0).max()) + 1
    for band in (Band(True, None), Band(True, furthest), Band(False, None), Band(False, furthest)):
        if torch.equal(seen, (band.sees(queries[:, None], keys) & tokens).expand_as(seen)):
            return band
    ranges = _ranges(seen, queries, keys)
    inside = _in_one_range(ranges, queries, keys)
    for band in (Band(True, None), Band(True, furthest)):
        if torch.equal(seen, (band.sees(queries[:, None], keys) | inside) & tokens):
            return Ranged(band, ranges)
    return None


def _ranges(seen: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Where consecutive queries see up to the same later key: the half-open ranges, [batch, ranges, 2] int32."""
    last = torch.where(seen, keys, -1).amax(-1)
    found = []
    for row in last.tolist():
        begins: dict[int, int] = {}
        for query, end in zip(queries.tolist(), row, strict=True):
            if end > query:
                begins.setdefault(end + 1, query)
        found.append([(begin, end) for end, begin in begins.items()])
    most = max(map(len, found))
    padded = [row + [(0, 0)] * (most - len(row)) for row in found]
    return torch.tensor(padded, dtype=torch.int32).view(len(found), most, 2)


def _in_one_range(ranges: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether a query and a key lie in one range: [batch, queries, keys]."""
    seen = torch.zeros(len(ranges), len(queries), len(keys), dtype=torch.bool)
    # [batch, 1, 1] each
    for begin, end in (pair[..., None, None].unbind(1) for pair in ranges.unbind(1)):
        seen |= together(begin, end, queries[:, None], keys)
    return seen
