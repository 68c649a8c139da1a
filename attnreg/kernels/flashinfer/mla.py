"""FLASHINFER_MLA/dense: NVIDIA's trtllm-gen kernels for decoding MLA, through FlashInfer. Not run on a GPU yet.

The adapter names the sub-backend and never passes "auto". The kernels are causal, and take equally many queries of each
request. In any other batch, the adapter makes every query a request of its own.
"""

from __future__ import annotations

from attnreg.kernels.dense.rows import DenseRows
from attnreg.kernels.flash_attn.sequences import refuse_unaligned
from attnreg.kernels.flashinfer import record
from attnreg.kernels.flashinfer.ragged import workspace
from attnreg.kernels.mla.adapters import latents, validate
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCacheShape, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASHINFER_MLA/dense"
# (width of a latent with its rotary part, width of the latent) -> qk_nope_head_dim of the models that have these
WIDTHS = {(576, 512): 128, (320, 256): 64}
BLOCKS = (32, 64)

_decode = record.TRTLLM_MLA.load()


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache. Values have no memory of their own: they are ``key[..., :head_size_v]``."""
    validate(spec, BACKEND, [*WIDTHS], BLOCKS)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> DenseRows:
    """The one call of a batch. Raises `SpecError`, `UnclaimedError`, and `BatchError` without a cache."""
    validate(spec, BACKEND, [*WIDTHS], BLOCKS)
    return DenseRows.of(batch, several=batch.causal is True)


def forward(spec: AttentionSpec, plan: DenseRows, call: Call) -> None:
    """Writes the attention of the batch's queries to the latents into ``output``, and into ``lse``.

    Source of the arguments' meanings: flashinfer/mla/_core.py.
    """
    tokens, with_lse = plan.num_tokens, call.lse is not None
    if not tokens:
        return
    shape = plan.requests, plan.queries, spec.num_heads
    cache, query, output = latents(spec, call), call.query[:tokens], call.output[:tokens]
    refuse_unaligned(BACKEND, query=query, key=cache)
    out = output if output.is_contiguous() else output.new_empty(output.shape)
    result = _decode(
        query=query.contiguous().view(*shape, -1),
        kv_cache=cache.squeeze(2),
        workspace_buffer=workspace(query),
        qk_nope_head_dim=WIDTHS[spec.head_size, spec.head_size_v],
        kv_lora_rank=spec.head_size_v,
        qk_rope_head_dim=spec.head_size - spec.head_size_v,
        block_tables=plan.block_table,
        seq_lens=plan.seq_lens,
        max_seq_len=plan.max_key_len,
        out=out.view(*shape, -1),
        bmm1_scale=spec.softmax_scale,
        bmm2_scale=1.0,
        enable_pdl=False,
        backend="trtllm-gen",
        return_lse=with_lse,
        return_lse_base="basee",
    )
    plan.store(call, out, result[1].view(tokens, -1) if with_lse else None)
