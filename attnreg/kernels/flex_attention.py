"""FLEX_ATTENTION: PyTorch's flex_attention over gathered keys and values, all requests of a batch in one call.

Keys are gathered because a flex kernel multiplies every element of a tile that it loads, masked or not. A NaN in an
unwritten slot times zero is NaN. The block mask is computed from the host's lengths, so no mask is ever held whole.
Where these are upper bounds, positions are shifted on the device, and keys before the first are hidden. Sinks become
one more key after all others: every query sees it, its score is the head's sink, and its value is zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attnreg.kernels.dense.attention import fill_empty
from attnreg.kernels.dense.cache import KeyPlaces, gather, places, write_kv, written
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, LayerParams, paged_cache_shape
from attnreg.runtime.masks import Band, in_band, together

__all__ = ["KEYS_APART", "forward", "kv_cache_shape", "plan", "write_kv"]

kv_cache_shape = paged_cache_shape
KEYS_APART = True

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
TILE = 128
QUERY_PADDING, KEY_PADDING, SINK = -1, -2, -3


class _Side(NamedTuple):
    """The queries or the keys of a batch, request after request: request and position of each, [n] int32.

    The request of padding is QUERY_PADDING or KEY_PADDING; the request of the sinks' key is SINK.
    """

    request: Tensor
    position: Tensor


class FlexPlan(NamedTuple):
    """One call of flex_attention for a batch; queries and keys are padded to whole tiles.

    query, key: on the device. places: of the keys. mask: None if no query sees a key. sink: the row of the key that
    stands for the sinks. softcap: as a tensor. tokens: the number of queries before the padding. empty: the rows of
    queries that see no key. written: see `cache.written`. absent: [keys] bool, the rows of keys that the cache does not
    hold; None if it holds all.
    """

    query: _Side
    key: _Side
    places: KeyPlaces
    mask: BlockMask | None
    sink: int | None
    softcap: Tensor | None
    tokens: int
    empty: Tensor
    written: tuple[Tensor, Tensor, Tensor] | None
    absent: Tensor | None = None


def plan(spec: AttentionSpec, batch: BatchMetadata) -> FlexPlan:
    """The block mask of a batch, and the places of its keys."""
    device = batch.seq_lens.device
    lengths, queries = batch.host_lens, batch.host_starts.diff()
    query = _side(queries, lengths - queries, QUERY_PADDING)
    # a request without queries needs no keys; others need none before their window, unless there are prefix ranges
    first = torch.zeros_like(lengths)
    left, _ = spec.sides(batch.causal)
    if left >= 0 and batch.mm_prefix is None:
        first = (lengths - queries - left).clamp(min=0)
    sinks = "sinks" in spec.features
    key = _side(torch.where(queries > 0, lengths - first, 0), first, KEY_PADDING, min_padding=1 if sinks else 0)
    has_keys = lengths.repeat_interleave(queries) > 0
    empty = (~has_keys).nonzero().flatten().to(device, non_blocking=True)
    stored = written(spec, batch)
    if not has_keys.any():
        return FlexPlan(query, key, KeyPlaces(None, empty), None, None, None, batch.num_tokens, empty, stored)
    # padding repeats the last key, which is finite; no query sees it
    keys = int((key.request >= 0).sum())
    at = torch.arange(len(key.request), device="cpu").clamp(max=keys - 1)
    if sinks:
        key.request[keys] = SINK
    query_there, key_there = (_there(batch, side) for side in (query, key))
    sink, at = keys if sinks else None, at.to(device, non_blocking=True)
    request, position = key_there.request[at], key_there.position[at].clamp(min=0)
    keys_at, absent = places(spec, batch, request, position), None
    if not _certain(batch):
        absent = batch.seq_lens[request] == 0
        assert keys_at.blocks is not None
        # the block table of a request without keys may hold anything
        keys_at = KeyPlaces(keys_at.blocks.masked_fill(absent, 0), keys_at.offsets)
    mask = _block_mask(spec, batch, query, key, key_there, sink, _mask_mod(spec, batch, query_there, key_there))
    softcap = _scalar(spec.softcap, device)
    return FlexPlan(query_there, key_there, keys_at, mask, sink, softcap, batch.num_tokens, empty, stored, absent)


def forward(spec: AttentionSpec, plan: FlexPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``."""
    if plan.mask is not None:
        # padded to whole tiles, so that a kernel is compiled for a layer, not for the length of a batch
        q = call.query.new_zeros(len(plan.query.request), *call.query.shape[1:])
        q[: plan.tokens] = call.query[: plan.tokens]
        k, v = gather(spec, plan.places, call)
        if plan.absent is not None:
            k, v = (x.masked_fill(plan.absent[:, None, None], 0) for x in (k, v))
        if plan.sink is not None:
            v[plan.sink].zero_()
        out, total = _call(spec, plan.mask, _score_mod(plan, call.params), q, k, v)
        call.output[: plan.tokens] = out[0].transpose(0, 1)[: plan.tokens]
        if call.lse is not None:
            total = total[0, :, : plan.tokens]
            # the kernel got a large finite number for a sink of +inf
            sinks = call.params.sinks
            call.lse[:, : plan.tokens] = total if sinks is None else total.maximum(sinks.float()[:, None])
    fill_empty(plan.empty, call)


