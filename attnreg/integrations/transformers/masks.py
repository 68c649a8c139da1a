"""transformers' masks, kept as what they mean: a tensor that is computed only where something looks into it.

A mask of attnreg's is boolean: true where a key takes part. A class that computes attention by itself, outside
transformers' attention interface, expects numbers to add to its scores; adding this mask would leave it without
causality and without padding, and nothing would say so. So the mask allows what has one meaning for a mask of booleans
(indexing, logic, a condition, PyTorch's own attention) and raises `UnclaimedError` for everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from transformers.masking_utils import causal_mask_function, sdpa_mask

from attnreg.integrations.transformers.meanings import MaskFunction, Ranged, fitted, known_band
from attnreg.runtime.interface import UnclaimedError
from attnreg.runtime.masks import Band

aten = torch.ops.aten
_CAUSAL: Any = causal_mask_function
# a mask of more elements than this is not looked through to find what it means
LARGEST = 1 << 28


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
        known = known_band(self.arguments["mask_function"])
        if known is not None:
            return known
        if self.batch * self.queries * self.keys > LARGEST:
            return None
        # in host memory, wherever the caller has tensors made
        with torch.device("cpu"):
            return fitted(self.dense()[:, 0].cpu(), self.padding, self.begin)

    def on(self, device: torch.device) -> MaskSource:
        """The same mask on another device, the same object for every layer there."""
        if device == self.device:
            return self
        if ("on", device) not in self.memo:
            # what is in host memory serves there too
            memo = {"padding": self.padding, "meaning": self.meaning()}
            self.memo["on", device] = replace(self, device=device, memo=memo)
        return self.memo["on", device]  # type: ignore[no-any-return]


# what has one meaning for a mask of booleans, and what comes of it is such a mask again
_LOGIC = {
    aten.alias, aten.cat, aten.clone, aten.detach, aten.diagonal, aten.expand, aten.permute, aten.repeat, aten.select,
    aten.slice, aten.split, aten.split_with_sizes, aten.squeeze, aten.stack, aten.t, aten.transpose, aten.unbind,
    aten.unsqueeze, aten.view, aten._unsafe_view, aten._reshape_alias, aten.flip, aten.roll, aten.tril, aten.triu,
    aten.all, aten.any, aten.bitwise_and, aten.bitwise_not, aten.bitwise_or, aten.logical_and, aten.logical_not,
    aten.logical_or, aten.nonzero,
}  # fmt: skip
_PICKED = {aten.gather, aten.index, aten.index_select}
# only its shape and its device are looked at
_MADE_LIKE = {aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros, aten.empty_like, aten.ones_like,
              aten.zeros_like, aten.full_like, aten.rand_like}  # fmt: skip
# where a mask says what is done to numbers
_CONDITIONS = {aten.masked_fill: 1, aten.masked_fill_: 1, aten.where: 0}
_ATTENTION = "scaled_dot_product"


class BooleanMask(Tensor):
    """A mask of booleans, true where a key takes part, that nobody can take for numbers.

    Reading it as numbers (adding it to scores, converting its dtype, comparing it with 0, filling it with -inf) raises
    `UnclaimedError`: for transformers' own masks of numbers 0 means that a key takes part, here it would mean the
    opposite.
    """

    booleans: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> BooleanMask:
        made: BooleanMask = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=torch.bool, device=values.device
        )
        made.booleans = values
        return made

    def __init__(self, values: Tensor) -> None: ...

    def whole(self) -> Tensor:
        """The mask as an ordinary tensor, computed if it was not."""
        return self.booleans

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        same = _same_mask(func, args, kwargs)
        if same is not None:
            return same
        if not _is_logic(func, args, kwargs):
            raise UnclaimedError(_misread(func), "attnreg")
        plain = tree_map(lambda x: x.whole() if isinstance(x, BooleanMask) else x, (args, kwargs))
        found = func(*plain[0], **plain[1])
        return found if func.overloadpacket in _MADE_LIKE else tree_map(_guarded, found)


class LazyMask(BooleanMask):
    """A mask [batch, 1, queries, keys] that is computed as soon as anything but attnreg works with it."""

    source: MaskSource

    @staticmethod
    def __new__(cls, source: MaskSource) -> LazyMask:
        shape = (source.batch, 1, source.queries, source.keys)
        made: LazyMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=source.device)
        made.source = source
        return made

    def __init__(self, source: MaskSource) -> None: ...

    def whole(self) -> Tensor:
        return self.source.dense()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, {self.source.meaning()})"


def _guarded(value: Any) -> Any:
    return BooleanMask(value) if type(value) is Tensor and value.dtype == torch.bool else value


def _same_mask(func: Any, args: Any, kwargs: Any) -> LazyMask | None:
    """The mask again, uncomputed, where it is only copied or moved."""
    first = args[0] if args else None
    if isinstance(first, LazyMask):
        if func.overloadpacket in (aten.detach, aten.alias, aten.clone):
            return LazyMask(first.source)
        if func.overloadpacket is aten._to_copy and kwargs.get("dtype") in (None, torch.bool):
            return LazyMask(first.source.on(torch.device(kwargs.get("device") or first.device)))
    return None


def _is_logic(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation reads a mask as what it is: booleans that say which keys take part."""
    name = func.overloadpacket
    if name is aten._to_copy:
        return kwargs.get("dtype") in (None, torch.bool)
    if name is aten._local_scalar_dense:
        return True
    if name is aten.copy_:
        return not isinstance(args[0], BooleanMask) and args[0].dtype == torch.bool
    if name in _CONDITIONS:
        place = _CONDITIONS[name]
        rest = [a for i, a in enumerate(args) if i != place]
        if not any(isinstance(a, BooleanMask) for a in rest):
            return True
        # a mask filled, or chosen from, by booleans is one still
        return all(isinstance(a, bool) or (isinstance(a, Tensor) and a.dtype == torch.bool) for a in rest)
    if _ATTENTION in str(name):
        # as the mask of PyTorch's attention, never as query, key or value
        return not any(isinstance(a, BooleanMask) for a in args[:3])
    if name in _MADE_LIKE:
        return True
    if name is aten.index and not isinstance(args[0], BooleanMask):
        # the mask says which elements are meant
        return True
    if name in _PICKED:
        return isinstance(args[0], BooleanMask)
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    if name in (aten.cat, aten.stack):
        # what stands beside a mask may have been numbers, of which 0 says the opposite
        return all(isinstance(x, BooleanMask) for x in given)
    return name in _LOGIC and all(x.dtype == torch.bool for x in given)


def _misread(func: Any) -> str:
    return (
        f"a class reads attnreg's mask as numbers (by {func.overloadpacket}); the mask is boolean, true where a key "
        "takes part. The class computes attention outside transformers' attention interface: load it with "
        'attn_implementation="eager"'
    )


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
