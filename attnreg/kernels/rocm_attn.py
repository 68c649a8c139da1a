"""ROCM_ATTN: attnreg's Triton kernels on the cache layout of AMD's paged attention (SPLIT), and on the plain ones.

One launch reads a request's cached context and its own new keys alike, which `write_kv` has stored by then; requests
with few queries are decoded in another. Both are those of TRITON_ATTN: a layout is a way of loading a tile. Sinks are
not among what kernels for this layout take, so they come afterwards, from the LSE.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnreg.kernels import triton_attn
from attnreg.kernels.triton_attn import Plan, kv_cache_shape, plan, write_kv
from attnreg.runtime.interface import NO_PARAMS, AttentionSpec, KVCache, LayerParams

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]


def forward(
    spec: AttentionSpec,
    plan: Plan,
    query: Tensor,
    kv_cache: KVCache | None,
    output: Tensor,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    lse: Tensor | None = None,
    params: LayerParams = NO_PARAMS,
) -> None:
    """Writes the attention of the batch's queries into ``output``."""
    if params.sinks is None:
        triton_attn.forward(spec, plan, query, kv_cache, output, key=key, value=value, lse=lse, params=params)
        return
    totals = torch.empty(spec.num_heads, len(query), dtype=torch.float32, device=query.device)
    without = replace(params, sinks=None)
    triton_attn.forward(spec, plan, query, kv_cache, output, key=key, value=value, lse=totals, params=without)
    # exp(lse) of the denominator exp(lse) + exp(sink), for the rows that are no padding
    shares = torch.sigmoid(totals - params.sinks.float()[:, None])[:, : plan.num_tokens]
    attended = output[: plan.num_tokens]
    attended.copy_(attended * shares.T[:, :, None])
