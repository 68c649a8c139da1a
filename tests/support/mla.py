"""Specs, caches and absorbed queries of MLA layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.runtime import latents
from attnreg.runtime.interface import AttentionSpec
from attnreg.runtime.mla.interface import MLASpec, latent_cache_shape, projections


def mla_spec(num_heads: int = 4, **changes: Any) -> MLASpec:
    """A layer whose heads have (nope, rope, v) of (32, 16, 16); its latent is of 64, or as fp8_ds_mla wants it."""
    rank, rope = (512, 64) if changes.get("kv_dtype") == "fp8_ds_mla" else (64, 16)
    fields: dict[str, Any] = {
        "num_heads": num_heads, "num_kv_heads": 1, "head_size": rank + rope, "head_size_v": rank,
        "dtype": torch.bfloat16, "softmax_scale": 0.1, "block_size": 16, "features": frozenset({"lse"}), "latent": True,
    }  # fmt: skip
    return MLASpec(latent=AttentionSpec(**(fields | changes)), qk_nope_head_dim=32, v_head_dim=16)


def filled_cache(spec: MLASpec, seq_lens: list[int], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A cache of random latents, and a block table for requests of these lengths; what no request has is NaN."""
    layer = spec.latent
    block = layer.block_size or 1
    needed = [-(-n // block) for n in seq_lens]
    shape, dtype = latent_cache_shape(layer, sum(needed) + 2)
    tokens = torch.randn(*shape[:2], layer.head_size)
    if layer.kv_dtype == "fp8_ds_mla":
        cache = latents.packed(*tokens.split([512, 64], -1))
    else:
        cache = (tokens if scale is None else tokens / scale).to(dtype)
    ids = torch.randperm(shape[0]).int()
    table = torch.full((len(seq_lens), max([*needed, 1]) + 1), 2**30, dtype=torch.int32)
    used = torch.zeros(shape[:2], dtype=torch.bool)
    for i, (count, length) in enumerate(zip(needed, seq_lens, strict=True)):
        table[i, :count], ids = ids[:count], ids[count:]
        for k in range(length):
            used[int(table[i, k // block]), k % block] = True
    bytes_ = cache.view(torch.uint8)
    bytes_[~used] = 0xFF
    return cache, table


def absorbed(spec: MLASpec, kv_b_proj: Tensor, query: Tensor) -> Tensor:
    """Queries [tokens, num_heads, qk_head_dim] as the latent form takes them, float64."""
    nope, rope = query.double().split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
    return torch.cat([torch.einsum("thn,hnc->thc", nope, projections(spec, kv_b_proj).w_uk.double()), rope], -1)
