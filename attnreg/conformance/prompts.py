"""Trials of MLA prompts whose context is in a cache of latents, for the rows that attend in the expanded form.

The kernels of such a row get keys without a cache. The layer reads, dequantises and expands the context in chunks. A
claim on a cache means that the layer gets the right result with the row's kernels. The context here consists of
quarters, which every format of latents holds exactly. Each element of a key or value is one element of its latent. So
only the attention over the parts, and their merge, round anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnreg.conformance.trial import UNUSED, Case, Draw, Trial, blocks_of, lengths_of, padded
from attnreg.runtime import latents
from attnreg.runtime.interface import NO_PARAMS, AttentionSpec, BatchMetadata, KVCache, LayerParams
from attnreg.runtime.latents import RANK, ROPE
from attnreg.runtime.layer import Attention
from attnreg.runtime.mla.interface import MLASpec, latent_cache_shape
from attnreg.runtime.mla.prompts import ExpandedPrompts

if TYPE_CHECKING:
    from attnreg.selection.trace import Selection

# the KV dtypes of caches that hold latents
FORMATS = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
SCALE = 0.25
# the largest element of the context: a tile with it has a power of two as its scale in fp8_ds_mla
LARGEST = 7 / 4


@dataclass(frozen=True)
class CachedPrompts:
    """The layer of a trial for a row for prompts; its context is in a cache of latents.

    batch: the batch, with its block table. latent, rope: the two parts of the new tokens. latents: the cache.
    """

    prompts: ExpandedPrompts
    batch: BatchMetadata
    latent: Tensor
    rope: Tensor
    latents: Tensor

    @property
    def spec(self) -> AttentionSpec:
        """The attention over expanded keys, without a cache."""
        return self.prompts.new_tokens

    @property
    def params(self) -> LayerParams:
        """No numbers: the layer has only dimensions."""
        return NO_PARAMS

    def new_kv_cache(self, num_blocks: int, device: torch.device | str) -> KVCache:
        """Raises AssertionError, because the cache is already filled."""
        raise AssertionError("a trial of prompts has its cache")

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache, batch: BatchMetadata) -> None:
        """Raises AssertionError, because another row's kernels write latents."""
        raise AssertionError("a row for prompts writes no latents")

    def attend(self, query: Tensor, kv_cache: Any, batch: Any, output: Tensor, **given: Any) -> None:
        """Attends to the context and to the new tokens; it ignores the keys and values of the call."""
        lse = given.get("lse")
        self.prompts(query, self.latent, self.rope, self.latents, self.batch, output, lse=lse)

    def moved(self) -> CachedPrompts:
        """The same prompts, with the blocks of their cache moved to other places."""
        table, count = self.batch.block_table, self.latents.shape[0]
        assert table is not None
        bytes_ = self.latents.view(torch.uint8).roll(1, 0)
        batch = replace(self.batch, block_table=((table + 1) % count).int())
        return replace(self, batch=batch, latents=bytes_.view(self.latents.dtype))


