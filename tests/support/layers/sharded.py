"""Layers whose cache is sharded over ranks, beside the same layer on one; the functions that ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attnreg
from attnreg import AttentionRequest, BatchMetadata, Platform
from attnreg.runtime.layer import Attention
from attnreg.runtime.parallel.attention import ContextParallel


@dataclass(frozen=True)
class Case:
    """A layer, and the steps that it computes one after the other: the queries and the keys of each request."""

    steps: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    backend: str = "CPU_ATTN"
    platform: dict[str, str] = field(default_factory=lambda: {"platform": "cpu", "arch": "x86_64"})
    request: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    interleave: int = 1
    # each rank has an equal part of the heads of every KV head
    by_head: bool = False
    # of every step; None: as the request has it
    causal: Any = True
    tree: bool = False
    # rows of query past the batch's tokens
    padding: int = 0


PLAIN = {"head_size": 16, "num_heads": 4, "num_kv_heads": 2, "dtype": "float32", "block_size": 4}


def own_heads(case: Case, rank: int, world: int) -> list[int]:
    """The heads of the whole that a rank has."""
    num_heads, kv_heads = ({**PLAIN, **case.request}[name] for name in ("num_heads", "num_kv_heads"))
    if not case.by_head:
        return list(range(num_heads))
    each, group = num_heads // kv_heads // world, num_heads // kv_heads
    return [kv * group + rank * each + i for kv in range(kv_heads) for i in range(each)]


def layer_of(case: Case, *, seed: int = 0, heads: list[int] | None = None) -> Attention:
    """The layer of a case, or of some of its heads; its sinks are the same wherever they are made."""
    request = AttentionRequest(**{**PLAIN, **case.request, **({} if heads is None else {"num_heads": len(heads)})})
    registry = attnreg.load_registry("default")
    selection = attnreg.select(request, Platform(**case.platform), registry, case.backend)
    generator = torch.Generator().manual_seed(seed)
    # a tuple is the shape of random numbers, a list the numbers themselves
    tensors = {tuple: lambda shape: torch.rand(shape, generator=generator), list: torch.tensor}
    made = {
        name: tensors[type(value)](value).to(case.device) if type(value) in tensors else value
        for name, value in case.numbers.items()
    }
    if heads is not None and "sinks" in made:
        made["sinks"] = made["sinks"][heads]
    return Attention.from_selection(selection, **made)


def inputs(
    case: Case, layer: Attention, step: int, tokens: int, heads: list[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The query, key and value of a step, the same on every rank; of latents, the two parts of the key.

    heads: of the whole, those whose queries are given.
    """
    spec = layer.spec
    generator = torch.Generator().manual_seed(step)
    values = spec.head_size_v
    sizes = (values, spec.head_size - values) if spec.latent else (spec.head_size, values)
    num_heads = {**PLAIN, **case.request}["num_heads"]
    shapes = [(num_heads, spec.head_size), *((spec.num_kv_heads, size) for size in sizes)]
    made = [torch.randn(tokens + case.padding, *shape, generator=generator) for shape in shapes]
    if heads is not None:
        made[0] = made[0][:, heads]
    return tuple(x.to(case.device, dtype=spec.dtype) for x in made)  # type: ignore[return-value]


