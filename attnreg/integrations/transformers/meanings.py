"""What a mask of transformers means: a band of keys, a band with ranges beside it, or nothing that a batch can say.

A mask function that holds no tensor means the same at every position, so asking it at far positions tells what it is:
causal or not, with or without a window. One that holds tensors (image tokens that see each other, packed sequences) is
computed, and what is found is compared with every element. Nothing here knows a mask function by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.runtime.masks import Band, together

MaskFunction = Callable[..., Tensor]


class Ranged(NamedTuple):
    """A band, and the ranges of keys that see each other whatever it says: [batch, ranges, 2] int32, half-open."""

    band: Band
    ranges: Tensor


_PLAIN = (int, float, bool, str, bytes, type(None))
# far from both ends, and no multiple of anything
_FAR = 3 * (1 << 20) + 12_345
_NEAR = 4096


def identity(value: Any) -> Hashable | None:
    """What a function computes, as something to compare; None where it holds what may differ from call to call."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, tuple):
        return _all(value)
    if not isinstance(value, FunctionType):
        return None
    held = _all(cell.cell_contents for cell in value.__closure__ or ())
    defaults = _all((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
    return None if held is None or defaults is None else (value.__code__, held, defaults)


def _all(values: Any) -> Hashable | None:
    found = tuple(map(identity, values))
    return None if None in found else found


def band_of(function: MaskFunction) -> Band | None:
    """What a function of positions means, found by asking it; None for anything but a band of keys."""
    zero = torch.zeros((), dtype=torch.long)

    def sees(query: int, keys: Tensor) -> Tensor:
        return function(zero, zero, torch.tensor(query), keys).expand(keys.shape)

    def reach(direction: int) -> int:
        """How many keys in a row are seen on one side of a query that is far from both ends."""
        low, high = 0, 1
        while high <= _FAR and bool(sees(_FAR, torch.tensor([_FAR + direction * high]))):
            low, high = high, high * 2
        high = min(high, _FAR + 1)
        while high - low > 1:
            middle = (low + high) // 2
            seen = bool(sees(_FAR, torch.tensor([_FAR + direction * middle])))
            low, high = (middle, high) if seen else (low, middle)
        return low

    try:
        before, after = reach(-1), reach(1)
        window = None if before == _FAR else before + 1
        band = Band(after == 0, window)
        # a band is what it looks like where the search ended; what lies between and elsewhere has to agree
        for query in (0, 1, 7, 63, 1000, _FAR, _FAR + 1, 2 * _FAR):
            edges = [torch.arange(_NEAR) + near - _NEAR // 2 for near in (query, query - before, query + after)]
            keys = torch.cat([*edges, torch.arange(0, 2 * _FAR, 9973)])
            keys = keys[keys >= 0]
            if not torch.equal(sees(query, keys), band.sees(torch.tensor(query), keys)):
                return None
    except (RuntimeError, IndexError, TypeError):
        # it needs more than positions
        return None
    return band


def fitted(seen: Tensor, padding: Tensor | None, begin: int) -> Band | Ranged | None:
    """A causal band, with a window or without, and ranges; None unless a mask says just that at every element.

    seen: the mask, [batch, queries, keys] bool. padding: [batch, keys] bool, false where a key is none. begin: the
    position of the first query among the keys.
    """
    keys = torch.arange(seen.shape[2], dtype=torch.int32)
    queries = keys[begin : begin + seen.shape[1]]
    tokens = torch.ones((), dtype=torch.bool)
    if padding is not None:
        # what the mask says of padding is no part of its meaning
        tokens = padding[:, None, :] & padding[:, begin:][:, : seen.shape[1], None]
        seen = seen & tokens
    ranges = _ranges(seen, queries, keys)
    inside = _in_one_range(ranges, queries, keys)
    # a window shows where it cuts: it is as wide as the furthest key that is seen
    first = torch.where(seen, keys, len(keys)).amin(-1)
    furthest = int((queries - first).clamp(min=0).max())
    for window in (None, furthest + 1):
        band = Band(True, window)
        near = band.sees(queries[:, None], keys)
        if torch.equal(seen, (near & tokens).expand_as(seen)):
            return band
        if torch.equal(seen, (near | inside) & tokens):
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
