"""FlashBuild: FlashAttention 3 behind the runtime's contract, by the one operator that every build registers.

It reads packed keys and values, or pages of a cache in place. vLLM's build computes bfloat16 sinks for up to 64 heads.
The adapter adds other sinks to the result by its LSE, which costs a pass and a rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnreg.kernels.flash_attn.sequences import ALIGNMENT, Sequences, refuse_unaligned, store_rows, store_sinks
from attnreg.kernels.upstream import UpstreamError
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, Repeated
from attnreg.runtime.tensors import is_captured

# for how many query heads the kernel takes sinks
MOST_HEADS = 64


@dataclass(slots=True, eq=False)
class FlashBuild:
    """One build. backend: its name in messages. fwd: its operator. more: arguments that only this build takes."""

    backend: str
    fwd: Callable[..., Any]
    more: dict[str, Any]

    @classmethod
    def first(cls, backend: str, *ways: tuple[Callable[[], Callable[..., Any]], dict[str, Any]]) -> FlashBuild:
        """The first build whose operator loads. A way is the function that loads one, and the arguments that it adds.

        Raises `UpstreamError` with the reasons of all if none loads.
        """
        reasons = []
        for load, more in ways:
            try:
                return cls(backend, load(), more)
            except UpstreamError as e:
                reasons.append(str(e))
        raise UpstreamError("; ".join(reasons))

    def plan(self, spec: AttentionSpec, batch: BatchMetadata) -> Sequences:
        """The sequences of a batch."""
        return Sequences.of(spec, batch)

    def forward(self, spec: AttentionSpec, plan: Sequences, call: Call) -> None:
        """Writes the attention of the batch's queries into ``output``, and into ``lse``. Raises `BatchError`.

        Source of the arguments' meanings: vllm/vllm_flash_attn/flash_attn_interface.py and hopper/flash_api.cpp.
        """
        if plan.block_table is None and is_captured(call.query):
            message = f"a CUDA graph is being captured, and {self.backend} reads packed keys up to the host's last"
            raise BatchError([message])
        if plan.nothing(call):
            return
        key, value = plan.keys(call, spec.kv_layout)
        refuse_unaligned(self.backend, query=call.query, key=key, value=value, output=call.output)
        sinks = call.params.sinks
        inside = bool(self.more) and sinks is not None and sinks.dtype == torch.bfloat16
        inside = inside and spec.num_heads <= MOST_HEADS
        arguments = self.arguments(spec, plan)
        if inside:
            arguments["s_aux"] = sinks
        lse = self.fwd(q=call.query, k=key, v=value, out=call.output[: call.query.shape[0]], **arguments)[1]
        if sinks is not None and not inside:
            lse = store_sinks(sinks, call, lse, plan)
        elif sinks is not None:
            # the kernel returns -inf for a row without a key
            lse = torch.maximum(lse, sinks.float()[:, None])
        if call.lse is not None:
            store_rows(call.lse.mT, lse.mT, plan)

    def repeat(self, spec: AttentionSpec, plan: Sequences, call: Call) -> Repeated:
        """A function that repeats a call over packed keys, on other tensors with equal facts. Raises `BatchError`."""
        arguments, keys = self.arguments(spec, plan), plan.num_keys
        key, value = call.packed
        refuse_unaligned(self.backend, query=call.query, key=key, value=value, output=call.output)

        def again(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
            addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | output.data_ptr()
            if not keys or addresses % ALIGNMENT:
                # `forward` reports what is wrong
                self.forward(spec, plan, call._replace(query=query, key=key, value=value, output=output))
            else:
                self.fwd(q=query, k=key[:keys], v=value[:keys], out=output, **arguments)

        return again

    def arguments(self, spec: AttentionSpec, plan: Sequences) -> dict[str, Any]:
        """The arguments of a plan's calls without their tensors."""
        max_query_len, max_key_len = plan.most(spec)
        return dict(
            k_new=None, v_new=None, q_v=None, cu_seqlens_q=plan.query_starts, cu_seqlens_k=plan.key_starts,
            cu_seqlens_k_new=None, seqused_q=None, seqused_k=plan.seq_lens,
            max_seqlen_q=max_query_len, max_seqlen_k=max_key_len, page_table=plan.block_table,
            kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
            q_descale=None, k_descale=None, v_descale=None, softmax_scale=spec.softmax_scale, is_causal=plan.causal,
            window_size_left=plan.left, window_size_right=plan.right, softcap=spec.softcap or 0.0,
            is_rotary_interleaved=False, scheduler_metadata=None,
            # the number of splits would depend on the other requests of the batch
            num_splits=1 if "batch_invariant" in spec.features else 0,
            pack_gqa=None, sm_margin=0, **self.more,
        )  # fmt: skip
