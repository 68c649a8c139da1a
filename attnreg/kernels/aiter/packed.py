"""Attention over packed keys and values through aiter's FlashAttention: any mask, in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnreg.kernels.aiter import common, record
from attnreg.runtime.interface import AttentionSpec, LayerParams

_varlen = record.FLASH_ATTN_VARLEN.load()
_batch_prefill = record.MHA_BATCH_PREFILL.load()


@dataclass(frozen=True, slots=True, eq=False)
class RowLengths:
    """The rows of each request's queries and keys: int32 prefix sums, and upper bounds of the lengths."""

    query_starts: Tensor
    key_starts: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool


def attend(
    spec: AttentionSpec,
    lengths: RowLengths,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    params: LayerParams,
) -> None:
    """Writes the attention of packed queries to packed keys into ``output``; rows without a key get zero.

    Source of the arguments' meanings: aiter/ops/mha.py. Both functions align queries to the last keys.
    """
    if not query.shape[0]:
        return
    if not key.shape[0]:
        output.zero_()
        return
    left, _ = spec.sides(causal=True)
    right = 0 if left >= 0 and lengths.causal else left
    arguments = {
        "q": query,
        "k": key,
        "v": value,
        "cu_seqlens_q": lengths.query_starts,
        "max_seqlen_q": lengths.max_query_len,
        "max_seqlen_k": lengths.max_key_len,
        "softmax_scale": spec.softmax_scale,
        "logits_soft_cap": spec.softcap or 0.0,
        "causal": lengths.causal,
        "window_size": (left, right),
        "alibi_slopes": common.float32(params.alibi_slopes),
    }
    # for bfloat16 and head size 128, _varlen runs assembly kernels that have no sinks and take a window of (0, 0) for
    # no window
    if params.sinks is None and left != 0:
        # some engines pass min_seqlen_q=1; then the kernel does not write requests with few queries
        common.into(output, lambda out: _varlen(**arguments, cu_seqlens_k=lengths.key_starts, min_seqlen_q=0, out=out))
        return
    # as a paged cache with one token in each page
    pages = common.with_spare(torch.arange(key.shape[0], device=key.device))
    common.into(
        output,
        lambda out: _batch_prefill(
            **arguments,
            kv_indptr=lengths.key_starts,
            kv_page_indices=pages,
            sink_ptr=common.float32(params.sinks),
            out=out,
        ),
    )
