"""Attention in float64, one request at a time: the reference by which claims are verified.

The code follows the contract in `attnreg.runtime.interface` step by step, at the expense of speed. The lengths are
those on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.runtime.interface import NO_PARAMS, AttentionSpec, BatchMetadata, KVCache, LayerParams, by_token


class Reference(NamedTuple):
    """The exact answer for the rows before the padding, and the magnitudes from which error bounds are computed.

    output: [num_tokens, num_heads, head_size_v] float64; lse: [num_heads, num_tokens] float64.
    abs_output: shaped as output, sum of p * abs(v).
    abs_score: shaped as lse, the largest ``softmax_scale * sum(abs(q) * abs(k)) + abs(bias)`` of a visible key.
    """

    output: Tensor
    lse: Tensor
    abs_output: Tensor
    abs_score: Tensor


def attention(
    spec: AttentionSpec,
    batch: BatchMetadata,
    query: Tensor,
    kv_cache: KVCache | None = None,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    params: LayerParams = NO_PARAMS,
) -> Reference:
    """The result that `KernelModule.forward` must come to from the same arguments, computed on the CPU."""
    starts = batch.query_start_loc.tolist()
    tokens = starts[-1]
    output = torch.zeros(tokens, spec.num_heads, spec.head_size_v, dtype=torch.float64)
    lse = torch.full((spec.num_heads, tokens), -torch.inf, dtype=torch.float64)
    abs_output, abs_score = torch.zeros_like(output), torch.zeros_like(lse)
    for i in range(batch.num_reqs):
        rows = slice(starts[i], starts[i + 1])
        k, v = request_kv(spec, batch, i, kv_cache, key, value, params)
        q = query[rows].cpu().double().transpose(0, 1)
        visible = visible_keys(spec, batch, i)
        # each KV head serves a whole group of query heads
        group = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)

        scores = spec.softmax_scale * (q @ k.mT)  # [num_heads, queries, keys]
        sizes = abs(spec.softmax_scale) * (q.abs() @ k.abs().mT)
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if params.alibi_slopes is not None:
            query_at, key_at = positions(batch, i)
            bias = -params.alibi_slopes.cpu().double()[:, None, None] * (query_at - key_at).abs()
            scores, sizes = scores + bias, sizes + bias.abs()
        scores = scores.masked_fill(~visible, -torch.inf)
        terms = scores
        if params.sinks is not None:
            sinks = params.sinks.cpu().double()[:, None, None].expand(-1, scores.shape[1], 1)
            terms = torch.cat([scores, sinks], dim=-1)
        total = torch.logsumexp(terms, dim=-1) if terms.shape[-1] else torch.full(scores.shape[:2], -torch.inf).double()
        # without a key and a sink there is nothing to divide by, and the weights are zero
        weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0)[..., None])

        output[rows] = (weights @ v).transpose(0, 1)
        lse[:, rows] = total
        abs_output[rows] = (weights @ v.abs()).transpose(0, 1)
        if scores.shape[-1]:
            abs_score[:, rows] = sizes.masked_fill(~visible, 0.0).amax(dim=-1)
    return Reference(output, lse, abs_output, abs_score)


def positions(batch: BatchMetadata, request: int) -> tuple[Tensor, Tensor]:
    """A request's query positions [queries, 1] and key positions [keys]; the last query is at the last key."""
    starts, keys = batch.query_start_loc, int(batch.seq_lens[request])
    queries = int(starts[request + 1] - starts[request])
    return torch.arange(keys - queries, keys)[:, None], torch.arange(keys)


def visible_keys(spec: AttentionSpec, batch: BatchMetadata, request: int) -> Tensor:
    """Whether a key takes part for a query of a request: [queries, keys] bool."""
    query_at, key_at = positions(batch, request)
    distance = query_at - key_at
    visible = torch.ones_like(distance, dtype=torch.bool)
    if batch.causal:
        visible &= distance >= 0
    if spec.sliding_window is not None:
        visible &= distance.abs() < spec.sliding_window
    if batch.mm_prefix is not None:
        for begin, end in batch.mm_prefix[request].tolist():
            visible |= (query_at >= begin) & (query_at < end) & (key_at >= begin) & (key_at < end)
    return visible


def request_kv(
    spec: AttentionSpec,
    batch: BatchMetadata,
    request: int,
    kv_cache: KVCache | None,
    key: Tensor | None,
    value: Tensor | None,
    params: LayerParams,
) -> tuple[Tensor, Tensor]:
    """One request's keys and values: [num_kv_heads, keys, head_size] and [..., head_size_v], float64, dequantised."""
    keys = int(batch.seq_lens[request])
    if kv_cache is None:
        starts = batch.query_start_loc if batch.key_start_loc is None else batch.key_start_loc
        first = int(starts[request])
        # without a cache, the call has packed keys and values
        assert key is not None
        assert value is not None
        k, v = (x[first : first + keys].cpu().double().transpose(0, 1) for x in (key, value))
        return k, v
    # a cache is read through a block table
    assert batch.block_table is not None
    assert spec.block_size is not None
    dequantised = []
    for cache, scale in zip(by_token(kv_cache, spec.kv_layout), (params.k_scale, params.v_scale), strict=True):
        token = torch.arange(keys, device=cache.device)
        # float32 holds every format exactly, and PyTorch cannot index 8-bit floats
        x = cache.float()[batch.block_table[request, token // spec.block_size], token % spec.block_size]
        x = x.cpu().double()
        if scale is not None:
            x = x * scale.cpu().double()[:, None]
        dequantised.append(x.transpose(0, 1))
    return dequantised[0], dequantised[1]
