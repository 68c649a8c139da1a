"""Attention: the object that an engine holds for each layer. No other module allocates or reshapes outputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor

from attnreg.request import features_of
from attnreg.runtime import arguments, ops
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchError,
    BatchMetadata,
    Call,
    KernelModule,
    KVCache,
    KVCacheShape,
    LayerParams,
    Layout,
    SpecError,
    UnclaimedError,
)
from attnreg.selection.refusal import NoBackendError, alternatives
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Set
    from typing import Self

    from attnreg.selection.trace import Selection


class Attention:
    """One layer's attention by the backend that was selected for it.

    ``spec`` and ``params`` go to the kernel module; ``selection`` says why this backend was chosen. The custom ops
    (`attnreg.ops`) find a layer by its ``name``.
    """

    def __init__(self, selection: Selection, spec: AttentionSpec, params: LayerParams) -> None:
        if selection.backend is None:
            raise NoBackendError(selection)
        arguments.validate_params(spec, params)
        self.selection = selection
        self.backend = selection.backend.name
        self.spec = spec
        self.params = params
        self.name: str | None = None
        self.module = cast("KernelModule", selection.backend.load())

    @classmethod
    def from_selection(
        cls,
        selection: Selection,
        *,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_layout: Layout | None = None,
        name: str | None = None,
    ) -> Self:
        """The layer for a selection, with the numbers and tensors that the request only names.

        softmax_scale: default ``head_size ** -0.5``. sliding_window: keys that a query sees, itself included. sinks,
        alibi_slopes: [num_heads], floating; kept as they are, so weights may be loaded into them later. k_scale,
        v_scale: the factors of a quantised cache, float32: one element, or [num_kv_heads] if the request asks
        for per_head_quant_scales; None is 1. kv_layout: of the cache; None: the request's facet of this name, or NHD.

        Raises `UnclaimedError` for a feature that is given but not in the request, `SpecError` for one that is in the
        request but not given, `NoBackendError` for a selection without a backend, ImportError for a row without a
        kernel module.
        """
        if selection.backend is None:
            raise NoBackendError(selection)
        request = selection.request
        per_head = any(s is not None and s.numel() > 1 for s in (k_scale, v_scale))
        features = features_of(
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            alibi=alibi_slopes,
            per_head_quant_scales=per_head,
        )
        _refuse_unasked(selection, features)
        layout: Layout = kv_layout or dict(request.extra).get("cache_layout") or "NHD"  # type: ignore[assignment]
        _refuse_layout(selection, layout)
        architecture = selection.registry.vocabulary.architectures.get(selection.platform.arch or "")
        spec = AttentionSpec.from_request(
            request,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            softcap=softcap,
            kv_layout=layout,
            fnuz=architecture is not None and architecture.fp8 == "fnuz",
            options=tuple(selection.backend.row.options.items()),
        )
        params = LayerParams(
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            k_scale=_per_head(k_scale, spec.num_kv_heads),
            v_scale=_per_head(v_scale, spec.num_kv_heads),
        )
        layer = cls(selection, spec, params)
        if name is not None:
            ops.register(layer, name)
        return layer

    def __repr__(self) -> str:
        return f"<Attention {self.name or ''} {self.backend} {self.selection.request}>"

    def kv_cache_shape(self, num_blocks: int) -> KVCacheShape:
        """The shapes and the type of this layer's cache."""
        return self.module.kv_cache_shape(self.spec, num_blocks)

    def new_kv_cache(self, num_blocks: int, device: torch.device | str = "cpu") -> KVCache:
        """A cache of this many blocks, uninitialised."""
        shape = self.kv_cache_shape(num_blocks)
        return KVCache(
            torch.empty(shape.key, dtype=shape.dtype, device=device),
            torch.empty(shape.value, dtype=shape.dtype, device=device),
        )

    def plan(self, batch: BatchMetadata) -> Any:
        """The backend's plan for a batch, computed once and shared by every layer of the same backend and spec.

        Raises `BatchError` for a batch that does not fit, `UnclaimedError` for a mask that is not in the request.
        """
        return self._planned(batch)[0]

    def _planned(self, batch: BatchMetadata) -> tuple[Any, arguments.Fit]:
        key = (self.backend, self.spec)
        if key not in batch.plans:
            features = features_of(attn_type=self.spec.attn_type, causal=batch.causal, mm_prefix=batch.mm_prefix)
            _refuse_unasked(self.selection, features)
            fit = arguments.Fit.of(self.spec, batch)
            batch.plans[key] = self.module.plan(self.spec, batch), fit
        planned: tuple[Any, arguments.Fit] = batch.plans[key]
        return planned

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
    ) -> Tensor:
        """Writes key and value to the cache (if both are given), attends, and returns the output.

        query [tokens, num_heads, head_size], key and value [keys, num_kv_heads, head_size(_v)]; heads and their
        elements may be one dimension. output: shaped as query, with head_size_v; allocated if None. Rows
        from ``batch.num_tokens`` on are padding and stay as they are. lse: [num_heads, tokens] float32, written to.

        Raises `BatchError` and `UnclaimedError`, before anything is launched or written.
        """
        output = self.new_output(query) if output is None else output
        write = self._write(key, value, kv_cache, batch) if kv_cache is not None and key is not None else None
        packed = (None, None) if batch.paged else (key, value)
        attend = self._attend(query, kv_cache if batch.paged else None, batch, output, *packed, lse)
        if write is not None:
            write()
        attend()
        return output

    __call__ = forward

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache, batch: BatchMetadata) -> None:
        """Writes keys and values to the slots of ``batch.slot_mapping``. Arguments and errors as in `forward`."""
        self._write(key, value, kv_cache, batch)()

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
    ) -> None:
        """Attends to the cache, or to packed keys and values; writes no cache. Arguments as in `forward`."""
        self._attend(query, kv_cache, batch, output, key, value, lse)()

    def new_output(self, query: Tensor) -> Tensor:
        """Uninitialised memory for the output of a query, with the query's number of dimensions."""
        heads, size = self.spec.num_heads, self.spec.head_size_v
        return query.new_empty(query.shape[0], *((heads * size,) if query.ndim == 2 else (heads, size)))

    def _write(self, key: Tensor, value: Tensor | None, kv_cache: KVCache, batch: BatchMetadata) -> Callable[[], None]:
        """Validates a write to the cache, and returns the call that does it."""
        spec, (plan, fit) = self.spec, self._planned(batch)
        if batch.slot_mapping is None:
            raise BatchError(["slot_mapping is None: there is no place to write key and value to"])
        key, value = _by_head(key, spec.num_kv_heads), _by_head(value, spec.num_kv_heads)
        fit.validate_keys(key, value, fit.num_slots)
        fit.validate_cache(kv_cache)
        fit.validate_params(self.params)
        if fit.debug:
            arguments.validate_places(spec, batch, kv_cache)
        assert value is not None
        if key.shape[0] != fit.num_slots:
            key, value = key[: fit.num_slots], value[: fit.num_slots]
        return partial(self.module.write_kv, spec, plan, key, value, kv_cache, params=self.params)

    def _attend(
        self,
        query: Tensor,
        kv_cache: KVCache | None,
        batch: BatchMetadata,
        output: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        lse: Tensor | None,
    ) -> Callable[[], None]:
        """Validates an attention call, and returns the call that runs it."""
        spec, (plan, fit) = self.spec, self._planned(batch)
        if lse is not None and "lse" not in spec.features:
            _refuse_unasked(self.selection, {"lse"})
        if batch.paged != (kv_cache is not None) or batch.paged != (key is None):
            raise BatchError([_STORAGE[batch.paged]])
        query, output = _by_head(query, spec.num_heads), _by_head(output, spec.num_heads)
        fit.validate_queries(query, output, lse)
        fit.validate_params(self.params)
        if kv_cache is not None:
            fit.validate_cache(kv_cache)
            if fit.debug:
                arguments.validate_places(spec, batch, kv_cache)
        elif key is not None:
            key, value = _by_head(key, spec.num_kv_heads), _by_head(value, spec.num_kv_heads)
            fit.validate_keys(key, value, fit.num_keys)
        return partial(self.module.forward, spec, plan, Call(query, kv_cache, output, key, value, lse, self.params))


