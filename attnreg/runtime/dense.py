"""Dense attention in PyTorch: by its own kernels, or over whole score matrices in float32 for softcap and sinks.

A caller masks the scores and adds its biases between `scores_of` and `attend_by_scores`. Callers of `attend_by_sdpa`
pass its result to `keep_nan`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnreg.runtime.tensors import has_memory

# the largest head_size of CUDA's flash kernel, which takes groups
_WIDEST_GROUPED = 256


def attend_by_sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool = False, scale: float
) -> Tensor:
    """Output [batch, heads, queries, head_size_v] of PyTorch's `scaled_dot_product_attention`.

    Shapes: query [batch, heads, queries, head_size], key and value [batch, num_kv_heads, keys, head_size(_v)]; mask
    broadcasts against [batch, heads, queries, keys]. ``causal``: key j is visible to query i if j <= i, without a mask.

    On CUDA, grouped heads beside a mask fall to the math kernel wherever cuDNN's kernel does not serve them. That holds
    the whole score matrix, so the KV heads are repeated. On an H200 (torch 2.11), 8k tokens with 32/8 heads of 512 took
    1.4 GiB in place of 20.4; heads of 128, which cuDNN serves, took 0.1 GiB more. A processor's kernel takes groups:
    repeating the heads of a context took 2.5 times its time for one query.
    """
    group = query.shape[1] // key.shape[1]
    of_context = query.is_cpu and query.shape[2] < key.shape[2]
    if group > 1 and (mask is not None or query.shape[-1] > _WIDEST_GROUPED) and not of_context:
        key, value, group = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=group > 1
    )


def scores_of(query: Tensor, key: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """The scores, scaled and softcapped: [batch, heads, queries, keys] float32, which the caller may overwrite.

    Shapes: query [batch, heads, queries, head_size], key [batch, num_kv_heads, keys, head_size].
    """
    batch, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    # a KV head meets all queries of its group in one product
    q = query.float().reshape(batch, kv_heads, heads // kv_heads * queries, size)
    scores = (q @ key.float().mT).mul_(scale).view(batch, heads, queries, key.shape[2])
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return scores


def attend_by_scores(scores: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, queries, head_size_v] and LSE [batch, heads, queries], both float32; overwrites the scores.

    Shapes: scores [batch, heads, queries, keys], -inf for a masked key; value [batch, num_kv_heads, keys, head_size_v];
    sinks broadcast against [batch, heads, queries]. For a row that sees no key, the output is zero and the LSE is its
    sink, or -inf without sinks.
    """
    total = scores.logsumexp(-1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float())
    # a row that sees no key: -inf - -inf is NaN
    weights = scores.sub_(total.masked_fill(total == -torch.inf, 0.0)[..., None]).exp_()
    batch, heads, queries, keys = weights.shape
    kv_heads = value.shape[1]
    out = weights.view(batch, kv_heads, heads // kv_heads * queries, keys) @ value.float()
    return out.view(batch, heads, queries, value.shape[3]), total


def keep_nan(output: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
    """The output of PyTorch's attention, with NaN in the rows whose query is not finite.

    Shapes: output [batch, heads, queries, head_size_v], query [batch, heads, queries, head_size]; mask broadcasts
    against [batch, heads, queries, keys]. A row that a bool mask shows no key stays zero.

    PyTorch's CPU kernel takes a row of NaN scores for a row without keys, and returns zero. Zero is a plausible number,
    so nobody would notice the overflow. The output of a GPU is returned unchanged, because a check would wait for it.
    """
    # one sum passes most calls: it is finite only if all elements are. The sum of large finite numbers may be infinite,
    # so it decides no more than that. Tensors of a transform such as vmap have no number to read
    if not query.is_cpu or (has_memory(query) and math.isfinite(query.sum().item())):
        return output
    lost = ~query.isfinite().all(-1, keepdim=True)
    if mask is not None and mask.dtype == torch.bool:
        lost = lost & mask.any(-1, keepdim=True)
    return output.masked_fill(lost, torch.nan)
