"""FLASHMLA: DeepSeek's decoding kernel for MLA on Hopper, as vLLM builds it, behind the runtime's contract.

The adapter loads the library from its file, without importing vLLM. The kernel takes equally many queries of each
request. In any other batch, the adapter makes every query a request of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from attnreg.kernels.dense.rows import DenseRows
from attnreg.kernels.flash_attn.sequences import refuse_unaligned
from attnreg.kernels.flash_mla import record
from attnreg.kernels.mla.adapters import latents, validate
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCacheShape, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASHMLA"
# fixed in the kernel: the widths of a latent with and without its rotary part, and the tokens of a block
WIDTHS, BLOCK = (576, 512), 64

_decode = record.DENSE_DECODE.load()


@dataclass(slots=True, eq=False)
class FlashMlaPlan(DenseRows):
    """schedule: what the kernel computed from the lengths in the first call; the calls of other layers reuse it."""

    schedule: list[Tensor | None] = field(default_factory=lambda: [None, None])


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache. Values have no memory of their own: they are ``key[..., :head_size_v]``."""
    validate(spec, BACKEND, [WIDTHS], [BLOCK])
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> FlashMlaPlan:
    """The one call of a batch. Raises `SpecError` for a layer other than MLA, `BatchError` without a cache."""
    validate(spec, BACKEND, [WIDTHS], [BLOCK])
    return FlashMlaPlan.of(batch)


def forward(spec: AttentionSpec, plan: FlashMlaPlan, call: Call) -> None:
    """Writes the attention of the batch's queries to the latents into ``output``, and into ``lse``.

    Source of the arguments' meanings: vllm/third_party/flashmla/flash_mla_interface.py.
    """
    tokens = plan.num_tokens
    if not tokens:
        return
    shape = plan.requests, plan.queries, spec.num_heads
    cache, query, output = latents(spec, call), call.query[:tokens], call.output[:tokens]
    refuse_unaligned(BACKEND, query=query, key=cache)
    out = output if output.is_contiguous() else output.new_empty(output.shape)
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
    plan.store(call, out, lse.transpose(1, 2).reshape(tokens, spec.num_heads))
