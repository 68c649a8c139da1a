"""Continuous batching: attnreg replaces transformers' own functions while ``generate_batch`` runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnreg.integrations.tensors import any_autocast, autocast, autocasts
from attnreg.integrations.transformers.arguments import CallArguments
from attnreg.integrations.transformers.batches import VarlenBatch
from attnreg.integrations.transformers.call_cache import KnownCall
from attnreg.integrations.transformers.calls import TransformersCall
from attnreg.integrations.transformers.engine import Engine
from attnreg.integrations.transformers.forms.releases import part, recognising, submodule, unrecognised
from attnreg.integrations.transformers.latent.modules import PROJECTION
from attnreg.integrations.transformers.paged.batches import PagedGroup, fills_kwargs, group_of, step_of, step_phase
from attnreg.integrations.transformers.paged.cache import Stored, served_class, stored_in
from attnreg.integrations.transformers.unsupported_classes import is_outside
from attnreg.runtime.interface import UnclaimedError
from attnreg.runtime.masks import Band

# _NAMES: those that transformers accepts for continuous batching, beside flash kernels. Since 5.19 it has no
# "paged|sdpa". It refuses "sdpa" to models with sinks or softcap
_PAGED_NAME = "paged|eager"
_NAMES = [name for name in ("sdpa", "paged|sdpa", _PAGED_NAME) if name in ALL_ATTENTION_FUNCTIONS.valid_keys()]
# the function that tells whether the inputs of a step have a mask
_MASKED = "attn_mask_is_needed"
_CACHE = "PagedAttentionCache"
# the arguments with the places of a step's keys; and those that a step needs beside its largest lengths
_PLACES = ("read_index", "write_index")
_STEP = {*_PLACES, "cache", "cu_seq_lens_k", "cu_seq_lens_q"}
# arguments of continuous batching that are read, or that repeat these; transformers 5.17 and 5.18 name the longest
# query and the most keys ``max_seqlen_*``
_PAGED = frozenset(
    {
        "block_table", "cache", "logits_indices", "logits_processor_args", "max_seqlen_k", "max_seqlen_q", "read_index",
        "write_index",
    }
)  # fmt: skip


@dataclass(eq=False)
class _Block:
    """An open block of `continuous_batching`: the engine that serves in it, and the model if one is given.

    config: of the model's paged cache. before: each config of the model and of its parts, with its implementation
    before the block.
    """

    engine: Engine
    model: Any
    config: Any
    before: list[tuple[Any, Any]]


_lock = threading.RLock()
_open: list[_Block] = []
_installed = ExitStack()


def _block_of(config: Any) -> _Block | None:
    """The innermost open block for a config's model, else the innermost block; None if none serves the config."""
    if getattr(config, "_attn_implementation", None) not in _NAMES:
        return None
    own = [block for block in _open if block.config is config]
    return next(iter(own[-1:] or _open[-1:]), None)


def _is_unmasked(config: Any) -> bool:
    """Whether transformers builds no mask for a config: it belongs to the model of an open block."""
    return getattr(config, "_attn_implementation", None) == _PAGED_NAME and any(b.config is config for b in _open)


@contextmanager
def continuous_batching(engine: Engine, model: Any = None) -> Iterator[None]:
    """A context in which attnreg serves calls with a paged cache, and ``model`` makes such calls.

    transformers builds a mask of queries times all keys for every step, request by request. attnreg does not read it,
    so inside the block transformers builds none for ``model``. Raises `UnclaimedError`, before anything is changed, for
    a model or a release of transformers that attnreg does not serve.
    """
    for module in () if model is None else model.modules():
        _refuse_latents(module)
    if model is not None and is_outside(type(model)):
        raise UnclaimedError(
            f"{type(model).__name__} computes attention by itself, outside transformers' attention interface; use "
            "model.generate",
            engine.name,
        )
    block = _Block(engine, model, None if model is None else model.config.get_text_config(), _implementations(model))
    with _lock:
        if not _open:
            _install()
        block.before = next((b.before for b in _open if model is not None and b.model is model), block.before)
        _open.append(block)
    try:
        if model is not None:
            model.set_attn_implementation(_PAGED_NAME)
            if block.config._attn_implementation != _PAGED_NAME:
                raise unrecognised(f"{type(model).__name__} does not take attn_implementation={_PAGED_NAME!r}")
        yield
    finally:
        with _lock:
            _open.remove(block)
            if not _open:
                _installed.close()
            if all(other.model is not model for other in _open):
                for config, name in block.before:
                    config._attn_implementation = name


def _implementations(model: Any) -> list[tuple[Any, Any]]:
    """The configs of a model and of its parts, a whole before its parts, and the implementation of each."""
    if model is None:
        return []
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    configs = [model.config, *(part.config for part in parts)]
    for config in configs:
        configs += filter(None, (getattr(config, name, None) for name in config.sub_configs))
    return [(config, config._attn_implementation) for config in {id(config): config for config in configs}.values()]


