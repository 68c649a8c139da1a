"""Specs, caches and absorbed queries of MLA layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnreg.runtime import latents
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata
from attnreg.runtime.mla.interface import MLASpec, latent_cache_shape, projections


def mla_spec(num_heads: int = 4, **changes: Any) -> MLASpec:
    """A layer whose heads have (nope, rope, v) of (32, 16, 16); its latent is of 64, or as fp8_ds_mla wants it."""
    rank, rope = (512, 64) if changes.get("kv_dtype") == "fp8_ds_mla" else (64, 16)
    fields: dict[str, Any] = {
        "num_heads": num_heads, "num_kv_heads": 1, "head_size": rank + rope, "head_size_v": rank,
        "dtype": torch.bfloat16, "softmax_scale": 0.1, "block_size": 16, "features": frozenset({"lse"}), "latent": True,
    }  # fmt: skip
    return MLASpec(latent=AttentionSpec(**(fields | changes)), qk_nope_head_dim=32, v_head_dim=16)


def latent_spec(**changes: Any) -> AttentionSpec:
    """A layer in its latent form of 512 + 64, as other packages' kernels are compiled for, with blocks of 64 tokens."""
    fields: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "dtype": torch.bfloat16,
        "softmax_scale": 0.1, "block_size": 64, "latent": True,
    }  # fmt: skip
    return AttentionSpec(**(fields | changes))


def refuses(module: Any, spec: AttentionSpec, error: type[Exception], words: str) -> None:
    """Fails unless a kernel module refuses to plan a batch of a layer, with these words."""
    batch = BatchMetadata.build([1], [5], block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(error, match=words):
        module.plan(spec, batch)


def refuses_packed_keys(module: Any, spec: AttentionSpec) -> None:
    """Fails unless a kernel module refuses a batch without a cache."""
    with pytest.raises(BatchError, match="no block_table"):
        module.plan(spec, BatchMetadata.build([5]))


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
