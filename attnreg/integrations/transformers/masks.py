"""transformers' masks, kept as they are described: a tensor that is only computed where something looks into it.

transformers describes a mask by a function of positions, a 2D padding mask and offsets.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.masking_utils import causal_mask_function, sdpa_mask

from attnreg.integrations.transformers.meanings import MaskFunction, Ranged, band_of, fitted, identity
from attnreg.runtime.masks import Band

aten = torch.ops.aten
# what each mask function means, by what it computes
_bands: dict[Hashable, Band | None] = {}
_CAUSAL: Any = causal_mask_function


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

    def meaning(self) -> Band | Ranged | None:
        """What the mask means beside its padding; None where it is nothing that a batch can say."""
        if "meaning" not in self.memo:
            self.memo["meaning"] = self._meaning()
        return self.memo["meaning"]  # type: ignore[no-any-return]

    def _meaning(self) -> Band | Ranged | None:
        function: MaskFunction = self.arguments["mask_function"]
        key = identity(function)
        # here, wherever the caller has tensors made
        with torch.device("cpu"):
            if key is None:
                fits = self.begin >= 0 and self.begin + self.queries <= self.keys
                return fitted(self.dense()[:, 0].cpu(), self.padding, self.begin) if fits else None
            if key not in _bands:
                _bands[key] = band_of(function)
        return _bands[key]

    def on(self, device: torch.device) -> MaskSource:
        """The same mask on another device, the same object for every layer there."""
        if device == self.device:
            return self
        if ("on", device) not in self.memo:
            # what is in host memory serves there too
            memo = {"padding": self.padding, "meaning": self.meaning()}
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
        return f"LazyMask({tuple(self.shape)}, {self.source.meaning()})"

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
