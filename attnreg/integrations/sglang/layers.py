"""Layers of SGLang as requests of the registry, and as layers of attnreg's runtime."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnreg
from attnreg.integrations.sglang.forms import KERNELS, LatentSizes, LayerForm
from attnreg.integrations.sglang.registries import NAME, SglangError, registry
from attnreg.request import features_of
from attnreg.runtime.layer import Attention
from attnreg.selection.selector import evaluate

# the registry's words for a cache whose elements are not those of the model
_CACHES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e4m3fnuz: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.float8_e5m2fnuz: "fp8_e5m2",
}


class RunFacts(NamedTuple):
    """What the layers of one model runner have in common.

    dtype: of queries. cache_dtype: of the KV pool's elements. chunk: the positions of a chunk, for layers that have
    chunks. features: what the run asks of every layer. latents: the sizes of the pool's latents, for a model with MLA.
    """

    dtype: torch.dtype
    cache_dtype: torch.dtype
    page_size: int
    chunk: int | None
    features: frozenset[str]
    platform: attnreg.Platform
    latents: LatentSizes | None = None

    @property
    def quantised(self) -> bool:
        """Whether the pool holds 8-bit floats."""
        return self.cache_dtype.itemsize == 1


@functools.cache
def platform_of(device: str) -> attnreg.Platform:
    """The platform of one of SGLang's device types. Raises `SglangError` if this machine has no such device."""
    kinds = {"cuda": ("cuda", "rocm"), "cpu": ("cpu",)}.get(device, ())
    for platform in attnreg.detect_all(registry().vocabulary):
        if platform.platform in kinds:
            return platform
    raise SglangError(f"attnreg ({NAME}) finds no device of the type {device!r} on this machine")


def problems_of(layer: Any, run: RunFacts, *, sinks: bool = False) -> list[str]:
    """Every reason against a layer (`RadixAttention`); an empty list if attnreg serves it.

    sinks: whether the model has layers with sinks. SGLang passes sinks with a call, so no layer tells.
    """
    problems = [*_unspoken(layer, run)]
    if problems:
        return problems
    try:
        form = form_of(layer, run)
        if form is LayerForm.EXPANDED and "batch_invariant" in run.features:
            # SGLang computes prompts of such runs over latents too
            return problems
        request = _request(layer, run, {"sinks"} if sinks else set())
        verdict = evaluate(request, run.platform, registry(), NAME)
        problems = [*verdict.against(NAME)]
        if not problems:
            new_layer(layer, run, None)
    except ValueError as e:
        # a word that the registry does not know, or a number that the runtime refuses
        problems = [str(e)]
    return problems


def new_layer(layer: Any, run: RunFacts, sinks: Tensor | None) -> Attention:
    """The runtime's layer for one of SGLang's. Raises ValueError, with every reason, for one that is not served."""
    scales: list[Tensor | None] = [None, None]
    if run.latents is not None:
        _refuse_scale(layer, run)
    elif run.quantised:
        scales = [_scale(layer.k_scale), _scale(layer.v_scale)]
    request = _request(layer, run, features_of(sinks=sinks))
    selection = KERNELS[form_of(layer, run)].select(request, run.platform, to_run=True)
    return Attention.from_selection(
        selection,
        softmax_scale=float(layer.scaling),
        sliding_window=_window(layer),
        chunk=_chunk(layer, run),
        softcap=layer.logit_cap or None,
        sinks=sinks,
        k_scale=scales[0],
        v_scale=scales[1],
    )


class RuntimeLayers:
    """The runtime's layers of one model runner, each made at its first call."""

    def __init__(self, run: RunFacts) -> None:
        self.run = run
        # a layer of SGLang -> the addresses that its runtime layer was made for, and this runtime layer
        self._made: dict[Any, tuple[Any, Attention]] = {}

    def of(self, layer: Any, sinks: Tensor | None) -> Attention:
        """The runtime's layer for one of SGLang's; made again if its sinks or scales have been replaced."""
        # the runtime's layer keeps the memory of these tensors, so their addresses identify them
        made_for = _address(sinks), _address(layer.k_scale), _address(layer.v_scale)
        known = self._made.get(layer)
        if known is None or known[0] != made_for:
            known = self._made[layer] = made_for, new_layer(layer, self.run, sinks)
        return known[1]


def _unspoken(layer: Any, run: RunFacts) -> Iterator[str]:
    """Reasons against a layer for which the registry has no words."""
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind != "decoder":
        # by SGLang's backend, layout and mode such a layer is causal or not
        yield f"attn_type is {kind}; served: decoder"
    if layer.is_cross_attention:
        yield "the layer is cross-attention over an encoder"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        yield f"logit_capping_method is {layer.logit_capping_method!r}; served: 'tanh'"
    if layer.pos_encoding_mode not in (None, "NONE"):
        yield f"pos_encoding_mode is {layer.pos_encoding_mode!r}; served: 'NONE'"
    if layer.xai_temperature_len > 0:
        yield f"xai_temperature_len is {layer.xai_temperature_len}: scores scale with the position"
    if layer.tp_k_head_num != layer.tp_v_head_num:
        yield f"the layer has {layer.tp_k_head_num} heads of keys and {layer.tp_v_head_num} of values"
    other = not run.quantised and run.cache_dtype != run.dtype
    if other and (layer.k_scale is not None or layer.v_scale is not None):
        yield f"the layer has KV scales, and SGLang would divide by them for a cache of {run.cache_dtype}"


def form_of(layer: Any, run: RunFacts) -> LayerForm:
    """The form in which a layer asks for attention. Raises ValueError for a layer of MLA whose sizes do not tell."""
    return LayerForm.HEADS if run.latents is None else run.latents.form_of(layer)


def _request(layer: Any, run: RunFacts, features: Any) -> attnreg.AttentionRequest:
    asked = features_of(sliding_window=_window(layer), softcap=layer.logit_cap or None, chunk=_chunk(layer, run))
    same, form = run.cache_dtype == run.dtype, form_of(layer, run)
    return attnreg.AttentionRequest(
        attention="mha" if form is LayerForm.HEADS else "mla",
        phase="prefill" if form is LayerForm.EXPANDED else "any",
        head_size=layer.qk_head_dim,
        head_size_v=layer.v_head_dim,
        num_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        dtype=_word(run.dtype),
        kv_dtype="auto" if same else _CACHES.get(run.cache_dtype, _word(run.cache_dtype)),
        block_size=None if form is LayerForm.EXPANDED else run.page_size,
        features=asked | run.features | features,
    )


def _refuse_scale(layer: Any, run: RunFacts) -> None:
    """Raises ValueError for a scale of latents. Of SGLang's two ways to store them, one divides by it."""
    scale = layer.k_scale
    if run.quantised and scale is not None and float(scale) != 1.0:
        raise ValueError(f"the layer's KV scale is {float(scale):g}, and SGLang stores latents of prompts without it")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _window(layer: Any) -> int | None:
    """The keys that a query sees. SGLang's number leaves out the query's own; -1 is no window."""
    size = layer.sliding_window_size
    return None if size is None or size < 0 else size + 1


def _chunk(layer: Any, run: RunFacts) -> int | None:
    """The positions of a chunk, if the layer has chunks: those with rotary embeddings in Llama 4."""
    return run.chunk if layer.use_irope else None


def _scale(scale: Any) -> Tensor | None:
    return torch.tensor([scale], dtype=torch.float32) if isinstance(scale, float) else scale


def _address(tensor: Any) -> Any:
    return tensor.data_ptr() if isinstance(tensor, Tensor) else tensor