def _install() -> None:
    """Replaces transformers' own functions by attnreg's, all of them or none. Raises `UnclaimedError`."""
    inputs = submodule("generation.continuous_batching.input_outputs")
    api = submodule("generation.continuous_batching.continuous_api")
    missing = sorted(_STEP - part(inputs, "PagedAttentionArgs").__annotations__.keys())
    if missing:
        raise unrecognised(f"a step of continuous batching has no {' and no '.join(missing)}")
    masked, kind = part(inputs, _MASKED), part(api, _CACHE)
    fills_kwargs(kind.update)
    served = served_class(kind, lambda config: _block_of(config) is not None, _is_unmasked)
    with recognising("transformers' table of attention functions"):
        originals = {name: ALL_ATTENTION_FUNCTIONS[name] for name in _NAMES}
    for name, original in originals.items():
        _installed.callback(AttentionInterface.register, name, original)
        AttentionInterface.register(name, _instead_of(name, original))
    for owner, name, old, new in (
        (inputs, _MASKED, masked, lambda config: not _is_unmasked(config) and masked(config)),
        (api, _CACHE, kind, served),
    ):
        _installed.callback(setattr, owner, name, old)
        setattr(owner, name, new)


def _refuse_latents(module: torch.nn.Module) -> None:
    """Raises `UnclaimedError` for a module that expands latents: no paged cache of transformers holds these keys."""
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


def _instead_of(name: str, original: Any) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def paged(module: torch.nn.Module, query: Tensor, stored: Stored, *args: Any, **kwargs: Any) -> Any:
        block = _block_of(stored.group.paged.config)
        if block is None:
            raise unrecognised(f"{type(module).__name__} attends to a paged cache of another attn_implementation")
        return _attend(block.engine, module, query, stored, *args, **kwargs)

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *args: Any,
        cache: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        stored = stored_in(key, value)
        if stored is None and cache is not None:
            # before transformers 5.24
            stored = Stored(group_of(cache, module.layer_idx), key, value)  # type: ignore[arg-type]
        if stored is not None:
            return paged(module, query, stored, *args, **kwargs)
        _refuse_gathered(name, module, query, mask, kwargs)
        return original(module, query, key, value, mask, *args, **kwargs)

    return attend


def _refuse_gathered(name: str, module: torch.nn.Module, query: Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
    """Raises `UnclaimedError` for a call whose keys may be those of a paged cache that attnreg does not know."""
    if any(kwargs.get(word) is not None for word in _PLACES):
        raise unrecognised(
            f"{type(module).__name__} attends to a paged cache that was made before continuous_batching, or that is of "
            "another form"
        )
    # several requests in one row: without a mask each query would see the keys of all
    if name == _PAGED_NAME and mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        raise unrecognised(f"{type(module).__name__} attends without a mask and without a paged cache")


def _attend(
    engine: Engine,
    module: torch.nn.Module,
    query: Tensor,
    stored: Stored,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of packed queries [1, heads, tokens, size] to the paged cache; stores new keys and values first.

    It does not read the mask of queries times keys: the lengths and the window of the layer's cache determine it.
    Autocast casts as in calls without a paged cache; keys and values are stored in its dtype.
    """
    off: AbstractContextManager[Any] = nullcontext()
    if any_autocast() and autocasts(query.device):
        query, stored.key, stored.value = autocast(query, stored.key, stored.value)
        off = torch.autocast(query.device.type, enabled=False)
    engine.refuse_unknown(module, dropout, {k: v for k, v in kwargs.items() if k not in _PAGED})
    _refuse_latents(module)
    window = stored.group.window
    call = CallArguments(module, query, stored.key, stored.value, None, True, scaling, window, softcap, s_aux)
    with off:
        return _attended(engine, call, stored, kwargs), None


def _attended(engine: Engine, call: CallArguments, stored: Stored, kwargs: dict[str, Any]) -> Tensor:
    """The output of a call over the paged cache."""
    query, key, value, group = call.query, call.key, call.value, stored.group
    found = _found(engine, call, group, step_phase(group, kwargs, query.device))
    step = step_of(group, kwargs, query.device, copied=found.layer.spec.block_size is None)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # zeros, because rows after the last request are padding that the model still multiplies
    output = query.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    if step.in_place:
        found.layer.forward(q, k, v, group.cache, step.batch, output)
    else:
        key, value = stored.copies(key, value, kwargs)
        found.layer.forward(q, key, value, None, step.batch, output)
    return output[None]


def _found(engine: Engine, call: CallArguments, group: PagedGroup, phase: str) -> KnownCall:
    """The layer that runs a module's calls of a phase on its paged cache, and the record of its calls."""
    module, query, key, value, _, _, scale, window, softcap, sinks, *_ = call
    calls = engine.calls.of(module)
    facts = (
        "paged", phase, group.block_size, window, query.shape[1], *key.shape[1::2], value.shape[3], query.dtype,
        query.device, scale, scale.__class__, softcap, softcap.__class__, group.cache.key.dtype,
    )  # fmt: skip
    found: KnownCall | None = calls.known(facts, sinks)
    if found is not None:
        found.run.calls += 1
        return found
    if group.cache.key.dtype != query.dtype:
        raise UnclaimedError(
            f"{type(module).__name__} computes in {query.dtype}, and the paged cache keeps {group.cache.key.dtype}; "
            "under autocast, give the model autocast's dtype",
            "attnreg",
        )
    validated = TransformersCall(call)
    asked = validated.asked(VarlenBatch(Band(True, window), False, query.device, [], [], None, None, None, None, 0))
    in_place = replace(asked.request, block_size=group.block_size)
    if engine.evaluate(in_place, query.device).backend is not None:
        asked = replace(asked, request=engine.of_phase(in_place, phase, query.device))
    found = KnownCall.of(*engine.layer_of(validated, asked))
    calls.keep(facts, sinks, found)
    return found
