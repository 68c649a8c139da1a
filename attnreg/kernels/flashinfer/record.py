"""The functions of FlashInfer that the adapters call: their arguments, and the source at the commit that was read."""

from __future__ import annotations

from typing import Any

from attnreg.kernels.upstream import Function, UpstreamError

_PREFILL = (
    "https://github.com/flashinfer-ai/flashinfer/blob/002920bf8256465171c95d76519ea1cf35244865/flashinfer/prefill.py"
)

TRTLLM_RAGGED = Function(
    name="trtllm_ragged_attention_deepseek",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=(
        "query", "key", "value", "workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale",
        "o_sf_scale", "batch_size", "window_left", "cum_seq_lens_q", "cum_seq_lens_kv", "enable_pdl", "is_causal",
        "return_lse", "out",
    ),
    defaults={
        "attention_sinks": None, "skip_softmax_threshold_scale_factor": None, "lse": None,
        "sage_attn_sfs": (None, None, None, None), "num_elts_per_sage_attn_blk": (0, 0, 0, 0), "backend": "trtllm-gen",
    },
)  # fmt: skip

WRAPPER = Function(
    name="BatchPrefillWithRaggedKVCacheWrapper",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=("float_workspace_buffer", "kv_layout", "backend"),
    defaults={
        "use_cuda_graph": False, "qo_indptr_buf": None, "kv_indptr_buf": None, "custom_mask_buf": None,
        "mask_indptr_buf": None, "jit_args": None, "jit_kwargs": None,
    },
)  # fmt: skip

PLAN = Function(
    name="plan",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=(
        "self", "qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "causal",
        "sm_scale", "q_data_type", "kv_data_type", "o_data_type",
    ),
    defaults={
        "custom_mask": None, "packed_custom_mask": None, "pos_encoding_mode": "NONE", "use_fp16_qk_reduction": False,
        "window_left": -1, "logits_soft_cap": None, "rope_scale": None, "rope_theta": None, "non_blocking": True,
        "prefix_len_ptr": None, "token_pos_in_items_ptr": None, "token_pos_in_items_len": 0, "max_item_len_ptr": None,
        "fixed_split_size": None, "disable_split_kv": False, "seq_lens": None, "seq_lens_q": None,
        "max_token_per_sequence": None, "max_sequence_kv": None, "v_indptr": None, "o_indptr": None,
    },
)  # fmt: skip

RUN = Function(
    name="run",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=("self", "q", "k", "v", "out", "return_lse"),
    defaults={
        "q_scale": None, "k_scale": None, "v_scale": None, "o_scale": None, "lse": None, "enable_pdl": None,
        "kv_cache_sf": None,
    },
)  # fmt: skip


def load_wrapper() -> Any:
    """The class of the ragged wrapper. Raises `UpstreamError` where it or one of its methods is gone or changed."""
    wrapper = WRAPPER.load()
    for method in (PLAN, RUN):
        changes = [*method.changes(getattr(wrapper, method.name, None))]
        if changes:
            raise UpstreamError(
                f"flashinfer's {WRAPPER.name}.{method.name} {', and '.join(changes)} {method.written_for}"
            )
    return wrapper
