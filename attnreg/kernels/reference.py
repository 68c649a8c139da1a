"""Attention in float64, one request at a time: the reference by which claims are verified.

The code follows the contract in `attnreg.runtime.interface` step by step, at the expense of speed. It reads the lengths
on the device. Rotated keys and values of a packed cache stay rotated: the queries are rotated like the keys, and the
output is rotated back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.runtime import latents
from attnreg.runtime.interface import NO_PARAMS, AttentionSpec, BatchMetadata, KVCache, LayerParams, by_token
from attnreg.runtime.turboquant import codec
from attnreg.runtime.turboquant.cache_bytes import packed_blocks

# how many scores are computed at once
_SCORES = 2**25


class Reference(NamedTuple):
    """The exact answer for the rows before the padding, and the magnitudes from which error bounds are computed.

    output: [num_tokens, num_heads, head_size_v] float64; lse: [num_heads, num_tokens] float64.
    abs_output: shaped as output, sum of p * abs(v).
    abs_score: shaped as lse, the largest ``softmax_scale * sum(abs(q) * abs(k)) + abs(bias)`` of a visible key, as the
    cache holds it.
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
    indices: Tensor | None = None,
) -> Reference:
    """The exact result of `KernelModule.forward` for the same arguments, on the device of the query.

    indices: of sparse MLA, the positions that each query attends to; a position that is given twice counts once.
    """
    starts, device = batch.query_start_loc.tolist(), query.device
    tokens = starts[-1]
    packed = spec.packed if kv_cache is not None else None
    if packed is not None and packed.keys.code == "levels":
        query = codec.rotated(query, packed.keys.columns(spec.head_size))
    turned = packed is not None and packed.values.code == "levels"
    columns = packed.values.columns(spec.head_size_v) if packed is not None and turned else spec.head_size_v
    output = torch.zeros(tokens, spec.num_heads, columns, dtype=torch.float64, device=device)
    lse = torch.full((spec.num_heads, tokens), -torch.inf, dtype=torch.float64, device=device)
    exact = Reference(output, lse, torch.zeros_like(output), torch.zeros_like(lse))
    for i in range(batch.num_reqs):
        k, v = request_kv(spec, batch, i, kv_cache, key, value, params)
        visible = visible_keys(spec, batch, i)
        if indices is not None:
            chosen = indices[starts[i] : starts[i + 1], :, None]
            visible &= (chosen == torch.arange(visible.shape[1], device=device)).any(1)
        query_at, key_at = positions(batch, i)
        distance = query_at - key_at
        # memory holds the scores of this many queries at once
        some = max(1, _SCORES // (spec.num_heads * max(k.shape[1], 1)))
        for first in range(0, len(distance), some):
            part = slice(first, min(first + some, len(distance)))
            rows = slice(starts[i] + part.start, starts[i] + part.stop)
            _attend(spec, query[rows], k, v, distance[part], visible[part], params, exact, rows)
    if turned:
        # each element is a sum of all columns, times 1 or -1 and a factor
        sums = exact.abs_output.sum(-1, keepdim=True) * columns**-0.5
        exact = exact._replace(
            output=codec.unrotated(output, spec.head_size_v), abs_output=sums.expand(-1, -1, spec.head_size_v)
        )
    if "fp8_output" in spec.features:
        # numbers past the format's largest are saturated
        largest = torch.finfo(spec.output_dtype).max * (1.0 if params.out_scale is None else float(params.out_scale))
        exact.output.clamp_(-largest, largest)
    return exact


def _attend(
    spec: AttentionSpec,
    query: Tensor,
    k: Tensor,
    v: Tensor,
    distance: Tensor,
    visible: Tensor,
    params: LayerParams,
    exact: Reference,
    rows: slice,
) -> None:
    """Stores the exact rows of some queries [queries, num_heads, head_size] of one request.

    k, v: as `request_kv` returns them. distance, visible: [queries, keys].
    """
    (queries, keys), group = visible.shape, spec.num_heads // spec.num_kv_heads

    def per_head(x: Tensor, y: Tensor) -> Tensor:
        """The products [num_heads, queries, size] of each query head's matrix with that of its KV head."""
        products = x.reshape(spec.num_kv_heads, group * queries, x.shape[-1]) @ y
        return products.view(spec.num_heads, queries, y.shape[-1])

    q = query.double().transpose(0, 1)
    if params.q_scale is not None:
        q = q * params.q_scale.double().repeat_interleave(group)[:, None, None]
    scores = spec.softmax_scale * per_head(q, k.mT)  # [num_heads, queries, keys]
    sizes = abs(spec.softmax_scale) * per_head(q.abs(), k.abs().mT)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if params.alibi_slopes is not None:
        bias = -params.alibi_slopes.double()[:, None, None] * distance.abs()
        scores, sizes = scores + bias, sizes + bias.abs()
    scores = scores.masked_fill(~visible, -torch.inf)
    terms = scores
    if params.sinks is not None:
        sinks = params.sinks.double()[:, None, None].expand(-1, queries, 1)
        terms = torch.cat([scores, sinks], dim=-1)
    total = terms.logsumexp(-1) if terms.shape[-1] else torch.full_like(scores.sum(-1), -torch.inf)
    # without a key and a sink, total is -inf: 0 in its place makes the weights 0
    weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0)[..., None])

    exact.output[rows] = per_head(weights, v).transpose(0, 1)
    exact.lse[:, rows] = total
    exact.abs_output[rows] = per_head(weights, v.abs()).transpose(0, 1)
    if keys:
        exact.abs_score[:, rows] = sizes.masked_fill(~visible, 0.0).amax(dim=-1)


