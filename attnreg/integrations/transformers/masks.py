"""transformers' masks kept by their meaning: a lazy mask is a tensor that is computed when an operation reads it.

A mask's meaning is fixed when transformers asks for the mask. Before a layer reads it, a static cache advances its
positions, and values that a mask function reads may change. So positions are kept as numbers, padding is kept as a
copy, and the mask of a function that is not transformers' own is computed at once.

A mask of attnreg is boolean: true where a key takes part. A class that computes attention by itself, outside
transformers' attention interface, expects numbers to add to its scores. If it added this mask, it would silently run
without causality and without padding. So the mask allows operations that have one meaning for booleans (indexing,
logic, a condition, PyTorch's own attention) and raises `UnclaimedError` for all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from transformers.masking_utils import causal_mask_function, sdpa_mask

from attnreg.integrations.tensors import refuse_wrapped
from attnreg.integrations.transformers.forms.releases import HOW, unrecognised
from attnreg.integrations.transformers.host_copies import Fetched, ends_of
from attnreg.integrations.transformers.mask_patterns import MaskFunction, Ranged, fitted, known_band
from attnreg.runtime.interface import UnclaimedError
from attnreg.runtime.masks import Band

aten = torch.ops.aten
_CAUSAL: Any = causal_mask_function
LARGEST = 1 << 28  # the meaning of a mask with more elements is not computed


@dataclass(frozen=True, eq=False)
class MaskSource:
    """transformers' description of a mask: ``arguments`` are those of its `sdpa_mask`, which computes the whole mask.

    offset: the position of the first query. band: of its mask function, if known. told: [batch, at most keys] true for
    keys that are tokens, None if transformers gives no such mask. all_told: whether all of these keys are tokens.
    """

    arguments: dict[str, Any]
    batch: int
    queries: int
    keys: int
    offset: int | Fetched
    device: torch.device
    band: Band | None = None
    told: Tensor | None = None
    all_told: Fetched | None = None
    # values derived once for all layers that share the mask
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def begin(self) -> int:
        """The position of the first query among the keys."""
        offset = self.offset if isinstance(self.offset, int) else int(self.offset.get())
        return offset - self.arguments["kv_offset"]  # type: ignore[no-any-return]

    def dense(self) -> Tensor:
        """The whole mask: [batch, 1, queries, keys] bool, true where a key takes part."""
        if "dense" not in self.memo:
            now: dict[str, Any] = {
                "q_offset": self.begin + self.arguments["kv_offset"],
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
            mask = sdpa_mask(**{**self.arguments, **now})
            # sdpa_mask returns None only where a mask may be skipped
            assert mask is not None
            self.memo["dense"] = mask.expand(self.batch, 1, self.queries, self.keys).to(self.device)
        dense: Tensor = self.memo["dense"]
        return dense

    @property
    def whole(self) -> int:
        """The number of first keys that are tokens of every request, if all keys in ``told`` are tokens; else 0.

        The host reads one truth value. In host memory, the whole mask would be read by as many threads as the host has.
        """
        if self.all_told is None:
            return self.keys
        return self.told_keys if bool(self.all_told.get()) else 0

    @property
    def told_keys(self) -> int:
        """The number of keys in ``told``; all keys if it is None."""
        return self.keys if self.told is None else self.told.shape[1]

    @property
    def hides_nothing(self) -> bool:
        """Whether every query sees every key, for a function made of transformers' own parts."""
        return self.band == Band(False, None) and self.whole == self.keys

    @property
    def firsts(self) -> list[int] | None:
        """The column of each request's first token, if all later keys in ``told`` are tokens; else None.

        The device finds these few numbers.
        """
        if "firsts" not in self.memo:
            self.memo["firsts"] = self._firsts()
        return self.memo["firsts"]  # type: ignore[no-any-return]

    def _firsts(self) -> list[int] | None:
        if self.told is None or self.whole:
            return [0] * self.batch
        firsts = ends_of(self.told, self.told_keys)
        return None if firsts is None else firsts * (self.batch // len(firsts))

    @property
    def seen_from(self) -> list[int] | None:
        """The first key that each request's single query sees, if it sees exactly the keys from there to itself.

        Else None, as for several queries. The device finds it from the whole mask.
        """
        if self.queries != 1 or not 0 <= self.begin < self.keys:
            return None
        if "seen_from" not in self.memo:
            self.memo["seen_from"] = ends_of(self.dense()[:, 0, 0], self.begin + 1)
        return self.memo["seen_from"]  # type: ignore[no-any-return]

    @property
    def padding(self) -> Tensor | None:
        """[batch, keys] bool in host memory, true where a key is a token; None if every key is one."""
        if "padding" not in self.memo:
            self.memo["padding"] = self._padding()
        return self.memo["padding"]  # type: ignore[no-any-return]

    def padding_before(self, stop: int) -> Tensor | None:
        """The first columns of `padding`, up to ``stop``; None if each of these keys is a token."""
        if stop <= self.whole or self.padding is None:
            return None
        padding = self.padding[:, :stop]
        return None if bool(padding.all()) else padding

    def _padding(self) -> Tensor | None:
        if self.told is None or self.whole == self.keys:
            return None
        host = self.told.cpu()
        # keys past the end of transformers' mask are no tokens
        host = torch.cat([host, host.new_zeros(len(host), self.keys - host.shape[1])], 1).expand(self.batch, -1)
        return None if bool(host.all()) else host

    def meaning(self) -> Band | Ranged | None:
        """The meaning of the mask apart from its padding; None if no batch can express it."""
        if "meaning" not in self.memo:
            self.memo["meaning"] = self._meaning()
        return self.memo["meaning"]  # type: ignore[no-any-return]

    def _meaning(self) -> Band | Ranged | None:
        if self.band is not None:
            return self.band
        if self.batch * self.queries * self.keys > LARGEST:
            return None
        seen = self.dense()[:, 0].cpu()
        # in host memory, whatever default device the caller has
        with torch.device("cpu"):
            return fitted(seen, self.padding, self.begin)

    def on(self, device: torch.device) -> MaskSource:
        """The same mask on another device; one object for all layers there."""
        if device == self.device:
            return self
        if ("on", device) not in self.memo:
            # values in host memory are the same for every device
            memo = {"padding": self.padding, "meaning": self.meaning()}
            self.memo["on", device] = replace(self, device=device, memo=memo)
        return self.memo["on", device]  # type: ignore[no-any-return]


# operations with one meaning for a boolean mask, and a boolean mask as result
_LOGIC = {
    aten.alias, aten.cat, aten.clone, aten.detach, aten.diagonal, aten.expand, aten.permute, aten.repeat, aten.select,
    aten.slice, aten.split, aten.split_with_sizes, aten.squeeze, aten.stack, aten.t, aten.transpose, aten.unbind,
    aten.unsqueeze, aten.view, aten._unsafe_view, aten._reshape_alias, aten.flip, aten.roll, aten.tril, aten.triu,
    aten.all, aten.any, aten.bitwise_and, aten.bitwise_not, aten.bitwise_or, aten.logical_and, aten.logical_not,
    aten.logical_or,
}  # fmt: skip
_NOT = {aten.bitwise_not, aten.logical_not}
_PICKED = {aten.gather, aten.index, aten.index_select}
# operations that read only the shape, dtype and device of the mask
_MADE_LIKE = {aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros, aten.empty_like, aten.ones_like,
              aten.zeros_like, aten.full_like, aten.rand_like}  # fmt: skip
# operations with a mask as condition, and the position of that argument
_CONDITIONS = {aten.masked_fill: 1, aten.masked_fill_: 1, aten.where: 0}
_ATTENTION = "scaled_dot_product"


class BooleanMask(Tensor):
    """A boolean mask, true where a key takes part, that raises if it is read as numbers.

    Adding it to scores, converting its dtype, comparing it with 0 or filling it with -inf raises `UnclaimedError`. In
    transformers' masks of numbers, 0 means that a key takes part; here 0 would mean the opposite. It also raises for
    filling scores with a negative number where it is true. ``negated`` masks are true where no key takes part. A lazy
    mask that hides nothing may be added: it is 0 everywhere.
    """

    booleans: Tensor
    negated = False

    @staticmethod
    def __new__(cls, values: Tensor) -> BooleanMask:
        made: BooleanMask = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=torch.bool, device=values.device
        )
        made.booleans = values
        return made

    def __init__(self, values: Tensor) -> None: ...

    def whole(self) -> Tensor:
        """The mask as an ordinary tensor, computed if it is lazy."""
        return self.booleans

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        same = _same_mask(func, args, kwargs)
        if same is not None:
            return same
        if _writes(func, args, kwargs):
            raise UnclaimedError(
                f"a class writes into attnreg's mask (by {func.overloadpacket}), which layers may have read before; "
                "`mask & other` makes another mask",
                "attnreg",
            )
        added = _added(func, args, kwargs)
        if added is not None:
            return added
        if not _is_logic(func, args, kwargs):
            raise UnclaimedError(_misread(func), "attnreg")
        plain_args = tree_map(lambda x: x.whole() if isinstance(x, BooleanMask) else x, (args, kwargs))
        result = func(*plain_args[0], **plain_args[1])
        if func.overloadpacket in _LOGIC and not all(x.dtype == torch.bool for x in tree_flatten(result)[0]):
            # a view of the bytes, or logic with an integer: 0 and 1
            raise UnclaimedError(_misread(func), "attnreg")
        if func.overloadpacket in _MADE_LIKE:
            return result
        masks = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, BooleanMask)]
        negated = any(x.negated for x in masks) != (func.overloadpacket in _NOT)
        return tree_map(lambda x: _guarded(x, negated), result)


