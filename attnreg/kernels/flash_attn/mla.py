"""FLASH_ATTN_MLA/FA3: FlashAttention 3 over cached latents, behind the runtime's contract.

Its operator takes the rotary part of queries and keys as the two, the latents as values, and the latent part of the
queries beside them as ``q_v``. The library is loaded from its file, so vLLM itself is not imported.
"""

from __future__ import annotations

from attnreg.kernels.flash_attn import record
from attnreg.kernels.flash_attn.builds import FlashBuild
from attnreg.kernels.flash_attn.sequences import Sequences, refuse_unaligned, store_rows
from attnreg.kernels.mla.adapters import latents, validate
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchError,
    BatchMetadata,
    Call,
    KVCacheShape,
    paged_cache_shape,
)

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASH_ATTN_MLA/FA3"
# all lengths are read on the device
CAPTURABLE = True
# widths of a latent with its rotary part and of the latent alone
WIDTHS = ((576, 512), (320, 256))
# tokens of a block. With 512 columns of values a tile has 64 keys, and pages of a tile are loaded whole: what lies
# behind a request's last key, NaN if it is that, meets a weight of 0
BLOCKS = (16, 32, 48)

build = FlashBuild.first(BACKEND, (record.FA3_VLLM.load, record.FA3_OF_VLLM), (record.FA3.load, {}))


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache; its value has no memory of its own: it is ``key[..., :head_size_v]``."""
    validate(spec, BACKEND, WIDTHS, BLOCKS)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Sequences:
    """The sequences of a batch. Raises `SpecError` for a layer other than MLA, `BatchError` without a cache."""
    validate(spec, BACKEND, WIDTHS, BLOCKS)
    if batch.block_table is None:
        raise BatchError(["there is no block_table: MLA in its latent form reads the cache"])
    return build.plan(spec, batch)


def forward(spec: AttentionSpec, plan: Sequences, call: Call) -> None:
    """Writes the attention of the batch's queries to the latents into ``output``, and into ``lse``.

    Source of the arguments' meanings: vllm/v1/attention/backends/mla/flashattn_mla.py and hopper/flash_api.cpp.
    """
    if plan.nothing(call):
        return
    cache, query, width = latents(spec, call), call.query, spec.head_size_v
    refuse_unaligned(BACKEND, query=query, key=cache, output=call.output)
    arguments = build.arguments(spec, plan) | {"q_v": query[..., :width]}
    out = call.output[: query.shape[0]]
    lse = build.fwd(q=query[..., width:], k=cache[..., width:], v=cache[..., :width], out=out, **arguments)[1]
    if call.lse is not None:
        store_rows(call.lse.mT, lse.mT, plan)
