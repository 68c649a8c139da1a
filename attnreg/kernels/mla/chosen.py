"""Sparse MLA as dense MLA: a batch in which every query is a request of its own, whose keys are the chosen tokens.

The cache is read token by token, as a cache with blocks of one token. The block table of a query holds the places of
its keys. So any kernel of the latent form computes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, KVCache
from attnreg.runtime.sparse.indices import ends_of, rows_of


class Chosen(NamedTuple):
    """The keys of each query: the prefix sums of queries [rows + 1], the number of keys of each [rows], and the keys'
    places in the cache [rows, topk], int32."""

    starts: Tensor
    counts: Tensor
    places: Tensor


def by_token(spec: AttentionSpec, batch: BatchMetadata, call: Call) -> tuple[AttentionSpec, BatchMetadata, Call]:
    """A call over chosen tokens as a call of dense MLA, by PyTorch's operations; without the padding."""
    cache, apart = tokens_of(spec, call)
    rows, table = batch.num_tokens, batch.block_table
    assert table is not None
    assert spec.block_size is not None
    request, row = rows_of(batch)
    position = indices_of(call)[:rows].long()
    seen = (position >= 0) & (position < ends_of(batch, request, row)[:, None])
    # puts the keys that the query sees first, in their order
    order = torch.sort(seen.int(), dim=-1, descending=True, stable=True).indices
    position = position.masked_fill(~seen, 0).gather(1, order)
    block = table[request[:, None], position // spec.block_size].long()
    places = block * apart + position % spec.block_size
    counts = seen.sum(-1)
    # one more column, because a request of one query counts as having a key of its own, even if it chose none
    places = torch.nn.functional.pad(places, (0, 1))
    # places past the query's keys become 0
    places = places.masked_fill(torch.arange(places.shape[1], device=places.device) >= counts[:, None], 0)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=places.device)
    lse = None if call.lse is None else call.lse[:, :rows]
    call = call._replace(query=call.query[:rows], output=call.output[:rows], lse=lse)
    return dense_call(spec, call, cache, Chosen(starts, counts.int(), places.int()))


def indices_of(call: Call) -> Tensor:
    """The chosen tokens of a call."""
    # the layer has validated that they are given
    assert call.indices is not None
    return call.indices


def tokens_of(spec: AttentionSpec, call: Call) -> tuple[KVCache, int]:
    """The cache in blocks of one token, and how many tokens apart its blocks begin.

    Raises `BatchError` if this is not a whole number.
    """
    assert call.kv_cache is not None
    key = call.kv_cache.key
    token_dim = 1 if spec.kv_layout == "NHD" else 2
    blocks, block_size, width = key.shape[0], key.shape[token_dim], key.shape[3]
    between, step = key.stride(0), key.stride(token_dim)
    if block_size == 1:
        step = between
    elif blocks < 2:
        between = block_size * step
    if blocks and (not step or between % step or (blocks - 1) * (between // max(step, 1)) + block_size > 2**31):
        problem = f"kv_cache.key has strides {list(key.stride())}; of sparse MLA a block's is a multiple of a token's"
        raise BatchError([f"{problem}, and the cache has up to {2**31} tokens"])
    apart = between // step if blocks else 1
    tokens = (blocks - 1) * apart + block_size if blocks else 0
    key = key.as_strided((tokens, 1, 1, width), (step, step, step, 1), key.storage_offset())
    return KVCache(key, key[..., : spec.head_size_v]), apart


def dense_call(
    spec: AttentionSpec, call: Call, cache: KVCache, keys: Chosen
) -> tuple[AttentionSpec, BatchMetadata, Call]:
    rows, topk = keys.places.shape
    batch = BatchMetadata(
        query_start_loc=keys.starts,
        seq_lens=keys.counts,
        max_query_len=1,
        max_seq_len=topk,
        query_start_loc_cpu=torch.arange(rows + 1, dtype=torch.int32, device="cpu"),
        seq_lens_cpu=torch.full((rows,), topk, dtype=torch.int32, device="cpu"),
        block_table=keys.places,
        causal=False,
    )
    dense = replace(spec, block_size=1, sparse=False, kv_layout="NHD")
    return dense, batch, call._replace(kv_cache=cache, indices=None)
