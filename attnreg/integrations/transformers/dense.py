"""Dense attention under any mask and bias, for calls of transformers that no batch can express."""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.runtime.dense import attend_by_scores, attend_by_sdpa, keep_nan, scores_of


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
    query_sinks: Tensor | None = None,
) -> Tensor:
    """The output [batch, queries, heads, size] of transformers' tensors; softcap and sinks take a whole score matrix.

    mask: broadcasts against [batch, heads, queries, keys]; bool (true takes part) or added to the scores. bias: added.
    query_sinks: [batch, heads, queries, 1] a sink for each query.
    """
    added = _added(mask, bias, query.dtype)
    if softcap is None and sinks is None and query_sinks is None:
        if added is not None:
            # PyTorch's CUDA kernels need a mask whose keys are adjacent, so one number for all keys is expanded too
            added = added.expand(*added.shape[:-1], key.shape[2])
            if added.stride(-1) != 1:
                # contiguous() would keep the stride of a single key
                added = added.clone(memory_format=torch.contiguous_format)
        out = attend_by_sdpa(query, key, value, mask=added, scale=scale)
        return keep_nan(out, query, added).transpose(1, 2).contiguous()
    scores = scores_of(query, key, scale=scale, softcap=softcap)
    if added is not None and added.dtype == torch.bool:
        scores.masked_fill_(~added, -torch.inf)
    elif added is not None:
        scores += added
    every = None if sinks is None else sinks.float()[:, None]
    if query_sinks is not None:
        of_query = query_sinks.float().squeeze(-1)
        every = of_query if every is None else torch.logaddexp(every, of_query)
    out, _ = attend_by_scores(scores, value, every)
    return out.to(query.dtype).transpose(1, 2).contiguous()


def _added(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias as one tensor: bool if it is a boolean mask alone, else added to the scores."""
    if bias is None:
        return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    if mask is None:
        return bias.to(dtype)
    if mask.dtype == torch.bool:
        # the lowest finite number, as in transformers' masks: a row of -inf has no softmax
        return torch.where(mask, bias, torch.finfo(dtype).min).to(dtype)
    return (bias + mask).to(dtype)