def positions(batch: BatchMetadata, request: int) -> tuple[Tensor, Tensor]:
    """A request's query positions [queries, 1] and key positions [keys]; the last query is at the last key."""
    starts, keys = batch.query_start_loc, int(batch.seq_lens[request])
    queries, device = int(starts[request + 1] - starts[request]), starts.device
    return torch.arange(keys - queries, keys, device=device)[:, None], torch.arange(keys, device=device)


def visible_keys(spec: AttentionSpec, batch: BatchMetadata, request: int) -> Tensor:
    """Whether a key takes part for a query of a request: [queries, keys] bool."""
    query_at, key_at = positions(batch, request)
    distance = query_at - key_at
    within = torch.ones_like(distance, dtype=torch.bool)
    if spec.sliding_window is not None:
        within &= distance.abs() < spec.sliding_window
    if spec.asymmetric_window is not None:
        left, right = spec.asymmetric_window
        within &= (distance <= left) | (left == -1)
        within &= (-distance <= right) | (right == -1)
    visible = within.clone()
    if batch.causal if isinstance(batch.causal, bool) else batch.causal[request]:
        visible &= distance >= 0
    if spec.chunk is not None:
        visible &= query_at // spec.chunk == key_at // spec.chunk
    if batch.mm_prefix is not None:
        for begin, end in batch.mm_prefix[request].tolist():
            together = (query_at >= begin) & (query_at < end) & (key_at >= begin) & (key_at < end)
            visible |= together & (within | (distance < 0)) if "mm_prefix_in_window" in spec.features else together
    if batch.tree_mask is not None:
        queries, keys = visible.shape
        first = int(batch.query_start_loc[request])
        own = torch.eye(queries, dtype=torch.bool, device=visible.device)
        visible[:, keys - queries :] &= own | batch.tree_mask[first : first + queries, :queries]
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
    """One request's keys and values: [num_kv_heads, keys, head_size] and [..., head_size_v], float64, dequantised.

    Keys and values of a packed cache are as `attnreg.runtime.turboquant.codec.decode` returns them, rotated or not.
    """
    keys = int(batch.seq_lens[request])
    if kv_cache is None:
        starts = batch.query_start_loc if batch.key_start_loc is None else batch.key_start_loc
        first = int(starts[request])
        # without a cache, the call has packed keys and values
        assert key is not None
        assert value is not None
        k, v = (x[first : first + keys].double().transpose(0, 1) for x in (key, value))
        return k, v
    # a cache is read through a block table
    assert batch.block_table is not None
    assert spec.block_size is not None
    blocks = batch.block_table[request, : -(-keys // spec.block_size)].long()
    if spec.packed is not None:
        pages = packed_blocks(spec.packed, spec.head_size, spec.head_size_v, spec.block_size)
        # [blocks, heads, block_size, bytes] -> [heads, keys, columns]
        k, v = (
            codec.decode(page, page.rows(x[blocks]).transpose(0, 1).flatten(1, 2)[:, :keys])
            for page, x in zip(pages, kv_cache, strict=True)
        )
        return k, v
    if spec.kv_dtype == "fp8_ds_mla":
        latent = latents.unpacked(by_token(KVCache(*(x[blocks] for x in kv_cache)), spec.kv_layout).key)
        k = latent.flatten(0, 1)[:keys].double().transpose(0, 1)
        return k, k[..., : spec.head_size_v]
    stored = by_token(KVCache(*(_blocks(x, blocks).float() for x in kv_cache)), spec.kv_layout)
    k, v = (x.flatten(0, 1)[:keys].double().transpose(0, 1) for x in stored)
    if params.k_scale is not None:
        k = k * params.k_scale.double()[:, None, None]
    if params.v_scale is not None:
        v = v * params.v_scale.double()[:, None, None]
    return k, v


def _blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """Some blocks of a cache. PyTorch cannot index 8-bit floats."""
    return cache.view(torch.uint8)[blocks].view(cache.dtype) if cache.itemsize == 1 else cache[blocks]
