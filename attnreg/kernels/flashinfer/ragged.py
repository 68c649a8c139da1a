"""Ragged: the requests of a batch that have both queries and keys, as FlashInfer's adapters share it.

The kernels take no request without a query or a key. A row without a key has the output zero and the lse -inf. Lengths
are the host's. FlashInfer's LSE is to the base 2, [tokens, heads].
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.kernels.dense.pages import Pages
from attnreg.runtime.interface import (
    NO_PARAMS,
    AttentionSpec,
    BatchError,
    BatchMetadata,
    Call,
    KVCache,
    LayerParams,
    SpecError,
    UnclaimedError,
)

# vLLM's size
WORKSPACE = 394 << 20
_workspaces: dict[tuple[torch.device, int, str], Tensor] = {}


class Ragged(NamedTuple):
    """The requests that have both queries and keys.

    rows, keys: the rows of their queries and of their keys, [n] int64; None if they are all rows, in order.
    host_queries, host_keys: the prefix sums of both, int32 in host memory; query_starts and key_starts are their copies
    on the device. empty: the rows of queries without a key, [n] int64. num_rows: of all requests. active: the requests'
    places in the batch.
    """

    num_rows: int
    num_reqs: int
    rows: Tensor | None
    keys: Tensor | None
    host_queries: Tensor
    host_keys: Tensor
    query_starts: Tensor
    key_starts: Tensor
    lengths: Tensor
    max_query_len: int
    max_key_len: int
    empty: Tensor
    causal: bool
    active: tuple[int, ...]


def ragged(batch: BatchMetadata, backend: str) -> Ragged:
    """The requests of a batch without a cache. Raises `BatchError` for other batches, and for causality by request."""
    if batch.block_table is not None:
        raise BatchError([f"the batch has a block_table: {backend} attends to packed keys of MLA in its expanded form"])
    return requests_of(batch, batch.host_lens.tolist(), backend)


def requests_of(batch: BatchMetadata, lengths: list[int], backend: str) -> Ragged:
    """The requests of a batch with these lengths of keys; ``keys`` is None with a cache. Raises `BatchError`."""
    if not isinstance(batch.causal, bool):
        raise BatchError([f"causal is by request; {backend} has one mask for all requests"])
    device = batch.seq_lens.device
    starts = batch.host_starts.tolist()
    if batch.key_start_loc is None:
        begins = starts[:-1]
    elif batch.key_rows is None:
        begins = [0, *accumulate(lengths)][:-1]
    else:
        raise BatchError([f"key_rows is given, and {backend} reads packed keys one behind the other"])
    active = [i for i, k in enumerate(lengths) if k and starts[i + 1] > starts[i]]
    queries, keys = [starts[i + 1] - starts[i] for i in active], [lengths[i] for i in active]
    if batch.causal and any(q > k for q, k in zip(queries, keys, strict=True)):
        raise BatchError(["a causal request has more queries than keys"])
    rows = [row for i in active for row in range(starts[i], starts[i + 1])]
    places = [row for i in active for row in range(begins[i], begins[i] + lengths[i])] if not batch.paged else []
    empty = [row for i, k in enumerate(lengths) if not k for row in range(starts[i], starts[i + 1])]

    def on_device(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)

    sums = [[0, *accumulate(queries)], [0, *accumulate(keys)]]
    host_queries, host_keys = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in sums)
    return Ragged(
        num_rows=starts[-1],
        num_reqs=len(active),
        rows=None if rows == list(range(starts[-1])) else on_device(rows),
        keys=None if places == list(range(len(places))) else on_device(places),
        host_queries=host_queries,
        host_keys=host_keys,
        query_starts=host_queries.to(device, non_blocking=True),
        key_starts=host_keys.to(device, non_blocking=True),
        lengths=on_device(keys, torch.int32),
        max_query_len=max(queries, default=0),
        max_key_len=max(keys, default=0),
        empty=on_device(empty),
        causal=batch.causal,
        active=tuple(active),
    )


class Arguments(NamedTuple):
    """The tensors of a call as the kernels take them, all dense; out is the call's output itself if that is dense."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor


