"""The operators of FlashMLA that the adapters call: their arguments, and the source that was read."""

from __future__ import annotations

from attnreg.kernels.upstream import UpstreamOperator

_SOURCE = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/third_party/flashmla/flash_mla_interface.py"

DENSE_DECODE = UpstreamOperator(
    name="dense_decode_fwd",
    modules=("_flashmla_C",),
    libraries={"_flashmla_C": ("vllm", "_flashmla_C*.so")},
    source=_SOURCE,
    passes=(
        "q", "kcache", "head_size_v", "seqlens_k", "block_table", "softmax_scale", "is_causal",
        "tile_scheduler_metadata", "num_splits", "out_",
    ),
    defaults={},
)  # fmt: skip
SPARSE_PREFILL = UpstreamOperator(
    name="sparse_prefill_fwd",
    modules=("_flashmla_C",),
    libraries={"_flashmla_C": ("vllm", "_flashmla_C*.so")},
    source=_SOURCE,
    passes=("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length", "out_"),
    defaults={},
)
