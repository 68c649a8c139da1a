"""Selection on AMD's GPUs."""

from __future__ import annotations

from support.rows.words import Row, features

ROCM: list[Row] = [
    (
        "ROCM_ATTN leads without opt-ins, and the whole order is judged",
        "gfx942",
        {},
        "ROCM_ATTN",
        {
            "ROCM_AITER_FA": "flag aiter is off; flag aiter_mha is off",
            "ROCM_AITER_UNIFIED_ATTN": "flag aiter is off",
            "TRITON_ATTN": "",
            "TURBOQUANT": "kv_dtype is auto; supported: turboquant_*",
        },
    ),
    ("opt-ins displace it", "gfx942 +aiter +aiter_mha", {}, "ROCM_AITER_FA/paged", {"ROCM_ATTN": ""}),
    ("and so does aiter alone", "gfx950 +aiter", {}, "ROCM_AITER_UNIFIED_ATTN", {"ROCM_ATTN": ""}),
    (
        "an opt-in to a package that is not there does not",
        "gfx942 +aiter +aiter_mha -aiter",
        {},
        "ROCM_ATTN",
        {"ROCM_AITER_FA": "package aiter is not installed"},
    ),
    ("it serves RDNA too", "gfx1100", {}, "ROCM_ATTN", {}),
    (
        "sinks pass it over",
        "gfx942",
        features("sinks"),
        "TRITON_ATTN",
        {"ROCM_ATTN": "emulates sinks (slow); TRITON_ATTN serves them natively"},
    ),
    (
        "sinks with both opt-ins",
        "gfx942 +aiter +aiter_mha",
        features("sinks"),
        "ROCM_AITER_FA/paged",
        {"ROCM_ATTN": "emulates sinks (slow); ROCM_AITER_FA/paged serves them natively"},
    ),
    (
        "sinks with aiter alone",
        "gfx942 +aiter",
        features("sinks"),
        "ROCM_AITER_UNIFIED_ATTN",
        {
            "ROCM_ATTN": "emulates sinks (slow); ROCM_AITER_UNIFIED_ATTN serves them natively",
            "ROCM_AITER_FA": "flag aiter_mha is off",
        },
    ),
    (
        "aiter is not installed",
        "gfx942 +aiter -aiter",
        features("sinks"),
        "TRITON_ATTN",
        {"ROCM_AITER_UNIFIED_ATTN": "package aiter is not installed"},
    ),
    (
        "aiter is not switched on",
        "gfx942",
        features("sinks"),
        "TRITON_ATTN",
        {"ROCM_AITER_UNIFIED_ATTN": "flag aiter is off"},
    ),
    (
        "aiter does not support the architecture",
        "gfx90a +aiter",
        features("sinks"),
        "TRITON_ATTN",
        {"ROCM_AITER_UNIFIED_ATTN": "arch is gfx90a; needs gfx942, gfx950, gfx1200, gfx1201 or gfx1250"},
    ),
    (
        "all three at once are three reasons",
        "gfx90a -aiter",
        features("sinks"),
        "TRITON_ATTN",
        {
            "ROCM_AITER_UNIFIED_ATTN": (
                "arch is gfx90a; needs gfx942, gfx950, gfx1200, gfx1201 or gfx1250; "
                "package aiter is not installed; flag aiter is off"
            )
        },
    ),
    (
        "non-causal never goes to UNIFIED: ROCM_ATTN claims it",
        "gfx942 +aiter",
        features("non_causal"),
        "ROCM_ATTN",
        {"ROCM_AITER_UNIFIED_ATTN": "non_causal is not supported"},
    ),
    (
        "nor where ROCM_ATTN has not the width",
        "gfx942 +aiter",
        {"head_size": 112, **features("non_causal")},
        "TRITON_ATTN",
        {
            "ROCM_ATTN": "head_size is 112; supported: 32, 64, 80, 96, 128, 160, 192, 224, 256",
            "ROCM_AITER_UNIFIED_ATTN": "non_causal is not supported",
        },
    ),
    (
        "nor on RDNA 4, where it leads",
        "gfx1201 +aiter",
        features("non_causal"),
        "ROCM_ATTN",
        {"ROCM_AITER_UNIFIED_ATTN": "non_causal is not supported"},
    ),
    ("RDNA 4 with aiter", "gfx1201 +aiter", {}, "ROCM_AITER_UNIFIED_ATTN", {"ROCM_ATTN": ""}),
    ("RDNA 4 without", "gfx1200", {}, "ROCM_ATTN", {"ROCM_AITER_UNIFIED_ATTN": "flag aiter is off"}),
    (
        "softcap",
        "gfx942 +aiter +aiter_mha",
        features("softcap"),
        "ROCM_AITER_UNIFIED_ATTN",
        {"ROCM_AITER_FA": "softcap is not supported", "ROCM_ATTN": ""},
    ),
    (
        "a head size that it lacks",
        "gfx942",
        {"head_size": 100},
        "TRITON_ATTN",
        {"ROCM_ATTN": "head_size is 100; supported: 32, 64, 80, 96, 128, 160, 192, 224, 256"},
    ),
    (
        "a KV connector",
        "gfx942",
        features("kv_connector"),
        "TRITON_ATTN",
        {"ROCM_ATTN": "kv_connector is not supported"},
    ),
    (
        "a turboquant cache goes to TURBOQUANT by the data of the others",
        "gfx942 +aiter +aiter_mha",
        {"kv_dtype": "turboquant_k8v4"},
        "TURBOQUANT/Triton",
        {
            "ROCM_ATTN": ("kv_dtype is turboquant_k8v4; supported: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2"),
            "ROCM_AITER_FA": "kv_dtype is turboquant_k8v4; supported: auto, float16, bfloat16, fp8, fp8_e4m3",
            "ROCM_AITER_UNIFIED_ATTN": "kv_dtype is turboquant_k8v4; supported: auto, float16, bfloat16, fp8, fp8_e4m3",
            "TRITON_ATTN": "kv_dtype is turboquant_k8v4; supported: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2",
        },
    ),
    (
        "and to nobody where TURBOQUANT refuses",
        "gfx942",
        {"kv_dtype": "turboquant_4bit_nc", "head_size": 320},
        None,
        {"TURBOQUANT": "head_size is 320; supported: multiples of 4 from 32 to 256"},
    ),
    (
        "encoders with sinks pass over the kernels that take none natively",
        "gfx942 +aiter",
        {"attn_type": "encoder_only", **features("sinks")},
        "TRITON_ATTN",
        {
            "ROCM_ATTN": "emulates sinks (slow); TRITON_ATTN serves them natively",
            "ROCM_AITER_UNIFIED_ATTN": "the kernel for encoder attention takes no ALiBi slopes, sinks or softcap",
        },
    ),
    (
        "cross-attention with sinks and a window is served by nobody",
        "gfx942 +aiter",
        {"attn_type": "encoder_decoder", **features("sinks", "sliding_window")},
        None,
        {
            "ROCM_ATTN": "attn_type is encoder_decoder; supported: decoder, encoder, encoder_only",
            "ROCM_AITER_UNIFIED_ATTN": (
                "queries and keys of cross-attention have no distance, which ALiBi and a window need"
            ),
            "TRITON_ATTN": "cross-attention shares no positions: windows, ALiBi and masks by position do not apply",
        },
    ),
]
