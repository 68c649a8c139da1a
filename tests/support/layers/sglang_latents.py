"""A model runner of SGLang with multi-head latent attention, and what its models give attention layers in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from support.layers.sglang_world import Facts, World, close
from support.stand_ins import sglang_modules as sglang


@dataclass
class LatentWorld(World):
    """A world whose layers have MLA: latents of 64 and a rotary part of 16, keys of 32 + 16 and values of 24."""

    rank: int = 64
    rope: int = 16
    nope: int = 32
    value: int = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner.use_mla_backend = True
        self.runner.model = nn.ModuleList([layer for pair in self.pairs for layer in pair])
        shapes = [(self.facts.heads[0], size, self.rank) for size in (self.nope, self.value)]
        # of each layer W_UK and W_UV, of the size that keeps what they make at 1
        self.weights = [
            [torch.randn(*shape, generator=self.noise).div_(self.rank**0.5).to(self.facts.dtype) for shape in shapes]
            for _ in self.layers
        ]

    def _layers(self) -> list[Any]:
        """The layers over latents; each has a sibling of the same number for prompts, as in DeepSeek's models."""
        heads, scale, numbers = self.facts.heads[0], (self.nope + self.rope) ** -0.5, self.facts.layers
        self.pairs = [
            (
                sglang.RadixAttention(heads, self.rank + self.rope, scale, 1, i, v_head_dim=self.rank, **one),
                sglang.RadixAttention(heads, self.nope + self.rope, scale, heads, i, v_head_dim=self.value, **one),
            )
            for i, one in enumerate(numbers)
        ]
        return [latent for latent, _ in self.pairs]

    def _pool(self, slots: int, pages: int) -> Any:
        cache = self.facts.cache or self.facts.dtype
        return sglang.MLATokenToKVPool(slots, len(self.layers), self.rank, self.rope, cache)

    def new(self, rows: int, *sizes: int) -> Tensor:
        """Random rows in the model's dtype."""
        return torch.randn(rows, *sizes, generator=self.noise).to(self.facts.dtype)

    def remember(self, batch: Any, number: int, latent: Tensor, rope: Tensor) -> None:
        """Adds a step's latents and rotary parts to those of its requests, as the cache holds them."""
        begin = 0
        for request, count in zip(batch.req_pool_indices.tolist(), self._queries(batch), strict=True):
            part = slice(begin, begin + count)
            new = self._kept(latent[part], None), self._kept(rope[part], None)
            before = self.known.get((number, request))
            self.known[number, request] = (
                new if before is None else (torch.cat([before[0], new[0]]), torch.cat([before[1], new[1]]))
            )
            begin += count

    def exact(self, batch: Any, number: int, query: Tensor) -> Tensor:
        """The exact output [tokens, heads * value] in float64, from keys and values of every head."""
        up, down = (weight.double() for weight in self.weights[number])
        out, begin = [], 0
        for request, count in zip(batch.req_pool_indices.tolist(), self._queries(batch), strict=True):
            latent, rope = self.known[number, request]
            keys = torch.cat([torch.einsum("kr,hnr->hkn", latent, up), rope.expand(up.shape[0], *rope.shape)], -1)
            rows = query[begin : begin + count].double()
            scores = torch.einsum("qhd,hkd->hqk", rows, keys) * self.layers[number].scaling
            key_at = torch.arange(latent.shape[0])
            scores = scores.masked_fill(key_at > key_at[-count:, None], -torch.inf)
            seen = torch.einsum("hqk,kr->qhr", scores.softmax(-1), latent)
            out.append(torch.einsum("qhr,hvr->qhv", seen, down).flatten(1))
            begin += count
        return torch.cat(out)

    def absorbed(self, number: int, query: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What SGLang's models give a layer over latents: queries, latents with rotary parts, and latents."""
        nope, own_rope = query.split([self.nope, self.rope], -1)
        query = torch.cat([torch.einsum("thn,hnr->thr", nope, self.weights[number][0]), own_rope], -1)
        return query.flatten(1), torch.cat([latent, rope], -1)[:, None], latent[:, None]

    def outputs(self, number: int, seen: Tensor) -> Tensor:
        """The output of every head from what a layer over latents gives."""
        seen = seen.view(seen.shape[0], -1, self.rank)
        return torch.einsum("thr,hvr->thv", seen, self.weights[number][1]).flatten(1)

    def expanded(self, number: int, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, as SGLang's models give them for prompts without context."""
        up, down = self.weights[number]
        keys = torch.einsum("tr,hnr->thn", latent, up)
        return (
            torch.cat([keys, rope[:, None].expand(*keys.shape[:2], -1)], -1),
            torch.einsum("tr,hvr->thv", latent, down),
        )


def run_latents(world: LatentWorld, backend: Any, batch: Any, padding: int = 0) -> None:
    """Computes every layer of a step in the form that SGLang's `triton` gets, and compares it with the exact answer.

    padding: rows behind the step's tokens.
    """
    backend.init_forward_metadata(batch)
    attend_latents(world, backend, batch, batch, padding)


def attend_latents(world: LatentWorld, backend: Any, batch: Any, given: Any, padding: int = 0) -> None:
    """The layers of a step. given: the batch that the backend sees, with slots for the padding's rows."""
    tokens, heads = batch.out_cache_loc.shape[0], world.facts.heads[0]
    prompts = batch.forward_mode.name == "EXTEND" and not any(batch.extend_prefix_lens_cpu)
    for number, (over_latents, for_prompts) in enumerate(world.pairs):
        query = world.new(tokens + padding, heads, world.nope + world.rope)
        latent, rope = world.new(tokens + padding, world.rank), world.new(tokens + padding, world.rope)
        world.remember(batch, number, latent[:tokens], rope[:tokens])
        if prompts:
            place = sglang.KVWriteLoc.for_batch(batch)
            world.pool.set_kv_buffer(for_prompts, place, torch.cat([latent, rope], -1)[:tokens, None], None)
            key, value = world.expanded(number, latent, rope)
            found = backend.forward(query.flatten(1), key, value, for_prompts, given, save_kv_cache=False)
        else:
            seen = backend.forward(*world.absorbed(number, query, latent, rope), over_latents, given)
            found = world.outputs(number, seen)
        close(found[:tokens], world.exact(batch, number, query[:tokens]), world.facts.dtype)


def latent_world(**facts: Any) -> LatentWorld:
    """A world of MLA with these facts."""
    return LatentWorld(Facts(**facts))
