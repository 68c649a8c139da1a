"""ContextParallel: attention whose KV cache is sharded by token over the ranks of a process group.

Every rank has all queries and this step's new keys and values. Of the earlier keys, the context, it has its shard. A
step does four things on each rank:

1. It attends to its shard of the context, without a mask, because the context comes before every query.
2. It sends the output and LSE to the other ranks, in one collective.
3. Meanwhile it writes its own share of the new keys to the cache. It also attends to all new keys, which lie in a small
   cache of their own; this attention has the mask of the batch and the sinks.
4. It merges the states of all ranks with the state of the new keys.

So any backend that has an lse serves, by the contract of `attnreg.runtime.interface`, and no kernel knows of ranks.
This includes MLA in its latent form.

ALiBi, chunks and mm_prefix are not served: they compare query positions with positions in the context. A window is
served by copying each query's part of the shard. Such a layer is better left unsharded, because it needs few keys.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.runtime.arguments import Work, slots_problems
from attnreg.runtime.batch import BatchError, BatchMetadata, tensor_words
from attnreg.runtime.interface import Call, KVCache, SpecError, by_token
from attnreg.runtime.layer import Attention
from attnreg.runtime.parallel.batch import ShardedBatch, Window, shard
from attnreg.runtime.parallel.exchange import Exchange, Message
from attnreg.runtime.parallel.shards import Shards
from attnreg.runtime.spec import AttentionSpec
from attnreg.runtime.states.memory import overlap_problems
from attnreg.runtime.tensors import named, tensor_problems
from attnreg.runtime.validation import refuse, validate_batch
from attnreg.selection.refusal import NoBackendError
from attnreg.selection.selector import evaluate

# features that compare the positions of keys in the context with those of queries
_REFUSED = ("alibi", "chunk", "mm_prefix")
# features that one computation has alone: the attention to the new keys, or the merge
_ONCE = frozenset({
    "sinks", "fp8_output", "sliding_window", "asymmetric_window", "tree_mask", "causal_by_request", "non_causal",
})  # fmt: skip
# replaces an LSE of +inf before the merge: it is so large that no other state has any weight beside it
_MOST = torch.finfo(torch.float32).max


# Compilers do not trace into it. What they make of a traced error depends on the release: torch 2.11 fails with its own
# error, and 2.15 runs the call without raising anything
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_graph() -> None:
    raise BatchError(["ContextParallel is no part of a compiled graph; call torch.compiler.disable(parallel)"])


class ContextParallel:
    """The attention of a layer over a KV cache that the ranks of a group share.

    layer: the attention of the whole cache. group: a group of torch.distributed; None: all processes. interleave: how
    many consecutive tokens a rank gets at a time (`attnreg.runtime.parallel.shards`); it divides block_size. by_head:
    the ranks share the query heads, as under tensor parallelism, and ``layer`` has the heads of this rank alone. Every
    rank has equally many heads, and all of them read the same KV heads, which every rank has.

    The constructor is a collective call. Raises `SpecError` if ranks differ, or for a layer that cannot be sharded;
    `NoBackendError` if the layer's backend has no lse.
    """

    def __init__(self, layer: Attention, group: Any = None, *, interleave: int = 1, by_head: bool = False) -> None:
        self.layer, self.exchange = layer, Exchange(group, by_head=by_head)
        problem: Exception | None = None
        try:
            self._prepare(interleave)
        except (SpecError, NoBackendError) as e:
            problem = e
        self.exchange.agree({**_facts(layer), "interleave": interleave, "by_head": by_head}, problem)

    def _prepare(self, interleave: int) -> None:
        spec = self.layer.spec
        self.shards = Shards(self.exchange.rank, self.exchange.world_size, interleave)
        self.block_size = self.shards.validate_block_size(spec.block_size)
        self.left = spec.sides(causal=True)[0]
        refuse_unshardable(spec)
        if self.left >= 0 and spec.kv_layout == "SPLIT":
            raise SpecError("kv_layout is SPLIT, and the layer has a window, whose keys are copied in NHD or HND alone")
        if self.left >= 0 and spec.packed is not None:
            raise SpecError(f"kv_dtype is {spec.kv_dtype}, and the layer has a window; pages of codes are not copied")
        self.step = _part(self.layer, (spec.features - {"fp8_output"}) | {"lse"}, "decoder")
        ranks = self.exchange.world_size if self.exchange.by_head else 1
        features = (spec.features - _ONCE) | {"lse"}
        try:
            # a backend that takes keys of other tokens serves several queries of a request at once
            self.context = _part(self.layer, features, "encoder_decoder", ranks)
        except (NoBackendError, SpecError):
            self.context = _part(self.layer, features, "decoder", ranks)
        # each copy of a window belongs to one query
        self.windows = _part(self.layer, features, "decoder", ranks) if self.left >= 0 else self.context

    @property
    def kind(self) -> tuple[object, ...]:
        """A key: layers with equal kinds may use the same `ShardedBatch`."""
        return self.shards, self.block_size, self.left, self.context.spec.attn_type

    def shard(self, batch: BatchMetadata, *, slots: bool = False) -> ShardedBatch:
        """The batch of a step on this rank, for all layers of a KV-cache group whose `kind` is the same.

        batch: the batch of all ranks, with the block table that they share, and ``seq_lens`` that count the keys
        of all ranks. slots: the batch's slot_mapping says where the new keys go in this rank's cache, -1 for keys of
        other ranks. Without ``slots``, slot_mapping is not read: the new keys' positions decide. The call does not
        wait for the device. Raises `BatchError`.
        """
        if not isinstance(batch, BatchMetadata):
            raise BatchError([f"batch is {tensor_words(batch)}; expected BatchMetadata"])
        table = batch.block_table
        if table is None:
            raise BatchError(["block_table is None; a cache that ranks share is paged"])
        if batch.mm_prefix is not None:
            raise BatchError(["mm_prefix is given; its ranges hold positions of other ranks, which is not served"])
        # a shared block holds the tokens of one block on each rank
        tokens = validate_batch(
            replace(self.layer.spec, block_size=self.block_size * self.shards.world_size), batch
        ).tokens
        by_query, mapping = self.context.spec.attn_type == "decoder", batch.slot_mapping if slots else None
        if slots and mapping is None:
            raise BatchError(["slot_mapping is None; with slots=True it says where this rank's new keys go"])
        refuse([] if mapping is None else [*slots_problems(mapping.shape[0], tokens)])
        sharded = shard(
            batch, table, self.shards, self.block_size, left=self.left, by_query=by_query, slot_mapping=mapping
        )
        return replace(sharded, kind=self.kind)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: KVCache,
        batch: ShardedBatch,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Writes this rank's share of the new keys and values, attends to all ranks' keys, and returns the output.

        query, key, value, output and lse are the layer's, as `Attention.forward` takes them. key and value are the same
        on every rank; kv_cache is the rank's shard. A collective call. On CUDA a graph can capture it, if the graph
        also captures `shard`. Compiled models call ``torch.compiler.disable(parallel)``. Raises `BatchError`, also
        while a compiler traces.
        """
        if torch.compiler.is_compiling():
            # a compiler would move the collective, and keep the lengths of this step
            _refuse_graph()
        problem: ValueError | None = None
        try:
            output = self._output(query, batch, output, lse)
            calls = self._calls(query, key, value, kv_cache, batch, output, lse)
            # the ranks' calls write to memory of their own; only the merge writes to the caller's
            written = {"output": output} if lse is None else {"output": output, "lse": lse}
            read = {"query": query, "key": key, "value": value}
            refuse([*overlap_problems(written, {**read, "kv_cache.key": kv_cache[0], "kv_cache.value": kv_cache[1]})])
        except ValueError as e:
            problem = e
        device = query.device if isinstance(query, Tensor) else torch.device("cpu")
        call = {"tokens": getattr(batch, "tokens", None), "query": tensor_words(query)}
        self.exchange.validate(device, call, problem)
        assert output is not None
        if batch.tokens == 0:
            return output
        calls.written.run()
        if calls.shared is None:
            calls.step.run()
            return output
        shared, kv_heads = calls.shared, self.layer.spec.num_kv_heads
        if shared.query is not None:
            self.exchange.gather(calls.step.given.query, shared.query, kv_heads)
        if batch.window is not None:
            self._copy(kv_cache, shared.copies, batch.window)
        shared.context.run()
        # while the states of the ranks are on their way, each rank computes its own part
        pending = self.exchange.start(shared.message, kv_heads)
        calls.step.run()
        if self.layer.params.sinks is not None:
            # a sink of +inf takes all the weight, but the merge takes an LSE of +inf for an empty state
            calls.own_lse.clamp_(max=_MOST)
        merged, merged_lse = self._by_head(output)[: batch.tokens], None if lse is None else lse[:, : batch.tokens]
        pending.merge(merged, merged_lse, calls.own, calls.own_lse, self.layer.params.out_scale)
        if merged_lse is not None and self.layer.params.sinks is not None:
            merged_lse.masked_fill_(merged_lse == _MOST, torch.inf)
        return output

    __call__ = forward

    def _calls(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: KVCache,
        batch: ShardedBatch,
        output: Tensor,
        lse: Tensor | None,
    ) -> _Calls:
        """The validated calls of this rank, with memory for their results."""
        spec, device, tokens = self.layer.spec, query.device, batch.tokens
        written = _RankCall.of(self.context, batch.context, None, key, value, kv_cache)
        cache = self.step.new_kv_cache(batch.step_blocks, device)
        # without context the new keys are all keys, and every rank has them: no exchange is needed
        if batch.begins and spec.output_dtype == spec.dtype:
            if lse is None:
                lse = torch.empty(spec.num_heads, query.shape[0], dtype=torch.float32, device=device)
            step = _RankCall.of(self.step, batch.step, query, key, value, cache, output, lse)
            return _Calls(written, step, output, lse, None)
        query = query[:tokens]
        own = torch.empty(tokens, spec.num_heads, spec.head_size_v, dtype=spec.dtype, device=device)
        own_lse = torch.empty(spec.num_heads, tokens, dtype=torch.float32, device=device)
        step = _RankCall.of(self.step, batch.step, query, key, value, cache, own, own_lse)
        return _Calls(written, step, own, own_lse, self._shared(query, kv_cache, batch))

    def _shared(self, query: Tensor, kv_cache: KVCache, batch: ShardedBatch) -> _SharedContext:
        """The validated call for this rank's part of the context, with memory for what ranks send each other."""
        spec, device, tokens = self.context.spec, query.device, batch.tokens
        message = Message.of(tokens, spec.num_heads, spec.head_size_v, spec.dtype, device)
        states, whole = (message.output, message.lse), None
        if self.exchange.by_head:
            query = whole = query.new_empty(tokens, spec.num_heads, spec.head_size)
        if batch.window is None:
            context, copies = _RankCall.of(self.context, batch.context, query, None, None, kv_cache, *states), kv_cache
        else:
            copies = self.windows.new_kv_cache(batch.window.num_blocks, device)
            context = _RankCall.of(self.windows, batch.window.batch, query, None, None, copies, *states)
        return _SharedContext(whole, message, copies, context)

    def _output(self, query: Tensor, batch: Any, output: Tensor | None, lse: Tensor | None) -> Tensor:
        """The output, validated, or new memory for it."""
        if not isinstance(batch, ShardedBatch):
            raise BatchError([f"batch is {tensor_words(batch)}; expected a ShardedBatch, as `shard` returns it"])
        if batch.kind != self.kind:
            made, own = _kind_words(*batch.kind), _kind_words(*self.kind)
            raise BatchError([f"batch is a shard for {made}; this layer has {own}: take one of a layer of its kind"])
        spec = self.layer.spec
        output = self.layer.new_output(query) if output is None else output
        if not isinstance(query, Tensor) or not query.ndim:
            raise BatchError([f"query is {tensor_words(query)}; expected a tensor with a row for each token"])
        rows = query.shape[0]
        places: dict[str, Any] = {"device": query.device, "beside": "query", "dense": False, "written": True}
        shape = rows, spec.num_heads, spec.head_size_v
        problems = [*tensor_problems("output", self._by_head(output), shape, spec.output_dtype, **places)]
        if lse is not None:
            problems += tensor_problems("lse", lse, (spec.num_heads, rows), torch.float32, **places)
        refuse(problems)
        return output

    def _by_head(self, output: Any) -> Any:
        """An output as [tokens, heads, size]; anything else unchanged, for validation to report."""
        count = self.layer.spec.num_heads
        if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] % count:
            return output
        return output.view(output.shape[0], count, output.shape[1] // count)

    def _copy(self, kv_cache: KVCache, copies: KVCache, window: Window) -> None:
        """Copies the keys and values of each query's window to blocks of its own."""
        layout = self.layer.spec.kv_layout
        for source, target in zip(by_token(kv_cache, layout), by_token(copies, layout), strict=True):
            if source.dtype.itemsize == 1:
                # PyTorch can index bytes, but no 8-bit floats
                source, target = source.view(torch.uint8), target.view(torch.uint8)
            target.copy_(source[window.blocks, window.offsets].view(target.shape))


def refuse_unshardable(spec: AttentionSpec) -> None:
    """Raises `SpecError` for a layer whose cache ranks cannot share, with any backend."""
    for feature in _REFUSED:
        if feature in spec.features:
            raise SpecError(
                f"the layer has {feature}, which compares queries with positions in their context; ranks that "
                "share a cache have only a part of these positions each"
            )
    if spec.sparse:
        raise SpecError(
            "the layer is of sparse MLA, whose indices name tokens of the whole context; a rank has only a part of it"
        )
    if spec.attn_type != "decoder":
        raise SpecError(f"attn_type is {spec.attn_type}; ranks share the cache of a decoder")


class _RankCall(NamedTuple):
    """A call of a layer, validated: what was planned for its batch, whether it writes keys, and its tensors."""

    layer: Attention
    planned: Any
    writes: bool
    given: Any

    @classmethod
    def of(
        cls,
        layer: Attention,
        batch: BatchMetadata,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache,
        output: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> _RankCall:
        planned = layer._planned(batch)
        work = Work(write=key is not None or query is None, attend=query is not None)
        given = named(Call, (query, kv_cache, output, key, value, lse, layer.params, None, None))
        if lse is not None:
            layer._refuse_lse()
        return cls(layer, planned, work.write, planned.fit.call(work, given))

    def run(self) -> None:
        """Writes the new keys and values, and attends."""
        self.layer._execute(self.planned, self.writes, self.given)


class _SharedContext(NamedTuple):
    """The call for this rank's part of the context, which writes the states of the message.

    query: memory for the queries of all ranks; None if each rank has all queries. copies: the cache that it reads.
    """

    query: Tensor | None
    message: Message
    copies: KVCache
    context: _RankCall


class _Calls(NamedTuple):
    """The calls of one rank: ``step`` attends to the new keys and writes ``own`` and ``own_lse``.

    written: writes the new keys that are the rank's. shared: attends to the context; None if there is no context.
    """

    written: _RankCall
    step: _RankCall
    own: Tensor
    own_lse: Tensor
    shared: _SharedContext | None


def _part(layer: Attention, features: frozenset[str], attn_type: str, ranks: int = 1) -> Attention:
    """The layer with these features, and with ``ranks`` times its heads.

    Raises `NoBackendError` if its backend does not serve them.
    """
    selection, params, num_heads = layer.selection, layer.params, layer.spec.num_heads * ranks
    request = replace(selection.request, features=features, attn_type=attn_type, num_heads=num_heads)
    spec = replace(
        layer.spec,
        features=features,
        attn_type=attn_type,
        num_heads=num_heads,
        sliding_window=layer.spec.sliding_window if "sliding_window" in features else None,
        asymmetric_window=layer.spec.asymmetric_window if "asymmetric_window" in features else None,
    )
    params = replace(
        params,
        sinks=params.sinks if "sinks" in features else None,
        out_scale=params.out_scale if "fp8_output" in features else None,
    )
    return Attention(evaluate(request, selection.platform, selection.registry, layer.backend), spec, params)


def _kind_words(shards: Any = None, block_size: Any = None, left: Any = -1, attn_type: Any = None) -> str:
    """A `ContextParallel.kind` in words."""
    keys = "all keys" if left < 0 else f"a window of {left} keys before the query's own"
    return f"{shards} with blocks of {block_size} tokens, {keys}, {attn_type}"


def _facts(layer: Attention) -> dict[str, str]:
    """The facts of a layer that must be equal on all ranks, as text."""
    spec = {field.name: getattr(layer.spec, field.name) for field in fields(layer.spec)}
    return {"backend": layer.backend, **{k: str(sorted(v) if k == "features" else v) for k, v in spec.items()}}
