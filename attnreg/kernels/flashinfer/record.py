"""The functions of FlashInfer that the adapters call: their arguments, and the source of the release that was read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnreg.kernels.upstream import Function, UpstreamError

_SOURCE = "https://github.com/flashinfer-ai/flashinfer/blob/v0.7.4/flashinfer"
_PREFILL = f"{_SOURCE}/prefill.py"

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
        "q_seq_lens_cpu": None, "kv_seq_lens_cpu": None, "use_fp16_softmax": None, "uses_spcompress": None,
        "skip_all_rows_active_check": True,
    },
)  # fmt: skip

WRAPPER = Function(
    name="BatchPrefillWithRaggedKVCacheWrapper",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=("float_workspace_buffer", "kv_layout", "backend"),
    defaults={
        "use_cuda_graph": False, "qo_indptr_buf": None, "kv_indptr_buf": None, "custom_mask_buf": None,
        "mask_indptr_buf": None, "jit_args": None, "jit_kwargs": None, "variant_owns_mask": False,
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
        "qo_indptr_cpu": None, "kv_indptr_cpu": None, "uniform_q_len": None, "use_token_head_sf": False,
    },
)  # fmt: skip

RUN = Function(
    name="run",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=("self", "q", "k", "v", "out", "return_lse"),
    defaults={
        "q_scale": None, "k_scale": None, "v_scale": None, "o_scale": None, "lse": None, "lse_base": "log2",
        "lse_layout": "NH", "enable_pdl": None, "kv_cache_sf": None,
    },
)  # fmt: skip


# FLASHINFER/fa2 passes these two as well
_MHA = ("window_left", "logits_soft_cap")
PLAN_MHA = replace(
    PLAN, passes=(*PLAN.passes, *_MHA), defaults={k: v for k, v in PLAN.defaults.items() if k not in _MHA}
)

PAGED_WRAPPER = Function(
    name="BatchPrefillWithPagedKVCacheWrapper",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=("float_workspace_buffer", "kv_layout", "backend"),
    defaults={
        "use_cuda_graph": False, "qo_indptr_buf": None, "paged_kv_indptr_buf": None, "paged_kv_indices_buf": None,
        "paged_kv_last_page_len_buf": None, "custom_mask_buf": None, "mask_indptr_buf": None, "jit_args": None,
        "jit_kwargs": None, "variant_owns_mask": False, "max_total_num_rows": None,
    },
)  # fmt: skip

PAGED_PLAN = Function(
    name="plan",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=(
        "self", "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads",
        "num_kv_heads", "head_dim_qk", "page_size", "causal", "sm_scale", "window_left", "logits_soft_cap",
        "q_data_type", "kv_data_type", "o_data_type",
    ),
    defaults={
        "head_dim_vo": None, "custom_mask": None, "packed_custom_mask": None, "pos_encoding_mode": "NONE",
        "use_fp16_qk_reduction": False, "rope_scale": None, "rope_theta": None, "non_blocking": True,
        "prefix_len_ptr": None, "token_pos_in_items_ptr": None, "token_pos_in_items_len": 0, "max_item_len_ptr": None,
        "seq_lens": None, "seq_lens_q": None, "block_tables": None, "max_token_per_sequence": None,
        "max_sequence_kv": None, "fixed_split_size": None, "disable_split_kv": False, "uniform_q_len": None,
        "use_token_head_sf": False,
    },
)  # fmt: skip

PAGED_RUN = Function(
    name="run",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=("self", "q", "paged_kv_cache", "out", "return_lse"),
    defaults={
        "q_scale": None, "k_scale": None, "v_scale": None, "lse": None, "lse_base": "log2", "lse_layout": "NH",
        "enable_pdl": None, "window_left": None, "sinks": None, "kv_cache_sf": None,
        "skip_softmax_threshold_scale_factor": None, "use_fp16_softmax": None, "uses_spcompress": None,
    },
)  # fmt: skip

TRTLLM_MLA = Function(
    name="trtllm_batch_decode_with_kv_cache_mla",
    modules=("flashinfer.mla",),
    source=f"{_SOURCE}/mla/_core.py",
    passes=(
        "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim",
        "block_tables", "seq_lens", "max_seq_len", "out", "bmm1_scale", "bmm2_scale", "enable_pdl", "backend",
        "return_lse", "return_lse_base",
    ),
    defaults={
        "sparse_mla_top_k": 0, "sinks": None, "skip_softmax_threshold_scale_factor": None, "is_var_seq": True,
        "uses_shared_paged_kv_idx": True, "lse": None, "cute_dsl_impl": "auto", "kv_scale_format": "auto",
        "cum_seq_lens_q": None, "max_q_len": None, "multi_ctas_kv_counter_buffer": None,
        "sparse_mla_top_k_lens": None, "enable_dcp": False, "cp_world": 1, "cp_rank": 0,
        "causal_seqlens_kv_global": None, "use_fp16_softmax": None,
    },
)  # fmt: skip


XQA = Function(
    name="xqa_batch_decode_with_kv_cache",
    modules=("flashinfer.decode",),
    source=f"{_SOURCE}/decode.py",
    passes=(
        "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "bmm2_scale",
        "window_left", "out", "sinks", "kv_layout", "enable_pdl",
    ),
    defaults={"q_len_per_req": 1, "o_scale": 1.0, "mask": None, "kv_cache_sf": None, "q_cu_seq_lens": None},
)  # fmt: skip

TRTLLM_CONTEXT = Function(
    name="trtllm_batch_context_with_kv_cache",
    modules=("flashinfer.prefill",),
    source=_PREFILL,
    passes=(
        "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale",
        "bmm2_scale", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv", "window_left", "out", "kv_layout",
        "enable_pdl", "sinks", "causal", "return_lse", "backend",
    ),
    defaults={
        "out_dtype": None, "o_sf_scale": None, "o_sf_vec_size": None, "kv_cache_sf": None,
        "skip_softmax_threshold_scale_factor": None, "uses_shared_paged_kv_idx": True, "lse": None,
        "multi_ctas_kv_counter_buffer": None, "use_fp16_softmax": None, "uses_spcompress": None,
        # beside a left window, -1 means 0 if causal, as before this argument existed
        "window_right": -1, "variable_window_token_starts": None, "variable_window_token_ends": None,
    },
)  # fmt: skip


def load_wrapper(wrapper: Function = WRAPPER, methods: tuple[Function, ...] = (PLAN, RUN)) -> Any:
    """The class of a wrapper. Raises `UpstreamError` if it or one of its methods is missing or has changed."""
    found = wrapper.load()
    for method in methods:
        changes = [*method.changes(getattr(found, method.name, None))]
        if changes:
            raise UpstreamError(
                f"flashinfer's {wrapper.name}.{method.name} {', and '.join(changes)} {method.written_for}"
            )
    return found
