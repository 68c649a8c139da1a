"""Attention under any mask and bias, whole: what is used where a batch cannot say what transformers asks for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[batch, queries, heads, size], from tensors as transformers passes them; it holds every score where it must.

    mask: broadcasts against [batch, heads, queries, keys]; bool (true takes part) or added to the scores. bias: added.
    """
    added = _added(mask, bias, query.dtype)
    if softcap is None and sinks is None:
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous()
    group = query.shape[1] // key.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = query.float() @ k.mT * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if added is not None:
        scores = scores.masked_fill(~added, -torch.inf) if added.dtype == torch.bool else scores + added
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None, None])
    # a row without a key: -inf less -inf
    weights = torch.where(total == -torch.inf, 0.0, (scores - total).exp())
    return (weights @ v).to(query.dtype).transpose(1, 2).contiguous()


def _added(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias as one tensor; bool where there is no number in it."""
    if bias is None:
        return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    if mask is None:
        return bias.to(dtype)
    if mask.dtype == torch.bool:
        # the least number, as transformers masks: -inf in a whole row is no softmax
        return torch.where(mask, bias, torch.finfo(dtype).min).to(dtype)
    return (bias + mask).to(dtype)
