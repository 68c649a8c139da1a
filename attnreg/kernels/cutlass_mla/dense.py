"""CUTLASS_MLA/dense: vLLM's CUTLASS kernel for decoding MLA on data-centre Blackwell.

The adapter loads the library from its file, without importing vLLM. The kernel takes one query of each request, so the
adapter makes every query a request of its own. The kernel takes 128 heads; fewer are padded. Not run on a GPU yet.
"""

from __future__ import annotations

import torch

from attnreg.kernels.cutlass_mla import record
from attnreg.kernels.dense.rows import DenseRows
from attnreg.kernels.flash_attn.sequences import refuse_unaligned
from attnreg.kernels.mla.adapters import latents, validate
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchMetadata,
    Call,
    KVCacheShape,
    UnclaimedError,
    paged_cache_shape,
)

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "CUTLASS_MLA/dense"
# fixed in the kernel: the widths of a latent with and without its rotary part, the tokens of a block, the heads
WIDTHS, BLOCK, HEADS = (576, 512), 128, 128
# -1: the kernel chooses
SPLITS = -1

_decode, _workspace_size = record.DECODE.load(), record.WORKSPACE_SIZE.load()


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache. Values have no memory of their own: they are ``key[..., :head_size_v]``."""
    _validate(spec)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> DenseRows:
    """The one call of a batch. Raises `SpecError`, `UnclaimedError`, and `BatchError` without a cache."""
    _validate(spec)
    return DenseRows.of(batch, several=False)


def _validate(spec: AttentionSpec) -> None:
    validate(spec, BACKEND, [WIDTHS], [BLOCK])
    if spec.num_heads > HEADS:
        raise UnclaimedError(f"num_heads {spec.num_heads}: the kernel has {HEADS}", BACKEND)


def forward(spec: AttentionSpec, plan: DenseRows, call: Call) -> None:
    """Writes the attention of the batch's queries to the latents into ``output``, and into ``lse``.

    Source of the arguments' meanings: vllm/v1/attention/backends/mla/cutlass_mla.py.
    """
    tokens, heads = plan.num_tokens, spec.num_heads
    if not tokens:
        return
    cache, query, output = latents(spec, call), call.query[:tokens], call.output[:tokens]
    refuse_unaligned(BACKEND, query=query, key=cache)
    if heads < HEADS:
        query = torch.nn.functional.pad(query, (0, 0, 0, HEADS - heads))
    in_place = heads == HEADS and output.is_contiguous()
    out = output if in_place else output.new_empty(tokens, HEADS, WIDTHS[1])
    lse = torch.empty((tokens, HEADS) if call.lse is not None else (0,), dtype=torch.float32, device=query.device)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
    size = _workspace_size(max_seq_len=plan.max_key_len, num_batches=tokens, sm_count=processors, num_kv_splits=SPLITS)
    _decode(
        out=out,
        lse=lse,
        q_nope=query[..., : WIDTHS[1]],
        q_pe=query[..., WIDTHS[1] :],
        kv_c_and_k_pe_cache=cache.squeeze(2),
        seq_lens=plan.seq_lens,
        page_table=plan.block_table,
        workspace=torch.empty(size, dtype=torch.uint8, device=query.device),
        scale=spec.softmax_scale,
        num_kv_splits=SPLITS,
    )
    plan.store(call, out[:, :heads], lse[:, :heads] if call.lse is not None else None)
