"""Calls over a packed KV cache, for an engine that is registered with a KV dtype."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache

from attnreg.errors import did_you_mean
from attnreg.integrations.transformers.batches import varlen_rows
from attnreg.integrations.transformers.calls import LayerRequest, TransformersCall, is_crossed
from attnreg.integrations.transformers.compressed.cache import BLOCK_SIZE, PackedLayer, held_by, packed_cache
from attnreg.integrations.transformers.forms.releases import CACHE, part, recognising, unrecognised
from attnreg.language.packed import packed_formats
from attnreg.models.reader import requests_from_model
from attnreg.runtime.interface import UnclaimedError

if TYPE_CHECKING:
    from attnreg.integrations.transformers.arguments import CallArguments
    from attnreg.integrations.transformers.call_cache import LayerRun
    from attnreg.registry import Registry
    from attnreg.runtime.layer import Attention


# the method of ``generate`` that makes a cache and puts it among the arguments of the model's forward
PREPARE = "_prepare_cache_for_generation"


class CompressedEngine(Protocol):
    """The engine that selects backends for the layers."""

    name: str
    registry: Registry

    def layer_of(self, call: TransformersCall, asked: LayerRequest) -> tuple[Attention, LayerRun]: ...


class CompressedLayers:
    """The layers of an engine that keep a packed format, and their calls."""

    def __init__(self, engine: CompressedEngine, kv_dtype: str) -> None:
        words = engine.registry.vocabulary.words["kv_dtypes"]
        formats = packed_formats(words)
        if kv_dtype not in formats:
            raise ValueError(f"kv_dtype is {kv_dtype!r}; expected a packed format: {did_you_mean(kv_dtype, formats)}")
        self._engine, self.name, self.kv_dtype = engine, engine.name, kv_dtype
        self.skip_layers: tuple[Mapping[str, Any], ...] = tuple(words[kv_dtype].facts.get("skip_layers", ()))
        # id of a config -> a weak reference to it, and which of its layers are packed
        self._packs: dict[int, tuple[Any, dict[int, bool]]] = {}

    def cache(self, config: Any) -> DynamicCache:
        """A cache for a model's config. Raises `UnclaimedError` for a model that cannot have a packed one."""
        if getattr(config, "is_encoder_decoder", False):
            raise UnclaimedError("the cache of an encoder with a decoder has no packed form", self.name)
        return packed_cache(config, self.packs(config), self.kv_dtype, self.name)

    def packs(self, config: Any) -> dict[int, bool]:
        """Whether the layer of an index keeps the packed format."""
        known = self._packs.get(id(config))
        if known is None or known[0]() is not config:
            layers = requests_from_model(config, kv_dtype=self.kv_dtype, skip_layers=self.skip_layers).layers
            own = [layer for layer in layers if layer.request is not None and not layer.part and layer.kind != "vision"]
            latent = next((layer for layer in own if layer.attention != "mha"), None)
            if latent is not None:
                raise UnclaimedError(f"layer {latent.layer_idx} caches latents, which have no packed form", self.name)
            packs = {layer.layer_idx: layer.request.kv_dtype == self.kv_dtype for layer in own if layer.request}
            known = self._packs[id(config)] = ref(config), packs
        return known[1]

    def attend(self, call: TransformersCall, held: PackedLayer) -> Tensor:
        """The output [batch, queries, heads, size_v] of a call over packed pages; stores its new keys there first.

        Raises `UnclaimedError` and `NoBackendError`, before anything is stored.
        """
        varlen = call.batch
        if held.kv_dtype != self.kv_dtype:
            raise UnclaimedError(
                f"the cache keeps {held.kv_dtype}, and {self.name!r} is registered with "
                f"kv_dtype={self.kv_dtype!r}; make a cache by new_cache(model)",
                self.name,
            )
        why = varlen if isinstance(varlen, str) else held.refusal(varlen, call.queries)
        if isinstance(varlen, str) or why is not None:
            kind = type(call.module).__name__
            raise UnclaimedError(f"{kind}: {why}, and a packed KV cache is attended to as a batch alone", self.name)
        asked = call.asked(varlen)
        request = replace(asked.request, kv_dtype=self.kv_dtype, block_size=BLOCK_SIZE)
        layer, _ = self._engine.layer_of(call, replace(asked, request=request))
        key, value, pages, batch = held.rows(layer, varlen)
        rows = [None if x is None else varlen_rows(x) for x in (call.query, key, value)]
        if varlen.queries is not None:
            rows = [None if x is None else x[varlen.queries] for x in rows]
        query, new_key, new_value = rows
        assert query is not None
        found = layer.forward(query, new_key, new_value, pages, batch)
        size, heads, queries, _ = call.query.shape
        if varlen.queries is not None:
            whole = found.new_zeros(size * queries, *found.shape[1:])
            whole[varlen.queries] = found
            found = whole
        return found.view(size, queries, heads, -1)

    def held(self, call: CallArguments) -> PackedLayer | None:
        """The packed layer that a call attends to; None if its cache is plain.

        Raises `UnclaimedError` if a layer that should be packed has cached keys in transformers' own cache.
        """
        held = held_by(call.key, call.value)
        if held is not None or call.key.shape[2] == call.query.shape[2]:
            return held
        module = call.module
        index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
        if index is not None and config is not None and not is_crossed(module) and self.packs(config).get(index):
            raise UnclaimedError(
                f"{type(module).__name__} of layer {index} has a cache of transformers' own, and "
                f"{self.name!r} is registered with kv_dtype={self.kv_dtype!r}; use generate, or pass "
                f"{CACHE}=new_cache(model)",
                self.name,
            )
        return None


