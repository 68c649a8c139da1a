"""A model runner of SGLang with requests in its pools, and what each step of them must give, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from support.stand_ins import sglang_modules as sglang

POSITIONS, REQUESTS = 192, 6


@dataclass
class Facts:
    """How a world differs from a plain one: 2 layers with 4 heads over 2 KV heads of 32, float32, pages of 16."""

    page: int = 16
    heads: tuple[int, int] = (4, 2)
    size: int = 32
    size_v: int | None = None
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    # the numbers of each layer, for `RadixAttention`
    layers: tuple[dict[str, Any], ...] = ({}, {})
    # whether layers with windows have a pool of their own
    windows_apart: bool = False
    chunk: int | None = None
    sinks: bool = False


@dataclass
class World:
    """One runner; requests grow by `extend`, `decode` and `verify`, and each returns a step to compute."""

    facts: Facts
    seed: int = 0
    # the tokens that each request has, by the row of its slots
    lens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts = self.facts
        self.noise = torch.Generator().manual_seed(self.seed)
        self.layers = self._layers()
        pages = REQUESTS * -(-POSITIONS // facts.page) + 1
        slots = pages * facts.page
        self.tokens = torch.zeros(REQUESTS + 1, POSITIONS, dtype=torch.int32)
        # page 0 is for padding
        self.order = (torch.randperm(pages - 1, generator=self.noise) + 1).tolist()
        self.pool, self.mapping = self._pool(slots, pages), None
        self.runner = SimpleNamespace(
            device="cpu",
            page_size=facts.page,
            dtype=facts.dtype,
            kv_cache_dtype=facts.cache or facts.dtype,
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.tokens),
            kv_index_translator=SimpleNamespace(is_translating=False, write_ids=self._write_ids),
            attention_chunk_size=facts.chunk,
            use_mla_backend=False,
            model_config=SimpleNamespace(
                context_len=POSITIONS, is_encoder_decoder=False, has_attention_sinks=facts.sinks
            ),
            model=nn.ModuleList(self.layers),
        )
        self.sinks = [torch.randn(facts.heads[0], generator=self.noise) if facts.sinks else None for _ in self.layers]
        # the exact keys and values of each layer and request, in the order of their positions
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def _layers(self) -> list[Any]:
        facts = self.facts
        heads, kv_heads = facts.heads
        return [
            sglang.RadixAttention(
                heads, facts.size, facts.size**-0.5, kv_heads, i, v_head_dim=facts.size_v or -1, **numbers
            )
            for i, numbers in enumerate(facts.layers)
        ]

    def _pool(self, slots: int, pages: int) -> Any:
        facts = self.facts
        shape = facts.heads[1], facts.size, facts.size_v or facts.size, facts.cache or facts.dtype
        if not facts.windows_apart:
            return sglang.MHATokenToKVPool(slots, len(self.layers), *shape)
        inside = [layer.sliding_window_size > -1 for layer in self.layers]
        counts, layers = [0, 0], {}
        for i, apart in enumerate(inside):
            layers[i] = counts[apart], apart
            counts[apart] += 1
        # whole pages have other places in the pool for windows
        other = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(pages - 1, generator=self.noise) + 1])
        mapping = (other[:, None] * facts.page + torch.arange(facts.page)).flatten()
        pools = [sglang.MHATokenToKVPool(slots, count, *shape) for count in counts]
        return sglang.SWAKVPool(pools[0], pools[1], layers, torch.cat([mapping, mapping.new_tensor([-1])]))

    def _write_ids(self, batch: Any, kind: Any) -> Tensor:
        assert kind is sglang.IdSpaceKind.SLIDING_WINDOW
        slots: Tensor = self.pool.full_to_swa_index_mapping[batch.out_cache_loc]
        return slots

    def _grow(self, request: int, queries: int) -> Tensor:
        """The slots of a request's next tokens."""
        page, begin = self.facts.page, self.lens.get(request, 0)
        for position in range(begin, begin + queries):
            if position % page == 0:
                first = self.order.pop() * page
                end = min(page, POSITIONS - position)
                self.tokens[request, position : position + end] = torch.arange(first, first + end)
        self.lens[request] = begin + queries
        return self.tokens[request, begin : begin + queries].to(torch.int64)

    def extend(self, queries: dict[int, int], mode: str = "EXTEND") -> Any:
        """A step that computes so many tokens of these requests."""
        before = [self.lens.get(request, 0) for request in queries]
        slots = torch.cat([self._grow(request, count) for request, count in queries.items()])
        lens = torch.tensor([self.lens[request] for request in queries])
        return sglang.ForwardBatch(
            forward_mode=sglang.Mode(mode), batch_size=len(queries), req_pool_indices=torch.tensor([*queries]),
            seq_lens=lens, out_cache_loc=slots, seq_lens_sum=int(lens.sum()), seq_lens_cpu=lens.clone(),
            extend_seq_lens=torch.tensor([*queries.values()], dtype=torch.int32),
            extend_prefix_lens_cpu=before, extend_seq_lens_cpu=[*queries.values()],
        )  # fmt: skip

    def decode(self, requests: list[int]) -> Any:
        """A step of one token for each of these requests."""
        batch = self.extend(dict.fromkeys(requests, 1), "DECODE")
        batch.extend_seq_lens = batch.extend_prefix_lens_cpu = batch.extend_seq_lens_cpu = None
        return batch

    def verify(self, requests: list[int], drafts: int, mask: Tensor | None, topk: int) -> Any:
        """A step that verifies drafts. mask [requests, drafts, drafts] bool; SGLang's form on a processor."""
        batch = self.extend(dict.fromkeys(requests, drafts), "TARGET_VERIFY")
        batch.extend_seq_lens = batch.extend_prefix_lens_cpu = batch.extend_seq_lens_cpu = None
        batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens - drafts, batch.seq_lens_cpu - drafts
        batch.seq_lens_sum = int(batch.seq_lens.sum())
        flat = None if mask is None else mask.flatten()
        batch.spec_info = sglang.EagleVerifyInput(flat, drafts, topk)
        return batch

    def inputs(self, batch: Any, layer: Any, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a step, as `RadixAttention` passes them on; remembers the keys and values."""
        facts, rows = self.facts, batch.out_cache_loc.shape[0]
        heads, kv_heads = facts.heads

        def random(count: int, size: int) -> Tensor:
            return torch.randn(rows, count, size, generator=self.noise).mul_(scale).to(facts.dtype)

        query, key, value = random(heads, facts.size), random(kv_heads, facts.size), random(kv_heads, layer.v_head_dim)
        begin = 0
        for request, count in zip(batch.req_pool_indices.tolist(), self._queries(batch), strict=True):
            part = slice(begin, begin + count)
            before = self.known.get((layer.layer_id, request))
            new = self._kept(key[part], layer.k_scale), self._kept(value[part], layer.v_scale)
            self.known[layer.layer_id, request] = (
                new if before is None else (torch.cat([before[0], new[0]]), torch.cat([before[1], new[1]]))
            )
            begin += count
        return query.flatten(1), key, value

    def _kept(self, rows: Tensor, scale: Any) -> Tensor:
        """Rows as the cache holds them, in float64."""
        cache = self.facts.cache or self.facts.dtype
        if cache == rows.dtype:
            return rows.double()
        factor = 1.0 if scale is None else float(scale)
        return (rows / factor).to(cache).double() * factor

    def _queries(self, batch: Any) -> list[int]:
        if batch.spec_info is not None:
            return [batch.spec_info.draft_token_num] * batch.batch_size
        return batch.extend_seq_lens_cpu or [1] * batch.batch_size

    def expected(self, batch: Any, layer: Any, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """The exact output [tokens, heads * size_v] in float64, by SGLang's own meaning of a layer's numbers."""
        out, begin = [], 0
        sinks = self.sinks[layer.layer_id]
        group = layer.tp_q_head_num // layer.tp_k_head_num
        for i, (request, count) in enumerate(zip(batch.req_pool_indices.tolist(), self._queries(batch), strict=True)):
            keys, values = (x.repeat_interleave(group, 1) for x in self.known[layer.layer_id, request])
            rows = query[begin : begin + count].view(count, layer.tp_q_head_num, -1).double()
            scores = torch.einsum("qhd,khd->hqk", rows, keys) * layer.scaling
            if layer.logit_cap:
                scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
            key_at = torch.arange(keys.shape[0])
            query_at = key_at[-count:, None]
            seen = key_at <= query_at
            if layer.sliding_window_size > -1:
                # SGLang's window leaves out the query's own position
                seen &= key_at >= query_at - layer.sliding_window_size
            if layer.use_irope and self.facts.chunk:
                seen &= key_at // self.facts.chunk == query_at // self.facts.chunk
            if mask is not None:
                seen[:, -count:] = mask[i] | torch.eye(count, dtype=torch.bool)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                column = sinks.double()[:, None, None].expand(-1, count, 1)
                weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
            begin += count
        return torch.cat(out)


def run(world: World, backend: Any, batch: Any, mask: Tensor | None = None, scale: float = 1.0) -> None:
    """Computes every layer of a step, and compares it with the exact answer."""
    backend.init_forward_metadata(batch)
    attend(world, backend, batch, mask, scale)


def attend(world: World, backend: Any, batch: Any, mask: Tensor | None = None, scale: float = 1.0) -> None:
    for layer in world.layers:
        sinks = world.sinks[layer.layer_id]
        kwargs = {} if sinks is None else {"sinks": sinks}
        query, key, value = world.inputs(batch, layer, scale)
        found = backend.forward(query, key.clone(), value.clone(), layer, batch, **kwargs)
        close(found, world.expected(batch, layer, query, mask), world.facts.dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


def trees(requests: int, drafts: int) -> Tensor:
    """Random trees: each draft sees itself, the root and a random ancestor's path."""
    noise = torch.Generator().manual_seed(3)
    mask = torch.eye(drafts, dtype=torch.bool).repeat(requests, 1, 1)
    for tree in mask:
        for node in range(1, drafts):
            tree[node] |= tree[int(torch.randint(0, node, (), generator=noise))]
    return mask


def whole_mask(batch: Any, mask: Tensor) -> Tensor:
    """SGLang's FULL_MASK: each row of a tree after a column for every token before."""
    rows = [
        torch.cat([torch.ones(mask.shape[1], int(before), dtype=torch.bool), tree], 1).flatten()
        for before, tree in zip(batch.seq_lens, mask, strict=True)
    ]
    # SGLang may give more room than the masks take
    return torch.cat([*rows, torch.zeros(77, dtype=torch.bool)])