def prepare(case: Case, selection: Selection, device: torch.device, *, causal: bool | None) -> Trial:
    """The tensors of a case. causal: None means by request. Its queries see the keys that the expanded form has."""
    draw, request = Draw(case.seed, device), case.request
    layer = Attention.from_selection(selection)
    spec, dtype, heads = layer.spec, layer.spec.dtype, layer.spec.num_heads
    latent_spec = replace(
        spec, num_kv_heads=1, head_size=RANK + ROPE, head_size_v=RANK, latent=True, options=(), kv_layout="NHD",
        kv_dtype=request.kv_dtype or "auto",
    )  # fmt: skip
    nope, width = spec.head_size - ROPE, spec.head_size_v
    mla = MLASpec(latent=latent_spec, qk_nope_head_dim=nope, v_head_dim=width, expanded_features=request.features)
    block = spec.block_size or 16
    lengths = lengths_of(case.lengths, block, "decoder")
    queries, keys = [q for q, _ in lengths], [k for _, k in lengths]
    table, slots, blocks = blocks_of(draw, keys, block, None)
    contexts = [_quarters(draw, k - q) for q, k in lengths]
    new = [draw.normal(q, RANK + ROPE, dtype=dtype) for q in queries]
    picked = torch.randint(RANK, (heads, nope + width), generator=draw.generator).to(device)
    weight = torch.nn.functional.one_hot(picked.flatten(), RANK).to(dtype)
    workspace = block + 3
    prompts = ExpandedPrompts(
        mla, layer.module, weight, kv_scale=_scale(latent_spec, device), workspace_tokens=workspace
    )
    by_request = [i % 2 == 1 for i in range(len(lengths))]
    batch = BatchMetadata.build(
        queries, keys, device=device, block_table=table.to(device), causal=by_request if causal is None else causal
    )
    cache = _cache(latent_spec, blocks, contexts, [s[: len(c)] for s, c in zip(slots, contexts, strict=True)], device)
    latent, rope = padded(torch.cat(new)).split([RANK, ROPE], -1)  # type: ignore[no-untyped-call]
    tokens: list[tuple[Tensor, ...]] = [
        _expanded(torch.cat([c.to(dtype), n]), picked, nope) for c, n in zip(contexts, new, strict=True)
    ]
    key, value = (padded(torch.cat(x)) for x in zip(*tokens, strict=True))
    query = padded(draw.normal(sum(queries), heads, spec.head_size, dtype=dtype))
    packed = BatchMetadata.build(queries, keys, device=device, causal=batch.causal)
    most = max(len(c) for c in contexts)
    return Trial(
        CachedPrompts(prompts, batch, latent, rope, cache), packed, query, key, value, None, tokens,
        merges=-(-most // workspace) + 1 if most else 0,
    )  # fmt: skip


def _quarters(draw: Draw, tokens: int) -> Tensor:
    """Latents with their rotary parts [tokens, RANK + ROPE] float32; every tile has the largest number."""
    numbers = torch.randint(-7, 8, (tokens, RANK + ROPE), generator=draw.generator) / 4
    numbers[:, : RANK : latents.TILE] = LARGEST
    return numbers.to(draw.device)


def _scale(spec: AttentionSpec, device: torch.device) -> Tensor | None:
    quantised = spec.quantised and spec.kv_dtype != "fp8_ds_mla"
    return torch.tensor([SCALE], device=device) if quantised else None


def _cache(
    spec: AttentionSpec, blocks: int, contexts: list[Tensor], slots: list[Tensor], device: torch.device
) -> Tensor:
    """A cache [blocks, block_size, width] with each request's context at its slots; all other slots are NaN."""
    shape, dtype = latent_cache_shape(spec, blocks)
    # the bits of NaN are all ones; a fnuz format has no -0, and its NaN has the bits of -0 in other formats
    nan = 0x80 if spec.fnuz and spec.quantised and spec.kv_dtype != "fp8_ds_mla" else UNUSED
    cache = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), nan, dtype=torch.uint8, device=device)
    rows = torch.cat(contexts)
    if spec.kv_dtype == "fp8_ds_mla":
        stored = latents.packed(*rows.split([RANK, ROPE], -1))  # type: ignore[no-untyped-call]
    else:
        scale = _scale(spec, device)
        stored = (rows if scale is None else rows / scale).to(dtype).view(torch.uint8)
    cache.flatten(0, 1)[torch.cat(slots).to(device)] = stored
    return cache if dtype == torch.uint8 else cache.view(dtype)


def _expanded(rows: Tensor, picked: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Keys [tokens, heads, nope + ROPE] and values [tokens, heads, width], expanded from latents with rotary parts."""
    parts = rows[:, picked]
    rope = rows[:, None, RANK:].expand(-1, picked.shape[0], -1)
    return torch.cat([parts[..., :nope], rope], -1), parts[..., nope:]