def _call(spec: AttentionSpec, mask: BlockMask, score_mod: ScoreMod | None, *packed: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of flex_attention for packed q, k, v: compiled on a GPU, eager on a CPU."""
    q, k, v = (x.transpose(0, 1)[None] for x in packed)
    grouped = spec.num_heads != spec.num_kv_heads
    if q.is_cuda:
        # each combination of features compiles a kernel, and a process may have many combinations
        with torch._dynamo.config.patch(recompile_limit=1024):
            out, aux = _compiled()(
                q, k, v, score_mod, mask, spec.softmax_scale, grouped,
                kernel_options=_kernel_options(q, v), return_aux=AuxRequest(lse=True),
            )  # fmt: skip
        return out, aux.lse
    with warnings.catch_warnings():
        # no order for CPUs names this backend, because it is slow without a compiler
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        result: Any = flex_attention(
            q, k, v, score_mod, mask, spec.softmax_scale, grouped, return_aux=AuxRequest(lse=True)
        )
    return result[0], result[1].lse


def _kernel_options(query: Tensor, value: Tensor) -> Any:
    """Smaller tiles, if PyTorch's defaults do not fit into 227 KiB of shared memory.

    These do not fit for rows over 512 bytes, or for values wider than queries, because PyTorch chooses by the queries.
    """
    wide = max(query.shape[-1], value.shape[-1]) * query.itemsize > 512 or value.shape[-1] > query.shape[-1]
    return {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1, "num_warps": 4} if wide else None


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _side(lengths: Tensor, first: Tensor, padding: int, min_padding: int = 0) -> _Side:
    """Requests and positions of tokens, from each request's number of tokens and first position.

    min_padding: the fewest rows of padding.
    """
    request = torch.arange(len(lengths), dtype=torch.int32, device="cpu").repeat_interleave(lengths)
    begin = lengths.cumsum(0) - lengths
    position = torch.arange(len(request), device="cpu") + (first - begin).repeat_interleave(lengths)
    more = min_padding + -(len(request) + min_padding) % TILE
    return _Side(
        torch.cat([request, request.new_full((more,), padding)]),
        torch.cat([position.int(), position.new_zeros(more, dtype=torch.int32)]),
    )


def _certain(batch: BatchMetadata) -> bool:
    """Whether the host knows the lengths of the keys, not only upper bounds."""
    return batch.on_host or not batch.paged


def _there(batch: BatchMetadata, side: _Side) -> _Side:
    """A side on the device, with positions counted by the device's lengths."""
    device = batch.seq_lens.device
    request, position = (x.to(device, non_blocking=True) for x in side)
    if not _certain(batch):
        more = batch.seq_lens_cpu.to(device, non_blocking=True) - batch.seq_lens
        position = position - torch.where(request >= 0, more[request.clamp(min=0)], 0)
    return _Side(request, position)


def _scalar(number: float | None, device: torch.device) -> Tensor | None:
    """A number as a tensor. The compiler would make a Python number a constant, or a symbol without a value."""
    if number is None:
        return None
    dtype = torch.int64 if isinstance(number, int) else torch.float32
    return torch.tensor(number, dtype=dtype).to(device, non_blocking=True)


def _window(spec: AttentionSpec) -> int | None:
    """How many keys a query's window has, its own included; None if it has all keys."""
    left, _ = spec.sides(causal=True)
    return None if left < 0 else left + 1


def _mask_mod(spec: AttentionSpec, batch: BatchMetadata, query: _Side, key: _Side) -> MaskMod:
    """The mask function that flex_attention calls with the rows of a query and a key."""
    causal, ranges, sinks = batch.causal is True, batch.mm_prefix, "sinks" in spec.features
    certain = _certain(batch)
    window = _scalar(_window(spec), batch.seq_lens.device)

    def visible(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        p, k = query.position[row], key.position[column]
        allowed = in_band(p, k, causal=causal, window=window)
        if ranges is not None:
            # padding has a negative request: it reads some range here, and the comparison of requests hides it below
            request = query.request[row].clamp(min=0)
            for i in range(ranges.shape[1]):
                begin, end = ranges[request, i, 0], ranges[request, i, 1]
                allowed = allowed | together(begin, end, p, k)
        allowed = allowed & (query.request[row] == key.request[column])
        if not certain:
            allowed = allowed & (k >= 0)
        return allowed | (key.request[column] == SINK) if sinks else allowed

    return visible


def _block_mask(
    spec: AttentionSpec,
    batch: BatchMetadata,
    query: _Side,
    key: _Side,
    key_there: _Side,
    sink: int | None,
    mask_mod: MaskMod,
) -> BlockMask:
    """The tiles that hold a visible key, from the extremes of each tile's requests and positions.

    key_there: the keys with their positions on the device.
    """
    (q_req_lo, q_req_hi), (q_lo, q_hi) = _extremes(query)
    (k_req_lo, k_req_hi), (k_lo, k_hi) = (tuple(x[None, :] for x in pair) for pair in _extremes(key))
    some = (q_req_lo[:, None] <= k_req_hi) & (k_req_lo <= q_req_hi[:, None])
    # positions ascend only within one request; tiles of several requests are compared by request alone
    single = (q_req_lo == q_req_hi)[:, None] & (k_req_lo == k_req_hi) & (q_req_lo[:, None] == k_req_lo)
    full = single.clone()
    far, near = q_hi[:, None] - k_lo, q_lo[:, None] - k_hi  # the largest and the smallest p - k of a tile
    band = Band(batch.causal is True, _window(spec))
    if batch.mm_prefix is None:
        some &= ~single | band.touches(near, far)
    full &= band.covers(near, far)
    if sink is not None:
        # the sinks' key shares its tile with padding, so that tile is never full
        some[:, sink // TILE] = True
    device = batch.seq_lens.device
    some, full = some.to(device, non_blocking=True), full.to(device, non_blocking=True)
    if not _certain(batch):
        full = full & (key_there.position.view(-1, TILE).amin(1) >= 0)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~full),
        *_ordered(full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(len(query.request), len(key.request)),
        compute_q_blocks=False,
    )


def _extremes(side: _Side) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Smallest and largest request, smallest and largest position of each tile: four [tiles]."""
    request, position = (x.view(-1, TILE) for x in side)
    return (request.amin(1), request.amax(1)), (position.amin(1), position.amax(1))


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The number of set tiles of each row [1, 1, rows], and the columns [1, 1, rows, columns], the set ones first."""
    counts = tiles.sum(1, dtype=torch.int32)
    indices = tiles.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None]


def _score_mod(plan: FlexPlan, params: LayerParams) -> ScoreMod | None:
    """The score function that applies softcap, ALiBi and sinks in the contract's order; None if a layer has none."""
    softcap, slopes, sinks = plan.softcap, params.alibi_slopes, params.sinks
    # float32 whatever their type: scores are float32, and a compiler takes no other type beside them
    slopes, sinks = (None if x is None else x.float() for x in (slopes, sinks))
    # the softmax of +inf would be NaN: +inf less the largest score, which is +inf
    sinks = None if sinks is None else sinks.clamp(max=1e30)
    if softcap is None and slopes is None and sinks is None:
        return None
    query_at, (key_request, key_at) = plan.query.position, plan.key

    def modified(score: Tensor, _batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[head] * (query_at[row] - key_at[column]).abs()
        if sinks is not None:
            score = torch.where(key_request[column] == SINK, sinks[head], score)
        return score

    return modified
