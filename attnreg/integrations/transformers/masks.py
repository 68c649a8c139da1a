"""transformers' masks, kept as what they mean: a tensor that is only computed where something looks into it.

transformers describes a mask by a function of positions, a 2D padding mask and offsets. A function that holds no
tensor means the same at every position, so asking it at far positions tells what it is: causal or not, with or without
a window. One that holds tensors (image tokens that see each other, packed sequences) is computed, and what is found is
held against every element. Nothing here knows a mask function by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.masking_utils import causal_mask_function, sdpa_mask

aten = torch.ops.aten
MaskFunction = Callable[..., Tensor]
_CAUSAL: Any = causal_mask_function


class Sight(NamedTuple):
    """Which keys a query sees: those up to its own (``causal``) or all, and of those the nearest ``window``.

    The window counts as the kernels' contract does: the query and the window - 1 keys before it, and where the sight is
    not causal as many after it. None: no window.
    """

    causal: bool
    window: int | None


class Ranged(NamedTuple):
    """A sight, and the ranges of keys that see each other whatever it says: [batch, ranges, 2] int32, half-open."""

    sight: Sight
    ranges: Tensor


@dataclass(frozen=True, eq=False)
class MaskSource:
    """What transformers says of a mask: ``arguments`` are those of its own `sdpa_mask`, which computes it whole.

    begin: the position of the first query among the keys.
    """

    arguments: dict[str, Any]
    batch: int
    queries: int
    keys: int
    begin: int
    device: torch.device
    # what is derived from it, once for all layers that share it
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def dense(self) -> Tensor:
        """[batch, 1, queries, keys] bool, true where a key takes part."""
        if "dense" not in self.memo:
            skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            found = sdpa_mask(**{**self.arguments, **skip})
            # it is None only where it may be skipped
            assert found is not None
            self.memo["dense"] = found.expand(self.batch, 1, self.queries, self.keys).to(self.device)
        dense: Tensor = self.memo["dense"]
        return dense

    @property
    def padding(self) -> Tensor | None:
        """[batch, keys] bool in host memory: which keys are tokens; None where all are."""
        if "padding" not in self.memo:
            self.memo["padding"] = self._padding()
        return self.memo["padding"]  # type: ignore[no-any-return]

    def _padding(self) -> Tensor | None:
        given: Tensor | None = self.arguments["attention_mask"]
        if given is None:
            return None
        offset = int(self.arguments["kv_offset"])
        # one transfer for each mask with padding, as transformers' own functions make to see whether there is any
        host = given[:, offset : offset + self.keys].bool().cpu()
        # keys that transformers' mask does not reach are none
        host = torch.cat([host, host.new_zeros(len(host), self.keys - host.shape[1])], 1).expand(self.batch, -1)
        return None if bool(host.all()) else host

    def sight(self) -> Sight | Ranged | None:
        """What the mask means beside its padding; None where it is nothing that a batch can say."""
        if "sight" not in self.memo:
            self.memo["sight"] = self._sight()
        return self.memo["sight"]  # type: ignore[no-any-return]

    def _sight(self) -> Sight | Ranged | None:
        function: MaskFunction = self.arguments["mask_function"]
        key = _meaning(function)
        # here, wherever the caller has tensors made
        with torch.device("cpu"):
            if key is None:
                return _fitted(self)
            if key not in _sights:
                _sights[key] = sight_of(function)
        return _sights[key]

    def on(self, device: torch.device) -> MaskSource:
        """The same mask on another device, the same object for every layer there."""
        if device == self.device:
            return self
        if ("on", device) not in self.memo:
            # what is in host memory serves there too
            memo = {"padding": self.padding, "sight": self.sight()}
            self.memo["on", device] = replace(self, device=device, memo=memo)
        return self.memo["on", device]  # type: ignore[no-any-return]


class LazyMask(Tensor):
    """A boolean mask [batch, 1, queries, keys] that is computed as soon as anything but attnreg works with it."""

    source: MaskSource

    @staticmethod
    def __new__(cls, source: MaskSource) -> LazyMask:
        shape = (source.batch, 1, source.queries, source.keys)
        made: LazyMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=source.device)
        made.source = source
        return made

    def __init__(self, source: MaskSource) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, {self.source.sight()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name, first = func.overloadpacket, args[0] if args else None
        if isinstance(first, LazyMask):
            if name in (aten.detach, aten.alias, aten.clone):
                return cls(first.source)
            if name is aten._to_copy and kwargs.get("dtype") in (None, torch.bool):
                return cls(first.source.on(torch.device(kwargs.get("device") or first.device)))
        args, kwargs = tree_map(lambda x: x.source.dense() if isinstance(x, LazyMask) else x, (args, kwargs))
        return func(*args, **kwargs)


# a compiler would trace into it, and need not
@torch.compiler.disable  # type: ignore[untyped-decorator]
def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = _CAUSAL,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> LazyMask:
    """What transformers asks a mask function for; its signature is theirs."""
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "device": device,
        **more,
    }
    # a static cache counts in a tensor
    begin = int(q_offset) - int(kv_offset)
    return LazyMask(MaskSource(arguments, batch_size, q_length, kv_length, begin, torch.device(device)))


# functions without tensors -------------------------------------------------------------------------------------------

_sights: dict[Hashable, Sight | None] = {}
_PLAIN = (int, float, bool, str, bytes, type(None))
# far from both ends, and no multiple of anything
_FAR = 3 * (1 << 20) + 12_345
_NEAR = 4096


def _meaning(value: Any) -> Hashable | None:
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
    found = tuple(map(_meaning, values))
    return None if None in found else found


def sight_of(function: MaskFunction) -> Sight | None:
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
        sight = Sight(after == 0, window)
        # a band is what it looks like where the search ended; what lies between and elsewhere has to agree
        for query in (0, 1, 7, 63, 1000, _FAR, _FAR + 1, 2 * _FAR):
            edges = [torch.arange(_NEAR) + near - _NEAR // 2 for near in (query, query - before, query + after)]
            keys = torch.cat([*edges, torch.arange(0, 2 * _FAR, 9973)])
            keys = keys[keys >= 0]
            if not torch.equal(sees(query, keys), visible(sight, torch.tensor(query), keys)):
                return None
    except (RuntimeError, IndexError, TypeError):
        # it needs more than positions
        return None
    return sight


def visible(sight: Sight, query: Tensor, key: Tensor) -> Tensor:
    """Whether queries at some positions see keys at others; the tensors broadcast."""
    seen = key <= query if sight.causal else (key == key) & (query == query)
    if sight.window is not None:
        seen = seen & (query - key < sight.window) & (key - query < sight.window)
    return seen


# functions with tensors ----------------------------------------------------------------------------------------------


def _fitted(source: MaskSource) -> Sight | Ranged | None:
    """A causal sight, with a window or without, and ranges; only if it is what the mask says at every element."""
    if source.begin < 0 or source.begin + source.queries > source.keys:
        return None
    seen, padding = source.dense()[:, 0].cpu(), source.padding
    keys = torch.arange(source.keys, dtype=torch.int32)
    queries = keys[source.begin : source.begin + source.queries]
    tokens = torch.ones((), dtype=torch.bool)
    if padding is not None:
        # rows and columns of padding are not the sight's business
        tokens = padding[:, None, :] & padding[:, source.begin :][:, : source.queries, None]
        seen = seen & tokens
    ranges = _ranges(seen, queries, keys)
    inside = _together(ranges, queries, keys)
    # a window shows where it cuts: it is as wide as the furthest sight
    first = torch.where(seen, keys, source.keys).amin(-1)
    furthest = int((queries - first).clamp(min=0).max())
    for window in (None, furthest + 1):
        sight = Sight(True, window)
        band = visible(sight, queries[:, None], keys)
        if torch.equal(seen, (band & tokens).expand_as(seen)):
            return sight
        if torch.equal(seen, (band | inside) & tokens):
            return Ranged(sight, ranges)
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


def _together(ranges: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether a query and a key lie in one range: [batch, queries, keys]."""
    begin, end = ranges[..., :1], ranges[..., 1:]
    seen = torch.zeros(len(ranges), len(queries), len(keys), dtype=torch.bool)
    for i in range(ranges.shape[1]):
        query_in, key_in = (((begin[:, i] <= x) & (x < end[:, i])) for x in (queries, keys))
        seen |= query_in[:, :, None] & key_in[:, None, :]
    return seen
