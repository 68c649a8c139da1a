"""The indexer of sparse MLA, in PyTorch: which tokens of its context a query attends to.

The score of a query token with a key token is the sum over the indexer's heads of
``weight[head] * relu(scale * (query[head] . key))``; a key is shared by all heads. A query takes the ``topk`` keys with
the highest scores among those that it sees; among equal scores, the earlier keys. DeepSeek-V3.2 and GLM-MoE-DSA use
``index_head_dim ** -0.5`` as scale. Their weights are a projection times ``index_n_heads ** -0.5``. Their kernels also
rotate queries and keys by a Hadamard matrix and use fp8, which changes rounding alone.

Source: DeepSeek-V3.2-Exp, equation 1; transformers, DeepseekV32Indexer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.runtime.batch import BatchError, BatchMetadata, tensor_words
from attnreg.runtime.lengths import prefix_sums
from attnreg.runtime.spec import AttentionSpec
from attnreg.runtime.tensors import tensor_problems
from attnreg.runtime.validation import refuse, validate_batch

# how many scores of single heads are computed at once
_SCORES = 1 << 24


def choose_tokens(
    query: Tensor, weights: Tensor, keys: Tensor, batch: BatchMetadata, *, topk: int, scale: float
) -> Tensor:
    """The positions that each query attends to, [tokens, topk] int32; -1 where it sees fewer keys.

    query [tokens, index_n_heads, index_head_dim] and weights [tokens, index_n_heads], of any floating types; keys
    [num_blocks, block_size, index_head_dim], in the blocks of the batch's block table, or packed [num_keys,
    index_head_dim] for a batch without one. Positions count from a request's first key. Computes in float32, or in
    float64 for float64 queries. Shapes come from the host's lengths; where these are upper bounds, the device's lengths
    decide what a query sees. Rows past the batch's tokens are -1. Raises `BatchError`.
    """
    _validate(query, weights, keys, batch, topk, scale)
    starts, lengths = batch.host_starts.tolist(), batch.host_lens.tolist()
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    chosen = torch.full((query.shape[0], topk), -1, dtype=torch.int32, device=query.device)
    key_starts = prefix_sums(lengths)
    for i, length in enumerate(lengths):
        if not length:
            continue
        if batch.block_table is None:
            first = batch.key_start_loc[i] if batch.key_start_loc is not None else key_starts[i]
            key = keys.index_select(0, first + torch.arange(length, device=keys.device)).to(dtype)
        else:
            count = -(-length // keys.shape[1])
            # the host's length may be an upper bound, with more blocks than the cache has
            blocks = batch.block_table[i, :count].long().clamp(0, keys.shape[0] - 1)
            key = keys[blocks].flatten(0, 1)[:length].to(dtype)
        position = torch.arange(length, device=query.device)
        step = max(1, _SCORES // (query.shape[1] * length))
        for row in range(starts[i], starts[i + 1], step):
            rows = slice(row, min(row + step, starts[i + 1]))
            products = torch.einsum("thd,kd->thk", query[rows].to(dtype), key) * scale
            scores = torch.einsum("th,thk->tk", weights[rows].to(dtype), products.relu())
            own = batch.seq_lens[i] - starts[i + 1] + torch.arange(rows.start, rows.stop, device=query.device)
            end = batch.seq_lens[i].expand_as(own)
            if isinstance(batch.causal, Tensor):
                end = torch.where(batch.causal[i], own + 1, end)
            elif batch.causal:
                end = own + 1
            seen = position < end[:, None]
            order = scores.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
            # the sort puts keys that the query does not see last
            exists = torch.arange(order.shape[1], device=query.device) < end[:, None]
            chosen[rows, : order.shape[1]] = order.int().masked_fill(~exists, -1)
    return chosen


def _validate(query: Tensor, weights: Tensor, keys: Tensor, batch: BatchMetadata, topk: int, scale: float) -> None:
    if not isinstance(batch, BatchMetadata):
        raise BatchError([f"batch is {tensor_words(batch)}; expected BatchMetadata"])
    if type(topk) is not int or topk < 1:
        raise BatchError([f"topk is {topk!r}; expected an integer of at least 1"])
    device = batch.seq_lens.device
    problems = [*tensor_problems("query", query, (None, None, None), None, device=device, dense=False)]
    if not problems:
        tokens, heads, size = query.shape
        key_shape = (None, size) if batch.block_table is None else (None, None, size)
        problems += tensor_problems("weights", weights, (tokens, heads), None, device=device, dense=False)
        problems += tensor_problems("keys", keys, key_shape, None, device=device, dense=False)
    refuse(problems)
    tokens, heads, size = query.shape
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=1, head_size=size, head_size_v=size, dtype=torch.float32, softmax_scale=scale,
        block_size=None if batch.block_table is None else keys.shape[1],
    )  # fmt: skip
    valid = validate_batch(spec, batch)
    if tokens < valid.tokens:
        problems.append(f"query has {tokens} rows; the batch has {valid.tokens} tokens")
    if batch.block_table is None:
        least = int(batch.host_lens.sum()) if batch.key_rows is None else batch.key_rows
        problems += [f"keys has {keys.shape[0]} rows; the batch has {least}"] if keys.shape[0] < least else []
    elif valid.places is not None:
        problems += valid.places._replace(slot=-1).problems(keys.shape[0], keys.shape[1])
    refuse(problems)
