"""Continuous batching: attnreg in the place of transformers' own functions while ``generate_batch`` runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnreg.integrations.transformers.batches import Packed
from attnreg.integrations.transformers.calls import TransformersCall
from attnreg.integrations.transformers.engine import Engine
from attnreg.runtime.interface import BatchMetadata
from attnreg.runtime.masks import Band

# the names that transformers accepts for continuous batching beside flash kernels; it refuses "sdpa" to models with
# sinks or softcap
_NAMES = ("sdpa", "paged|eager")


@contextmanager
def continuous_batching(engine: Engine, model: Any = None) -> Iterator[None]:
    """A context in which attnreg serves calls with a paged cache, and ``model`` makes such calls."""
    originals = {name: ALL_ATTENTION_FUNCTIONS[name] for name in _NAMES}
    before = None if model is None else model.config._attn_implementation
    for name, original in originals.items():
        AttentionInterface.register(name, _instead_of(original, engine))
    try:
        if model is not None:
            model.set_attn_implementation("paged|eager")
        yield
    finally:
        for name, original in originals.items():
            AttentionInterface.register(name, original)
        if model is not None:
            model.set_attn_implementation(before)


def _instead_of(original: Any, engine: Engine) -> Any:
    def attend(module: torch.nn.Module, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is None:
            return original(module, *args, **kwargs)
        return _attend(engine, cache, module, *args, **kwargs)

    return attend


def _attend(
    engine: Engine,
    cache: Any,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Packed queries [1, heads, tokens, size] against the keys that the cache gathers for each request.

    The mask, of queries times keys elements, is not read: lengths and window already say what it says.
    """
    engine.refuse_unknown(module, dropout, {k: v for k, v in kwargs.items() if k not in _PAGED})
    key, value = _update(cache, module, key, value, kwargs)
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask[_kind(module)]
    batch = _batch(attention_mask, kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], query.device)
    packed = Packed(Band(True, sliding_window), False, query.device, [], [], None, None, None, key.shape[2])
    call = TransformersCall(module, query, key, value, attention_mask, True, scaling, sliding_window, softcap, s_aux)
    layer, _ = engine.layer(call, packed)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # rows after the last request are padding, which the model still multiplies
    output = query.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    layer.forward(q, k, v, None, batch, output)
    return output[None], None


def _update(
    cache: Any, module: torch.nn.Module, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Stores new keys and values, and returns those of all requests; puts the lengths for this layer into kwargs."""
    if _fills_kwargs(cache.__class__):
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        return key, value
    # transformers 5.17 and some before
    places = {name: kwargs[name] for name in ("read_index", "write_index")}
    stored = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **places)
    if isinstance(kwargs["cu_seq_lens_k"], dict):
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][_kind(module)]
    key, value = (x.transpose(0, 1)[None] for x in stored)
    return key, value


@cached
def _fills_kwargs(kind: type[Any]) -> bool:
    """Whether a cache class takes all arguments of a call, and puts the layer's lengths into them."""
    return "kwargs" in inspect.signature(kind.update).parameters


def _kind(module: torch.nn.Module) -> str:
    """transformers' name of the group of layers that share a cache with this one."""
    return "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"


# transformers 5.17 and some before name the longest query and the most keys ``max_seqlen_*``
_PAGED = frozenset(
    {
        "block_table", "logits_indices", "logits_processor_args", "max_seqlen_k", "max_seqlen_q", "read_index",
        "write_index",
    }
)  # fmt: skip


def _batch(mask: Tensor | None, queries: Tensor, keys: Tensor, device: torch.device) -> BatchMetadata:
    """The batch of a step, kept on the step's mask and so shared by all layers that have this mask."""
    batch: BatchMetadata | None = getattr(mask, "_attnreg_batch", None)
    if batch is None:
        query_lens, seq_lens = queries.diff().tolist(), keys.diff().tolist()
        batch = BatchMetadata.build(query_lens, seq_lens, device=device)
        if mask is not None:
            mask._attnreg_batch = batch  # type: ignore[attr-defined]
    return batch
