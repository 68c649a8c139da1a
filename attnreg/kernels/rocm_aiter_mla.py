"""ROCM_AITER_MLA: aiter's assembly kernels for MLA behind the runtime's contract. Not run on AMD hardware yet.

The kernels read token by token (pages of one token). They take 16, 32, 64 or 128 heads, and the same number of queries
in each request. Any other batch is turned into requests with a single query of 16 heads. With an fp8 cache the kernels
round queries to fp8, so errors exceed the contract's bounds, which include no rounding of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnreg.kernels.aiter import common, record
from attnreg.kernels.triton.cache import write_new_kv
from attnreg.runtime.interface import (
    NO_PARAMS,
    AttentionSpec,
    BatchError,
    BatchMetadata,
    Call,
    KVCache,
    KVCacheShape,
    LayerParams,
    SpecError,
    UnclaimedError,
)

BACKEND = "ROCM_AITER_MLA"
# fixed in the kernels: a latent of 512 with a rotary part of 64, and the latent alone
WIDTHS = (576, 512)
# the numbers of heads that the kernels are built for, by whether the cache is quantised; and those for prompts
HEADS = {False: (16, 32, 64, 128), True: (16, 128)}
PROMPT_HEADS = (16, 128)
# how many heads a request has after a split by heads
GROUP = 16
# the most queries of one request in a decode
MOST_QUERIES = 4

_decode = record.MLA_DECODE.load()
_prefill = record.MLA_PREFILL.load()


@dataclass(frozen=True, slots=True, eq=False)
class AiterMlaPlan:
    """The one call for a batch.

    form: ``whole`` requests, ``single`` queries with groups of heads, or ``prompts``. query_starts, kv_starts: prefix
    sums over the call's requests, int32. slots: the slots of the keys, [kv_starts[-1]] int32. last: [requests] int32
    ones, the length of each request's last page.
    """

    num_tokens: int
    form: Literal["whole", "single", "prompts"]
    query_starts: Tensor
    kv_starts: Tensor
    slots: Tensor
    last: Tensor
    max_query_len: int
    slot_mapping: Tensor | None


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache. Values have no memory of their own: they are ``key[..., :head_size_v]``."""
    _validate(spec)
    return common.kv_cache_shape(spec, num_blocks, BACKEND)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> AiterMlaPlan:
    """The one call of a batch. Raises `SpecError` for a layer other than MLA, `BatchError` without a cache."""
    _validate(spec)
    if batch.block_table is None:
        raise BatchError(["there is no block_table: MLA in its latent form reads the cache"])
    common.refuse_padding(batch, BACKEND)
    device, lengths = batch.seq_lens.device, batch.host_starts.diff()
    # the actual largest length: batch.max_query_len is only an upper bound
    n = int(lengths.max()) if len(lengths) else 0
    native = spec.num_heads in HEADS[spec.quantised]
    uniform = bool((lengths == n).all()) and n <= MOST_QUERIES
    prompts = n > MOST_QUERIES and spec.num_heads in PROMPT_HEADS and not spec.quantised and "lse" not in spec.features
    if native and uniform and (batch.causal or n == 1):
        form: Literal["whole", "single", "prompts"] = "whole"
    else:
        form = "prompts" if prompts and batch.causal else "single"
    if form == "single":
        groups = -(-spec.num_heads // GROUP)
        request = torch.arange(batch.num_reqs, device="cpu").repeat_interleave(lengths)
        # the keys of a causal query end before those of the later queries
        later = batch.host_starts[1:][request] - 1 - torch.arange(batch.num_tokens, device="cpu")
        request, later = request.repeat_interleave(groups), (later * batch.causal).repeat_interleave(groups)
        starts = torch.arange(len(request) + 1, device="cpu")
    else:
        # requests without a query are left out
        request = lengths.nonzero().flatten()
        later, starts = torch.zeros_like(request), pad(lengths[request].cumsum(0), (1, 0))
    # the host may know only upper bounds
    most = int((batch.host_lens[request] - later).sum())
    request, later = torch.stack([request, later]).to(device, non_blocking=True)
    seen = (batch.seq_lens[request] - later).clamp(min=0)
    kv_starts = common.starts_of(seen)
    blocks, offsets = common.packed_places(spec, batch, request, seen, kv_starts, most)
    assert blocks is not None
    assert spec.block_size is not None
    return AiterMlaPlan(
        num_tokens=batch.num_tokens,
        form=form,
        query_starts=common.int32(starts, device),
        kv_starts=kv_starts,
        slots=common.with_spare(blocks * spec.block_size + offsets),
        last=torch.ones(len(request), dtype=torch.int32, device=device),
        max_query_len=1 if form == "single" else n,
        slot_mapping=batch.slot_mapping,
    )


def _validate(spec: AttentionSpec) -> None:
    common.validate_cache(spec, BACKEND)
    if not spec.latent:
        raise SpecError(f"the layer is not MLA in its latent form; {BACKEND} computes nothing else")
    if (spec.head_size, spec.head_size_v) != WIDTHS:
        message = f"head sizes {spec.head_size} and {spec.head_size_v}: the kernels are compiled for {WIDTHS}"
        raise UnclaimedError(message, BACKEND)
    if not spec.quantised and (spec.dtype, spec.cache_dtype) != (torch.bfloat16, torch.bfloat16):
        message = f"dtype {spec.dtype}, kv_dtype {spec.kv_dtype}: the kernels know bfloat16 and fp8"
        raise UnclaimedError(message, BACKEND)


def write_kv(
    spec: AttentionSpec,
    plan: AiterMlaPlan,
    key: Tensor,
    value: Tensor,
    kv_cache: KVCache,
    *,
    params: LayerParams = NO_PARAMS,
) -> None:
    """Stores the batch's new latents (key) with their rotary parts (value)."""
    _latents(spec, kv_cache)
    scales = LayerParams(k_scale=params.k_scale, v_scale=params.k_scale)
    write_new_kv(spec, plan, key, value, kv_cache, params=scales)


def forward(spec: AttentionSpec, plan: AiterMlaPlan, call: Call) -> None:
    """Writes the attention of the batch's queries to the latents into ``output``, and into ``lse``.

    Source of the arguments' meanings: aiter/mla.py and csrc/py_itfs_cu/asm_mla.cu.
    """
    assert call.kv_cache is not None
    tokens, latents = plan.num_tokens, _latents(spec, call.kv_cache)
    if not tokens:
        return
    query, output, lse = call.query[:tokens], call.output[:tokens], call.lse
    heads = -(-spec.num_heads // GROUP) * GROUP if plan.form == "single" else spec.num_heads
    rows, group = (tokens * heads // GROUP, GROUP) if plan.form == "single" else (tokens, heads)
    q = pad(query, (0, 0, 0, heads - spec.num_heads)).reshape(rows, group, spec.head_size).contiguous()
    arguments = {
        "kv_buffer": latents,
        "qo_indptr": plan.query_starts,
        "kv_indptr": plan.kv_starts,
        "kv_indices": plan.slots,
        "kv_last_page_lens": plan.last,
        "max_seqlen_q": plan.max_query_len,
        "sm_scale": spec.softmax_scale,
    }
    in_place = heads == spec.num_heads and output.is_contiguous()
    out = output.view(rows, group, -1) if in_place else output.new_empty(rows, group, spec.head_size_v)
    if plan.form == "prompts":
        _prefill(q=q, o=out, **arguments)
    else:
        q_scale = kv_scale = None
        if spec.quantised:
            (q, q_scale), kv_scale = _as_fp8(q), common.one_scale(call.params.k_scale, query)
        lse_rows = _decode(q=q, o=out, q_scale=q_scale, kv_scale=kv_scale, return_lse=lse is not None, **arguments)[1]
        if lse is not None:
            lse[:, :tokens] = lse_rows.view(tokens, heads)[:, : spec.num_heads].T
    if not in_place:
        output.copy_(out.view(tokens, heads, -1)[:, : spec.num_heads])


def _latents(spec: AttentionSpec, kv_cache: KVCache) -> Tensor:
    """The cache as [slots, 1, 1, head_size], a page for each token. Raises `BatchError` if it cannot be viewed so."""
    key = kv_cache.key
    if not key.is_contiguous():
        raise BatchError(["kv_cache.key has gaps; aiter's kernels for MLA read the slots of a dense cache"])
    return key.view(-1, 1, 1, spec.head_size)


def _as_fp8(query: Tensor) -> tuple[Tensor, Tensor]:
    """Queries as fp8, and their one scale, [1] float32."""
    largest = torch.finfo(common.FP8).max
    scale = (query.abs().amax().float() / largest).clamp(min=torch.finfo(torch.float32).tiny).view(1)
    return (query.float() / scale).clamp(-largest, largest).to(common.FP8), scale
