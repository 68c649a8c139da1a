"""The operators of PyTorch below scaled_dot_product_attention: their arguments, and the source that was read."""

from __future__ import annotations

from attnreg.kernels.upstream import UpstreamOperator

_SOURCE = "https://github.com/pytorch/pytorch/blob/v2.15.0/aten/src/ATen/native/native_functions.yaml"

FLASH = UpstreamOperator(
    name="_flash_attention_forward",
    modules=("aten",),
    source=_SOURCE,
    passes=(
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask", "scale", "window_size_left", "window_size_right",
    ),
    defaults={"seqused_k": None, "alibi_slopes": None, "block_table": None, "num_splits": None},
)  # fmt: skip

CUDNN = UpstreamOperator(
    name="_scaled_dot_product_cudnn_attention",
    modules=("aten",),
    source=_SOURCE,
    passes=("query", "key", "value", "attn_bias", "compute_log_sumexp", "is_causal", "scale"),
    defaults={"dropout_p": 0.0, "return_debug_mask": False},
)  # fmt: skip

EFFICIENT = UpstreamOperator(
    name="_efficient_attention_forward",
    modules=("aten",),
    source=_SOURCE,
    passes=(
        "query", "key", "value", "bias", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p",
        "custom_mask_type", "scale", "window_size",
    ),
    defaults={"compute_log_sumexp": False, "seqlen_k": None},
)  # fmt: skip
