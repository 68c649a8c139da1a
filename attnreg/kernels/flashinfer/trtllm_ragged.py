"""TRTLLM_RAGGED: NVIDIA's trtllm-gen kernels for prompts of MLA, through FlashInfer. Not run on Blackwell yet."""

from __future__ import annotations

from attnreg.kernels.flashinfer import record
from attnreg.kernels.flashinfer.ragged import (
    Ragged,
    arguments,
    ragged,
    store,
    store_empty,
    validate,
    workspace,
    write_kv,
)
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCacheShape, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "TRTLLM_RAGGED"
# of the widths of keys and values that the row claims, those with a compiled kernel
WIDTHS = ((192, 128), (256, 256))

_attend = record.TRTLLM_RAGGED.load()


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shapes of a cache of expanded keys. No prompt reads such a cache."""
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Ragged:
    """The requests of a batch. Raises `SpecError`, `UnclaimedError` and `BatchError`."""
    validate(spec, WIDTHS, BACKEND)
    return ragged(batch, BACKEND)


def forward(spec: AttentionSpec, plan: Ragged, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``."""
    if not plan.num_reqs:
        store_empty(plan, call)
        return
    query, key, value, out = arguments(plan, call)
    result = _attend(
        query=query,
        key=key,
        value=value,
        workspace_buffer=workspace(query),
        seq_lens=plan.lengths,
        max_q_len=plan.max_query_len,
        max_kv_len=plan.max_key_len,
        bmm1_scale=spec.softmax_scale,
        bmm2_scale=1.0,
        o_sf_scale=1.0,
        batch_size=plan.num_reqs,
        window_left=-1,
        cum_seq_lens_q=plan.query_starts,
        cum_seq_lens_kv=plan.key_starts,
        enable_pdl=False,
        is_causal=plan.causal,
        return_lse=call.lse is not None,
        out=out,
    )
    store(plan, call, out, result[1] if call.lse is not None else None)
