"""Selection on XPU and CPU, of vision towers, and of requests that leave something open."""

from __future__ import annotations

from support.rows.words import VISION, Row, features

OTHERS: list[Row] = [
    ("XPU", "xe2", {"block_size": 64}, "FLASH_ATTN/XPU", {}),
    (
        "XPU, blocks of 16",
        "xe2",
        {},
        "TORCH_SDPA/gathered",
        {"FLASH_ATTN": "block_size is 16; supported: multiples of 64"},
    ),
    (
        "XPU, softcap",
        "xe2",
        {"block_size": 64, **features("softcap")},
        None,
        {"FLASH_ATTN": "softcap is not supported", "TORCH_SDPA": "softcap is not supported"},
    ),
    (
        "XPU, turboquant, whose kernels were never compiled for it",
        "xe_hpc",
        {"kv_dtype": "turboquant_k8v4"},
        None,
        {"TORCH_SDPA": "kv_dtype is turboquant_k8v4; supported: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2"},
    ),
    ("CPU", "x86_64", {}, "CPU_ATTN", {}),
    ("CPU, sinks", "aarch64", features("sinks"), "CPU_ATTN", {}),
    ("CPU, blocks of any size", "x86_64", {"block_size": 20}, "CPU_ATTN", {}),
    ("CPU, values of another width", "x86_64", {"head_size_v": 64, **features("softcap")}, "CPU_ATTN", {}),
    ("CPU, fp8 needs no AVX-512", "x86_64", {"kv_dtype": "fp8"}, "CPU_ATTN", {}),
    (
        "CPU, nvfp4",
        "x86_64_avx512",
        {"kv_dtype": "nvfp4"},
        None,
        {"CPU_ATTN": "kv_dtype is nvfp4; supported: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2"},
    ),
    ("CPU, cross-attention", "x86_64", {"attn_type": "encoder_decoder"}, "CPU_ATTN", {}),
    (
        "CPU, cross-attention with a window",
        "x86_64",
        {"attn_type": "encoder_decoder", **features("sliding_window")},
        None,
        {"CPU_ATTN": "cross-attention shares no positions: windows, ALiBi and masks by position do not apply"},
    ),
    ("CPU, PyTorch is not installed", "x86_64 -torch", {}, None, {"CPU_ATTN": "package torch is not installed"}),
    ("vision, Turing", "sm75", VISION, "TORCH_SDPA/efficient", {}),
    ("vision, Hopper", "sm90", VISION, "HOPPER_ATTN", {}),
    ("vision of 72, Hopper", "sm90", {**VISION, "head_size": 72}, "FLASH_ATTN/FA3", {}),
    ("vision, Blackwell", "sm100", VISION, "FLASH_ATTN/FA4", {}),
    (
        "vision, a width of its own",
        "sm90",
        {**VISION, "head_size": 20},
        "TORCH_SDPA/gathered",
        {
            "FLASH_ATTN": "head_size is 20; supported: multiples of 8 up to 256",
            "TRITON_ATTN": "head_size is 20; supported: 32 to 512",
        },
    ),
    ("vision, CDNA", "gfx942", VISION, "FLASH_ATTN/ROCm", {}),
    ("vision, CDNA with aiter", "gfx942 +aiter +aiter_mha", VISION, "ROCM_AITER_FA/vision", {}),
    (
        "vision, RDNA",
        "gfx1100",
        VISION,
        "TORCH_SDPA/gathered",
        {"FLASH_ATTN": "arch is gfx1100; needs gfx90a, gfx942 or gfx950"},
    ),
    ("vision, XPU", "xe2", VISION, "FLASH_ATTN/XPU", {}),
    ("vision, CPU", "x86_64", VISION, "TORCH_SDPA/gathered", {}),
]

# an absent KV dtype and block size constrain nothing; TURBOQUANT alone wants to know
ABSENT: list[Row] = [
    ("no block size", "xe2", {"block_size": None}, "FLASH_ATTN/XPU", {}),
    (
        "no KV dtype",
        "sm90",
        {"kv_dtype": None},
        "FLASH_ATTN/FA3",
        {"TURBOQUANT": "kv_dtype is not given, and must be one of the turboquant formats"},
    ),
]