_STORAGE = {
    True: "the batch has a block_table: attention reads kv_cache, and takes no packed keys and values",
    False: "the batch has no block_table: attention takes packed keys and values, and reads no kv_cache",
}


@overload
def _by_head(x: Tensor, heads: int) -> Tensor: ...
@overload
def _by_head(x: Tensor | None, heads: int) -> Tensor | None: ...
def _by_head(x: Tensor | None, heads: int) -> Tensor | None:
    """[rows, heads * size] as [rows, heads, size]; any other shape is returned as it is, for validation to report."""
    if x is None or x.ndim != 2 or x.shape[1] % heads:
        return x
    return x.view(x.shape[0], heads, x.shape[1] // heads)


def _refuse_unasked(selection: Selection, words: Set[str]) -> None:
    """Raises `UnclaimedError` for features that are used but not in the request."""
    unasked = words - selection.request.features
    if not unasked:
        return
    assert selection.backend is not None
    backend, names = selection.backend.name, ", ".join(sorted(unasked))
    asking = replace(selection.request, features=selection.request.features | unasked)
    verdict = evaluate(asking, selection.platform, selection.registry, backend)
    if verdict.backend is not None and verdict.backend.name == backend:
        message = f"{names}: given, but not asked for when {backend} was selected; add it to the request's features"
        raise UnclaimedError(message, backend, [backend])
    why = "; ".join(reason.text for reason in verdict.candidates[0].reasons)
    others = alternatives(verdict)
    help_ = f"these accept it when asked for: {', '.join(others)}" if others else "no backend here accepts it"
    raise UnclaimedError(f"{names}: {backend} does not serve it ({why}); {help_}", backend, others)


def _refuse_layout(selection: Selection, layout: str) -> None:
    """Raises `UnclaimedError` for a cache layout that the row does not claim. Every row has NHD."""
    assert selection.backend is not None
    request = selection.request
    if layout == "NHD" or "cache_layout" not in selection.registry.vocabulary.facets:
        return
    asking = replace(request, extra={**dict(request.extra), "cache_layout": layout})  # type: ignore[arg-type]
    verdict = evaluate(asking, selection.platform, selection.registry, selection.backend.name)
    if verdict.backend is None:
        why = "; ".join(reason.text for reason in verdict.candidates[0].reasons)
        others = alternatives(verdict)
        help_ = f"these read it: {', '.join(others)}" if others else "no backend here reads it"
        raise UnclaimedError(f"{selection.backend.name}: {why}; {help_}", selection.backend.name, others)


def _per_head(scale: Tensor | None, num_kv_heads: int) -> Tensor | None:
    """A scale as [num_kv_heads] float32: a view, so that later changes of the scale take effect."""
    if scale is None:
        return None
    if scale.dtype != torch.float32 or scale.numel() not in (1, num_kv_heads):
        expected = f"expected one float32 element, or {num_kv_heads}"
        raise SpecError(f"a KV scale is {list(scale.shape)} {scale.dtype}; {expected}")
    return scale.reshape(-1).expand(num_kv_heads)