class LazyMask(BooleanMask):
    """A mask [batch, 1, queries, keys] that is computed when code other than attnreg reads it."""

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


def _guarded(value: Any, negated: bool) -> Any:
    if type(value) is not Tensor or value.dtype != torch.bool:
        return value
    mask = BooleanMask(value)
    mask.negated = negated
    return mask


def _same_mask(func: Any, args: Any, kwargs: Any) -> LazyMask | None:
    """The lazy mask that results from an operation that only copies or moves one; None for any other operation."""
    first = args[0] if args else None
    if isinstance(first, LazyMask):
        if func.overloadpacket in (aten.detach, aten.alias, aten.clone):
            return LazyMask(first.source)
        if func.overloadpacket is aten._to_copy and kwargs.get("dtype") in (None, torch.bool):
            return LazyMask(first.source.on(torch.device(kwargs.get("device") or first.device)))
    return None


def _added(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The sum of numbers and a mask that hides nothing, which is 0 everywhere as a mask of numbers; else None.

    With its own functions transformers passes None then. Classes may add any other mask: BEiT adds it to its bias.
    """
    if func is not aten.add.Tensor or kwargs:
        return None
    mask, other = args if isinstance(args[0], LazyMask) else args[::-1]
    if not isinstance(mask, LazyMask) or not isinstance(other, Tensor) or not other.is_floating_point():
        return None
    if not mask.source.hides_nothing:
        return None
    return other + other.new_zeros(()).expand(mask.shape)


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation writes into a mask."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    written = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return any(isinstance(named.get(name), BooleanMask) for name in written)


def _is_logic(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation reads a mask as booleans, never as numbers."""
    name = func.overloadpacket
    if name is aten._to_copy:
        return kwargs.get("dtype") in (None, torch.bool)
    if name in (aten._local_scalar_dense, aten.nonzero):
        return True
    if name is aten.copy_:
        return bool(args[0].dtype == torch.bool)
    if name in _CONDITIONS:
        place = _CONDITIONS[name]
        rest = [a for i, a in enumerate(args) if i != place]
        if not any(isinstance(a, BooleanMask) for a in rest):
            return not _fills_what_takes_part(name, args)
        # a mask whose elements are replaced by booleans is still a boolean mask
        return all(isinstance(a, bool) or (isinstance(a, Tensor) and a.dtype == torch.bool) for a in rest)
    if _ATTENTION in str(name):
        # allowed as the mask of PyTorch's attention, refused as query, key or value
        return not any(isinstance(a, BooleanMask) for a in args[:3])
    # the second: the mask is the index
    if name in _MADE_LIKE or (name is aten.index and not isinstance(args[0], BooleanMask)):
        return True
    if name in _PICKED:
        return isinstance(args[0], BooleanMask)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    if name in (aten.cat, aten.stack):
        # another tensor may come from a mask of numbers, where 0 has the opposite meaning
        return all(isinstance(x, BooleanMask) for x in tensors)
    return name in _LOGIC and all(x.dtype == torch.bool for x in tensors)


def _fills_what_takes_part(name: Any, args: Any) -> bool:
    """Whether scores become negative where keys take part: the operation expects a mask that hides where it is true."""
    mask, value = (args[1], args[2]) if name is not aten.where else (args[0], args[1])
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return not mask.negated and isinstance(value, int | float) and value < 0


def _misread(func: Any) -> str:
    return (
        f"a class reads attnreg's mask as numbers (by {func.overloadpacket}); the mask is boolean, true where a key "
        "takes part. The class computes attention outside transformers' attention interface: load it with "
        'attn_implementation="eager"'
    )


# without this, a compiler would trace into it for nothing
@torch.compiler.disable(reason="attnreg: export with eager or sdpa")  # type: ignore[no-untyped-call,untyped-decorator]
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
    """The mask for a batch; transformers calls this function and defines its signature."""
    if not more.keys() <= HOW:
        names = ", ".join(sorted(more.keys() - HOW))
        raise unrecognised(f"masks are asked for with {names}")
    refuse_wrapped(q_offset, attention_mask, cure='use attn_implementation="eager" or "sdpa"')
    # a tensor of a static cache changes before the mask is read
    offset = Fetched(q_offset) if isinstance(q_offset, Tensor) else int(q_offset)
    kv_offset = int(kv_offset)
    if attention_mask is not None:
        # from a mask of integers `sdpa_mask` would make another one of integers, which is then added to scores
        attention_mask = attention_mask.to(torch.bool, copy=True)
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "device": device,
        **more,
    }
    told = attention_mask
    if told is not None and (kv_offset or told.shape[1] > kv_length):
        told = told[:, kv_offset : kv_offset + kv_length]
    all_told = None if told is None else Fetched(told.all())
    band = known_band(mask_function)
    source = MaskSource(arguments, batch_size, q_length, kv_length, offset, torch.device(device), band, told, all_told)
    if band is None:
        # computed now, because the function may read values that change later
        source.dense()
    return LazyMask(source)
