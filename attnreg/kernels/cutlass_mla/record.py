"""The operators of vLLM's CUTLASS kernel for MLA that the adapter calls, and the source that was read."""

from __future__ import annotations

from attnreg.kernels.upstream import UpstreamOperator

_SOURCE = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/attention/backends/mla/cutlass_mla.py"
_LIBRARY = {"_C": ("vllm", "_C_stable_libtorch*.so")}

DECODE = UpstreamOperator(
    name="sm100_cutlass_mla_decode",
    modules=("_C",),
    libraries=_LIBRARY,
    source=_SOURCE,
    passes=(
        "out", "lse", "q_nope", "q_pe", "kv_c_and_k_pe_cache", "seq_lens", "page_table", "workspace", "scale",
        "num_kv_splits",
    ),
    defaults={},
)  # fmt: skip

WORKSPACE_SIZE = UpstreamOperator(
    name="sm100_cutlass_mla_get_workspace_size",
    modules=("_C",),
    libraries=_LIBRARY,
    source=_SOURCE,
    passes=("max_seq_len", "num_batches", "sm_count", "num_kv_splits"),
    defaults={},
)
