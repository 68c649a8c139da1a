"""FLASH_ATTN/FA3: FlashAttention 3, from its own package or from vLLM's, behind the runtime's contract.

Packed keys and values, or pages of a cache in place. The library is loaded from its file, so vLLM itself is not
imported. vLLM's build takes bfloat16 sinks of up to 64 heads; others are added to the result by its LSE, which costs
a pass and a rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnreg.kernels.flash_attn import record
from attnreg.kernels.flash_attn.sequences import ALIGNMENT, Sequences, refuse_unaligned, store_rows, store_sinks
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.kernels.upstream import UpstreamError
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, Repeated, paged_cache_shape

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "repeat", "write_kv"]

BACKEND = "FLASH_ATTN/FA3"
# all lengths are read on the device; of packed keys the host cuts the padding off, so `forward` refuses their capture
CAPTURABLE = True
# query heads with sinks in the kernel
MOST_HEADS = 64
kv_cache_shape = paged_cache_shape


def _loaded() -> tuple[Callable[..., Any], dict[str, Any]]:
    """The operator of the first package that has it, and what it takes beside the arguments of the other's."""
    try:
        return record.FA3_VLLM.load(), record.FA3_OF_VLLM
    except UpstreamError as e:
        try:
            return record.FA3.load(), {}
        except UpstreamError as other:
            raise UpstreamError(f"{e}; {other}") from other


_fwd, _more = _loaded()


def plan(spec: AttentionSpec, batch: BatchMetadata) -> Sequences:
    """The sequences of a batch."""
    return Sequences.of(spec, batch)


def forward(spec: AttentionSpec, plan: Sequences, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``. Raises `BatchError`.

    Source of the arguments' meanings: vllm/vllm_flash_attn/flash_attn_interface.py and hopper/flash_api.cpp.
    """
    if plan.block_table is None and call.query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise BatchError([f"a CUDA graph is being captured, and {BACKEND} reads packed keys up to the host's last"])
    if plan.nothing(call):
        return
    key, value = plan.keys(call)
    if plan.block_table is not None and spec.kv_layout == "HND":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    refuse_unaligned(BACKEND, query=call.query, key=key, value=value, output=call.output)
    sinks = call.params.sinks
    inside = bool(_more) and sinks is not None and sinks.dtype == torch.bfloat16 and spec.num_heads <= MOST_HEADS
    arguments = _arguments(spec, plan)
    if inside:
        arguments["s_aux"] = sinks
    lse = _fwd(q=call.query, k=key, v=value, out=call.output, **arguments)[1]
    if sinks is not None and not inside:
        lse = store_sinks(sinks, call, lse, plan)
    elif sinks is not None:
        # of a row without a key the kernel has -inf
        lse = torch.maximum(lse, sinks.float()[:, None])
    if call.lse is not None:
        store_rows(call.lse.mT, lse.mT, plan)


def repeat(spec: AttentionSpec, plan: Sequences, call: Call) -> Repeated:
    """A function that runs a call over packed keys again, on other tensors like these. Raises `BatchError`."""
    arguments, keys = _arguments(spec, plan), plan.num_keys
    key, value = call.packed
    refuse_unaligned(BACKEND, query=call.query, key=key, value=value, output=call.output)

    def again(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | output.data_ptr()
        if not keys or addresses % ALIGNMENT:
            # which says what is wrong
            forward(spec, plan, call._replace(query=query, key=key, value=value, output=output))
        else:
            _fwd(q=query, k=key[:keys], v=value[:keys], out=output, **arguments)

    return again


def _arguments(spec: AttentionSpec, plan: Sequences) -> dict[str, Any]:
    """The arguments of a plan's calls without their tensors."""
    return dict(
        k_new=None, v_new=None, q_v=None, cu_seqlens_q=plan.query_starts, cu_seqlens_k=plan.key_starts,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None if plan.block_table is None else plan.seq_lens,
        max_seqlen_q=plan.max_query_len, max_seqlen_k=plan.max_key_len, page_table=plan.block_table,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=spec.softmax_scale, is_causal=plan.causal,
        window_size_left=plan.left, window_size_right=plan.right, softcap=spec.softcap or 0.0,
        is_rotary_interleaved=False, scheduler_metadata=None,
        # splits depend on what else is in the batch
        num_splits=1 if "batch_invariant" in spec.features else 0,
        pack_gqa=None, sm_margin=0, **_more,
    )  # fmt: skip
