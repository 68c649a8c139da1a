"""Layers that run the AITER rows, their caches, and assertions on their outputs and calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnreg
from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.bounds import bounds
from attnreg.kernels import reference
from attnreg.kernels.aiter import record
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchMetadata,
    KVCache,
    LayerParams,
)
from attnreg.runtime.layer import Attention

MHA = ("ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN")


# row -> the functions of aiter that its kernel module calls
FUNCTIONS = {
    "ROCM_AITER_FA": (
        record.FLASH_ATTN_VARLEN, record.MHA_BATCH_PREFILL, record.PAGED_ATTENTION_V1, record.UNIFIED_ATTENTION
    ),
    "ROCM_AITER_MLA": (record.MLA_DECODE, record.MLA_PREFILL),
    "ROCM_AITER_UNIFIED_ATTN": (record.FLASH_ATTN_VARLEN, record.MHA_BATCH_PREFILL, record.UNIFIED_ATTENTION),
}  # fmt: skip


def check_calls(calls: list[tuple[str, dict[str, Any]]], row: str) -> None:
    """Assert that each call is of a function on the row's record, with exactly the recorded arguments."""
    recorded = {function.name: function for function in FUNCTIONS[row]}
    for name, arguments in calls:
        assert arguments.keys() == set(recorded[name].passes), name


def check_all_is_called(calls: list[tuple[str, dict[str, Any]]], row: str) -> None:
    """Assert what `check_calls` does, and that every function of the row's module was called."""
    check_calls(calls, row)
    assert {name for name, _ in calls} == {function.name for function in FUNCTIONS[row]}


def make(registry: Registry, platform: Platform, backend: str, **fields: Any) -> Attention:
    """A layer of 4 heads and 2 KV heads with blocks of 16. ``fields`` belong to its request or to the layer."""
    request = {"head_size": 64, "num_heads": 4, "num_kv_heads": 2, "block_size": 16, "dtype": "bfloat16"}
    names = AttentionRequest.__dataclass_fields__
    asked = AttentionRequest(**(request | {k: v for k, v in fields.items() if k in names}))
    selection = attnreg.select(asked, platform, registry, backend, to_run=True)
    return Attention.from_selection(selection, **{k: v for k, v in fields.items() if k not in names})


def filled(layer: Attention, seq_lens: list[int]) -> tuple[KVCache, Tensor]:
    """A cache of random numbers with all blocks in use, and a block table for requests of these lengths."""
    size = layer.spec.block_size or 1
    blocks = [-(-k // size) for k in seq_lens]
    cache = layer.new_kv_cache(sum(blocks))
    for tensor in cache[:1] if layer.spec.latent else cache:
        tensor.copy_(torch.randn(tensor.shape))
    table = torch.zeros(len(seq_lens), max([*blocks, 1]), dtype=torch.int32)
    free = torch.randperm(sum(blocks)).int()
    for row, count in zip(table, blocks, strict=True):
        row[:count], free = free[:count], free[count:]
    return cache, table


def check(layer: Attention, batch: BatchMetadata, query: Tensor, output: Tensor, *storage: Any) -> None:
    """Assert that the output is the reference's but for rounding."""
    spec, params = layer.spec, layer.params
    cache, key, value = (*storage, None, None, None)[:3]
    exact = reference.attention(spec, batch, query, cache, key=key, value=value, params=params)
    allowed, _ = bounds(spec, batch, exact, 8.0)
    assert ((output[: batch.num_tokens].double() - exact.output).abs() <= allowed).all()


def latent_layer(registry: Registry, platform: Platform, heads: int = 16, **fields: Any) -> Attention:
    """A layer of MLA in its latent form."""
    features = frozenset(fields.pop("features", ()))
    request = AttentionRequest(
        attention="mla", head_size=576, num_heads=heads, num_kv_heads=1, block_size=16, features=features,
        dtype=fields.get("dtype", "bfloat16"), kv_dtype=fields.get("kv_dtype", "auto"),
    )  # fmt: skip
    selection = attnreg.select(request, platform, registry, "ROCM_AITER_MLA", to_run=True)
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_size=576,
        head_size_v=512,
        dtype=getattr(torch, request.dtype),
        softmax_scale=192**-0.5,
        kv_dtype=request.kv_dtype or "auto",
        block_size=16,
        features=features,
        kv_layout=fields.get("kv_layout", "NHD"),
        latent=True,
    )
    return Attention(selection, spec, fields.get("params", LayerParams()))
