"""Continuous batching: attnreg in the place of transformers' own functions while ``generate_batch`` runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnreg.integrations.tensors import any_autocast, autocast, autocasts
from attnreg.integrations.transformers.batches import Packed
from attnreg.integrations.transformers.calls import TransformersCall
from attnreg.integrations.transformers.engine import Engine
from attnreg.integrations.transformers.latent.modules import PROJECTION
from attnreg.integrations.transformers.paged.batches import Group, group_of, step_of, step_phase
from attnreg.integrations.transformers.sites import Found
from attnreg.runtime.interface import UnclaimedError
from attnreg.runtime.masks import Band

# the names that transformers accepts for continuous batching beside flash kernels; it refuses "sdpa" to models with
# sinks or softcap
_NAMES = ("sdpa", "paged|eager")
# the function that tells whether the inputs of a step have a mask
_MASKED = "attn_mask_is_needed"
# arguments of continuous batching that are read, or that say what these say; transformers 5.17 and some before name the
# longest query and the most keys ``max_seqlen_*``
_PAGED = frozenset(
    {
        "block_table", "cache", "logits_indices", "logits_processor_args", "max_seqlen_k", "max_seqlen_q", "read_index",
        "write_index",
    }
)  # fmt: skip


@contextmanager
def continuous_batching(engine: Engine, model: Any = None) -> Iterator[None]:
    """A context in which attnreg serves calls with a paged cache, and ``model`` makes such calls.

    transformers builds a mask of queries times all keys for every step, request by request. attnreg reads none, so for
    models on "paged|eager" it builds none here.
    """
    from transformers.generation.continuous_batching import input_outputs

    for module in () if model is None else model.modules():
        _refuse_latents(module)
    originals = {name: ALL_ATTENTION_FUNCTIONS[name] for name in _NAMES}
    before = None if model is None else model.config._attn_implementation
    for name, original in originals.items():
        AttentionInterface.register(name, _instead_of(original, engine))
    masked = getattr(input_outputs, _MASKED, None)
    if masked is not None:
        setattr(input_outputs, _MASKED, lambda config: config._attn_implementation != "paged|eager" and masked(config))
    try:
        if model is not None:
            model.set_attn_implementation("paged|eager")
        yield
    finally:
        if masked is not None:
            setattr(input_outputs, _MASKED, masked)
        for name, original in originals.items():
            AttentionInterface.register(name, original)
        if model is not None:
            model.set_attn_implementation(before)


def _refuse_latents(module: torch.nn.Module) -> None:
    """Raises `UnclaimedError` for a module that expands latents to keys that no paged cache of transformers holds."""
    if PROJECTION not in module._modules:
        return
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    nope, rope, value = (getattr(module, name, 0) for name in names)
    if nope + rope == value == getattr(getattr(module, "config", None), "head_dim", None):
        return
    raise UnclaimedError(
        f"{type(module).__name__} expands latents to keys of {nope + rope} and values of {value}, and transformers' "
        "paged cache has one width, that of config.head_dim, for both; use model.generate, which caches latents",
        "attnreg",
    )


def _instead_of(original: Any, engine: Engine) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def paged(*args: Any, **kwargs: Any) -> Any:
        return _attend(engine, *args, **kwargs)

    def attend(module: torch.nn.Module, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is None:
            return original(module, *args, **kwargs)
        return paged(module, *args, cache=cache, **kwargs)

    return attend


def _attend(
    engine: Engine,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    cache: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Packed queries [1, heads, tokens, size] against the paged cache, where their keys and values are stored first.

    The mask, of queries times keys elements, is not read: the lengths and the window of the layer's cache say the same.
    Autocast casts as in calls without a paged cache; keys and values are stored in its dtype.
    """
    if any_autocast() and autocasts(query.device):
        query, key, value = autocast(query, key, value)
        with torch.autocast(query.device.type, enabled=False):
            return _attend(
                engine, module, query, key, value, cache=cache, scaling=scaling, dropout=dropout,
                sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, **kwargs,
            )  # fmt: skip
    engine.refuse_unknown(module, dropout, {k: v for k, v in kwargs.items() if k not in _PAGED})
    _refuse_latents(module)
    layer_idx: Any = module.layer_idx
    group = group_of(cache, layer_idx)
    phase = step_phase(group, kwargs, query.device)
    found = _found(engine, module, group, phase, query, key, value, scaling, softcap, s_aux)
    step = step_of(group, kwargs, query.device, copied=found.layer.spec.block_size is None)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # rows after the last request are padding, which the model still multiplies
    output = query.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    if step.in_place:
        found.layer.forward(q, k, v, group.cache, step.batch, output)
    else:
        key, value = group.update(key, value, kwargs)
        found.layer.forward(q, key, value, None, step.batch, output)
    return output[None], None


def _found(
    engine: Engine,
    module: torch.nn.Module,
    group: Group,
    phase: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: Any,
    softcap: Any,
    sinks: Tensor | None,
) -> Found:
    """The layer that runs a module's calls of a phase on its paged cache, and the record of its calls."""
    site = engine.sites.of(module)
    facts = (
        "paged", phase, group.block_size, group.window, query.shape[1], *key.shape[1::2], value.shape[3], query.dtype,
        query.device, scale, scale.__class__, softcap, softcap.__class__, group.cache.key.dtype,
    )  # fmt: skip
    found = site.found.get(facts)
    if found is not None and found.layer.params.sinks is sinks:
        found.run.calls += 1
        return found
    if group.cache.key.dtype != query.dtype:
        raise UnclaimedError(
            f"{type(module).__name__} computes in {query.dtype}, and the paged cache keeps {group.cache.key.dtype}; "
            "under autocast, give the model autocast's dtype",
            "attnreg",
        )
    call = TransformersCall(module, query, key, value, None, True, scale, group.window, softcap, sinks)
    asked = call.asked(Packed(Band(True, group.window), False, query.device, [], [], None, None, None, None, 0))
    in_place = replace(asked.request, block_size=group.block_size)
    if engine.evaluate(in_place, query.device).backend is not None:
        asked = replace(asked, request=engine.of_phase(in_place, phase, query.device))
    found = Found(*engine.layer_of(call, asked), None)
    site.keep(facts, found)
    return found
