"""FLASHMLA: DeepSeek's decoding kernel for MLA on Hopper, as vLLM builds it, behind the runtime's contract.

The library is loaded from its file, so vLLM itself is not imported. The kernel takes as many queries of each request;
of any other batch every query becomes a request of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnreg.kernels.flash_attn.sequences import refuse_unaligned
from attnreg.kernels.flash_mla import record
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
    paged_cache_shape,
)

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASHMLA"
# widths of a latent with its rotary part and of the latent alone, and the tokens of a block: fixed in the kernel
WIDTHS, BLOCK = (576, 512), 64

_decode = record.DENSE_DECODE.load()


@dataclass(slots=True, eq=False)
class MlaPlan:
    """The one call for a batch: ``requests`` with ``queries`` each.

    empty: whether a row of queries sees no key. schedule: what the kernel worked out of the lengths in the first call,
    for those of the other layers.
    """

    num_tokens: int
    requests: int
    queries: int
    causal: bool
    seq_lens: Tensor
    block_table: Tensor
    empty: Tensor
    slot_mapping: Tensor | None
    schedule: list[Tensor | None] = field(default_factory=lambda: [None, None])


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache; its value has no memory of its own: it is ``key[..., :head_size_v]``."""
    _validate(spec)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> MlaPlan:
    """The one call of a batch. Raises `SpecError` for a layer other than MLA, `BatchError` without a cache."""
    _validate(spec)
    if batch.block_table is None:
        raise BatchError(["there is no block_table: MLA in its latent form reads the cache"])
    lengths, device = batch.host_starts.diff(), batch.seq_lens.device
    queries = int(lengths[0]) if len(lengths) else 0
    causal, lens, table, requests = batch.causal is True, batch.seq_lens, batch.block_table, batch.num_reqs
    if (lengths != queries).any():
        request = torch.arange(batch.num_reqs, device="cpu").repeat_interleave(lengths)
        # the keys of a causal query end before those of the later queries
        later = (batch.host_starts[1:][request] - 1 - torch.arange(batch.num_tokens, device="cpu")) * causal
        request, later = torch.stack([request, later]).to(device, non_blocking=True)
        lens, table = (lens[request] - later).clamp(min=0).to(torch.int32), table[request]
        requests, queries, causal = batch.num_tokens, 1, False
    return MlaPlan(
        num_tokens=batch.num_tokens,
        requests=requests,
        queries=queries,
        causal=causal and queries > 1,
        seq_lens=lens.contiguous(),
        block_table=table,
        empty=(lens == 0).repeat_interleave(queries),
        slot_mapping=batch.slot_mapping,
    )


def _validate(spec: AttentionSpec) -> None:
    if not spec.latent:
        raise SpecError(f"the layer is none of MLA in its latent form, which is all that {BACKEND} computes")
    sizes = spec.head_size, spec.head_size_v, spec.block_size
    if sizes != (*WIDTHS, BLOCK):
        given = f"head sizes {sizes[0]} and {sizes[1]}, block_size {sizes[2]}"
        raise UnclaimedError(f"{given}: the kernel is compiled for {WIDTHS} and {BLOCK}", BACKEND)
    if spec.cache_dtype != spec.dtype:
        raise UnclaimedError(f"kv_dtype {spec.kv_dtype}: queries and latents are of one dtype", BACKEND)


def write_kv(
    spec: AttentionSpec,
    plan: MlaPlan,
    key: Tensor,
    value: Tensor,
    kv_cache: KVCache,
    *,
    params: LayerParams = NO_PARAMS,
) -> None:
    """Stores the batch's new latents, key, with their rotary parts, value."""
    write_new_kv(spec, plan, key, value, kv_cache, params=params)


def forward(spec: AttentionSpec, plan: MlaPlan, call: Call) -> None:
    """Writes the attention of the batch's queries to the latents into ``output``, and into ``lse``.

    Source of the arguments' meanings: vllm/third_party/flashmla/flash_mla_interface.py.
    """
    assert call.kv_cache is not None
    tokens = plan.num_tokens
    if not tokens:
        return
    shape = plan.requests, plan.queries, spec.num_heads
    # one head: both layouts are the same bytes
    cache = call.kv_cache.key if spec.kv_layout == "NHD" else call.kv_cache.key.transpose(1, 2)
    query, output = call.query[:tokens], call.output[:tokens]
    refuse_unaligned(BACKEND, query=query, key=cache)
    in_place = output.is_contiguous()
    out = output if in_place else output.new_empty(output.shape)
    _, lse, *plan.schedule = _decode(
        q=query.contiguous().view(*shape, -1),
        kcache=cache,
        head_size_v=WIDTHS[1],
        seqlens_k=plan.seq_lens,
        block_table=plan.block_table,
        softmax_scale=spec.softmax_scale,
        is_causal=plan.causal,
        tile_scheduler_metadata=plan.schedule[0],
        num_splits=plan.schedule[1],
        out_=out.view(*shape, -1),
    )
    output.copy_(out.masked_fill(plan.empty[:, None, None], 0))
    if call.lse is not None:
        rows = lse.transpose(1, 2).reshape(tokens, spec.num_heads)
        call.lse[:, :tokens] = rows.masked_fill(plan.empty[:, None], -torch.inf).mT
