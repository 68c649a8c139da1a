"""Prompts of MLA in the expanded form: new tokens, their context in chunks, and the merge of these.

Each step is attention over packed keys and values that are made here, by a kernel module with the contract of
`attnreg.runtime.interface`. First the new tokens attend to each other, into the output itself. Then the context
follows, chunk by chunk. A chunk is read from the cache, dequantised and expanded into the workspace. Its requests'
queries attend to it without a mask, and the result is merged into their rows of the output. Chunks are filled request
by request: a chunk holds a part of a long context, or the contexts of several requests. The plan's order puts requests
with context first. So the rows of a chunk are consecutive, and all of them have a key in it. A token without context
takes part in no merge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnreg.runtime.batch import BatchError, BatchMetadata, tensor_words
from attnreg.runtime.interface import AttentionSpec, Call, KernelModule, SpecError
from attnreg.runtime.lengths import prefix_sums
from attnreg.runtime.mla.interface import MLASpec, latent_cache_shape, projections, read_latents, weight_problems
from attnreg.runtime.states.memory import overlap_problems
from attnreg.runtime.states.merge import merge_attn_states
from attnreg.runtime.tensors import Alike, comparison, derivative_problems, is_captured, tensor_problems
from attnreg.runtime.validation import PlaceBounds, refuse, validate_batch

# tokens of context that are expanded at once: 0.9 GiB in 16 bits with 128 heads of (128, 64, 128)
WORKSPACE_TOKENS = 8192
# features that decide which new tokens see each other; their context comes before all of them
_OF_NEW_TOKENS = frozenset({"causal_by_request", "non_causal"})


class ContextPiece(NamedTuple):
    """A part [start, stop) of the context of a request; request is its number in the plan's order."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A chunk of context: the rows [first, last) of its queries, and its tokens' places [tokens] int64 in the cache."""

    first: int
    last: int
    plan: Any
    blocks: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _ExpansionPlan:
    """The attention of a batch. rows: [tokens] int64, the batch's rows in the plan's order; None: that order already.

    places: of its keys in the cache, None if they cannot be read. state: the batch's. alike: tells whether tensors have
    the shapes and strides of the batch's.
    """

    num_tokens: int
    places: PlaceBounds | None
    rows: Tensor | None
    plan: Any
    chunks: list[_Chunk]
    state: list[Any]
    alike: Alike


def chunks_of(contexts: list[int], workspace_tokens: int) -> list[list[ContextPiece]]:
    """The pieces of each chunk, for requests with these contexts in tokens; a request without context has no piece."""
    chunks: list[list[ContextPiece]] = []
    room = 0
    for request, context in enumerate(contexts):
        start = 0
        while start < context:
            if not room:
                chunks.append([])
                room = workspace_tokens
            stop = min(context, start + room)
            chunks[-1].append(ContextPiece(request, start, stop))
            room -= stop - start
            start = stop
    return chunks


class ExpandedPrompts:
    """Computes a batch's requests in the expanded form (`attnreg.runtime.mla.interface`).

    module: the kernel module for prompts. kv_b_proj: kept without a copy, so weights may be loaded into it later.
    kv_scale: the scale of an 8-bit cache, one float32. workspace_tokens: how many tokens of context are expanded at
    once, at least a block of the cache. Raises `SpecError`.
    """

    def __init__(
        self,
        spec: MLASpec,
        module: KernelModule,
        kv_b_proj: Tensor,
        *,
        kv_scale: Tensor | None = None,
        workspace_tokens: int = WORKSPACE_TOKENS,
    ) -> None:
        projections(spec, kv_b_proj)
        block_size = spec.latent.block_size or 1
        if type(workspace_tokens) is not int or workspace_tokens < block_size:
            raise SpecError(
                f"workspace_tokens is {workspace_tokens!r}; expected an integer of at least {block_size}, the tokens "
                "of a block of the cache"
            )
        self.spec, self.module, self.kv_b_proj, self.kv_scale = spec, module, kv_b_proj, kv_scale
        self.workspace_tokens = workspace_tokens
        self.new_tokens: AttentionSpec = spec.expanded
        # a chunk's keys lie elsewhere than its queries: kernels must not compare their positions
        features = spec.expanded_features - _OF_NEW_TOKENS
        self.context = replace(spec.expanded, attn_type="encoder_decoder", features=features)
        self._key = (ExpandedPrompts, spec, module, workspace_tokens)

    def __call__(
        self,
        query: Tensor,
        latent: Tensor,
        rope: Tensor,
        cache: Tensor,
        batch: BatchMetadata,
        output: Tensor,
        *,
        lse: Tensor | None = None,
    ) -> None:
        """Writes the output, and the lse, of every query of the batch: context in chunks, new tokens, and the merge.

        query [tokens, num_heads, qk_head_dim], latent [tokens, kv_lora_rank] and rope [tokens, qk_rope_head_dim] have
        the batch's tokens as rows. The cache [num_blocks, block_size, width] holds their latents already. output
        [tokens, num_heads, v_head_dim]; lse [num_heads, tokens] float32, written to if it is given.

        Raises `BatchError` before anything is launched, in three cases. A tensor does not fit. There is context, and
        the backend was not asked for its lse. A CUDA graph is being captured: the host's lengths make the chunks.
        """
        if not isinstance(batch, BatchMetadata) or batch.block_table is None:
            raise BatchError([f"batch is {tensor_words(batch)}, without a block_table; prompts of MLA have a cache"])
        if is_captured(batch.seq_lens):
            refuse(["a CUDA graph is being captured, and the chunks of a context are those of the host's lengths"])
        # the rest computes with the batch's lengths, so they are validated first
        plan = self._planned(batch)
        self._validate(query, latent, rope, cache, batch, output, lse)
        block_size = self.spec.latent.block_size or 1
        refuse([] if plan.places is None else [*plan.places._replace(slot=-1).problems(cache.shape[0], block_size)])
        n, rows = plan.num_tokens, plan.rows
        if not n:
            return
        if rows is None:
            self._attend(plan, query[:n], latent[:n], rope[:n], cache, output, lse)
            return
        ordered = query.new_empty(n, *output.shape[1:])
        ordered_lse = None if lse is None else lse.new_empty(lse.shape[0], n)
        self._attend(plan, query[rows], latent[rows], rope[rows], cache, ordered, ordered_lse)
        output.index_copy_(0, rows, ordered)
        if lse is not None and ordered_lse is not None:
            lse.index_copy_(1, rows, ordered_lse)

    def _validate(self, query: Any, latent: Any, rope: Any, cache: Any, batch: Any, output: Any, lse: Any) -> None:
        spec, dtype = self.spec, self.spec.latent.dtype
        device = batch.seq_lens.device
        places: dict[str, Any] = {"device": device}
        cache_shape, cache_dtype = latent_cache_shape(spec.latent, 0)
        problems = [
            *weight_problems(spec, self.kv_b_proj, device),
            *tensor_problems("query", query, (None, spec.num_heads, spec.qk_head_dim), dtype, **places),
            *tensor_problems("latent", latent, (None, spec.kv_lora_rank), dtype, **places),
            *tensor_problems("rope", rope, (None, spec.qk_rope_head_dim), dtype, **places),
            *tensor_problems("cache", cache, (None, *cache_shape[1:]), cache_dtype, **places),
            *tensor_problems("output", output, (None, spec.num_heads, spec.v_head_dim), dtype, written=True, **places),
        ]
        if self.kv_scale is not None:
            one = () if isinstance(self.kv_scale, Tensor) and self.kv_scale.ndim == 0 else (1,)
            problems += tensor_problems("kv_scale", self.kv_scale, one, torch.float32, **places)
        if lse is not None:
            sizes = spec.num_heads, None
            problems += tensor_problems("lse", lse, sizes, torch.float32, dense=False, written=True, **places)
        if not problems:
            tokens = batch.num_tokens
            named = {"query": query, "latent": latent, "rope": rope, "output": output}
            problems += [
                f"{name} has {x.shape[0]} rows; the batch has {tokens} tokens"
                for name, x in named.items()
                if x.shape[0] < tokens
            ]
            if lse is not None and lse.shape[1] < tokens:
                problems.append(f"lse has {lse.shape[1]} columns; the batch has {tokens} tokens")
        refuse(problems)
        written = {"output": output} | ({} if lse is None else {"lse": lse})
        # the new tokens' output is written before chunks of context read the queries
        read = {"query": query, "latent": latent, "rope": rope, "cache": cache}
        refuse([*overlap_problems(written, read)])
        whole = {**read, **written, "kv_b_proj": self.kv_b_proj}
        refuse(derivative_problems([*whole.values()], lambda: [*whole]))

    def _attend(
        self,
        plan: _ExpansionPlan,
        query: Tensor,
        latent: Tensor,
        rope: Tensor,
        cache: Tensor,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attends for queries in the plan's order; output and lse may have padding after them."""
        heads, size_v = self.spec.num_heads, self.spec.v_head_dim
        n = plan.num_tokens
        # kernels write a contiguous lse
        own_lse = plan.chunks if lse is None else not lse.is_contiguous()
        state_lse = query.new_empty(heads, n, dtype=torch.float32) if own_lse else lse
        key, value = self._expand(latent, rope, *self._memory(query, n))
        self._run(self.new_tokens, plan.plan, query, key, value, output, state_lse)
        del key, value
        if plan.chunks:
            assert state_lse is not None
            workspace = self._memory(query, max(len(chunk.blocks) for chunk in plan.chunks))
            most = max(chunk.last - chunk.first for chunk in plan.chunks)
            part_memory = query.new_empty(most * heads * size_v)
            lse_memory = query.new_empty(most * heads, dtype=torch.float32)
            for chunk in plan.chunks:
                rows = chunk.last - chunk.first
                part = part_memory[: rows * heads * size_v].view(rows, heads, size_v)
                part_lse = lse_memory[: heads * rows].view(heads, rows)
                c, r = self._context(cache, chunk, query.dtype)
                key, value = self._expand(c, r, *workspace)
                own = slice(chunk.first, chunk.last)
                self._run(self.context, chunk.plan, query[own], key, value, part, part_lse)
                out, out_lse = output[own], state_lse[:, own]
                merge_attn_states(out, part, part_lse, out, out_lse, out_lse)
        if lse is not None and state_lse is not lse:
            assert state_lse is not None
            lse[:, :n] = state_lse

    def _run(
        self,
        spec: AttentionSpec,
        plan: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        self.module.forward(spec, plan, Call(query, None, output, key, value, lse))

    def _memory(self, query: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Uninitialised memory for the keys of this many tokens, and for the result of kv_b_proj."""
        heads = self.spec.num_heads
        return (
            query.new_empty(tokens, heads, self.spec.qk_head_dim),
            query.new_empty(tokens, heads * (self.spec.qk_nope_head_dim + self.spec.v_head_dim)),
        )

    def _expand(self, latent: Tensor, rope: Tensor, keys: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of latents [n, kv_lora_rank] and rotary parts [n, rope], in the given memory."""
        n, nope = latent.shape[0], self.spec.qk_nope_head_dim
        torch.mm(latent, self.kv_b_proj.detach().t(), out=made[:n])
        parts, key = made[:n].view(n, self.spec.num_heads, -1), keys[:n]
        key[..., :nope] = parts[..., :nope]
        key[..., nope:] = rope[:, None]
        return key, parts[..., nope:]

    def _context(self, cache: Tensor, chunk: _Chunk, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The latents and rotary parts of a chunk, dequantised, in the layer's dtype."""
        # PyTorch cannot index 8-bit floats on every device
        bytes_ = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        rows = bytes_[chunk.blocks, chunk.offsets].view(cache.dtype)
        read = read_latents(self.spec.latent, rows, self.kv_scale).to(dtype)
        rank = self.spec.kv_lora_rank
        return read[:, :rank], read[:, rank:]

    def plan(self, batch: BatchMetadata) -> None:
        """Makes the plan of a batch. Raises `BatchError` for context if the backend was not asked for its lse."""
        self._planned(batch)

    def _planned(self, batch: BatchMetadata) -> _ExpansionPlan:
        """The plan of a batch as it is now, made once for all layers with equal specs."""
        plan: _ExpansionPlan | None = batch.plans.get(self._key)
        if plan is None or not plan.alike(*batch.given) or plan.state != batch.state():
            # a tensor may have been resized in place
            batch.watch()
            plan = batch.plans[self._key] = self._make_plan(batch)
        return plan

    def _make_plan(self, batch: BatchMetadata) -> _ExpansionPlan:
        places, given = validate_batch(self.spec.latent, batch).places, batch
        if not batch.on_host and not getattr(self.module, "CAPTURABLE", False):
            # a module that no graph can capture takes the number of packed keys from the host
            batch = replace(batch, seq_lens_cpu=batch.seq_lens.cpu())
        starts, lengths = batch.host_starts.tolist(), batch.host_lens.tolist()
        queries = [last - first for first, last in pairwise(starts)]
        # a request without queries has nothing to compute
        contexts = [max(0, k - q) if q else 0 for k, q in zip(lengths, queries, strict=True)]
        order = sorted(range(len(queries)), key=lambda i: not contexts[i])
        pieces = chunks_of([contexts[i] for i in order], self.workspace_tokens)
        if pieces and "lse" not in self.new_tokens.features:
            refuse(["a request has context, which is merged by an lse that the backend for prompts was not asked for"])
        rows, new = None, _new_tokens(batch)
        if order != sorted(order):
            host_rows = [row for i in order for row in range(starts[i], starts[i + 1])]
            rows = torch.tensor(host_rows, dtype=torch.int64, device="cpu").to(batch.seq_lens.device, non_blocking=True)
            new = _in_order(new, order)
        return _ExpansionPlan(
            num_tokens=batch.num_tokens,
            places=places,
            rows=rows,
            plan=self.module.plan(self.new_tokens, new),
            chunks=[self._chunk(batch, order, queries, chunk) for chunk in pieces],
            state=given.state(),
            alike=comparison(given.given),
        )

    def _chunk(self, batch: BatchMetadata, order: list[int], queries: list[int], pieces: list[ContextPiece]) -> _Chunk:
        """A chunk of context. Where the host knows only upper bounds of contexts, the device's lengths are right."""
        device, block_size = batch.seq_lens.device, self.spec.latent.block_size
        assert batch.block_table is not None
        assert block_size is not None
        first = sum(queries[i] for i in order[: pieces[0].request])
        owners = [order[piece.request] for piece in pieces]
        query_lens, key_lens = [queries[i] for i in owners], [piece.stop - piece.start for piece in pieces]
        chunk = BatchMetadata.build(query_lens, key_lens, device=device, causal=False)
        keys = sum(key_lens)
        # one transfer for all numbers of the host
        host = torch.tensor([owners, [piece.start for piece in pieces], key_lens], dtype=torch.int64, device="cpu")
        request, start, length = host.to(device, non_blocking=True).unbind()
        context = (batch.seq_lens - batch.query_start_loc.diff())[request].long()
        if not batch.on_host:
            # the device may have fewer keys; they follow each other without gaps all the same
            length = torch.minimum((context - start).clamp(min=0), length)
        ends = length.cumsum(0)
        if not batch.on_host:
            chunk = replace(chunk, seq_lens=length.int(), key_start_loc=pad(ends, (1, 0)).int())
        row = torch.arange(keys, device=device)
        piece = torch.searchsorted(ends, row, right=True).clamp(max=len(pieces) - 1)
        position = row + (start - ends + length)[piece]
        # rows past the last key are read too, but the kernel does not see them
        position = torch.minimum(position, (context - 1).clamp(min=0)[piece])
        block = batch.block_table[request[piece], position // block_size].long()
        if not batch.on_host:
            block = block.masked_fill((context <= 0)[piece], 0)
        return _Chunk(
            first=first,
            last=first + sum(query_lens),
            plan=self.module.plan(self.context, chunk),
            blocks=block,
            offsets=position % block_size,
        )


def _new_tokens(batch: BatchMetadata) -> BatchMetadata:
    """The new tokens of a batch as queries and keys, without a cache; padding has no keys."""
    queries, host_queries = batch.query_start_loc.diff(), batch.host_starts.diff()
    return BatchMetadata(
        query_start_loc=batch.query_start_loc,
        seq_lens=torch.minimum(batch.seq_lens, queries),
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_query_len,
        query_start_loc_cpu=batch.host_starts,
        seq_lens_cpu=torch.minimum(batch.host_lens, host_queries),
        causal=batch.causal,
    )


def _in_order(batch: BatchMetadata, order: list[int]) -> BatchMetadata:
    """The new tokens of a batch, with its requests in another order."""
    host = torch.tensor(order, dtype=torch.int64, device="cpu")
    device = host.to(batch.seq_lens.device, non_blocking=True)
    sums = prefix_sums(batch.host_starts.diff()[host].tolist())
    host_starts = torch.tensor(sums, dtype=torch.int32, device="cpu")
    causal = batch.causal
    return replace(
        batch,
        query_start_loc=host_starts.to(device.device, non_blocking=True),
        seq_lens=batch.seq_lens[device],
        query_start_loc_cpu=host_starts,
        seq_lens_cpu=batch.seq_lens_cpu[host],
        causal=causal[device] if isinstance(causal, Tensor) else causal,
    )
