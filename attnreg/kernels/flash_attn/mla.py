"""FLASH_ATTN_MLA/FA3: FlashAttention 3 over cached latents, behind the runtime's contract.

The operator takes the rotary parts of queries and keys as its queries and keys, the latents as its values, and the
latent part of the queries as ``q_v``. The adapter loads the library from its file, without importing vLLM.
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
# the device reads all lengths
CAPTURABLE = True
# the widths of a latent with its rotary part, and of the latent alone
WIDTHS = ((576, 512), (320, 256))
# tokens of a block. With 512 columns of values a tile has 64 keys, and the kernel loads pages of 64 tokens whole. It
# would multiply the values after a request's last key, which may be NaN, by a weight of 0
BLOCKS = (16, 32, 48)

build = FlashBuild.first(BACKEND, (record.FA3_VLLM.load, record.FA3_OF_VLLM), (record.FA3.load, {}))


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache. Values have no memory of their own: they are ``key[..., :head_size_v]``."""
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