def batch_of(case: Case, block: int, queries: Sequence[int], keys: Sequence[int], *, step: int, slots: bool) -> Any:
    """The batch of a step with the block table of a cache whose blocks hold ``block`` tokens each, in random order."""
    requests = max(len(keys) for _, keys in case.steps)
    most = max(max(keys) for _, keys in case.steps)
    columns = -(-most // block)
    order = torch.randperm(requests * columns, generator=torch.Generator().manual_seed(7)).int()
    table = order.view(requests, columns)[: len(keys)]
    mapping = []
    for i, (count, end) in enumerate(zip(queries, keys, strict=True)):
        positions = torch.arange(end - count, end)
        mapping.append(table[i, positions // block].long() * block + positions % block)
    tree = None
    if case.tree:
        tree = torch.rand(sum(queries), max(queries), generator=torch.Generator().manual_seed(step)) < 0.5
    return BatchMetadata.build(
        queries, keys, device=case.device, block_table=table.to(case.device), causal=case.causal,
        slot_mapping=torch.cat(mapping).to(case.device) if slots else None,
        tree_mask=None if tree is None else tree.to(case.device),
    )  # fmt: skip


def poisoned_cache(layer: Attention, blocks: int, device: str) -> Any:
    cache = layer.new_kv_cache(blocks, device)
    for x in cache:
        x.view(torch.uint8).fill_(0x7F)
    return cache


def alone(case: Case) -> list[tuple[Tensor, Tensor]]:
    """The output and the LSE of each step, by the layer on one device."""
    layer, found, cache = layer_of(case), [], None
    block = layer.spec.block_size
    assert block is not None
    for step, (queries, keys) in enumerate(case.steps):
        batch = batch_of(case, block, queries, keys, step=step, slots=True)
        if cache is None:
            rows = max(len(keys) for _, keys in case.steps) * -(-max(max(keys) for _, keys in case.steps) // block)
            cache = poisoned_cache(layer, rows, case.device)
        query, key, value = inputs(case, layer, step, sum(queries))
        lse = torch.full((layer.spec.num_heads, len(query)), torch.nan, device=case.device)
        output = layer(query, key[: sum(queries)], value[: sum(queries)], cache, batch, lse=lse)
        found.append((output[: sum(queries)].float().cpu(), lse[:, : sum(queries)].cpu()))
    return found


def sharded(rank: int, case: Case) -> list[tuple[Tensor, Tensor]]:
    """The same on one rank of several. Rows past the batch's tokens must stay as they are."""
    heads = own_heads(case, rank, dist.get_world_size())
    layer = layer_of(case, heads=heads)
    parallel = ContextParallel(layer, interleave=case.interleave, by_head=case.by_head)
    world = parallel.shards.world_size
    block = (layer.spec.block_size or 0) * world
    requests, most = (max(f(keys) for _, keys in case.steps) for f in (len, max))
    cache = poisoned_cache(layer, requests * -(-most // block), case.device)
    found = []
    for step, (queries, keys) in enumerate(case.steps):
        batch = parallel.shard(batch_of(case, block, queries, keys, step=step, slots=False))
        query, key, value = inputs(case, layer, step, sum(queries), heads)
        output = torch.full((len(query), len(heads), layer.spec.head_size_v), 7.0, device=case.device)
        output = output.to(layer.spec.output_dtype)
        lse = torch.full((len(heads), len(query)), 7.0, device=case.device)
        assert parallel(query, key, value, cache, batch, output, lse=lse) is output
        tokens = sum(queries)
        assert (output[tokens:].float() == 7).all()
        assert (lse[:, tokens:] == 7).all()
        found.append((output[:tokens].float().cpu(), lse[:, :tokens].cpu()))
    return found


def replayed(rank: int, case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """The output of each step on a GPU, computed as it is, and by a graph that was captured with the first step.

    All steps have as many queries; a step's numbers are copied into the batch of the capture.
    """
    heads = own_heads(case, rank, dist.get_world_size())
    layer = layer_of(case, heads=heads)
    parallel = ContextParallel(layer, interleave=case.interleave, by_head=case.by_head)
    block = (layer.spec.block_size or 0) * parallel.shards.world_size
    blocks = len(case.steps[0][1]) * -(-max(max(keys) for _, keys in case.steps) // block)
    eager, replays = [], []
    for outputs in (eager, replays):
        cache, graph, held = poisoned_cache(layer, blocks, case.device), torch.cuda.CUDAGraph(), None
        for x in cache:
            # the keys before the first step
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(rank)))
        for step, (queries, keys) in enumerate(case.steps):
            batch = batch_of(case, block, queries, keys, step=step, slots=False)
            tensors = inputs(case, layer, step, sum(queries), heads)
            if outputs is eager:
                outputs.append(parallel(*tensors, cache, parallel.shard(batch)).float().cpu())
                continue
            if held is None:
                # a graph may be replayed with any lengths up to those of its capture
                most = [max(keys[i] for _, keys in case.steps) for i in range(len(keys))]
                held = batch_of(case, block, queries, most, step=step, slots=False), tensors
                # what is compiled is compiled before; the keys that this writes are written again
                saved = [x.clone() for x in cache]
                parallel(*held[1], cache, parallel.shard(held[0]))
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    output = parallel(*held[1], cache, parallel.shard(held[0]))
                for x, y in zip(cache, saved, strict=True):
                    x.copy_(y)
            held[0].seq_lens.copy_(batch.seq_lens)
            for x, y in zip(held[1], tensors, strict=True):
                x.copy_(y)
            graph.replay()
            outputs.append(output.float().cpu())
    return eager, replays
