"""The attention function that transformers calls: it selects a backend for each call and runs the backend."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnreg.integrations.registration import validate_choices
from attnreg.integrations.tensors import (
    any_autocast,
    autocast,
    autocasts,
    in_forward_mode,
    platform_of,
    refuse_tangents,
    refuse_wrapped,
    unknown_dtype,
    without_gradient,
)
from attnreg.integrations.transformers.arguments import (
    HARMLESS,
    causal_of,
    refuse_unknown,
    validate_ignored,
)
from attnreg.integrations.transformers.batches import VarlenBatch
from attnreg.integrations.transformers.call_cache import Found, LayerRun, Site, Sites
from attnreg.integrations.transformers.calls import LayerRequest, TransformersCall
from attnreg.integrations.transformers.compressed.cache import held_by
from attnreg.integrations.transformers.compressed.layers import CompressedLayers
from attnreg.integrations.transformers.dense import dense_attention
from attnreg.integrations.transformers.latent.layers import LatentLayers
from attnreg.integrations.transformers.latent.lazy import latents_of
from attnreg.integrations.transformers.masks import BooleanMask
from attnreg.loader import unloadable
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest
from attnreg.runtime.interface import UnclaimedError
from attnreg.runtime.layer import Attention
from attnreg.selection.refusal import NoBackendError
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection, answer_sentence
from attnreg.selection.wording import layer_words

if TYPE_CHECKING:
    from attnreg.registry import Registry

_log = logging.getLogger("attnreg.integrations.transformers")
_CURE = "train with another attn_implementation"
_ELSEWHERE = 'use attn_implementation="eager" or "sdpa"'


class Engine:
    """An attention function of transformers, with the registry that decides and a record of its calls."""

    def __init__(
        self,
        name: str,
        registry: Registry | None = None,
        *,
        platform: Platform | None = None,
        backend: str | None = None,
        dense: bool = True,
        ignore: tuple[str, ...] = (),
        latent: bool | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        if registry is None:
            from attnreg.loader import default_registry

            registry = default_registry()
        validate_choices(registry, platform, backend)
        self.name = name
        self.registry = registry
        self.backend = backend
        self.dense = dense
        self._platform = platform
        validate_ignored(ignore)
        self._harmless = HARMLESS | set(ignore)
        self._platforms: dict[torch.device, Platform] = {}
        self._layers: WeakKeyDictionary[torch.nn.Module, dict[LayerRequest, Attention]] = WeakKeyDictionary()
        self._runs: WeakKeyDictionary[torch.nn.Module, dict[tuple[LayerRequest, str], LayerRun]] = WeakKeyDictionary()
        self.sites = Sites()
        self.latent_layers = LatentLayers(self, latent)
        self.compressed = None if kv_dtype is None else CompressedLayers(self, kv_dtype)
        self._told: set[Any] = set()

    @torch.compiler.disable(reason="attnreg: export with eager or sdpa")  # type: ignore[no-untyped-call,untyped-decorator]
    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        indices: Tensor | None = None,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: [batch, queries, heads, size_v], and no weights.

        query [batch, heads, queries, size], key and value [batch, KV heads, keys, size(_v)]. The output of a query
        without a key is zero, under a bias the mean of all values. s_aux: [heads] sinks. sinks: [batch, heads, queries,
        1] a sink for each query. indices: [batch, queries, chosen] the keys that an indexer chose for each query; no
        other key takes part. Under autocast, query, key and value are cast as PyTorch's attention casts them. Raises
        `NoBackendError` and `UnclaimedError`.
        """
        if any_autocast() and autocasts(query.device):
            query, key, value = autocast(query, key, value)
            # a backend computes as it claims to, in float32 where it accumulates
            with torch.autocast(query.device.type, enabled=False):
                answer: tuple[Tensor, None] = self.attend(
                    module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal,
                    sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, position_bias=position_bias,
                    indices=indices, sinks=sinks, **more,
                )  # fmt: skip
            return answer
        if dropout or not more.keys() <= self._harmless:
            self.refuse_unknown(module, dropout, more)
        plain = position_bias is indices is sinks is more.get("cu_seq_lens_q") is None
        site = self.sites.of(module) if plain else None
        if s_aux is None and site is not None:
            numbers = scaling, sliding_window, softcap
            repeated = self._repeated(site, module, query, key, value, attention_mask, numbers)
            if repeated is not None:
                return repeated, None
        is_causal = causal_of(module, attention_mask, query.shape[2]) if is_causal is None else is_causal
        given = attention_mask, is_causal, scaling, sliding_window, softcap, s_aux, position_bias, indices, sinks
        boundaries = more.get("cu_seq_lens_q")
        if self.compressed is not None:
            out = self._compressed(self.compressed, module, query, key, value, given, boundaries)
            if out is not None:
                return out, None
        latents = latents_of(key, value)
        if latents is None:
            key, value = self.latent_layers.expanded(module, key, value)
        kv = (key, value) if latents is None else (latents.latent, latents.rope)
        trained = query, *kv, attention_mask, s_aux, position_bias, sinks, scaling, softcap
        refuse_tangents(*trained, cure=_CURE)
        mask = None if isinstance(attention_mask, BooleanMask) else attention_mask
        refuse_wrapped(query, *kv, mask, s_aux, position_bias, sinks, indices, cure=_ELSEWHERE)
        question = None
        if site is not None and latents is None:
            numbers = scaling, sliding_window, softcap
            question = site.question(query, key, value, attention_mask, is_causal, numbers, s_aux is None)
            found = None if question is None else site.known(question)
            if question is not None and found is not None and found.layer.params.sinks is s_aux:
                found.run.calls += 1
                batch = question.varlen or found.varlen
                # a call without a mask keeps its own
                assert batch is not None
                if torch.is_grad_enabled():
                    return self._attend(found.layer, batch, query, key, value, trained), None
                out = batch.attend(found.layer, query, key, value)
                site.remember(found, batch, scaling, softcap)
                return out, None
        call = TransformersCall(module, query, key, value, *given)
        varlen = call.batch
        if boundaries is not None:
            call.refuse_sequences(boundaries)
        with torch.no_grad():
            attended = self.latent_layers.attend(call, latents)
        if attended is not None:
            return without_gradient(attended, *trained, cure=_CURE), None
        if not isinstance(varlen, VarlenBatch):
            with torch.no_grad():
                out = self._dense(call, varlen)
            return without_gradient(out, *trained, cure=_CURE), None
        layer, run = self.layer(call, varlen)
        if site is not None and question is not None:
            of_phase = question.phase is not None and self.tells_phases(run.asked.request, query.device)
            facts = (*question.facts, question.phase) if of_phase else question.facts
            site.keep(facts, Found(layer, run, varlen if attention_mask is None else None))
        return self._attend(layer, varlen, call.query, call.key, call.value, trained), None

    def _compressed(
        self,
        layers: CompressedLayers,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        given: tuple[Any, ...],
        boundaries: Tensor | None,
    ) -> Tensor | None:
        """The output over keys and values in a packed cache; None where the cache is plain."""
        held = held_by(key, value)
        if held is None:
            layers.refuse_plain(module, query.shape[2], key.shape[2])
            return None
        mask, _, scale, _, softcap, sinks, *_ = given
        trained = query, mask, sinks, scale, softcap
        refuse_tangents(*trained, cure=_CURE)
        refuse_wrapped(query, sinks, cure=_ELSEWHERE)
        call = TransformersCall(module, query, key, value, *given)
        if boundaries is not None:
            call.refuse_sequences(boundaries)
        with torch.no_grad():
            out = layers.attend(call, held)
        return without_gradient(out, *trained, cure=_CURE)

    def _repeated(
        self,
        site: Site,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        numbers: tuple[Any, Any, Any],
    ) -> Tensor | None:
        """The output of a call that is like one of this module or of another; None where it has to be looked at.

        The call has nothing but these; numbers: its scale, window and softcap. Nothing may be recorded of it for
        gradients, and no cache is varlen.
        """
        if self.compressed is not None or torch.is_grad_enabled() or in_forward_mode():
            return None
        latents = latents_of(key, value)
        if latents is not None:
            return self.latent_layers.repeated(site, module, query, latents, mask, numbers)
        scale, _, softcap = numbers
        return site.repeated(query, key, value, mask, scale, softcap)

    def _attend(
        self, layer: Attention, varlen: VarlenBatch, query: Tensor, key: Tensor, value: Tensor, trained: tuple[Any, ...]
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return varlen.attend(layer, query, key, value)
        with torch.no_grad():
            out = varlen.attend(layer, query, key, value)
        return without_gradient(out, *trained, cure=_CURE)

    def layer(self, call: TransformersCall, varlen: VarlenBatch) -> tuple[Attention, LayerRun]:
        """The layer that runs a call, by the selected backend, and the record of its calls. Raises `NoBackendError`."""
        asked = call.asked(varlen)
        request = self.of_phase(asked.request, varlen.phase, call.query.device)
        return self.layer_of(call, replace(asked, request=request))

    def layer_of(self, call: TransformersCall, asked: LayerRequest) -> tuple[Attention, LayerRun]:
        """The layer of `layer` for what a call is known to ask for."""
        layers = self._layers.setdefault(call.module, {})
        layer = layers.get(asked)
        if layer is None or layer.params.sinks is not call.sinks:
            layer = layers[asked] = Attention.from_selection(
                self.select(asked.request, call.query.device),
                softmax_scale=asked.scale,
                sliding_window=asked.window,
                softcap=asked.softcap,
                sinks=call.sinks,
            )
            self.tell(layer.selection)
        return layer, self.record(call.module, asked, layer.selection)

    def evaluate(self, request: AttentionRequest, device: torch.device) -> Selection:
        """The selection for a request on a device, among backends that can run here; its backend may be None.

        Raises `UnclaimedError` for a dtype that the registry does not know: it comes from tensors, not from a person.
        """
        unknown = unknown_dtype(request.dtype, self.registry)
        if unknown is not None:
            raise UnclaimedError(f"{unknown}; {_ELSEWHERE}, or convert the model", self.name)
        return evaluate(request, self.platform(device), self.registry, self.backend, unloadable=unloadable)

    def select(self, request: AttentionRequest, device: torch.device) -> Selection:
        """The selection of `evaluate`. Raises `NoBackendError` where it has no backend."""
        selection = self.evaluate(request, device)
        if selection.backend is None:
            raise NoBackendError(selection)
        return selection

    def of_phase(self, request: AttentionRequest, phase: str, device: torch.device) -> AttentionRequest:
        """The request of one phase of decoding, where another backend is selected for it than for both phases."""
        known = phase in self.registry.vocabulary.words_of("phase")
        if self.backend is not None or not known or (request.attention, request.attn_type) != ("mha", "decoder"):
            return request
        of_phase = replace(request, phase=phase)
        chosen, both = self.evaluate(of_phase, device).chosen, self.evaluate(request, device).chosen
        return request if chosen is None or (both is not None and chosen.title == both.title) else of_phase

    def tells_phases(self, request: AttentionRequest, device: torch.device) -> bool:
        """Whether some phase of a request has a backend of its own."""
        both = replace(request, phase="any")
        return any(self.of_phase(both, phase, device) is not both for phase in ("prefill", "decode"))

    @property
    def detects(self) -> bool:
        """Whether the platforms of devices are this machine's."""
        return self._platform is None

    def platform(self, device: torch.device) -> Platform:
        """The platform of a device: the engine's own if it has one, else this machine's."""
        if self._platform is not None:
            return self._platform
        if device not in self._platforms:
            self._platforms[device] = platform_of(device, self.registry)
        return self._platforms[device]

    def runs_of(self, model: torch.nn.Module) -> tuple[LayerRun, ...]:
        """The runs of each module of a model, in the order of the modules."""
        named = ((name, self._runs.get(module, {})) for name, module in model.named_modules())
        return tuple(replace(run, module=name) for name, seen in named for run in seen.values())

    def refuse_unknown(self, module: torch.nn.Module, dropout: float, more: dict[str, Any]) -> None:
        """Raises `UnclaimedError` for arguments that may change the result and that attnreg does not serve."""
        refuse_unknown(module, dropout, more, self._harmless, self.name)

    def record(
        self, module: torch.nn.Module, asked: LayerRequest, selection: Selection | None, dense: str = ""
    ) -> LayerRun:
        seen = self._runs.setdefault(module, {})
        run = seen.get((asked, dense))
        if run is None:
            index = getattr(module, "layer_idx", None)
            run = seen[asked, dense] = LayerRun("", index, asked, selection, dense)
        run.calls += 1
        return run

    def tell(self, selection: Selection) -> None:
        key = selection.request, selection.platform
        if key not in self._told:
            self._told.add(key)
            _log.info("%s", answer_sentence(selection))
            for warning in selection.warnings:
                _log.warning("%s", warning)

    def tell_expanded(self, kind: str, why: str) -> None:
        """Logs once for each class of modules why their keys are expanded from latents."""
        if (kind, why) not in self._told:
            self._told.add((kind, why))
            _log.info("%s: keys are expanded from their latents, because %s", kind, why)

    def _dense(self, call: TransformersCall, why: str) -> Tensor:
        """The output of a call that no batch can express, by PyTorch; counted, and logged once per kind of layer."""
        asked = call.asked(None)
        if not self.dense:
            if call.bias is not None:
                # no backend has a bias: the error states the reason of every candidate
                self.select(asked.request, call.query.device)
            name = type(call.module).__name__
            raise UnclaimedError(f"{name}: {why}, and dense attention is off (dense=False)", self.name)
        if (asked, why) not in self._told:
            self._told.add((asked, why))
            _log.warning("dense attention, through PyTorch, for %s: %s", layer_words(asked.request), why)
        self.record(call.module, asked, None, why)
        return dense_attention(
            call.query,
            call.key,
            call.value,
            mask=call.dense_mask(),
            bias=call.bias,
            scale=asked.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            query_sinks=call.query_sinks,
        )
