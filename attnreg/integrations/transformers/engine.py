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
    is_transformed,
    platform_of,
    refuse_tangents,
    refuse_wrapped,
    unknown_dtype,
    without_gradient,
)
from attnreg.integrations.transformers.arguments import (
    HARMLESS,
    CallArguments,
    refuse_unknown,
    validate_ignored,
)
from attnreg.integrations.transformers.batches import VarlenBatch
from attnreg.integrations.transformers.call_cache import CallCache, KnownCall, LayerRun
from attnreg.integrations.transformers.calls import LayerRequest, TransformersCall
from attnreg.integrations.transformers.compressed.cache import held_by
from attnreg.integrations.transformers.compressed.layers import CompressedLayers
from attnreg.integrations.transformers.dense import dense_attention
from attnreg.integrations.transformers.latent.layers import LatentLayers
from attnreg.integrations.transformers.latent.lazy import expanded, latents_of
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
        self._runs: WeakKeyDictionary[torch.nn.Module, dict[tuple[LayerRequest, str], LayerRun]] = WeakKeyDictionary()
        self.calls = CallCache()
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
        without a key is zero; with a bias it is the mean of all values. s_aux: [heads] sinks. sinks: [batch, heads,
        queries, 1] a sink for each query. indices: [batch, queries, chosen] the keys that an indexer chose for each
        query; no other key takes part. Under autocast, query, key and value are cast as PyTorch's attention casts them.
        Raises `NoBackendError` and `UnclaimedError`.
        """
        if dropout or not more.keys() <= self._harmless:
            self.refuse_unknown(module, dropout, more)
        # the constructor of a NamedTuple takes twice as long
        call = tuple.__new__(CallArguments, (
            module, query, key, value, attention_mask, is_causal, scaling, sliding_window, softcap, s_aux,
            position_bias, indices, sinks, more.get("cu_seq_lens_q"),
        ))  # fmt: skip
        if any_autocast() and autocasts(query.device):
            query, key, value = autocast(query, key, value)
            # without autocast: a backend accumulates in float32, as it claims
            with torch.autocast(query.device.type, enabled=False):
                return self._without_gradient(call._replace(query=query, key=key, value=value)), None
        if torch.is_grad_enabled():
            return self._without_gradient(call), None
        return self._attend(call), None

    def _without_gradient(self, call: CallArguments) -> Tensor:
        """The output of a call; the computation of a gradient raises RuntimeError."""
        inputs = self._inputs(call)
        with torch.no_grad():
            out = self._attend(call)
        return without_gradient(out, *inputs, cure=_CURE)

    def _attend(self, call: CallArguments) -> Tensor:
        """The output of a call, by the first of three ways that serves it.

        A known call is repeated. A call that a batch can express goes to a backend, with plain keys, latents or a
        compressed cache. Any other call runs densely.
        """
        beyond = not (call.bias is call.chosen is call.query_sinks is call.boundaries is None)
        latents = latents_of(call.key, call.value)
        if not beyond and self.compressed is None and not is_transformed():
            calls = self.calls.of(call.module) if latents is None else self.latent_layers
            repeated = calls.repeated(call)
            if repeated is not None:
                return repeated
        inputs = self._inputs(call)
        refuse_tangents(*inputs, cure=_CURE)
        refuse_wrapped(*(x for x in inputs if not isinstance(x, BooleanMask)), call.chosen, cure=_ELSEWHERE)
        if self.compressed is not None:
            held = self.compressed.held(call)
            if held is not None:
                return self.compressed.attend(TransformersCall(call), held)
        if latents is None:
            key, value = self.latent_layers.expanded(call.module, call.key, call.value)
            call = call._replace(key=key, value=value)
        validated = TransformersCall(call)
        batch = validated.batch
        attended = self.latent_layers.attend(validated, latents)
        if attended is not None:
            return attended
        if not isinstance(batch, VarlenBatch):
            return self._dense(validated, batch)
        found = self._found(validated, batch)
        if latents is None and not beyond:
            self._keep(call, batch, found)
        return batch.attend(found.layer, validated.query, validated.key, validated.value)

    def _inputs(self, call: CallArguments) -> tuple[Any, ...]:
        """The tensors that a call's output depends on; for lazy keys and values, their latents."""
        latents = latents_of(call.key, call.value)
        if latents is not None:
            kv: tuple[Tensor, ...] = latents.latent, latents.rope
        elif self.compressed is not None and held_by(call.key, call.value) is not None:
            kv = ()
        else:
            kv = expanded(call.key), expanded(call.value)
        return call.query, *kv, call.mask, call.sinks, call.bias, call.query_sinks, call.scale, call.softcap

    def _found(self, call: TransformersCall, batch: VarlenBatch) -> KnownCall:
        """The layer that runs a call's batch, by the selected backend, and the record of its calls."""
        asked = call.asked(batch)
        request = self.of_phase(asked.request, batch.phase, call.query.device)
        return KnownCall.of(*self.layer_of(call, replace(asked, request=request)))

    def _keep(self, call: CallArguments, batch: VarlenBatch, found: KnownCall) -> None:
        """Keeps the result for a call; for its phase, if the registry tells phases apart."""
        calls, phase = self.calls.of(call.module), None
        of_mask = calls.batch(call, call.key)
        if of_mask is None:
            # a mask that is a tensor has no facts
            found = found._replace(batch=batch)
        elif self.tells_phases(found.run.asked.request, call.query.device):
            phase = batch.phase
        calls.keep(calls.facts(call, of_mask, phase), call.sinks, found)

    def layer_of(self, call: TransformersCall, asked: LayerRequest) -> tuple[Attention, LayerRun]:
        """The layer that runs the asked layer's calls, and the record of these. Raises `NoBackendError`."""
        run = self._runs.get(call.module, {}).get((asked, ""))
        layer = None if run is None else run.layer
        if layer is None or layer.params.sinks is not call.sinks:
            layer = Attention.from_selection(
                self.select(asked.request, call.query.device),
                softmax_scale=asked.scale,
                sliding_window=asked.window,
                softcap=asked.softcap,
                sinks=call.sinks,
            )
            self.tell(layer.selection)
        run = self.record(call.module, asked, layer.selection)
        run.layer = layer
        return layer, run

    def evaluate(self, request: AttentionRequest, device: torch.device) -> Selection:
        """The selection for a request on a device, among backends that can run here; its backend may be None.

        Raises `UnclaimedError` for a dtype that the registry does not know: it comes from tensors, not from a person.
        """
        unknown = unknown_dtype(request.dtype, self.registry)
        if unknown is not None:
            raise UnclaimedError(f"{unknown}; {_ELSEWHERE}, or convert the model", self.name)
        return evaluate(request, self.platform(device), self.registry, self.backend, unloadable=unloadable)

    def select(self, request: AttentionRequest, device: torch.device) -> Selection:
        """The selection of `evaluate`. Raises `NoBackendError` if it has no backend."""
        selection = self.evaluate(request, device)
        if selection.backend is None:
            raise NoBackendError(selection)
        return selection

    def of_phase(self, request: AttentionRequest, phase: str, device: torch.device) -> AttentionRequest:
        """The request of one phase, if its backend differs from that for both phases; else the request itself."""
        known = phase in self.registry.vocabulary.words_of("phase")
        if self.backend is not None or not known or (request.attention, request.attn_type) != ("mha", "decoder"):
            return request
        of_phase = replace(request, phase=phase)
        chosen, both = self.evaluate(of_phase, device).chosen, self.evaluate(request, device).chosen
        return request if chosen is None or (both is not None and chosen.title == both.title) else of_phase

    def tells_phases(self, request: AttentionRequest, device: torch.device) -> bool:
        """Whether some phase of a request gets another backend than both phases together."""
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
