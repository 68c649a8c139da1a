"""The custom ops: torch.compile sees attention as opaque calls whose arguments include every tensor that they write.

A model passes an op the name of a layer that `register` has stored; the batch comes from `forward_context`. Because the
caches are arguments, a compiler learns from the schemas alone that attention reads what the update wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from attnreg.runtime.batch import tensor_words
from attnreg.runtime.interface import BatchError, BatchMetadata, KVCache
from attnreg.runtime.states.merge import merge_attn_states, merge_states
from attnreg.runtime.validation import refuse_derivatives

__all__ = [
    "SPLITTING_OPS",
    "Layer",
    "MLALayer",
    "attention",
    "forward_context",
    "merge_attn_states",
    "merge_states",
    "register",
    "register_mla",
    "unified_attention_with_output",
    "unified_kv_cache_update",
    "unified_kv_cache_update_and_attention",
    "unified_mla_attention_with_output",
]

# engines cut piecewise CUDA graphs at these ops, which depend on the lengths of a batch
SPLITTING_OPS = (
    "attnreg::unified_attention_with_output",
    "attnreg::unified_kv_cache_update",
    "attnreg::unified_kv_cache_update_and_attention",
    "attnreg::unified_mla_attention_with_output",
)

_UPDATE = (
    "unified_kv_cache_update(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, str layer, "
    "*, Tensor? query=None) -> ()"
)
_ATTENTION = (
    "unified_attention_with_output(Tensor query, Tensor? key_cache, Tensor? value_cache, Tensor(a!) output, str layer, "
    "*, Tensor? key=None, Tensor? value=None, Tensor(b!)? lse=None) -> ()"
)
_BOTH = (
    "unified_kv_cache_update_and_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor(c!) output, str layer, *, Tensor(d!)? lse=None) -> ()"
)
_MLA = (
    "unified_mla_attention_with_output(Tensor query, Tensor latent, Tensor rope, Tensor(a!) kv_cache, "
    "Tensor(b!) output, str layer, *, Tensor(c!)? lse=None, Tensor? indices=None) -> ()"
)


_PACKED = "the batch has no block_table: compiled attention with a kv_cache reads that alone, not packed keys"


class Layer(Protocol):
    """The methods of a layer that the ops call; `attnreg.Attention` has them."""

    name: str | None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        batch: BatchMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor: ...

    def new_output(self, query: Tensor) -> Tensor: ...

    def write_kv(
        self, key: Tensor, value: Tensor, kv_cache: KVCache, batch: BatchMetadata, *, query: Tensor | None = None
    ) -> None: ...

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache | None,
        batch: BatchMetadata,
        output: Tensor,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None: ...


# named layers, for as long as they live; and the batch of the current step
_layers: dict[str, ReferenceType[Layer]] = {}
_batches: ContextVar[tuple[BatchMetadata | None, Mapping[str, BatchMetadata]] | None] = ContextVar(
    "attnreg_batches", default=None
)


def _refuse_no_text(name: object) -> None:
    if not isinstance(name, str):
        raise ValueError(f"a layer's name must be a string; got {name!r}")
    if not name or not name.isprintable():
        raise ValueError(f"a layer's name must have printable characters alone, at least one; got {name!r}")


def register(layer: Layer, name: str) -> None:
    """Names a layer, so that the ops find it for as long as it lives.

    Raises ValueError for a name that is no string, is empty, holds control characters, or belongs to another layer.
    """
    _refuse_no_text(name)
    known = _layers.get(name)
    if known is not None and known() not in (None, layer):
        raise ValueError(f"there is a layer named {name!r} already; a name belongs to one layer of the process")

    def forget(reference: ReferenceType[Layer]) -> None:
        # another layer may have the name by now
        if _layers.get(name) is reference:
            del _layers[name]

    _layers[name] = ref(layer, forget)
    layer.name = name


@contextmanager
def forward_context(
    batch: BatchMetadata | None = None, *, layers: Mapping[str, BatchMetadata] | None = None
) -> Iterator[None]:
    """Sets the batch of the ops inside the block; layers: layer name -> batch, for other KV-cache groups."""
    token = _batches.set((batch, layers or {}))
    try:
        yield
    finally:
        _batches.reset(token)


def _layer_named(name: str) -> Layer:
    """The layer of a name. Raises LookupError if no living layer has it."""
    known = _layers.get(name)
    layer = None if known is None else known()
    if layer is None:
        names = ", ".join(sorted(_layers)) or "none"
        raise LookupError(f"there is no attention layer named {name!r}; the layers are: {names}")
    return layer


def _batch_for(layer: str) -> BatchMetadata:
    """The batch of a layer. Raises LookupError outside `forward_context`."""
    current = _batches.get()
    batch = None if current is None else current[1].get(layer, current[0])
    if batch is None:
        raise LookupError(f"no batch for layer {layer!r}: run the model inside `attnreg.ops.forward_context(batch)`")
    return batch


def _kv_cache_update(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, layer: str, *, query: Tensor | None = None
) -> None:
    found, batch = _layer_named(layer), _batch_for(layer)
    if query is not None and not batch.paged:
        raise BatchError([_PACKED])
    found.write_kv(key, value, KVCache(key_cache, value_cache), batch, query=query)


def _attention_with_output(
    query: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    output: Tensor,
    layer: str,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    cache = None if key_cache is None or value_cache is None else KVCache(key_cache, value_cache)
    _layer_named(layer).attend(query, cache, _batch_for(layer), output, key=key, value=value, lse=lse)


def _kv_cache_update_and_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    layer: str,
    *,
    lse: Tensor | None = None,
) -> None:
    found, batch = _layer_named(layer), _batch_for(layer)
    if not batch.paged:
        raise BatchError([_PACKED])
    found.forward(query, key, value, KVCache(key_cache, value_cache), batch, output, lse=lse)


class MLALayer(Protocol):
    """The method of a layer of MLA that its op calls; `attnreg.MLAAttention` has it."""

    name: str | None

    def forward(
        self,
        query: Tensor,
        latent: Tensor,
        rope: Tensor,
        kv_cache: Tensor,
        batch: BatchMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor: ...


# named layers of MLA, for as long as they live
_mla_layers: WeakValueDictionary[str, MLALayer] = WeakValueDictionary()


def register_mla(layer: MLALayer, name: str) -> None:
    """Names a layer of MLA, so that its op finds it for as long as it lives. Raises ValueError as `register` does."""
    _refuse_no_text(name)
    if _mla_layers.get(name, layer) is not layer:
        raise ValueError(f"there is a layer of MLA named {name!r} already; a name belongs to one layer of the process")
    _mla_layers[name] = layer
    layer.name = name


def _mla_attention_with_output(
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    layer: str,
    *,
    lse: Tensor | None = None,
    indices: Tensor | None = None,
) -> None:
    found = _mla_layers.get(layer)
    if found is None:
        names = ", ".join(sorted(_mla_layers)) or "none"
        raise LookupError(f"there is no layer of MLA named {layer!r}; the layers are: {names}")
    found.forward(query, latent, rope, kv_cache, _batch_for(layer), output, lse=lse, indices=indices)


def _write_nothing(*args: object, **kwargs: object) -> None:
    """The ops for tensors without data. They do nothing, because the ops return nothing and only write to arguments.

    PyTorch also calls this function if only one of several tensors has no data.
    """
    places = {str(x.device): x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
    if len(places) > 1:
        words = ", ".join(f"{tensor_words(x)} is on {place}" for place, x in places.items())
        raise BatchError([f"the tensors of a call are on several devices: {words}"])


# not torch.library.custom_op: its wrapper costs 20 µs a call, ten times as much as this
_library: Any = torch.library.Library("attnreg", "DEF")  # type: ignore[no-untyped-call]
for _schema, _function in (
    (_UPDATE, _kv_cache_update), (_ATTENTION, _attention_with_output), (_BOTH, _kv_cache_update_and_attention),
    (_MLA, _mla_attention_with_output),
):  # fmt: skip
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    refuse_derivatives(_library, _name, _function)
    torch.library.register_fake(f"attnreg::{_name}", _write_nothing, lib=_library)

unified_kv_cache_update = torch.ops.attnreg.unified_kv_cache_update
unified_attention_with_output = torch.ops.attnreg.unified_attention_with_output
unified_kv_cache_update_and_attention = torch.ops.attnreg.unified_kv_cache_update_and_attention
unified_mla_attention_with_output = torch.ops.attnreg.unified_mla_attention_with_output


def attention(
    layer: Layer, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: KVCache | None = None
) -> Tensor:
    """Computes and returns the output of `Attention.forward`; under a compiler or a tracer, through the ops.

    query [tokens, num_heads * head_size] or [tokens, num_heads, head_size]; the output has as many dimensions. key and
    value are written to ``kv_cache``; without a cache, attention reads them directly. Before anything is written, it
    raises ValueError for a layer without a name, `BatchError` for a key without a value, and all that
    `Attention.forward` raises.
    """
    if layer.name is None:
        raise ValueError("the ops find a layer by its name; give one to Attention.from_selection")
    if (key is None) != (value is None):
        raise BatchError([f"{'key' if key is None else 'value'} is None; expected key and value, or neither"])
    if type(query) is Tensor and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode():
        return layer.forward(query, key, value, kv_cache, _batch_for(layer.name))
    output = layer.new_output(query)
    if kv_cache is None:
        unified_attention_with_output(query, None, None, output, layer.name, key=key, value=value)
        return output
    if key is None or value is None:
        unified_attention_with_output(query, kv_cache.key, kv_cache.value, output, layer.name)
    else:
        # one op, so that nothing is written in a call that attention would refuse
        unified_kv_cache_update_and_attention(query, key, value, kv_cache.key, kv_cache.value, output, layer.name)
    return output
