"""MLAAttention: one layer of multi-head latent attention, with one backend for each of its two phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from attnreg.request import features_of
from attnreg.runtime import ops
from attnreg.runtime.arguments import slots_problems
from attnreg.runtime.batch import BatchError, BatchMetadata, tensor_words
from attnreg.runtime.interface import SpecError
from attnreg.runtime.layer import Attention, refuse_unasked
from attnreg.runtime.lengths import content, queries_of
from attnreg.runtime.mla.interface import (
    MLASpec,
    as_kv_cache,
    latent_cache_shape,
    parts_of,
    projections,
    weight_problems,
)
from attnreg.runtime.mla.phases import Phases, phases_of
from attnreg.runtime.mla.prompts import WORKSPACE_TOKENS, ExpandedPrompts
from attnreg.runtime.sparse.indices import validate_indices
from attnreg.runtime.states.memory import overlap_problems
from attnreg.runtime.tensors import Alike, Remembered, comparison, derivative_problems, is_captured, tensor_problems
from attnreg.runtime.validation import refuse

if TYPE_CHECKING:
    from attnreg.selection.trace import Selection


# the features of backends that the whole layer can have. Not batch_invariant: one product with kv_b_proj has all rows
# of a phase, and one chunk of context has several requests, so bits depend on the batch. Masks and ranks are no part of
# the contract of MLA
_SERVED = frozenset({"causal_by_request", "kv_connector", "lse", "non_causal"})
# the tensors of a call that attends alone, and of one that writes too
_READING = "query", "kv_cache", "output"
_WRITING = (*_READING, "latent", "rope")


class MLAAttention:
    """One layer of MLA (`attnreg.runtime.mla.interface`).

    decode: the selection for the latent form. prefill: the selection for `AttentionRequest.expanded`; None: prompts are
    computed in the latent form too. kv_b_proj [num_heads * (nope + v_head_dim), kv_lora_rank] is kept without a copy,
    so weights may be loaded into it later. softmax_scale: default ``(nope + rope) ** -0.5``. kv_scale: the scale of a
    quantised cache, one float32. decode_queries: requests of up to this many queries are decoded. workspace_tokens: how
    many tokens of context are expanded at once. The custom op (`attnreg.ops`) finds a layer by its ``name``.

    Raises `SpecError` for selections of different layers, for a weight that does not fit, and for a feature of its
    backends that the layer does not have (batch_invariant). Raises `NoBackendError` for a selection without a backend,
    ImportError for a row without a kernel module.
    """

    def __init__(
        self,
        decode: Selection,
        prefill: Selection | None = None,
        *,
        kv_b_proj: Tensor,
        softmax_scale: float | None = None,
        kv_scale: Tensor | None = None,
        decode_queries: int = 1,
        workspace_tokens: int = WORKSPACE_TOKENS,
        name: str | None = None,
    ) -> None:
        if type(decode_queries) is not int or decode_queries < 1:
            raise SpecError(f"decode_queries is {decode_queries!r}; expected an integer of at least 1")
        self.decode = Attention.from_selection(decode, softmax_scale=softmax_scale, k_scale=kv_scale)
        if not self.decode.spec.latent:
            raise SpecError(f"decode is a selection for {decode.request}; expected one of MLA in its latent form")
        _refuse_features("decode", self.decode)
        self.spec = MLASpec.from_request(decode.request, self.decode.spec)
        if self.decode.spec.sparse and prefill is not None:
            raise SpecError("prefill is given; sparse MLA computes prompts in the latent form too, so pass None")
        self.prefill: Attention | None = None
        self.prompts: ExpandedPrompts | None = None
        if prefill is not None:
            self.prefill = Attention.from_selection(prefill, softmax_scale=self.decode.spec.softmax_scale)
            _refuse_features("prefill", self.prefill)
            self.spec = replace(self.spec, expanded_features=prefill.request.features)
            _validate_prefill(self.spec, self.prefill)
            self.prompts = ExpandedPrompts(
                self.spec, self.prefill.module, kv_b_proj, kv_scale=self.decode.params.k_scale,
                workspace_tokens=workspace_tokens,
            )  # fmt: skip
        projections(self.spec, kv_b_proj)
        self.kv_b_proj, self.decode_queries, self._workspace_tokens = kv_b_proj, decode_queries, workspace_tokens
        self.name: str | None = None
        self._key = (MLAAttention, decode_queries)
        self._sizes = self.spec.qk_nope_head_dim, self.spec.kv_lora_rank, self.spec.qk_rope_head_dim
        # calls that passed validation, by the names of their tensors
        self._fitted: dict[Sequence[str], Remembered[None]] = {}
        if name is not None:
            ops.register_mla(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy plans anew, and has no name: a name belongs to one layer
        return partial(type(self), **self._given), self._selections

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        given: dict[str, Any] = {
            name: deepcopy(x, memo) if isinstance(x, Tensor) else x for name, x in self._given.items()
        }
        return type(self)(*self._selections, **given)

    @property
    def _selections(self) -> tuple[Selection, Selection | None]:
        return self.decode.selection, None if self.prefill is None else self.prefill.selection

    @property
    def _given(self) -> dict[str, Any]:
        """The constructor's arguments, without the selections."""
        return {
            "kv_b_proj": self.kv_b_proj,
            "softmax_scale": self.decode.spec.softmax_scale,
            "kv_scale": self.decode.params.k_scale,
            "decode_queries": self.decode_queries,
            "workspace_tokens": self._workspace_tokens,
        }

    def __repr__(self) -> str:
        prefill = "" if self.prefill is None else f", prompts {self.prefill.backend}"
        return f"<MLAAttention {self.name or ''} {self.decode.backend}{prefill} {self.decode.selection.request}>"

    def new_kv_cache(self, num_blocks: int, device: torch.device | str = "cpu") -> Tensor:
        """A cache of this many blocks, [num_blocks, block_size, width], uninitialised."""
        shape, dtype = latent_cache_shape(self.spec.latent, num_blocks)
        return torch.empty(shape, dtype=dtype, device=device)

    def new_output(self, query: Tensor) -> Tensor:
        """Uninitialised memory for the output of a query."""
        if not isinstance(query, Tensor) or query.ndim != 3:
            expected = f"[tokens, {self.spec.num_heads}, {self.spec.qk_head_dim}]"
            raise BatchError([f"query is {tensor_words(query)}; expected {expected}"])
        return query.new_empty(query.shape[0], self.spec.num_heads, self.spec.v_head_dim)

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
        stored: bool = False,
    ) -> Tensor:
        """Writes the new latents to the cache, attends, and returns the output [tokens, num_heads, v_head_dim].

        query [tokens, num_heads, nope + rope], rotated; latent [tokens, kv_lora_rank] and rope [tokens,
        qk_rope_head_dim] of the same tokens; kv_cache [num_blocks, block_size, width]. lse: [num_heads, tokens]
        float32, written to. indices: of sparse MLA, the positions that each query attends to, [tokens, topk] int32.
        stored: the cache holds the new latents already, so nothing is written to it, and the batch needs no
        slot_mapping. Rows from ``batch.num_tokens`` on are padding and stay unchanged. A captured graph computes all
        rows in the latent form, and makes the output of padding zero.

        Raises `BatchError` and `UnclaimedError` before anything is launched or written.
        """
        output = self.new_output(query) if output is None else output
        rows, capturing = self._validate(batch, _WRITING, (query, kv_cache, output, latent, rope), lse)
        # one phase writes its output before the other reads its queries
        written = {"kv_cache": kv_cache, "output": output} | ({} if lse is None else {"lse": lse})
        read = {"query": query, "latent": latent, "rope": rope, "kv_b_proj": self.kv_b_proj}
        refuse([*overlap_problems(written, read)])
        validate_indices(self.spec.latent, batch, indices, query.shape[0])
        slots = None if stored or batch.slot_mapping is None else batch.slot_mapping.shape[0]
        if slots is not None and slots < rows:
            # a graph may have more rows than this batch has tokens
            refuse([*slots_problems(slots, batch.num_tokens)])
        phases = None
        if not capturing and self.prompts is not None:
            phases = self._phases(batch)
            if phases.expanded is not None:
                # refuses what the layer for prompts refuses, before the cache is written
                assert self.prefill is not None
                refuse_unasked(self.prefill.selection, features_of(causal=batch.causal))
                self.prompts.plan(phases.expanded.batch)
        cache = as_kv_cache(self.spec.latent, kv_cache)
        if not stored:
            self.decode.write_kv(latent[:, None], rope[:, None], cache, batch)
        if phases is None:
            self._latent(slice(0, rows), query, cache, batch, output, lse, padded=capturing, indices=indices)
            return output
        if phases.latent is not None:
            self._latent(phases.latent.rows, query, cache, phases.latent.batch, output, lse)
        if phases.expanded is not None:
            self._expanded(phases.expanded.rows, query, latent, rope, kv_cache, phases.expanded.batch, output, lse)
        return output

    __call__ = forward

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        batch: BatchMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attends in the latent form, for any number of queries, to a cache that holds the latents of all tokens.

        It writes nothing to the cache. Arguments, output, padding and errors are those of `forward`.
        """
        made = output is None
        output = self.new_output(query) if output is None else output
        rows, capturing = self._validate(batch, _READING, (query, kv_cache, output), lse)
        if not made or lse is not None:
            written = {"output": output} | ({} if lse is None else {"lse": lse})
            read = {"query": query, "kv_cache": kv_cache, "kv_b_proj": self.kv_b_proj}
            refuse([*overlap_problems(written, read)])
        validate_indices(self.spec.latent, batch, indices, query.shape[0])
        cache = as_kv_cache(self.spec.latent, kv_cache)
        self._latent(slice(0, rows), query, cache, batch, output, lse, padded=capturing, indices=indices)
        return output

    def _phases(self, batch: BatchMetadata) -> Phases:
        """The phases of a batch as it is now, made once for all layers with the same ``decode_queries``."""
        known: tuple[Alike, Any, Phases] | None = batch.plans.get(self._key)
        if known is None or not known[0](*batch.given) or known[1] != batch.state():
            # a tensor may have been resized in place
            batch.watch()
            phases = phases_of(batch, self.decode_queries)
            known = batch.plans[self._key] = comparison(batch.given), batch.state(), phases
        return known[2]

    def _latent(
        self,
        rows: slice | Tensor,
        query: Tensor,
        cache: Any,
        batch: BatchMetadata,
        output: Tensor,
        lse: Tensor | None,
        *,
        padded: bool = False,
        indices: Tensor | None = None,
    ) -> None:
        """Computes rows in the latent form: absorbs W_UK, attends, multiplies by W_UV. padded: rows may be padding."""
        spec, (nope, rank, rope) = self.spec, self._sizes
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        q = query if count == query.shape[0] and isinstance(rows, slice) else query[rows]
        w_uk, w_uv = parts_of(spec, self.kv_b_proj)
        absorbed = q.new_empty(count, spec.num_heads, rank + rope)
        # each product writes where the next step reads: a copy costs the host as much as the product
        q_nope, q_rope = q.transpose(0, 1).split_with_sizes((nope, rope), 2)
        to_latent, to_rope = absorbed.transpose(0, 1).split_with_sizes((rank, rope), 2)
        torch.bmm(q_nope, w_uk, out=to_latent)
        to_rope.copy_(q_rope)
        memory = q.new_zeros if padded else q.new_empty
        latents = memory(count, spec.num_heads, rank)
        whole = lse is None or (isinstance(rows, slice) and count == lse.shape[1])
        own_lse = lse if lse is None or (whole and lse.is_contiguous()) else lse.new_empty(lse.shape[0], count)
        self.decode.attend(absorbed, cache, batch, latents, lse=own_lse, indices=indices)
        if isinstance(rows, slice):
            part = output if q is query else output[rows]
            torch.bmm(latents.transpose(0, 1), w_uv.mT, out=part.transpose(0, 1))
        else:
            output[rows] = torch.bmm(latents.transpose(0, 1), w_uv.mT).transpose(0, 1)
        if lse is not None and own_lse is not None and own_lse is not lse:
            lse[:, rows] = own_lse

    def _expanded(
        self,
        rows: slice | Tensor,
        query: Tensor,
        latent: Tensor,
        rope: Tensor,
        kv_cache: Tensor,
        batch: BatchMetadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Computes rows in the expanded form."""
        assert self.prompts is not None
        if isinstance(rows, slice):
            own_lse = None if lse is None else lse[:, rows]
            self.prompts(query[rows], latent[rows], rope[rows], kv_cache, batch, output[rows], lse=own_lse)
            return
        part = self.new_output(query[rows])
        own_lse = None if lse is None else lse.new_empty(lse.shape[0], part.shape[0])
        self.prompts(query[rows], latent[rows], rope[rows], kv_cache, batch, part, lse=own_lse)
        output[rows] = part
        if lse is not None and own_lse is not None:
            lse[:, rows] = own_lse

    def _validate(self, batch: Any, names: Sequence[str], tensors: Sequence[Any], lse: Any) -> tuple[int, bool]:
        """The rows of queries to compute, and whether a CUDA graph is being captured, which computes all rows.

        names: of the given tensors, the first of them a query. Raises `BatchError` for tensors that do not fit.
        """
        if not isinstance(batch, BatchMetadata) or batch.block_table is None:
            raise BatchError([f"batch is {tensor_words(batch)}, without a block_table; a layer of MLA has a cache"])
        # the rest computes with the batch's lengths, so they are validated first
        self.decode.plan(batch)
        tokens = queries_of(content(batch.host_starts)).total
        if lse is not None:
            names, tensors = (*names, "lse"), (*tensors, lse)
        query, compared = tensors[0], (batch.seq_lens, self.kv_b_proj, *tensors)
        fitted = self._fitted.get(names) or self._fitted.setdefault(names, Remembered())
        known = fitted.find(compared) is not None
        problems = [] if known else [*self._tensor_problems(dict(zip(names, tensors, strict=True)), batch)]
        rows = query.shape[0] if isinstance(query, Tensor) and query.ndim else None
        if rows is not None and rows < tokens:
            problems.append(f"query has {rows} rows; the batch has {tokens} tokens")
        if batch.mm_prefix is not None or batch.tree_mask is not None:
            problems.append("the batch has mm_prefix or tree_mask; layers of MLA have no such mask")
        refuse(problems)
        if not known:
            fitted.put(compared, None)
        refuse(derivative_problems(compared[1:], lambda: ["kv_b_proj", *names]))
        capturing = is_captured(query)
        return query.shape[0] if capturing else tokens, capturing

    def _tensor_problems(self, given: dict[str, Any], batch: BatchMetadata) -> Iterator[str]:
        spec, query = self.spec, given["query"]
        rows = query.shape[0] if isinstance(query, Tensor) and query.ndim else None
        cache_shape, cache_dtype = latent_cache_shape(spec.latent, 0)
        shapes = {
            "query": (rows, spec.num_heads, spec.qk_head_dim),
            "latent": (rows, spec.kv_lora_rank),
            "rope": (rows, spec.qk_rope_head_dim),
            "kv_cache": (None, *cache_shape[1:]),
            "output": (rows, spec.num_heads, spec.v_head_dim),
            "lse": (spec.num_heads, rows),
        }
        dtypes = {"kv_cache": cache_dtype, "lse": torch.float32}
        yield from weight_problems(spec, self.kv_b_proj, batch.seq_lens.device)
        for name, shape in shapes.items():
            if name in given:
                yield from tensor_problems(
                    name, given[name], shape, dtypes.get(name, spec.latent.dtype), device=batch.seq_lens.device,
                    dense=name != "lse", written=name in ("kv_cache", "output", "lse"),
                )  # fmt: skip
        if "lse" in given and "lse" not in spec.latent.features & (
            spec.expanded_features if self.prompts else spec.latent.features
        ):
            yield "lse is given, but a backend of this layer was selected without the feature lse"


def _refuse_features(phase: str, layer: Attention) -> None:
    """Raises `SpecError` for features that the backend of a phase has and the layer around it does not."""
    if missing := layer.spec.features - _SERVED:
        names = ", ".join(sorted(missing))
        raise SpecError(
            f"{phase} asks for {names}, which {layer.backend} serves and a layer of MLA does not; it serves "
            f"{', '.join(sorted(_SERVED))}"
        )


def _validate_prefill(spec: MLASpec, prefill: Attention) -> None:
    """Raises `SpecError` if the layer for prompts is not the expanded form of the layer for decoding."""
    own = replace(prefill.spec, block_size=None, kv_dtype="auto", kv_layout=spec.expanded.kv_layout, options=())
    own = replace(own, fnuz=spec.expanded.fnuz)
    if own != spec.expanded:
        sizes = f"{prefill.spec.num_heads} heads of {prefill.spec.head_size}/{prefill.spec.head_size_v}"
        expected = f"{spec.num_heads} heads of {spec.qk_head_dim}/{spec.v_head_dim}"
        raise SpecError(
            f"prefill is a selection for {sizes}, {prefill.spec.dtype}; the layer's prompts, expanded, have {expected} "
            f"in {spec.latent.dtype} (select for request.expanded())"
        )
