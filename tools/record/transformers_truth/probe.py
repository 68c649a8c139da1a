"""A forward pass without numbers: floats on the meta device, indices and masks with values, attention recorded."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import AttentionInterface, AttentionMaskInterface

from transformers_truth.masks import Mask, make_mask
from transformers_truth.sight import CPU, META

# tensors up to this many elements keep their values where a value may matter
_SMALL = 1 << 22
# what an unknown bias adds to known scores
TRACE = 1 / 1024
_ATTENTION = re.compile(r"Attention|Attn|MLA$")
_NO_ATTENTION = re.compile(
    r"Pooling|Norm$|Structure|(Layer|Block|Map|Head|Adapter|Merger|Embedding|Output|Bias|Residual)\d*$"
)

aten = torch.ops.aten
_FACTORIES = {
    aten.arange, aten.full, aten.zeros, aten.ones, aten.scalar_tensor, aten.linspace, aten.logspace, aten.eye,
    aten.tril_indices, aten.triu_indices, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros,
    aten.new_ones, aten.new_full,
}  # fmt: skip
_EMPTIES = {aten.empty, aten.empty_like, aten.new_empty}
_SCORES = {aten.bmm, aten.baddbmm}
_COMBINING = {
    aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_, aten.where, aten.masked_fill,
    aten.masked_fill_,
}  # fmt: skip
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}


@dataclass(eq=False)
class Call:
    """What one attention computation received: its module, shapes, mask and scale, and how they were seen."""

    module: nn.Module
    path: str
    how: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: Any
    key_tensor: Tensor | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    scores: Tensor | None = None
    given: Mask | None = None
    # the forward pass of the model, and the forward pass of the module, that this call was part of
    run: int = 0
    turn: int = 0


class Probe(TorchDispatchMode):
    """Runs a model of any size: records its attention calls and the order in which its modules ran."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[nn.Module] = []
        self.names: dict[int, list[str]] = {}
        self.calls: list[Call] = []
        self.ran: dict[str, int] = {}
        # per attention module that computes by hand: the shapes of its last product
        self.products: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self.runs = 0
        # the run in which modules were called by themselves
        self.alone = -1
        self.turns: dict[int, int] = {}
        # per attention module: the mask that its forward was handed
        self.given: dict[int, Mask | None] = {}

    # ---- names -----------------------------------------------------------------------------------------------------
    def watch(self, model: nn.Module) -> None:
        self.names = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(id(module), []).append(name)

    def path(self, module: nn.Module) -> str:
        """The module's name; of a module shared by layers, the one under the layer that is running."""
        names = self.names.get(id(module), [])
        if not names:
            return self._new_name(module)
        if len(names) > 1:
            for outer in reversed(self.stack):
                above = self.names.get(id(outer), [])
                if len(above) == 1 and (under := [n for n in names if n.startswith(above[0] + ".")]):
                    return under[0]
        return names[0]

    def _new_name(self, module: nn.Module) -> str:
        """The name of a module that was put in after the model was built."""
        for outer in reversed(self.stack):
            for above in self.names.get(id(outer), [])[:1]:
                for name, inner in outer.named_modules():
                    if inner is module:
                        return f"{above}.{name}" if above else name
        return "?"

    def inside(self) -> nn.Module | None:
        """The innermost running module that looks like attention."""
        return next((m for m in reversed(self.stack) if looks_like_attention(m)), None)

    # ---- operators -------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if packet in _FACTORIES or packet in _EMPTIES:
            return self._make(func, packet, args, kwargs)
        if packet is aten._to_copy or packet is aten.to:
            return self._copy(func, args, kwargs)
        if kwargs.get("device") == META:
            kwargs["device"] = None
        flat, spec = tree_flatten((args, kwargs))
        tensors = [t for t in flat if isinstance(t, Tensor)]
        metas = [t for t in tensors if t.device == META]
        if packet in _SCORES and metas and (made := self._product(packet, args, kwargs)) is not None:
            return made
        if packet in (aten._softmax, aten._safe_softmax):
            self._softmax(args[0])
        if not metas:
            return func(*args, **kwargs)
        if (answer := self._guess(func, packet, args, kwargs)) is not None:
            return answer
        if len(metas) < len(tensors):
            if (kept := self._combine(func, packet, flat, spec)) is not None:
                return kept
            if func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].device != META:
                return args[0]
            if packet in _INDEXING:
                args = (args[0], [_positions(i) for i in args[1]], *args[2:])
            args, kwargs = tree_map(_to_meta, (args, kwargs))
        return func(*args, **kwargs)

    def _make(self, func: Any, packet: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        like = args[0] if args and isinstance(args[0], Tensor) else None
        device = kwargs.get("device") or (like.device if like is not None else CPU)
        if torch.device(device) != META:
            if like is not None and like.device == META:
                # a size on another device than the tensor it is taken from
                kwargs["device"] = device
            return func(*args, **kwargs)
        kwargs["device"] = META
        made = func(*args, **kwargs)
        keeps = packet in _FACTORIES or not (made.is_floating_point() or made.is_complex())
        if made.numel() > _SMALL or not keeps:
            return made
        if packet in _EMPTIES:
            return torch.zeros(made.shape, dtype=made.dtype, device=CPU)
        return func(*args, **{**kwargs, "device": CPU, **({"layout": torch.strided} if "layout" in kwargs else {})})

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        source: Tensor = args[0]
        target = kwargs.get("device")
        if source.device != META and target is not None and torch.device(target) == META:
            # stays where its values are
            return func(*args, **{**kwargs, "device": None, "pin_memory": None})
        if source.device == META and target is not None and torch.device(target) != META:
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=CPU)
        return func(*args, **kwargs)

    def _guess(self, func: Any, packet: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An answer where the values decide and there are none: nothing is selected, no condition holds."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if packet is aten._local_scalar_dense and first is not None:
            return {torch.bool: False}.get(first.dtype, 1.0 if first.is_floating_point() else 1)
        if packet is aten.is_nonzero or packet is aten.equal:
            return False
        if packet is aten.nonzero and first is not None:
            return torch.zeros((0, first.dim()), dtype=torch.long)
        if packet is aten.masked_select and first is not None:
            return torch.empty((0,), dtype=first.dtype, device=META)
        if packet in (aten.bincount, aten.histc) and first is not None:
            bins = kwargs.get("minlength") or (args[2] if len(args) > 2 else 1)
            return torch.zeros((int(bins),), dtype=torch.long)
        if packet is aten.allclose:
            return False
        return None

    def _product(self, packet: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Scores of ones, so that what is multiplied, added and masked afterwards can be read off them."""
        module = self.inside()
        if module is None:
            return None
        left, right = args[1:3] if packet is aten.baddbmm else args[:2]
        shape = (left.shape[0], left.shape[1], right.shape[2])
        self.products.setdefault(id(module), []).append((tuple(left.shape), tuple(right.shape)))
        if math.prod(shape) > _SMALL:
            return None
        scores = torch.ones(shape, dtype=left.dtype)
        if packet is aten.baddbmm:
            beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
            start = args[0]
            if start.device == META:
                start = _trace(shape, dtype=left.dtype, device=CPU)
            scores = start * beta + scores * alpha
        return scores

    def _combine(self, func: Any, packet: Any, flat: list[Any], spec: Any) -> Any:
        """Known scores with unknown numbers: those count as one in a product, and leave a trace in a sum."""
        module = self.inside()
        if module is None or packet not in _COMBINING:
            return None
        tails = {(p[0][1], p[1][2]) for p in self.products.get(id(module), [])}
        known = [t for t in flat if isinstance(t, Tensor) and t.device != META and t.dim() >= 3]
        if not any(tuple(t.shape[-2:]) in tails and t.is_floating_point() for t in known):
            return None
        if packet in (aten.add, aten.add_, aten.sub, aten.sub_):
            filler: Callable[..., Tensor] = _trace
        else:
            filler = torch.ones if packet in (aten.mul, aten.mul_, aten.div, aten.div_) else torch.zeros

        def fill(t: Any) -> Any:
            unknown = isinstance(t, Tensor) and t.device == META
            return filler(t.shape, dtype=t.dtype, device=CPU) if unknown else t

        args, kwargs = tree_unflatten([fill(t) for t in flat], spec)
        return func(*args, **kwargs)

    def _softmax(self, scores: Tensor) -> None:
        module = self.inside()
        if module is None or scores.dim() < 3:
            return
        made = self.products.get(id(module), [])
        tail = tuple(scores.shape[-2:])
        match = [p for p in made if (p[0][1], p[1][2]) == tail]
        if not match:
            return
        left, right = match[-1]
        heads = (scores.shape[1], scores.shape[1]) if scores.dim() == 4 else (left[0], right[0])
        rule = scores if scores.device != META else None
        self.record(
            module, "softmax", (1, heads[0], left[1], left[2]), (1, heads[1], right[2], right[1]), None,
            mask=None, scores=rule,
        )  # fmt: skip

    def record(self, module: nn.Module, how: str, query: Any, key: Any, value: Any, **rest: Any) -> None:
        value = key if value is None else value
        rest.setdefault("given", self.given.get(id(module)))
        call = Call(module, self.path(module), how, tuple(query), tuple(key), tuple(value), run=self.runs,
                    turn=self.turns.get(id(module), 0), **rest)  # fmt: skip
        self.calls.append(call)


def looks_like_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    if isinstance(module, nn.MultiheadAttention) or not _ATTENTION.search(name):
        return False
    return not _NO_ATTENTION.search(name)


def _trace(shape: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What an unknown bias leaves in scores: nothing at every third key, so that the scale is still seen there."""
    if not shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    steps = (torch.arange(shape[-1], device=device) % 3 == 1).to(dtype) * TRACE
    return steps.expand(shape).clone()


def _positions(index: Any) -> Any:
    return index.nonzero(as_tuple=True)[0] if _is_flags(index) else index


def _is_flags(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.device != META and index.dim() == 1


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device != META:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return value


# ---- what transformers calls ---------------------------------------------------------------------------------------
@contextlib.contextmanager
def probing() -> Iterator[Probe]:
    """A probe in the place of transformers' attention and mask functions, and of torch's own attention."""
    probe = Probe()

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *rest: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
        probe.record(module, "interface", query.shape, key.shape, value.shape, mask=attention_mask, key_tensor=key,
                     kwargs=kwargs)  # fmt: skip
        # [batch, tokens, heads, size] out of [batch, heads, tokens, size]
        shape = list(query.shape[:-1])
        weights = torch.empty((*shape, key.shape[-2]), dtype=query.dtype, device=META)
        if len(shape) == 3:
            shape = [shape[0], shape[2], shape[1]]
        return torch.empty((*shape, value.shape[-1]), dtype=query.dtype, device=META), weights

    def sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
             is_causal: bool = False, scale: float | None = None, **_: Any) -> Tensor:  # fmt: skip
        module = probe.inside()
        if module is not None:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            probe.record(module, "sdpa", query.shape, key.shape, value.shape, mask=attn_mask, key_tensor=key,
                         kwargs={"is_causal": is_causal, "scaling": scale})  # fmt: skip
        return torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=META)

    plain_tensor = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        # a literal has values, whatever device is the default
        device = CPU if device is None or torch.device(device) == META else device
        return plain_tensor(data, device=device, **kwargs)

    plain_call = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        probe.stack.append(module)
        probe.ran.setdefault(probe.path(module), len(probe.ran))
        if looks_like_attention(module):
            probe.given[id(module)] = next((a for a in (*args, *kwargs.values()) if isinstance(a, Mask)), None)
            probe.products.pop(id(module), None)
            probe.turns[id(module)] = probe.turns.get(id(module), 0) + 1
        try:
            return plain_call(module, *args, **kwargs)
        finally:
            probe.stack.pop()

    def every(*_: Any, **__: Any) -> Callable[..., Any]:
        return attend

    with contextlib.ExitStack() as undo:
        for interface, function in ((AttentionInterface, attend), (AttentionMaskInterface, make_mask)):
            undo.callback(_restore, interface._global_mapping, dict(interface._global_mapping))
            interface.register("eager", function)
        _swap(undo, AttentionInterface, "get_interface", every)
        _swap(undo, AttentionInterface, "__getitem__", every)
        _swap(undo, torch.nn.functional, "scaled_dot_product_attention", sdpa)
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models.") and ".modeling_" in name:
                for attribute in dir(module):
                    if re.fullmatch(r"eager_\w*attention\w*", attribute):
                        _swap(undo, module, attribute, attend)
                if hasattr(module, "scaled_dot_product_attention"):
                    _swap(undo, module, "scaled_dot_product_attention", sdpa)
        _swap(undo, nn.Module, "__call__", call)
        _swap(undo, torch, "tensor", tensor)
        _swap(undo, torch.fx.experimental._config, "meta_nonzero_assume_all_nonzero", True)
        undo.enter_context(torch.no_grad())
        undo.enter_context(META)
        undo.enter_context(probe)
        yield probe


def _swap(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _restore(mapping: dict[str, Any], before: dict[str, Any]) -> None:
    mapping.clear()
    mapping.update(before)