def stand_in(engines: Mapping[str, Any]) -> None:
    """Makes ``generate`` use a packed cache for models under a name of ``engines`` that has a KV dtype."""
    prepare = part(GenerationMixin, PREPARE)
    if hasattr(prepare, "attnreg"):
        return

    @functools.wraps(prepare)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self.config, "_attn_implementation", None) or ""
        compressed = engines[name].compressed if name in engines else None
        if compressed is None:
            return prepare(self, *args, **kwargs)
        with recognising(f"{prepare.__name__} of generate"):
            given = inspect.signature(prepare).bind(self, *args, **kwargs).arguments
            generation_config, model_kwargs = given["generation_config"], given["model_kwargs"]
            before = _caches(model_kwargs)
        out = prepare(self, *args, **kwargs)
        if not before:
            _pack(self, compressed, generation_config, model_kwargs)
        return out

    prepared.attnreg = True  # type: ignore[attr-defined]
    setattr(GenerationMixin, PREPARE, prepared)


def _caches(model_kwargs: Mapping[str, Any]) -> dict[str, Cache]:
    """The caches among the arguments of a model's forward, by their names, which differ between releases."""
    return {name: value for name, value in model_kwargs.items() if isinstance(value, Cache)}


def _pack(model: Any, layers: CompressedLayers, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Replaces the cache that transformers made for ``generate``, if any, by a packed one."""
    made = _caches(model_kwargs)
    name = layers.name
    if not made:
        with recognising("the making of a cache by generate"):
            wanted = generation_config.use_cache is not False and model._supports_default_dynamic_cache()
        if wanted:
            raise unrecognised("generate makes its cache elsewhere", name)
        return
    if len(made) > 1:
        raise unrecognised(f"generate makes several caches ({', '.join(made)})", name)
    ((place, cache),) = made.items()
    with recognising("a cache of generate"):
        implementation = generation_config.cache_implementation
        plain = type(cache) is DynamicCache and not cache.offloading and implementation in (None, "dynamic")
        drafts = generation_config.is_assistant
    if not plain:
        raise UnclaimedError(
            f"cache_implementation is {implementation!r}, and {name!r} is registered with "
            f"kv_dtype={layers.kv_dtype!r}, which has a cache of its own",
            name,
        )
    packed = layers.cache(model.config)
    if drafts:
        # rejected tokens of a draft are removed, from windows too
        packed.activate_past_recording()  # type: ignore[no-untyped-call]
    model_kwargs[place] = packed
