"""The functions of aiter that the adapters call: their arguments, and the source at the commit that was read."""

from __future__ import annotations

from attnreg.kernels.upstream import Function, UpstreamValue

# the sources that the adapters were written for; the newest mha.py was in a fork of ROCm/aiter
_ATTENTION = "https://github.com/ROCm/aiter/blob/0056982d17ebe7d15cdab0c8eb7cea36f1b61018/aiter/ops/attention.py"
_DTYPES = "https://github.com/ROCm/aiter/blob/02d69c3995186534495dc09f084cd25c156b3217/aiter/utility/dtypes.py"
_MHA = "https://github.com/AndreasKaratzas/aiter/blob/583b7b7b2d286f9a5c508ba05f8ced9a2e6b3b8b/aiter/ops/mha.py"
_MLA = "https://github.com/ROCm/aiter/blob/000edf30368dc91e66b46544cbf86694ca048b02/aiter/mla.py"
_UNIFIED = (
    "https://github.com/ROCm/aiter/blob/02c43589f810b8907c134b12cb5d21675a36c382/aiter/ops/triton/attention/"
    "unified_attention.py"
)

FLASH_ATTN_VARLEN = Function(
    name="flash_attn_varlen_func",
    modules=("aiter",),
    source=_MHA,
    passes=(
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "min_seqlen_q",
        "softmax_scale", "logits_soft_cap", "causal", "window_size", "alibi_slopes", "out",
    ),
    defaults={
        "dropout_p": 0.0, "bias": None, "deterministic": False, "return_lse": False, "return_attn_probs": False,
        "how_v3_bf16_cvt": 1, "block_table": None, "cu_seqlens_q_padded": None, "cu_seqlens_k_padded": None,
        # the adapter does not pass it: the assembly kernels for head size 128 have no sinks
        "sink_ptr": None,
    },
)  # fmt: skip

MHA_BATCH_PREFILL = Function(
    name="mha_batch_prefill_func",
    modules=("aiter",),
    source=_MHA,
    passes=(
        "q", "k", "v", "cu_seqlens_q", "kv_indptr", "kv_page_indices", "max_seqlen_q", "max_seqlen_k",
        "softmax_scale", "logits_soft_cap", "causal", "window_size", "alibi_slopes", "out", "sink_ptr",
    ),
    defaults={
        "dropout_p": 0.0, "deterministic": False, "return_lse": False, "return_attn_probs": False,
        "kv_last_page_lens": None, "block_table": None, "seqlen_k": None, "q_descale": None, "k_descale": None,
        "v_descale": None, "kv_block_descale": None, "sink_size": 0,
    },
)  # fmt: skip

MLA_DECODE = Function(
    name="mla_decode_fwd",
    modules=("aiter.mla",),
    source=_MLA,
    passes=(
        "q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q",
        "sm_scale", "q_scale", "kv_scale", "return_lse",
    ),
    defaults={
        "page_size": 1, "nhead_kv": 1, "logit_cap": 0.0, "num_kv_splits": None, "num_kv_splits_indptr": None,
        "work_meta_data": None, "work_indptr": None, "work_info_set": None, "reduce_indptr": None,
        "reduce_final_map": None, "reduce_partial_map": None, "intra_batch_mode": False, "return_logits": False,
        "g_kv_indptr": None, "cp_world_size": 1, "cp_rank": 0, "causal": True,
    },
)  # fmt: skip

MLA_PREFILL = Function(
    name="mla_prefill_fwd",
    modules=("aiter.mla",),
    source=_MLA,
    passes=(
        "q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q", "sm_scale",
    ),
    defaults={"logit_cap": 0.0, "num_kv_splits": None},
)  # fmt: skip

PAGED_ATTENTION_V1 = Function(
    name="paged_attention_v1",
    modules=("aiter",),
    source=_ATTENTION,
    passes=(
        "out", "workspace_buffer", "query", "key_cache", "value_cache", "scale", "block_tables", "cu_query_lens",
        "context_lens", "max_context_len", "alibi_slopes", "kv_cache_dtype", "kv_cache_layout", "logits_soft_cap",
        "k_scale", "v_scale",
    ),
    # the adapter sizes the workspace by this partition_size
    defaults={"fp8_out_scale": None, "partition_size": 256, "mtp": 1, "sliding_window": 0},
)  # fmt: skip

UNIFIED_ATTENTION = Function(
    name="unified_attention",
    # the second module is from before aiter sorted its Triton kernels into folders
    modules=("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention"),
    source=_UNIFIED,
    passes=(
        "q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal",
        "window_size", "block_table", "softcap", "q_descale", "k_descale", "v_descale", "alibi_slopes", "sinks",
    ),
    defaults={
        "q_scales": None, "output_scale": None, "qq_bias": None, "shuffled_kv_cache": False, "skip_reduce": False,
        "backend": None,
    },
)  # fmt: skip

FUNCTIONS = (FLASH_ATTN_VARLEN, MHA_BATCH_PREFILL, MLA_DECODE, MLA_PREFILL, PAGED_ATTENTION_V1, UNIFIED_ATTENTION)

# the fp8 format of this machine's GPU: e4m3fnuz on gfx942, e4m3fn on later ones
FP8 = UpstreamValue(name="fp8", modules=("aiter.utility.dtypes",), source=_DTYPES)
