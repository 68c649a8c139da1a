"""Selection of MLA, dense and sparse, and of its prefill, everywhere."""

from __future__ import annotations

from support.asking import MLA
from support.rows.words import PREFILL, SPARSE, WIDE, Row, features

MLA_ROWS: list[Row] = [
    ("Hopper", "sm90", MLA, "FLASH_ATTN_MLA/FA3", {"FLASHMLA": "", "TRITON_MLA": ""}),
    (
        "Hopper, fp8",
        "sm90",
        {**MLA, "kv_dtype": "fp8"},
        "FLASHMLA/paged",
        {"FLASH_ATTN_MLA": "kv_dtype is fp8; supported: auto, float16, bfloat16"},
    ),
    (
        "Hopper, non-causal",
        "sm90",
        {**MLA, **features("non_causal")},
        "HOPPER_MLA",
        {"FLASH_ATTN_MLA": "non_causal is not supported", "FLASHMLA": "non_causal is not supported"},
    ),
    (
        "Blackwell",
        "sm100",
        MLA,
        "FLASHINFER_MLA/dense",
        {"CUTLASS_MLA": "block_size is 64; supported: 128"},
    ),
    (
        "Blackwell, other dimensions",
        "sm100",
        {**MLA, "block_size": 128, "qk_nope_head_dim": 96},
        "CUTLASS_MLA/dense",
        {"FLASHINFER_MLA": "the kernel is compiled for a qk_nope_head_dim of 64, 128 or 192"},
    ),
    ("Ampere", "sm80", MLA, "TRITON_MLA", {}),
    ("Ada, fp8", "sm89", {**MLA, "kv_dtype": "fp8"}, "TRITON_MLA", {}),
    (
        "Ampere, fp8",
        "sm80",
        {**MLA, "kv_dtype": "fp8"},
        "TRITON_MLA",
        {},
    ),
    ("SM 12.x", "sm120", MLA, "TRITON_MLA", {}),
    ("ROCm", "gfx942", MLA, "TRITON_MLA", {"ROCM_AITER_MLA": "flag aiter is off; flag aiter_mla is off"}),
    ("ROCm with aiter", "gfx942 +aiter +aiter_mla", MLA, "ROCM_AITER_MLA/causal", {}),
    (
        "ROCm, a number of heads that is not compiled",
        "gfx942 +aiter +aiter_mla",
        {**MLA, "num_heads": 12},
        "TRITON_MLA",
        {"ROCM_AITER_MLA": "num_heads is 12; supported: 1, 2, 4, 8, multiples of 16"},
    ),
    ("CDNA 4, non-causal", "gfx950 +aiter +aiter_mla", {**MLA, **features("non_causal")}, "ROCM_AITER_MLA/gfx950", {}),
    (
        "CDNA 4, in float16",
        "gfx950 +aiter +aiter_mla",
        {**MLA, "dtype": "float16"},
        "TRITON_MLA",
        {"ROCM_AITER_MLA": "there is no kernel for queries in float16"},
    ),
    ("XPU", "xe2", MLA, "FLASH_ATTN_MLA/XPU", {}),
    ("CPU", "aarch64", {**MLA, "block_size": 16}, "CPU_MLA/plain", {}),
    ("CPU, a block size that is not 16", "x86_64", MLA, "TORCH_MLA", {"CPU_MLA": "block_size is 64; supported: 16"}),
    ("CPU with AMX", "x86_64_amx", MLA, "CPU_MLA/AMX", {}),
    ("sparse, Hopper", "sm90", SPARSE, "FLASHMLA_SPARSE", {"FLASHINFER_MLA_SPARSE": ""}),
    ("sparse, Blackwell", "sm100", SPARSE, "FLASHMLA_SPARSE", {}),
    ("sparse, Blackwell with few heads", "sm100", {**SPARSE, "num_heads": 16}, "FLASHINFER_MLA_SPARSE/trtllm-gen", {}),
    (
        "sparse, Blackwell with an fp8 cache",
        "sm100",
        {**SPARSE, "kv_dtype": "fp8"},
        "FLASHINFER_MLA_SPARSE/trtllm-gen",
        {},
    ),
    (
        "sparse, both parallelisms",
        "sm100",
        {**SPARSE, "num_heads": 8, **features("dcp", "pcp")},
        "FLASHMLA_SPARSE",
        {
            "FLASHINFER_MLA_SPARSE": (
                "prefill and decode context parallelism do not go together here; FLASHMLA_SPARSE combines them"
            )
        },
    ),
    (
        "sparse, a model without index_topk",
        "sm100",
        {**SPARSE, "num_heads": 8, "index_topk": None},
        "FLASHMLA_SPARSE",
        {"FLASHINFER_MLA_SPARSE": "the model's configuration has no index_topk"},
    ),
    (
        "sparse, no model: rules on its dimensions are silent",
        "sm100",
        {**SPARSE, "num_heads": 8, "index_topk": None, "model": None},
        "FLASHINFER_MLA_SPARSE/trtllm-gen",
        {},
    ),
    ("sparse, SM 12.x", "sm120", SPARSE, "FLASHINFER_MLA_SPARSE/SM120", {}),
    (
        "sparse, Ampere",
        "sm80",
        SPARSE,
        "TRITON_MLA_SPARSE",
        {
            "FLASHMLA_SPARSE": "arch is sm80; needs sm90, sm100 or sm103",
            "FLASHINFER_MLA_SPARSE": "arch is sm80; needs sm100 or sm103",
        },
    ),
    (
        "sparse, an nvfp4 latent on Hopper",
        "sm90",
        {**SPARSE, "kv_dtype": "nvfp4_ds_mla"},
        None,
        {"FLASHMLA_SPARSE": "an nvfp4_ds_mla cache needs data-centre Blackwell"},
    ),
    ("sparse, ROCm", "gfx942 +aiter +aiter_mla", SPARSE, "ROCM_AITER_MLA_SPARSE/CDNA 3 and 4", {}),
    (
        "sparse, ROCm without aiter",
        "gfx942",
        SPARSE,
        "TRITON_MLA_SPARSE",
        {"ROCM_AITER_MLA_SPARSE": "flag aiter is off; flag aiter_mla is off"},
    ),
    ("sparse, XPU", "xe_hpc", SPARSE, "XPU_MLA_SPARSE", {}),
    ("sparse, CPU", "x86_64", SPARSE, "TORCH_MLA_SPARSE", {}),
    ("prefill, Hopper", "sm90", PREFILL, "FLASH_ATTN_PREFILL/FA3", {}),
    ("prefill, Ampere", "sm80", PREFILL, "FLASH_ATTN_PREFILL/FA2", {}),
    ("prefill, Blackwell", "sm100", PREFILL, "FLASH_ATTN_PREFILL/FA4", {"TRTLLM_RAGGED": ""}),
    (
        "prefill, Blackwell at wide dimensions",
        "sm100",
        {**PREFILL, **WIDE},
        "TRTLLM_RAGGED",
        {"FLASH_ATTN_PREFILL": ""},
    ),
    ("prefill, Blackwell without FA4", "sm100 -flash-attn-4", PREFILL, "FLASH_ATTN_PREFILL/FA2", {}),
    (
        "prefill, Turing",
        "sm75",
        PREFILL,
        "TRITON_PREFILL",
        {"FLASH_ATTN_PREFILL": "arch is sm75; needs sm80 or later"},
    ),
    ("prefill, ROCm", "gfx942", PREFILL, "FLASH_ATTN_PREFILL/ROCm", {}),
    ("prefill, ROCm with aiter", "gfx942 +aiter +aiter_mla", PREFILL, "ROCM_AITER_FA_PREFILL", {}),
    ("prefill, XPU", "xe2", PREFILL, "FLASH_ATTN_PREFILL/XPU", {}),
    ("prefill, CPU", "x86_64", PREFILL, "CPU_PREFILL", {}),
]
