"""Attention: the object that an engine holds for each layer. No other module allocates or reshapes outputs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from attnreg import loader
from attnreg.language.packed import Packed
from attnreg.packages.proven import log_unproven
from attnreg.request import features_of
from attnreg.runtime import arguments, ops
from attnreg.runtime.arguments import Fit, Work
from attnreg.runtime.batch import tensor_words
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchError,
    BatchMetadata,
    Call,
    KernelModule,
    KVCache,
    KVCacheShape,
    LayerParams,
    LayerTensors,
    Layout,
    Repeated,
    SpecError,
    UnclaimedError,
)
from attnreg.runtime.sparse.indices import with_indices
from attnreg.runtime.spec import window_of
from attnreg.runtime.tensors import Alike, is_captured, named
from attnreg.selection.refusal import NoBackendError, alternatives
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import answer_sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set
    from typing import Self, Unpack

    from attnreg.selection.trace import Selection

# the kinds of calls
_WRITE, _ATTEND, _BOTH = Work(True, False), Work(False, True), Work(True, True)
# the keys of plans in a batch: one object for each module and spec, which is faster to look up than a spec
_KINDS: dict[tuple[KernelModule, AttentionSpec], object] = {}


class _Planned(NamedTuple):
    """A plan of a kernel module, the shapes that its calls must fit, and the state of the batch that it was made for.

    content: the plan depends on the values in the device's tensors. memory: holds these tensors' memory, so that no
    other tensor gets its addresses. alike: compares tensors' shapes and strides with the batch's.
    """

    plan: Any
    fit: Fit
    content: bool
    state: list[Any]
    alike: Alike
    memory: list[Tensor]


class Attention:
    """One layer's attention by the backend that was selected for it.

    ``spec`` and ``params`` go to the kernel module; ``selection`` has the reasons for this backend. The custom ops
    (`attnreg.ops`) find a layer by its ``name``.
    """

    def __init__(self, selection: Selection, spec: AttentionSpec, params: LayerParams) -> None:
        if selection.backend is None:
            raise NoBackendError(selection)
        refuse_unasked(selection, spec.features)
        arguments.validate_params(spec, params)
        self.selection = selection
        self.backend = selection.backend.name
        self.spec = spec
        self.params = params
        self.name: str | None = None
        self.module = cast("KernelModule", loader.load_kernel(selection.registry, selection.backend.title))
        log_unproven(selection)
        self._run: Callable[[AttentionSpec, Any, Call], None] | None = getattr(self.module, "run", None)
        self._kind = _KINDS.setdefault((self.module, spec), object())
        # kinds of masks already compared with the request: causal (None: by request), without ranges, without a tree
        self._served: set[tuple[bool | None, bool, bool]] = set()
        self._output = spec.num_heads, spec.head_size_v, spec.output_dtype
        # a captured graph reads the tensors of its plan for as long as it can be replayed
        self._captured: list[Any] = []

    @classmethod
    def from_selection(
        cls,
        selection: Selection,
        *,
        softmax_scale: float | None = None,
        sliding_window: int | Sequence[int] | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        kv_layout: Layout | None = None,
        name: str | None = None,
        **tensors: Unpack[LayerTensors],
    ) -> Self:
        """The layer for a selection, with the numbers and tensors that the request only names.

        softmax_scale: default ``head_size ** -0.5``, for MLA with the head size of its expanded keys. chunk: the
        positions of a chunk. kv_layout: of the cache; None: the request's facet cache_layout, or NHD.

        sliding_window: the keys that a query sees, itself included; or (left, right), those before its own and after
        it, -1 for all. The two sides of a layer that sees later keys may differ if the request asks for
        asymmetric_window.

        sinks, alibi_slopes: [num_heads], floating; kept as they are, so weights may be loaded into them later.

        k_scale, v_scale: the factors of a quantised cache, float32; None is 1. They have one element, or [num_kv_heads]
        if the request asks for per_head_quant_scales. A cache of latents has no v_scale: k_scale is the factor of both.
        q_scale, out_scale: the factors of fp8_query and fp8_output, one float32 element.

        Raises `UnclaimedError` for a feature that is given but not in the request, and `SpecError` for one that is in
        the request but not given. Raises `SpecError` if the selection was made to run and this machine lacks the
        device. Raises `NoBackendError` without a backend, and ImportError for a row without a kernel module.
        """
        if selection.backend is None:
            raise NoBackendError(selection)
        if selection.unloadable is not None:
            arguments.validate_device(selection.platform.platform)
        request, given = selection.request, LayerParams(**tensors)
        per_head = any(isinstance(s, Tensor) and s.numel() > 1 for s in (given.k_scale, given.v_scale))
        number, sides = window_of(sliding_window, request)
        features = features_of(
            sliding_window=number,
            asymmetric_window=sides,
            chunk=chunk,
            softcap=softcap,
            sinks=given.sinks,
            alibi=given.alibi_slopes,
            per_head_quant_scales=per_head,
            fp8_query=given.q_scale,
            fp8_output=given.out_scale,
        )
        refuse_unasked(selection, features)
        layout: Layout = kv_layout or dict(request.extra).get("cache_layout") or "NHD"  # type: ignore[assignment]
        _refuse_layout(selection, layout)
        architecture = selection.registry.vocabulary.architectures.get(selection.platform.arch or "")
        spec = AttentionSpec.from_request(
            request,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            chunk=chunk,
            softcap=softcap,
            kv_layout=layout,
            fnuz=architecture is not None and architecture.fp8 == "fnuz",
            options=tuple(selection.backend.row.options.items()),
            packed=Packed.among(selection.registry.vocabulary.words, request.kv_dtype),
        )
        if spec.latent and given.v_scale is not None:
            raise SpecError("v_scale is given; a latent is the key and the value, and k_scale is the scale of both")
        k_factors = arguments.per_head("k_scale", given.k_scale, spec.num_kv_heads)
        params = replace(
            given,
            k_scale=k_factors,
            v_scale=k_factors if spec.latent else arguments.per_head("v_scale", given.v_scale, spec.num_kv_heads),
            q_scale=arguments.per_head("q_scale", given.q_scale, spec.num_kv_heads),
            out_scale=arguments.per_head("out_scale", given.out_scale, 1),
        )
        layer = cls(selection, spec, params)
        if name is not None:
            ops.register(layer, name)
        return layer

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy has no plans, and no name, because a name belongs to one layer
        return type(self), (self.selection, self.spec, self.params)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.selection, self.spec, deepcopy(self.params, memo))

    def __repr__(self) -> str:
        return f"<Attention {self.name or ''} {self.backend} {self.selection.request}>"

    def kv_cache_shape(self, num_blocks: int) -> KVCacheShape:
        """The shapes and the type of this layer's cache."""
        return self.module.kv_cache_shape(self.spec, num_blocks)

    def new_kv_cache(self, num_blocks: int, device: torch.device | str = "cpu") -> KVCache:
        """A cache of this many blocks, uninitialised."""
        shape = self.kv_cache_shape(num_blocks)
        if self.spec.latent:
            key = torch.empty(shape.key, dtype=shape.dtype, device=device)
            return KVCache(key, key[..., : self.spec.head_size_v])
        return KVCache(
            torch.empty(shape.key, dtype=shape.dtype, device=device),
            torch.empty(shape.value, dtype=shape.dtype, device=device),
        )

    def plan(self, batch: BatchMetadata) -> Any:
        """The backend's plan for a batch, computed once and shared by every layer of the same backend and spec.

        Raises `BatchError` for a batch that does not fit, and `UnclaimedError` for a mask that is not in the request.
        """
        return self._planned(batch).plan

    def _planned(self, batch: BatchMetadata) -> _Planned:
        """The plan for a batch as it is now. It is made again if a tensor of the batch has changed since."""
        if not isinstance(batch, BatchMetadata):
            raise BatchError([f"batch is {tensor_words(batch)}; expected BatchMetadata"])
        capturing = is_captured(batch.seq_lens)
        if capturing and not getattr(self.module, "CAPTURABLE", False):
            problem = f"a CUDA graph is being captured, and {self.backend} computes from the host's lengths, which a "
            problem += "replay would keep; capture a backend that follows the device's (TRITON_ATTN, ROCM_ATTN)"
            raise BatchError([problem])
        if batch.key_rows is not None and not getattr(self.module, "KEYS_APART", False):
            raise BatchError([f"key_rows is given, and {self.backend} reads packed keys one behind the other"])
        planned: _Planned | None = batch.plans.get(self._kind)
        if planned is None or not planned.alike(*batch.given) or planned.state != batch.state(planned.content):
            # again, because memory may have been resized in place since another layer began to watch it
            batch.watch()
            causal = batch.causal if isinstance(batch.causal, bool) else None
            mask = causal, batch.mm_prefix is None, batch.tree_mask is None
            if mask not in self._served:
                features = features_of(
                    attn_type=self.spec.attn_type, causal=batch.causal, mm_prefix=batch.mm_prefix,
                    tree_mask=batch.tree_mask,
                )  # fmt: skip
                refuse_unasked(self.selection, features)
                self._served.add(mask)
            content = not getattr(self.module, "CAPTURABLE", False)
            state = batch.state(content)
            alike, fit = Fit.of(self.spec, batch)
            if fit.places is not None and not content:
                # `Fit.of` read the values of the batch's tensors
                content, state = True, batch.state()
            memory = [x.detach() for x in batch.given if not x.is_cpu] if content else []
            plan = self.module.plan(self.spec, batch)
            planned = batch.plans[self._kind] = _Planned(plan, fit, content, state, alike, memory)
        if capturing:
            self._captured.append(planned.plan)
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
        indices: Tensor | None = None,
    ) -> Tensor:
        """Writes key and value to the cache (if both are given), attends, and returns the output.

        query [tokens, num_heads, head_size], key and value [keys, num_kv_heads, head_size(_v)]; heads and their
        elements may be one dimension. output: shaped as query, with head_size_v; allocated if None. Rows
        from ``batch.num_tokens`` on are padding and stay as they are. lse: [num_heads, tokens] float32, written to.
        indices: for sparse MLA, the positions that each query attends to, [tokens, topk] int32.

        Raises `BatchError` and `UnclaimedError`, before anything is launched or written.
        """
        planned = self._planned(batch)
        output = self.new_output(query) if output is None else output
        write = key is not None and kv_cache is not None
        # without a write, a call reads either the cache or packed keys
        kv_cache = kv_cache if write or batch.paged else None
        if lse is not None:
            self._refuse_lse()
        given = named(Call, (query, kv_cache, output, key, value, lse, self.params, None, None))
        call = planned.fit.call(_BOTH if write else _ATTEND, given)
        if indices is not None or self.spec.sparse:
            call = with_indices(self.spec, batch, call, indices)
        self._execute(planned, write, call)
        return output

    __call__ = forward

    @property
    def kind(self) -> object:
        """The same object for layers of one backend and spec."""
        return self._kind

    def repeat(
        self, query: Tensor, key: Tensor, value: Tensor, batch: BatchMetadata, output: Tensor
    ) -> Repeated | None:
        """A function that runs this call of `forward` on any query, key, value and output like these; nothing runs yet.

        It uses only the tensors' addresses. The caller must guarantee equal shapes, strides and dtypes, and the same
        batch, unchanged. It serves every layer of this kind that has no tensors of its own. None if the backend has no
        such function, the layer has tensors, the batch has a cache, or a CUDA graph is being captured.
        """
        make: Callable[[AttentionSpec, Any, Call], Repeated] | None = getattr(self.module, "repeat", None)
        if make is None or self.params.tensors or batch.paged or is_captured(query):
            return None
        planned = self._planned(batch)
        call = planned.fit.call(_ATTEND, Call(query, None, output, key, value, None, self.params))
        return make(self.spec, planned.plan, call)

    def write_kv(
        self, key: Tensor, value: Tensor, kv_cache: KVCache, batch: BatchMetadata, *, query: Tensor | None = None
    ) -> None:
        """Writes keys and values to the slots of ``batch.slot_mapping``. Arguments and errors as in `forward`.

        query: of the call of `attend` that follows; nothing is written if that call would refuse the query.
        """
        planned = self._planned(batch)
        given = named(Call, (query, kv_cache, None, key, value, None, self.params, None, None))
        self._execute(planned, True, planned.fit.call(_WRITE if query is None else _BOTH, given))

    def attend(
        self, query: Tensor, kv_cache: KVCache | None, batch: BatchMetadata, output: Tensor, *,
        key: Tensor | None = None, value: Tensor | None = None, lse: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attends to the cache, or to packed keys and values; writes no cache. Arguments as in `forward`."""
        planned = self._planned(batch)
        if output is None:
            raise BatchError(["output is None; expected the tensor to write to"])
        if lse is not None:
            self._refuse_lse()
        given = named(Call, (query, kv_cache, output, key, value, lse, self.params, None, None))
        call = planned.fit.call(_ATTEND, given)
        if indices is not None or self.spec.sparse:
            call = with_indices(self.spec, batch, call, indices)
        self._execute(planned, False, call)

    def new_output(self, query: Tensor) -> Tensor:
        """Uninitialised memory for the output of a query, with the query's number of dimensions."""
        dimensions = query.ndim if isinstance(query, Tensor) else 0
        if dimensions not in (2, 3):
            sizes = self.spec.num_heads, self.spec.head_size
            raise BatchError([f"query is {tensor_words(query)}; expected [tokens, {sizes[0]}, {sizes[1]}]"])
        heads, size, dtype = self._output
        shape = query.shape[0], *((heads, size) if dimensions == 3 else (heads * size,))
        # torch.empty takes half the time, and gives vmap no batch of outputs
        return query.new_empty(shape, dtype=dtype)

    def _refuse_lse(self) -> None:
        """Raises `UnclaimedError` for a layer whose request does not ask for an lse."""
        if "lse" not in self.spec.features:
            refuse_unasked(self.selection, {"lse"})

    def _execute(self, planned: _Planned, write: bool, call: Call) -> None:
        """Runs a call: stores key and value if ``write``, and attends if the call has an output."""
        try:
            if self._run is not None:
                self._run(self.spec, planned.plan, call)
            else:
                self._run_parts(planned, write, call)
        except Exception as e:
            e.add_note(f"attnreg: {answer_sentence(self.selection)}")
            raise

    def _run_parts(self, planned: _Planned, write: bool, call: Call) -> None:
        """Runs a call by a module with one function for the write and one for attention."""
        if write:
            (key, value), slots = call.packed, planned.fit.num_slots
            assert call.kv_cache is not None
            self.module.write_kv(self.spec, planned.plan, key[:slots], value[:slots], call.kv_cache, params=call.params)
            call = call._replace(key=None, value=None) if planned.fit.paged else call._replace(kv_cache=None)
        if call.output is not None:
            # the module may change the call before it uses it, and `alike` is of the call as given
            self.module.forward(self.spec, planned.plan, call._replace(alike=None))


def refuse_unasked(selection: Selection, words: Set[str]) -> None:
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
    why, others = "; ".join(verdict.against(backend)), alternatives(replace(verdict, backend=None))
    help_ = f"these accept it when asked for: {', '.join(others)}" if others else "no backend here serves it"
    raise UnclaimedError(f"{names}: {backend} does not serve it ({why}); {help_}", backend, others)


def _refuse_layout(selection: Selection, layout: str) -> None:
    """Raises `UnclaimedError` for a cache layout that the backend does not claim."""
    assert selection.backend is not None
    request = selection.request
    # NHD is the default, which no caller chose where there is no cache
    if (layout == "NHD" and request.block_size is None) or "cache_layout" not in selection.registry.vocabulary.facets:
        return
    asking = replace(request, extra={**dict(request.extra), "cache_layout": layout})  # type: ignore[arg-type]
    verdict = evaluate(asking, selection.platform, selection.registry, selection.backend.name)
    if against := verdict.against(selection.backend.name):
        why, others = "; ".join(against), alternatives(replace(verdict, backend=None))
        help_ = f"these read it: {', '.join(others)}" if others else "no backend here reads it"
        raise UnclaimedError(f"{selection.backend.name}: {why}; {help_}", selection.backend.name, others)
