"""Keys and values that are expanded from latents when an operation reads them.

A class of transformers with multi-head latent attention caches latents and rotary parts. Its method ``expand_kv``
computes the keys and values of every head from them, for the attention function. Under attnreg's name that method
returns two lazy tensors: the attention function reads the latents behind them. Any other operation gets the expanded
tensors. The operation may write into them, so attnreg then attends to the expanded tensors too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

METHOD = "expand_kv"
Expand = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


class Sizes(NamedTuple):
    """The sizes of a layer of MLA: its heads, the parts of their keys and values, and its latents."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


class CallLatents:
    """The latents of one call of a module: latent [batch, 1, keys, rank], rope [batch, 1, keys, size], rotated.

    read: whether an operation has read the expanded keys or values.
    """

    def __init__(self, module: nn.Module, latent: Tensor, rope: Tensor, expand: Expand, sizes: Sizes) -> None:
        self.latent, self.rope, self.sizes = latent, rope, sizes
        self._module, self._expand = module, expand
        self.read = False

    @cached_property
    def expanded(self) -> tuple[Tensor, Tensor]:
        """The keys and values of every head, by the model's own code."""
        return self._expand(self._module, self.latent, self.rope)

    def lazy(self) -> tuple[Tensor, Tensor]:
        """The keys and values as lazy tensors, [batch, heads, keys, size]."""
        return LazyKeys(self, 0, self.sizes.nope + self.sizes.rope), LazyKeys(self, 1, self.sizes.value)


class LazyKeys(Tensor):
    """The expanded keys (part 0) or values (part 1) of latents, computed when an operation reads them."""

    latents: CallLatents
    part: int

    @staticmethod
    def __new__(cls, latents: CallLatents, part: int, size: int) -> LazyKeys:
        latent = latents.latent
        shape = latent.shape[0], latents.sizes.heads, latent.shape[2], size
        made: LazyKeys = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=latent.dtype, device=latent.device)
        made.latents, made.part = latents, part
        return made

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(_read, (args, kwargs or {}))
        return func(*args, **kwargs)


def _read(x: Any) -> Any:
    if not isinstance(x, LazyKeys):
        return x
    x.latents.read = True
    return x.latents.expanded[x.part]


def latents_of(key: Tensor, value: Tensor) -> CallLatents | None:
    """The latents behind the lazy keys and values of one call, if no operation has read these; else None."""
    if key.__class__ is not LazyKeys or value.__class__ is not LazyKeys:
        return None
    assert isinstance(key, LazyKeys)
    assert isinstance(value, LazyKeys)
    latents = key.latents
    whole = value.latents is latents and (key.part, value.part) == (0, 1)
    return latents if whole and not latents.read else None


def expanded(x: Tensor) -> Tensor:
    """A tensor, expanded if it is lazy."""
    return x.latents.expanded[x.part] if isinstance(x, LazyKeys) else x


class _LatentLayers(Protocol):
    def keys_of(self, module: nn.Module, latent: Tensor, rope: Tensor, expand: Expand) -> tuple[Tensor, Tensor]: ...


class LazyEngine(Protocol):
    """The engine that makes lazy keys for the modules of models under one of attnreg's names."""

    @property
    def latent_layers(self) -> _LatentLayers: ...


def stand_between(model: type[PreTrainedModel], engines: Mapping[str, LazyEngine]) -> None:
    """Makes the attention classes in the module of a model's class ask ``engines`` for the keys of latents.

    A class is changed once, for all models.
    """
    for base in model.__mro__:
        if issubclass(base, PreTrainedModel) and base is not PreTrainedModel and base.__module__ in sys.modules:
            for kind in list(vars(sys.modules[base.__module__]).values()):
                if isinstance(kind, type) and issubclass(kind, nn.Module) and METHOD in vars(kind):
                    _wrap(kind, engines)


def _wrap(kind: type[nn.Module], engines: Mapping[str, LazyEngine]) -> None:
    original = vars(kind)[METHOD]
    if hasattr(original, "attnreg"):
        return

    @functools.wraps(original)
    def expand_kv(self: Any, *latents: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:
        engine = engines.get(getattr(self.config, "_attn_implementation", None))  # type: ignore[arg-type]
        if engine is None or named or len(latents) != 2:
            return original(self, *latents, **named)  # type: ignore[no-any-return]
        return engine.latent_layers.keys_of(self, *latents, original)

    expand_kv.attnreg = True  # type: ignore[attr-defined]
    setattr(kind, METHOD, expand_kv)