def arguments(plan: Ragged, call: Call) -> Arguments:
    """The queries, keys and values of the requests, and memory for their output."""
    (key, value), k = call.packed, int(plan.host_keys[-1])
    key, value = (x[:k] if plan.keys is None else x.index_select(0, plan.keys) for x in (key, value))
    query, out = rows_of(plan, call)
    return Arguments(query, key.contiguous(), value.contiguous(), out)


def rows_of(plan: Ragged, call: Call) -> tuple[Tensor, Tensor]:
    """The queries of the requests, and memory for their output, both dense."""
    query, output = call.query[: plan.num_rows], call.output[: plan.num_rows]
    query = query if plan.rows is None else query.index_select(0, plan.rows)
    in_place = plan.rows is None and output.is_contiguous()
    out = output if in_place else output.new_empty(len(query), *output.shape[1:])
    # the kernels ignore the strides of queries
    return query.contiguous(), out


def pages_of(call: Call, backend: str) -> KVCache:
    """The keys and values of a cache in the layer's layout. Raises `BatchError` if the kernels cannot read them."""
    assert call.kv_cache is not None
    key, value = call.kv_cache.key, call.kv_cache.value
    if key.stride() != value.stride() or key.stride(-1) != 1:
        strides = f"{tuple(key.stride())} and {tuple(value.stride())}"
        needs = f"{backend} needs the same strides for keys and values, with contiguous heads"
        raise BatchError([f"kv_cache has strides {strides}: {needs}"])
    return call.kv_cache


def caches(spec: AttentionSpec, copied: Pages | None, call: Call, backend: str) -> tuple[KVCache, str]:
    """The pages that kernels read, and their layout: the cache, or pages with copies of packed keys and values."""
    if copied is not None:
        return copied.filled(call.packed), "NHD"
    return pages_of(call, backend), spec.kv_layout


def store(plan: Ragged, call: Call, out: Tensor, lse: Tensor | None) -> None:
    """Stores the kernels' results, and the rows without a key; lse [rows, heads], to the base 2."""
    n, output = plan.num_rows, call.output
    if plan.rows is not None:
        output.index_copy_(0, plan.rows, out)
    elif out.data_ptr() != output.data_ptr():
        output[:n] = out
    if call.lse is not None and lse is not None:
        natural = lse.float().t() * math.log(2.0)
        if plan.rows is None:
            call.lse[:, :n] = natural
        else:
            call.lse.index_copy_(1, plan.rows, natural.contiguous())
    store_empty(plan, call)


def write_kv(
    spec: AttentionSpec, plan: object, key: Tensor, value: Tensor, kv_cache: KVCache, *, params: LayerParams = NO_PARAMS
) -> None:
    """Raises `BatchError`: the backend of the latent form writes the cache of MLA."""
    raise BatchError(["a backend for prompts of MLA has no cache to write to; that of the latent form writes it"])


def store_empty(plan: Ragged, call: Call) -> None:
    """Stores the rows without a key."""
    if plan.empty.numel():
        call.output.index_fill_(0, plan.empty, 0)
        if call.lse is not None:
            call.lse.index_fill_(1, plan.empty, -torch.inf)


def workspace(tensor: Tensor, kernels: str = "") -> Tensor:
    """Memory for kernels on the current stream of a tensor's device; it begins as zeros, as they expect.

    kernels: the name of kernels that count in this memory, and so do not share it with others.
    """
    stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
    key = tensor.device, stream, kernels
    if key not in _workspaces:
        _workspaces[key] = torch.zeros(WORKSPACE if tensor.is_cuda else 16, dtype=torch.uint8, device=tensor.device)
    return _workspaces[key]


def validate(spec: AttentionSpec, widths: tuple[tuple[int, int], ...], backend: str) -> None:
    """Raises `SpecError` for another form of attention, `UnclaimedError` for widths without a compiled kernel."""
    if spec.latent or spec.num_kv_heads != spec.num_heads:
        raise SpecError(f"num_kv_heads is {spec.num_kv_heads}; {backend} computes MLA in its expanded form, in which "
                        f"every one of the {spec.num_heads} heads has keys")  # fmt: skip
    if (spec.head_size, spec.head_size_v) not in widths:
        compiled = ", ".join(f"{a}/{b}" for a, b in widths)
        message = f"head sizes {spec.head_size} and {spec.head_size_v}: the kernels are compiled for {compiled}"
        raise UnclaimedError(message, backend)
