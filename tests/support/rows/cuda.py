"""Selection on NVIDIA's GPUs."""

from __future__ import annotations

from support.rows.words import Row, features

CUDA: list[Row] = [
    ("Hopper", "sm90", {}, "HOPPER_ATTN", {"FLASH_ATTN": "", "FLASHINFER": "", "TRITON_ATTN": ""}),
    ("what was not measured on Hopper", "sm90", {"dtype": "float16"}, "FLASH_ATTN/FA3", {"TRITON_ATTN": ""}),
    ("Ampere", "sm80", {}, "FLASH_ATTN/FA2", {}),
    ("Ada", "sm89", {}, "FLASH_ATTN/FA2", {}),
    ("data-centre Blackwell", "sm100", {}, "FLASHINFER/trtllm-gen", {"FLASH_ATTN": ""}),
    ("Thor is not SM 10.x", "sm110", {}, "FLASH_ATTN/FA2", {"FLASHINFER": ""}),
    ("SM 12.x", "sm120", {}, "FLASH_ATTN/FA2", {"FLASHINFER": ""}),
    (
        "Turing",
        "sm75",
        {},
        "TRITON_ATTN",
        {
            "FLASH_ATTN": "arch is sm75; needs sm80 or later",
            "FLASHINFER": "arch is sm75; needs sm80 or later, up to sm121",
        },
    ),
    (
        "non-causal on Blackwell",
        "sm100",
        features("non_causal"),
        "FLASH_ATTN/FA4",
        {"FLASHINFER": ""},
    ),
    ("sinks on Hopper", "sm90", features("sinks"), "FLASH_ATTN/FA3", {"TRITON_ATTN": "", "FLEX_ATTENTION": ""}),
    (
        "batch invariance on Hopper",
        "sm90",
        features("batch_invariant"),
        "FLASH_ATTN/FA3",
        {
            "FLASHINFER": "batch_invariant is not supported",
            "TRITON_ATTN": "",
            "FLEX_ATTENTION": "batch_invariant is not supported",
        },
    ),
    (
        "sinks on Ampere",
        "sm80",
        features("sinks"),
        "TRITON_ATTN",
        {"FLASH_ATTN": "sinks is not supported", "FLASHINFER": "sinks is not supported"},
    ),
    ("sinks on SM 12.x", "sm120", features("sinks"), "FLASHINFER/XQA", {"FLASH_ATTN": "sinks is not supported"}),
    ("ALiBi on Hopper is FA2's", "sm90", features("alibi"), "FLASH_ATTN/FA2", {}),
    (
        "which pages in blocks of 256, if it is not vLLM's",
        "sm80 -vllm",
        features("alibi"),
        "TRITON_ATTN",
        {
            "FLASH_ATTN": (
                "the flash-attn package pages its KV cache in blocks of 256 tokens; vLLM's build in blocks of 16"
            )
        },
    ),
    ("mm_prefix on Hopper", "sm90", features("mm_prefix"), "TRITON_ATTN", {"FLASH_ATTN": "mm_prefix is not supported"}),
    ("head size 512 on Hopper is FA4's", "sm90", {"head_size": 512}, "FLASH_ATTN/FA4-wide", {}),
    ("fp8 on Hopper", "sm90", {"kv_dtype": "fp8"}, "HOPPER_ATTN", {}),
    ("fp8 of wide heads on Hopper", "sm90", {"kv_dtype": "fp8", "head_size": 256}, "FLASH_ATTN/FA3-engine", {}),
    ("prompts of heads of 80 on Hopper", "sm90", {"phase": "prefill", "head_size": 80}, "HOPPER_ATTN", {}),
    ("decodes with heads of 96 on Hopper", "sm90", {"phase": "decode", "head_size": 96}, "HOPPER_ATTN", {}),
    ("prompts on Hopper", "sm90", {"phase": "prefill"}, "HOPPER_ATTN", {}),
    ("prompts of wide heads on Hopper", "sm90", {"phase": "prefill", "head_size": 256}, "HOPPER_ATTN", {}),
    ("prompts of other heads on Hopper", "sm90", {"phase": "prefill", "head_size": 96}, "FLASH_ATTN/FA3", {}),
    ("tokens of wide heads on Hopper", "sm90", {"phase": "decode", "head_size": 256}, "HOPPER_ATTN", {}),
    ("narrow heads on Hopper", "sm90", {"head_size": 64}, "HOPPER_ATTN", {}),
    ("half-precision heads of 64 on Hopper", "sm90", {"head_size": 64, "dtype": "float16"}, "HOPPER_ATTN", {}),
    (
        "half-precision tokens on Hopper",
        "sm90",
        {"phase": "decode", "head_size": 64, "dtype": "float16"},
        "HOPPER_ATTN",
        {},
    ),
    ("sinks of gpt-oss on Hopper", "sm90", {"head_size": 64, **features("sinks")}, "HOPPER_ATTN", {}),
    ("encoders on Hopper", "sm90", {"head_size": 64, "attn_type": "encoder_only"}, "HOPPER_ATTN", {}),
    (
        "encoders in float32 on Hopper",
        "sm90",
        {"head_size": 64, "attn_type": "encoder_only", "dtype": "float32", "block_size": None},
        "TORCH_SDPA/efficient",
        {},
    ),
    ("pages of 128 on Hopper", "sm90", {"block_size": 128, "dtype": "float16"}, "FLASH_ATTN/FA3-engine", {}),
    (
        "fp8_e5m2 on Hopper",
        "sm90",
        {"kv_dtype": "fp8_e5m2"},
        "FLASHINFER/native",
        {"FLASH_ATTN": "kv_dtype is fp8_e5m2; supported: auto, float16, bfloat16"},
    ),
    (
        "fp8 on Ampere",
        "sm80",
        {"kv_dtype": "fp8"},
        "FLASHINFER/native",
        {
            "FLASH_ATTN": "kv_dtype is fp8; supported: auto, float16, bfloat16",
            # its kernels convert e4m3 by themselves; TRITON_MLA's do not
            "TRITON_ATTN": "",
        },
    ),
    ("nvfp4 on Blackwell", "sm103", {"kv_dtype": "nvfp4_4over6"}, "FLASHINFER/trtllm-gen", {}),
    (
        "nvfp4 with narrow heads on SM 12.x",
        "sm120",
        {"kv_dtype": "nvfp4", "head_size": 64},
        None,
        {"FLASHINFER": "the FA2 prefill kernel misreads an nvfp4 cache at head size 64"},
    ),
    (
        "float32",
        "sm90",
        {"dtype": "float32"},
        "TRITON_ATTN",
        {"FLASH_ATTN": "dtype is float32; supported: float16, bfloat16"},
    ),
    (
        "a scale per token and head",
        "sm90",
        {"kv_dtype": "int8_per_token_head"},
        None,
        {
            "TRITON_ATTN": (
                "kv_dtype is int8_per_token_head; supported: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2"
            )
        },
    ),
    ("turboquant on Hopper", "sm90", {"kv_dtype": "turboquant_3bit_nc"}, "TURBOQUANT/Hopper", {}),
    ("turboquant on Blackwell", "sm100", {"kv_dtype": "turboquant_3bit_nc"}, "TURBOQUANT/Triton", {}),
    (
        "FlashAttention is not installed",
        "sm90 -flash-attn-3 -flash-attn-4 -kernels -vllm",
        {"dtype": "float16"},
        "FLASHINFER/XQA",
        {"FLASH_ATTN": "needs package flash-attn-3 or package vllm"},
    ),
    (
        "values of another width",
        "sm90",
        {"head_size_v": 64},
        "HOPPER_ATTN",
        {"TRITON_ATTN": "", "FLEX_ATTENTION": "", "TORCH_SDPA": ""},
    ),
]
