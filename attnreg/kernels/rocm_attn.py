"""ROCM_ATTN: attnreg's Triton kernels on the cache layout of AMD's paged attention (SPLIT), and on NHD and HND.

One launch serves long prompts, another the requests with few queries. Both are TRITON_ATTN's, because a layout only
changes how a tile is loaded. `write_kv` stores a request's new keys first, so a launch reads them from the cache like
its context. Kernels for this layout take no sinks, so sinks are applied afterwards, from the LSE.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attnreg.kernels import triton_attn
from attnreg.kernels.triton_attn import CAPTURABLE, KEYS_APART, TritonPlan, kv_cache_shape, plan, write_kv
from attnreg.runtime.interface import AttentionSpec, Call

__all__ = ["CAPTURABLE", "KEYS_APART", "forward", "kv_cache_shape", "plan", "write_kv"]


def forward(spec: AttentionSpec, plan: TritonPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``."""
    sinks = call.params.sinks
    if sinks is None:
        triton_attn.forward(spec, plan, call)
        return
    totals = torch.empty(spec.num_heads, len(call.query), dtype=torch.float32, device=call.query.device)
    # float32, so that the output is rounded only once
    exact = torch.empty_like(call.output, dtype=torch.float32)
    triton_attn.forward(spec, plan, call._replace(output=exact, lse=totals, params=replace(call.params, sinks=None)))
    # the share exp(lse) / (exp(lse) + exp(sink)) of each row; 0 if both are 0. The device knows which rows are padding
    shares = torch.sigmoid(totals - sinks.float()[:, None]).masked_fill(totals == -torch.inf, 0.0)
    is_row = torch.arange(len(call.query), device=call.query.device) < plan.query_start_loc[-1:]
    shares = torch.where(is_row, shares, 1.0)
    call.output.copy_(torch.where(is_row[:, None, None], exact * shares.T[:, :, None], call.output))
