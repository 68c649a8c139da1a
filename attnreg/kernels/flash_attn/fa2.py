"""FLASH_ATTN/FA2: FlashAttention 2, from vLLM's build or from its own package, behind the runtime's contract.

vLLM's build is loaded from its file, and reads pages of a multiple of 16 tokens. The package flash-attn reads pages of
a multiple of 256. Its function returns an output in new memory, which the adapter copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnreg.kernels.flash_attn import record
from attnreg.kernels.flash_attn.sequences import Sequences, refuse_unaligned, store_rows
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.kernels.upstream import UpstreamError
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchError,
    BatchMetadata,
    Call,
    UnclaimedError,
    paged_cache_shape,
)

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASH_ATTN/FA2"
# the package reads pages of a multiple of this many tokens
PAGE = 256
kv_cache_shape = paged_cache_shape


def _loaded() -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """vLLM's operator and None; without it, None and the package's function."""
    try:
        return record.FA2_VLLM.load(), None
    except UpstreamError as e:
        try:
            return None, record.FA2.load()
        except UpstreamError as other:
            raise UpstreamError(f"{e}; {other}") from other


_operator, _function = _loaded()


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Sequences:
    """The sequences of a batch. Raises `UnclaimedError` for pages that the installed build does not read. Raises
    `BatchError` for a request with queries and no key in a cache: the kernel would write past its results. A rank that
    shares a cache may have such requests.
    """
    if batch.paged and _operator is None and spec.block_size is not None and spec.block_size % PAGE:
        message = f"block_size {spec.block_size}: the package flash-attn reads pages of a multiple of {PAGE} tokens"
        raise UnclaimedError(message, BACKEND)
    if batch.paged and ((batch.host_starts.diff() > 0) & (batch.host_lens == 0)).any():
        raise BatchError([f"a request has queries and no key in the cache: {BACKEND} writes past its results there"])
    return Sequences.of(spec, batch)


def forward(spec: AttentionSpec, plan: Sequences, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``.

    Source of the arguments' meanings: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp.
    """
    if plan.nothing(call):
        return
    key, value = plan.keys(call, spec.kv_layout)
    refuse_unaligned(BACKEND, query=call.query, key=key, value=value, output=call.output)
    slopes = call.params.alibi_slopes
    slopes = None if slopes is None else slopes.float().contiguous()
    # for one query a request, the kernel folds queries into heads; then every row must belong to a request
    exact = plan.max_query_len == 1 and plan.num_tokens == len(plan.seq_lens)
    rows, queries = (plan.num_tokens, 1) if exact else (len(call.query), max(plan.max_query_len, 2))
    call = call._replace(query=call.query[:rows], output=call.output[:rows])
    lse = (_by_operator if _function is None else _by_function)(spec, plan, call, queries, key, value, slopes)
    if call.lse is not None:
        # the kernel returns +inf for a row without a key
        store_rows(call.lse.mT[:rows], lse.masked_fill(lse == torch.inf, -torch.inf).mT, plan)


def _by_operator(
    spec: AttentionSpec, plan: Sequences, call: Call, queries: int, key: Tensor, value: Tensor, slopes: Tensor | None
) -> Tensor:
    """Writes the output and returns the LSE. queries: the most queries of a request, as the kernel is told."""
    assert _operator is not None
    lse: Tensor = _operator(
        q=call.query, k=key, v=value, out=call.output, cu_seqlens_q=plan.query_starts,
        # the kernel does not read it if there are pages
        cu_seqlens_k=plan.query_starts if plan.key_starts is None else plan.key_starts,
        seqused_k=None if plan.block_table is None else plan.seq_lens, leftpad_k=None, block_table=plan.block_table,
        alibi_slopes=slopes, max_seqlen_q=queries, max_seqlen_k=plan.most(spec)[1], p_dropout=0.0,
        softmax_scale=spec.softmax_scale, zero_tensors=False, is_causal=plan.causal, window_size_left=plan.left,
        window_size_right=plan.right, softcap=spec.softcap or 0.0, return_softmax=False,
        # the number of splits would depend on the other requests of the batch
        num_splits=1 if "batch_invariant" in spec.features else 0,
        gen=None,
    )[1]  # fmt: skip
    return lse


def _by_function(
    spec: AttentionSpec, plan: Sequences, call: Call, queries: int, key: Tensor, value: Tensor, slopes: Tensor | None
) -> Tensor:
    """Writes the output and returns the LSE. queries: the most queries of a request, as the kernel is told."""
    assert _function is not None
    key_starts = plan.key_starts
    if key_starts is None:
        key_starts = torch.nn.functional.pad(plan.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    output, lse, _ = _function(
        q=call.query, k=key, v=value, cu_seqlens_q=plan.query_starts, cu_seqlens_k=key_starts,
        max_seqlen_q=queries, max_seqlen_k=plan.most(spec)[1], softmax_scale=spec.softmax_scale,
        causal=plan.causal, window_size=(plan.left, plan.right), softcap=spec.softcap or 0.0, alibi_slopes=slopes,
        return_attn_probs=True, block_table=plan.block_table,
    )  # fmt: skip
    store_rows(call.output, output, plan)
    found: Tensor = lse
    return found
