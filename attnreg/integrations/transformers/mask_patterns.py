"""The meaning of a mask function of transformers: causal or not, with or without a window, and ranges of keys.

transformers makes mask functions of parts: causal, bidirectional, sliding windows and their intersections. The meaning
of such a function is read from its parts, and compared with the function once for each combination.

The meaning of any other function is fitted to its whole mask, element by element. It is fitted again for every mask,
because such a function may depend on the batch, on its module or on tensors.
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
    """A band, and ranges of tokens that see each other outside it too: [batch, ranges, 2] int32, half-open."""

    band: Band
    ranges: Tensor


class Reach(NamedTuple):
    """The keys from ``before`` positions before a query to ``after`` positions behind it; None: no limit."""

    before: int | None
    after: int | None

    def within(self, other: Reach) -> Reach:
        """The intersection of two reaches."""
        return Reach(_least(self.before, other.before), _least(self.after, other.after))

    @property
    def band(self) -> Band | None:
        """The reach as a band of the kernels' contract; None if the contract has no such band."""
        if self.after == 0:
            return Band(True, None if self.before is None else self.before + 1)
        if self.after == self.before:
            return Band(False, None if self.before is None else self.before + 1)
        return None


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _inner(maker: str, name: str) -> CodeType | None:
    """The code of the function ``name`` that transformers' function ``maker`` returns; None if there is none."""
    made_by = getattr(theirs, maker, None)
    codes = made_by.__code__.co_consts if isinstance(made_by, FunctionType) else ()
    return next((c for c in codes if isinstance(c, CodeType) and c.co_name == name), None)


_CAUSAL = theirs.causal_mask_function.__code__
_BIDIRECTIONAL = theirs.bidirectional_mask_function.__code__
_WINDOW = _inner("sliding_window_overlay", "inner_mask")
_WINDOW_BOTH = _inner("sliding_window_bidirectional_overlay", "inner_mask")
_AND = _inner("and_masks", "and_mask")
# parts and numbers of a function -> its band
_bands: dict[Hashable, Band | None] = {}
# a position far from the start that is no multiple of a common size
_FAR = 3 * (1 << 20) + 12_345
_NEAR = 64


def known_band(function: MaskFunction) -> Band | None:
    """The band of a function made of transformers' own parts alone; None for any other function."""
    key = _parts(function)
    if key is None:
        return None
    if key not in _bands:
        reach = _reach(function)
        band = None if reach is None else reach.band
        _bands[key] = band if reach is not None and band is not None and _agrees(function, band, reach) else None
    return _bands[key]


def _captured(function: FunctionType) -> list[Any]:
    """The values in a function's closure."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _reach(function: Any) -> Reach | None:
    if not isinstance(function, FunctionType):
        return None
    code, captured = function.__code__, _captured(function)
    if code is _CAUSAL:
        return Reach(None, 0)
    if code is _BIDIRECTIONAL:
        return Reach(None, None)
    if code in (_WINDOW, _WINDOW_BOTH) and len(captured) == 1 and type(captured[0]) is int and captured[0] > 0:
        return Reach(captured[0] - 1, None) if code is _WINDOW else Reach(captured[0], captured[0])
    if code is _AND and len(captured) == 1 and isinstance(captured[0], tuple) and captured[0]:
        whole = Reach(None, None)
        for part in map(_reach, captured[0]):
            if part is None:
                return None
            whole = whole.within(part)
        return whole
    return None


def _parts(function: Any) -> Hashable:
    """A key of a function of known parts: its code and the values that decide its reach; None for unknown parts."""
    if not isinstance(function, FunctionType):
        return None
    code, closure = function.__code__, function.__closure__
    if code is _CAUSAL or code is _BIDIRECTIONAL:
        return code
    if closure is None or len(closure) != 1:
        return None
    captured = closure[0].cell_contents
    if code is _AND and isinstance(captured, tuple):
        parts = tuple([_parts(part) for part in captured])
        return None if None in parts else (code, parts)
    return (code, captured) if code in (_WINDOW, _WINDOW_BOTH) and type(captured) is int else None


def _agrees(function: MaskFunction, band: Band, reach: Reach) -> bool:
    """Whether a function agrees with the band read from its parts, at and around the band's edges."""
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


def fitted(seen: Tensor, padding: Tensor | None, begin: int) -> Band | Ranged | None:
    """The band, or the causal band with ranges, that equals a mask at every element; None if there is none.

    seen: [batch, queries, keys] bool in host memory. padding: [batch, keys] bool, true for keys that are tokens; None:
    all are. Rows and columns of padding are not compared. begin: the position of the first query among the keys.
    """
    queries_in, keys_in = seen.shape[1:]
    if begin < 0 or begin + queries_in > keys_in:
        return None
    keys = torch.arange(keys_in, dtype=torch.int32, device="cpu")
    queries = keys[begin : begin + queries_in]
    tokens = torch.ones((), dtype=torch.bool, device="cpu")
    if padding is not None:
        tokens = padding[:, None, :] & padding[:, begin:][:, :queries_in, None]
        seen = seen & tokens
    # if there is a window, it is as wide as the largest distance to a visible key
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
    """The half-open ranges [batch, ranges, 2] int32 in which consecutive queries see up to the same later key."""
    last = torch.where(seen, keys, -1).amax(-1)
    ranges = []
    for row in last.tolist():
        begins: dict[int, int] = {}
        for query, end in zip(queries.tolist(), row, strict=True):
            if end > query:
                begins.setdefault(end + 1, query)
        ranges.append([(begin, end) for end, begin in begins.items()])
    most = max(map(len, ranges))
    padded = [row + [(0, 0)] * (most - len(row)) for row in ranges]
    return torch.tensor(padded, dtype=torch.int32, device="cpu").view(len(ranges), most, 2)


def _in_one_range(ranges: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether a query and a key lie in one range: [batch, queries, keys]."""
    seen = torch.zeros(len(ranges), len(queries), len(keys), dtype=torch.bool, device="cpu")
    # [batch, 1, 1] each
    for begin, end in (pair[..., None, None].unbind(1) for pair in ranges.unbind(1)):
        seen |= together(begin, end, queries[:, None], keys)
    return seen
