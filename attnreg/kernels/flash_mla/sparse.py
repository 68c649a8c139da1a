"""FLASHMLA_SPARSE/bfloat16: FlashMLA over the tokens that an indexer chose, as vLLM builds it.

The kernel takes places in a cache of single tokens, with -1 for none. It is compiled for some numbers of heads; other
numbers are padded. The adapter loads the library from its file, without importing vLLM.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from attnreg.kernels.flash_mla import record
from attnreg.kernels.mla.cache import write_latents as write_kv
from attnreg.kernels.mla.sparse import SparsePlan, by_token
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchMetadata,
    Call,
    KVCacheShape,
    SpecError,
    UnclaimedError,
    paged_cache_shape,
)

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASHMLA_SPARSE/bfloat16"
# the device reads all lengths
CAPTURABLE = True
# the widths of a latent with and without its rotary part; and the numbers of heads, on SM 9.x (True) and on other GPUs
WIDTHS, HEADS = (576, 512), {True: (8, 16, 32, 64, 128), False: (64, 128)}
# the kernel takes turns at two blocks of 64 chosen tokens
CHOSEN = 128

_attend = record.SPARSE_PREFILL.load()


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache. Values have no memory of their own: they are ``key[..., :head_size_v]``."""
    _validate(spec)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> SparsePlan:
    """The batch; its call depends on the tokens that the queries choose. Raises `SpecError`, `UnclaimedError` and
    `BatchError`.
    """
    _validate(spec)
    return SparsePlan(batch)


def forward(spec: AttentionSpec, plan: SparsePlan, call: Call) -> None:
    """Writes the attention of each query to the latents that it chose into ``output``, and into ``lse``.

    Source of the arguments' meanings: vllm/third_party/flashmla/flash_mla_interface.py#flash_mla_sparse_fwd.
    """
    query, output, device = call.query, call.output, call.query.device
    rows, heads = query.shape[:2]
    if not rows:
        return
    _, chosen, dense = by_token(spec, plan.batch, call)
    places, counts = chosen.block_table, chosen.seq_lens
    assert places is not None
    assert dense.kv_cache is not None
    unseen = torch.arange(places.shape[1], device=device) >= counts[:, None]
    # a query that chose no token has places too, all -1
    missing = max(-places.shape[1] % CHOSEN, CHOSEN - places.shape[1])
    places = pad(places.masked_fill(unseen, -1), (0, missing), value=-1)
    padded = next(n for n in HEADS[_is_hopper(device)] if n >= heads)
    query = query.contiguous() if padded == heads else pad(query, (0, 0, 0, padded - heads))
    out, _, lse = _attend(
        q=query,
        kv=dense.kv_cache.key[:, 0],
        indices=places[:, None],
        sm_scale=spec.softmax_scale,
        d_v=WIDTHS[1],
        attn_sink=None,
        # with topk_length, an H200 ended in an illegal memory access
        topk_length=None,
        out_=None,
    )
    # rows without a key become zero, and rows of padding stay unchanged
    empty = (counts == 0)[:, None]
    out = out[:, :heads].masked_fill(empty[..., None], 0)
    exists = (torch.arange(rows, device=device) < plan.batch.query_start_loc[-1])[:, None]
    output[:rows] = torch.where(exists[..., None], out, output[:rows])
    if call.lse is not None:
        kept = call.lse.mT[:rows]
        # the kernel's LSE is natural; for a row without a key it is +inf
        kept.copy_(torch.where(exists, lse[:, :heads].masked_fill(empty, -torch.inf), kept))


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _validate(spec: AttentionSpec) -> None:
    if not spec.sparse:
        raise SpecError(f"the layer is not sparse MLA; {BACKEND} computes nothing else")
    given = spec.head_size, spec.head_size_v
    if given != WIDTHS or spec.num_heads > HEADS[False][-1]:
        widths = f"{WIDTHS[0]} and {WIDTHS[1]}, and up to {HEADS[False][-1]} heads"
        message = f"head sizes {given[0]} and {given[1]}, {spec.num_heads} heads: the kernel is compiled for {widths}"
        raise UnclaimedError(message, BACKEND)
    if spec.dtype != torch.bfloat16 or spec.cache_dtype != torch.bfloat16:
        raise UnclaimedError(f"dtype {spec.dtype}, kv_dtype {spec.kv_dtype}: it computes bfloat16", BACKEND)
