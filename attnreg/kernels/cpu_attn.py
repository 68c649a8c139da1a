"""CPU_ATTN: every word of the vocabulary, on the processor, over gathered keys and values.

PyTorch's scaled_dot_product_attention where it has the words, and float32 scores held whole where it has not: for a
softcap, sinks, and the LSE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.kernels.dense import gathered
from attnreg.kernels.dense.gathered import Piece, Plan
from attnreg.kernels.torch_sdpa import kv_cache_shape, sdpa, write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, LayerParams

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

_BY_SCORES = frozenset({"lse", "sinks", "softcap"})


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Plan:
    """The dense calls of a batch, small enough to hold the scores where they are needed."""
    return gathered.plan(spec, batch, scores=not spec.features.isdisjoint({*_BY_SCORES, "alibi"}))


def forward(spec: AttentionSpec, plan: Plan, call: Call) -> None:
    """Attention as the contract says, in float32 where PyTorch's function does not do it."""
    by_scores = not spec.features.isdisjoint(_BY_SCORES)
    for piece in plan.pieces:
        q, (k, v) = call.query[piece.rows], gathered.gather(spec, piece.places, call)
        if by_scores:
            out, total = _attention(spec, piece, q, k, v, call.params)
            call.output[piece.rows] = out.to(call.output.dtype)
            if call.lse is not None:
                call.lse[:, piece.rows] = total
        else:
            call.output[piece.rows] = sdpa(spec, piece, q, k, v, call.params.alibi_slopes)
    gathered.fill_empty(plan.empty, call)


def _attention(
    spec: AttentionSpec, piece: Piece, query: Tensor, key: Tensor, value: Tensor, params: LayerParams
) -> tuple[Tensor, Tensor]:
    """One piece, all [requests, tokens, heads, size]: the output in float32, and the LSE [heads, requests, tokens]."""
    requests, queries = query.shape[:2]
    group = spec.num_heads // spec.num_kv_heads
    # a KV head meets all queries of its group in one product: [requests, num_kv_heads, group * queries, size]
    q = query.float().view(requests, queries, spec.num_kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    k, v = key.float().transpose(1, 2), value.float().transpose(1, 2)
    scores = (q @ k.mT).mul_(spec.softmax_scale).view(requests, spec.num_heads, queries, -1)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if params.alibi_slopes is not None:
        assert piece.distance is not None
        scores -= params.alibi_slopes.float()[:, None, None] * piece.distance[:, None]
    if piece.visible is not None:
        scores.masked_fill_(~piece.visible[:, None], -torch.inf)
    elif piece.causal:
        scores.masked_fill_(torch.ones(queries, queries, dtype=torch.bool, device=scores.device).triu(1), -torch.inf)
    total = scores.logsumexp(-1)
    if params.sinks is not None:
        total = torch.logaddexp(total, params.sinks.float()[:, None])
    weights = scores.sub_(total[..., None]).exp_()
    out = (weights.view(requests, spec.num_kv_heads, group * queries, -1) @ v).view(*weights.shape[:3], -1)
    return out.transpose(1, 2), total.transpose(0, 1)
