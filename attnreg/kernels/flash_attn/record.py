"""The functions of FlashAttention that the adapters call: their arguments, and the source that was read."""

from __future__ import annotations

from attnreg.kernels.flash_attn.hub import HubKernel
from attnreg.kernels.upstream import Function, UpstreamOperator

_FA2 = (
    "https://github.com/Dao-AILab/flash-attention/blob/005300258a22e5fc6be621063c3d5704e82b89d9/flash_attn/"
    "flash_attn_interface.py"
)
_FA3 = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/vllm_flash_attn/flash_attn_interface.py"

# one operator that two packages build: Tri Dao's, and vLLM's, which adds sinks and context parallelism
FA3_ARGUMENTS = (
    "q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
    "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left",
    "window_size_right", "softcap", "is_rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa",
    "sm_margin",
)  # fmt: skip
# arguments that have no default in vLLM's build
FA3_OF_VLLM = {"s_aux": None, "cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None}

FA3_VLLM = UpstreamOperator(
    name="fwd",
    modules=("_vllm_fa3_C",),
    libraries={"_vllm_fa3_C": ("vllm", "vllm_flash_attn/_vllm_fa3_C*.so")},
    source=_FA3,
    passes=(*FA3_ARGUMENTS, *FA3_OF_VLLM),
    defaults={},
)
FA3 = UpstreamOperator(
    name="fwd",
    modules=("flash_attn_3",),
    libraries={"flash_attn_3": ("flash_attn_3", "_C*.so")},
    source="https://github.com/Dao-AILab/flash-attention/blob/01afd16d248c4c7d0f9aed1914084f16c490eaed/hopper/flash_api.cpp",
    passes=FA3_ARGUMENTS,
    defaults={"attention_chunk": 0},
)

# the hub has both builds; the versions are those that transformers asks for
HUB_VLLM_FA3 = HubKernel("kernels-community/vllm-flash-attn3", 1)
HUB_FA3 = HubKernel("kernels-community/flash-attn3", 1)

# not the public function but the one that it calls, which takes the caller's memory for the output
FA4 = Function(
    name="_flash_attn_fwd",
    modules=("flash_attn.cute.interface",),
    source="https://pypi.org/project/flash-attn-4/4.0.0b36",
    passes=(
        "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k",
        "page_table", "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right", "learnable_sink",
        "num_splits", "return_lse",
    ),
    defaults={
        "qv": None, "seqused_q": None, "min_seqlen_k": None, "tile_mn": None, "mma_pv_is_rs": None,
        "intra_wg_overlap": None, "num_threads": 384, "pack_gqa": None, "_arch": None, "score_mod": None,
        "mask_mod": None, "block_sparse_tensors": None, "lse": None, "aux_tensors": None, "aux_scalars": None,
        "q_descale": None, "k_descale": None, "v_descale": None, "gather_kv_indices": None,
        "scheduler_metadata": None, "seqlen_k_per_split": None, "disable_scheduler_metadata": False,
        "gather_bwd_recompute_p": False,
    },
)  # fmt: skip

FA2_VLLM = UpstreamOperator(
    name="varlen_fwd",
    modules=("_vllm_fa2_C",),
    libraries={"_vllm_fa2_C": ("vllm", "vllm_flash_attn/_vllm_fa2_C*.so")},
    source=_FA3,
    passes=(
        "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table", "alibi_slopes",
        "max_seqlen_q", "max_seqlen_k", "p_dropout", "softmax_scale", "zero_tensors", "is_causal", "window_size_left",
        "window_size_right", "softcap", "return_softmax", "num_splits", "gen",
    ),
    defaults={},
)  # fmt: skip

FA2 = Function(
    name="flash_attn_varlen_func",
    modules=("flash_attn.flash_attn_interface",),
    source=_FA2,
    passes=(
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
        "window_size", "softcap", "alibi_slopes", "return_attn_probs", "block_table",
    ),
    defaults={"dropout_p": 0.0, "deterministic": False},
)  # fmt: skip
