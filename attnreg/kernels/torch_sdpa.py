"""TORCH_SDPA: PyTorch's scaled_dot_product_attention over gathered keys and values.

Causal prompts and rectangles without a mask take PyTorch's fused kernels, whatever has a mask those that take one.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnreg.kernels.dense import gathered
from attnreg.kernels.dense.gathered import Piece, Plan
from attnreg.runtime.interface import (
    NO_PARAMS,
    AttentionSpec,
    BatchMetadata,
    Call,
    KVCache,
    LayerParams,
    paged_cache_shape,
)

kv_cache_shape = paged_cache_shape


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Plan:
    """The dense calls of a batch; with ALiBi each piece has a bias per head, as large as its scores."""
    return gathered.plan(spec, batch, scores="alibi" in spec.features)


def write_kv(
    spec: AttentionSpec, plan: Plan, key: Tensor, value: Tensor, kv_cache: KVCache, *, params: LayerParams = NO_PARAMS
) -> None:
    gathered.write_kv(spec, plan.written, key, value, kv_cache, params=params)


def forward(spec: AttentionSpec, plan: Plan, call: Call) -> None:
    """Attention without softcap, sinks or LSE, which PyTorch's function cannot express."""
    for piece in plan.pieces:
        k, v = gathered.gather(spec, piece.places, call)
        call.output[piece.rows] = sdpa(spec, piece, call.query[piece.rows], k, v, call.params.alibi_slopes)
    gathered.fill_empty(plan.empty, call)


def sdpa(spec: AttentionSpec, piece: Piece, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None) -> Tensor:
    """One piece: all [requests, tokens, heads, size], keys and values with the KV heads only."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mask = None if piece.visible is None else piece.visible[:, None]
    if slopes is not None:
        assert piece.distance is not None
        # float32 whatever the layer's type: a slope times a distance does not fit 8 bits of mantissa
        bias = -slopes.float()[:, None, None] * piece.distance[:, None]
        if piece.causal:
            bias = bias.masked_fill(piece.distance.new_ones(piece.distance.shape[1:]).triu(1).bool(), -float("inf"))
        mask = bias if mask is None else bias.masked_fill(~mask, -float("inf"))
        if q.is_cuda:
            # beside 16-bit queries CUDA's kernels refuse a float32 bias, or misread it
            q, k, v = q.float(), k.float(), v.float()
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=piece.causal and mask is None,
        scale=spec.softmax_scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )
    return out.transpose(1, 2).to(query.dtype)
