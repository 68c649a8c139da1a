"""Selection, as rows: where, a change to one base request, the backend expected, and the exact reasons of others."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import sys
import threading
import types
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from support import tiny
from support.asking import BASE, MLA, at

import attnreg
from attnreg import AttentionRequest, NoBackendError, Platform, Registry, RequestError, load_registry, select
from attnreg.selection import selector
from attnreg.selection.selector import _CACHE_LIMIT, evaluate

SPARSE = {**MLA, "attention": "mla_sparse", "index_topk": 2048, "model": "deepseek_v32"}
PREFILL = {**MLA, "phase": "prefill", "head_size": 192, "head_size_v": 128, "num_kv_heads": 128}
VISION = {"role": "vision", "attn_type": "encoder_only", "head_size": 80, "block_size": None}
WIDE = {"qk_nope_head_dim": 192, "v_head_dim": 256, "head_size": 256, "head_size_v": None}


def features(*words: str) -> dict[str, Any]:
    return {"features": frozenset(words)}


# name, where, change, backend, reasons of candidates that were not chosen (all of a candidate's, joined by "; ")
Row = tuple[str, str, dict[str, Any], str | None, dict[str, str]]

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
    ("opt-ins do not displace it", "gfx942 +aiter +aiter_mha", {}, "ROCM_ATTN", {"ROCM_AITER_FA": ""}),
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
        "ROCM_ATTN",
        {"ROCM_AITER_FA": "softcap is not supported", "ROCM_AITER_UNIFIED_ATTN": ""},
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
        "TURBOQUANT",
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
        {"kv_dtype": "turboquant_4bit_nc", "head_size": 80},
        None,
        {"TURBOQUANT": "the Hadamard rotation of the keys needs a head size that is a power of two"},
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
            "ROCM_AITER_UNIFIED_ATTN": "queries and keys of cross-attention have no distance from each other",
            "TRITON_ATTN": "positions of queries and keys are not comparable in cross-attention",
        },
    ),
]

CUDA: list[Row] = [
    ("Hopper", "sm90", {}, "FLASH_ATTN/FA3", {"FLASHINFER": "", "TRITON_ATTN": "", "FLEX_ATTENTION": ""}),
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
    ("fp8 on Hopper", "sm90", {"kv_dtype": "fp8"}, "FLASH_ATTN/FA3", {}),
    (
        "fp8_e5m2 on Hopper",
        "sm90",
        {"kv_dtype": "fp8_e5m2"},
        "FLASHINFER/native",
        {"FLASH_ATTN": "kv_dtype is fp8_e5m2; supported: auto, float16, bfloat16, fp8, fp8_e4m3"},
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
    ("turboquant on Hopper", "sm90", {"kv_dtype": "turboquant_3bit_nc"}, "TURBOQUANT", {}),
    ("turboquant on Blackwell", "sm100", {"kv_dtype": "turboquant_3bit_nc"}, "TURBOQUANT", {}),
    (
        "FlashAttention is not installed",
        "sm90 -flash-attn-3 -vllm",
        {},
        "FLASHINFER/XQA",
        {"FLASH_ATTN": "package flash-attn-3 is not installed"},
    ),
    (
        "values of another width",
        "sm90",
        {"head_size_v": 64},
        "TRITON_ATTN",
        {"FLEX_ATTENTION": "", "TORCH_SDPA": ""},
    ),
]

MLA_ROWS: list[Row] = [
    ("Hopper", "sm90", MLA, "FLASH_ATTN_MLA/FA3", {"FLASHMLA": "", "TRITON_MLA": ""}),
    (
        "Hopper, fp8",
        "sm90",
        {**MLA, "kv_dtype": "fp8"},
        "FLASHMLA",
        {"FLASH_ATTN_MLA": "kv_dtype is fp8; supported: auto, float16, bfloat16"},
    ),
    (
        "Hopper, non-causal",
        "sm90",
        {**MLA, **features("non_causal")},
        "TRITON_MLA",
        {"FLASH_ATTN_MLA": "non_causal is not supported", "FLASHMLA": "non_causal is not supported"},
    ),
    (
        "Blackwell",
        "sm100",
        MLA,
        "FLASHINFER_MLA",
        {"CUTLASS_MLA": "block_size is 64; supported: multiples of 128"},
    ),
    (
        "Blackwell, other dimensions",
        "sm100",
        {**MLA, "block_size": 128, "qk_nope_head_dim": 96},
        "CUTLASS_MLA",
        {"FLASHINFER_MLA": "the kernel is compiled for a qk_nope_head_dim of 64, 128 or 192"},
    ),
    ("Ampere", "sm80", MLA, "TRITON_MLA", {}),
    ("Ada, fp8", "sm89", {**MLA, "kv_dtype": "fp8"}, "TRITON_MLA", {}),
    (
        "Ampere, fp8",
        "sm80",
        {**MLA, "kv_dtype": "fp8"},
        None,
        {"TRITON_MLA": "Triton has no fp8_e4m3 conversion below compute capability 8.9"},
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
    ("CPU, a block size that is not 16", "x86_64", MLA, None, {"CPU_MLA": "block_size is 64; supported: 16"}),
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
        None,
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
        None,
        {"ROCM_AITER_MLA_SPARSE": "flag aiter is off; flag aiter_mla is off"},
    ),
    ("sparse, XPU", "xe_hpc", SPARSE, "XPU_MLA_SPARSE", {}),
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
        None,
        {"FLASH_ATTN_PREFILL": "arch is sm75; needs sm80 or later"},
    ),
    ("prefill, ROCm", "gfx942", PREFILL, "FLASH_ATTN_PREFILL/ROCm", {}),
    ("prefill, ROCm with aiter", "gfx942 +aiter +aiter_mla", PREFILL, "ROCM_AITER_FA_PREFILL", {}),
    ("prefill, XPU", "xe2", PREFILL, "FLASH_ATTN_PREFILL/XPU", {}),
    ("prefill, CPU", "x86_64", PREFILL, "CPU_PREFILL", {}),
]

OTHERS: list[Row] = [
    ("XPU", "xe2", {"block_size": 64}, "FLASH_ATTN/XPU", {}),
    (
        "XPU, blocks of 16",
        "xe2",
        {},
        "TORCH_SDPA",
        {"FLASH_ATTN": "block_size is 16; supported: multiples of 64"},
    ),
    (
        "XPU, softcap",
        "xe2",
        {"block_size": 64, **features("softcap")},
        None,
        {"FLASH_ATTN": "softcap is not supported", "TORCH_SDPA": "softcap is not supported"},
    ),
    ("XPU, turboquant", "xe_hpc", {"kv_dtype": "turboquant_k8v4"}, "TURBOQUANT", {}),
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
        {"CPU_ATTN": "positions of queries and keys are not comparable in cross-attention"},
    ),
    ("CPU, PyTorch is not installed", "x86_64 -torch", {}, None, {"CPU_ATTN": "package torch is not installed"}),
    ("vision, Turing", "sm75", VISION, "TORCH_SDPA", {}),
    ("vision, Hopper", "sm90", VISION, "FLASH_ATTN/FA3", {}),
    ("vision, Blackwell", "sm100", VISION, "FLASH_ATTN/FA4", {}),
    (
        "vision, a width of its own",
        "sm90",
        {**VISION, "head_size": 20},
        "TORCH_SDPA",
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
        "TORCH_SDPA",
        {"FLASH_ATTN": "arch is gfx1100; needs gfx90a, gfx942 or gfx950"},
    ),
    ("vision, XPU", "xe2", VISION, "FLASH_ATTN/XPU", {}),
    ("vision, CPU", "x86_64", VISION, "TORCH_SDPA", {}),
]

# an absent KV dtype and block size constrain nothing; TURBOQUANT alone wants to know
ABSENT: list[Row] = [
    ("no block size", "xe2", {"block_size": None}, "FLASH_ATTN/XPU", {}),
    (
        "no KV dtype",
        "sm90",
        {"kv_dtype": None},
        "FLASH_ATTN/FA3",
        {"TURBOQUANT": "the KV cache must be given, as one of the turboquant formats"},
    ),
]
ROWS = [*ROCM, *CUDA, *MLA_ROWS, *OTHERS, *ABSENT]


@pytest.mark.parametrize(
    ("where", "change", "backend", "reasons"), [r[1:] for r in ROWS], ids=[f"{r[1]}: {r[0]}" for r in ROWS]
)
def test_rows(
    default: Registry, where: str, change: dict[str, Any], backend: str | None, reasons: dict[str, str]
) -> None:
    selection = evaluate(AttentionRequest(**{**BASE, **change}), at(where, default), default)
    assert (selection.chosen.title if selection.chosen else None) == backend
    said = {c.name: "; ".join(r.text for r in c.reasons) for c in selection.candidates}
    assert {name: said.get(name) for name in reasons} == reasons
    ranks = [c.rank for c in selection.candidates]
    assert ranks == list(range(1, len(ranks) + 1))
    if selection.chosen:
        assert all(c.reasons for c in selection.candidates if c.rank < selection.chosen.rank)


def test_every_order_is_asked_by_some_row(default: Registry) -> None:
    asked = {evaluate(AttentionRequest(**{**BASE, **r[2]}), at(r[1], default), default).order for r in ROWS}
    left = {o.title for orders in default.orders.values() for o in orders} - {o.title for o in asked if o}
    # one with what its neighbour has, for another head size; and three that repeat cuda/value-width
    assert left == {"cuda/hopper-mla-sparse-512", "rocm/value-width", "xpu/value-width"}


# asking by name ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS[::3], ids=[f"{r[1]}: {r[0]}" for r in ROWS[::3]])
def test_a_backend_asked_for_by_name_goes_through_the_same_evaluation(default: Registry, row: Row) -> None:
    request, platform = AttentionRequest(**{**BASE, **row[2]}), at(row[1], default)
    for automatic in evaluate(request, platform, default).candidates:
        named = evaluate(request, platform, default, automatic.name)
        assert [c.name for c in named.candidates] == [automatic.name]
        passed_over = [r for r in automatic.reasons if r.kind == "emulated"]
        assert named.candidates[0].reasons == (() if passed_over else automatic.reasons)
        assert named.candidates[0].variant == automatic.variant


def test_it_is_never_replaced_and_says_who_would_do(default: Registry) -> None:
    request = AttentionRequest(**BASE, **features("sinks"))
    with pytest.raises(NoBackendError) as caught:
        select(request, at("sm120", default), default, "FLASH_ATTN")
    lines = default.backends["FLASH_ATTN"].variants[0].features_at
    assert str(caught.value) == (
        "FLASH_ATTN does not accept this request on cuda sm120:\n"
        f"  FLASH_ATTN/FA2  sinks is not supported  [backends.yaml:{lines.line}]\n"
        "  help: would accept it: FLASHINFER, TRITON_ATTN, FLEX_ATTENTION"
    )
    assert caught.value.selection.requested == "FLASH_ATTN"
    assert caught.value.selection.backend is None


def test_experimental_rows_are_for_who_asks_for_them(default: Registry) -> None:
    request, platform = AttentionRequest(**BASE), at("sm90", default)
    assert select(request, platform, default, "TREE_ATTN").backend.name == "TREE_ATTN"
    first = load_registry("default", [{"orders": {"cuda": [{"name": "mine", "order": ["TREE_ATTN", "FLASH_ATTN"]}]}}])
    selection = select(request, platform, first)
    assert selection.backend.name == "FLASH_ATTN"
    assert [r.text for r in selection.candidates[0].reasons] == ["experimental: never chosen automatically"]
    assert select(
        request, platform, load_registry("default", [{"choices": [{"prefer": "TREE_ATTN"}]}])
    ).backend.name == ("TREE_ATTN")


def test_emulation_is_taken_where_nothing_is_native_and_warns(default: Registry) -> None:
    warning = "ROCM_ATTN emulates sinks (slow): sinks are a second pass over the output"
    request, platform = AttentionRequest(**BASE, **features("sinks")), at("gfx942", default)
    denied = select(request, platform, load_registry("default", [{"choices": [{"deny": ["TRITON_ATTN"]}]}]))
    assert denied.backend.name == "ROCM_ATTN"
    assert denied.warnings == (warning,)
    assert select(request, platform, default, "ROCM_ATTN").warnings == (warning,)
    assert select(request, platform, default).warnings == ()


# a user's choice -----------------------------------------------------------------------------------------------------

PREFERRED: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("valid", {}, "TRITON_ATTN", None),
    (
        "refused, and saying why",
        {"kv_dtype": "turboquant_k8v4"},
        "TURBOQUANT",
        (
            "TRITON_ATTN is preferred ({}) but not chosen: kv_dtype is turboquant_k8v4; supported: auto, float16, "
            "bfloat16, fp8, fp8_e4m3, fp8_e5m2"
        ),
    ),
]


@pytest.mark.parametrize(("change", "backend", "warning"), [c[1:] for c in PREFERRED], ids=[c[0] for c in PREFERRED])
def test_prefer(default: Registry, change: dict[str, Any], backend: str, warning: str | None) -> None:
    registry = load_registry("default", [{"choices": [{"prefer": "TRITON_ATTN"}]}])
    selection = select(AttentionRequest(**{**BASE, **change}), at("sm90", default), registry)
    assert selection.backend.name == backend
    assert selection.warnings == ((warning.format(registry.choices[0].where.short),) if warning else ())
    assert [c.name for c in selection.candidates] == [
        "TRITON_ATTN",
        "FLASH_ATTN",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "TURBOQUANT",
    ]


def test_a_preferred_backend_that_would_emulate_is_passed_over_aloud() -> None:
    registry = load_registry("default", [{"choices": [{"prefer": "ROCM_ATTN"}]}])
    selection = select(AttentionRequest(**BASE, **features("sinks")), at("gfx942", registry), registry)
    assert selection.backend.name == "TRITON_ATTN"
    why = "emulates sinks (slow); TRITON_ATTN serves them natively"
    here = registry.choices[0].where.short
    assert selection.warnings == (f"ROCM_ATTN is preferred ({here}) but not chosen: {why}",)


def test_require_is_this_or_an_error_and_an_argument_speaks_last(default: Registry) -> None:
    registry = load_registry("default", [{"choices": [{"require": "FLASHINFER", "when": {"role": "draft"}}]}])
    draft, platform = AttentionRequest(**BASE, role="draft"), at("sm90", default)
    selection = select(draft, platform, registry)
    assert selection.backend.name == selection.requested == "FLASHINFER"
    with pytest.raises(NoBackendError, match=r"^FLASHINFER does not accept this request on cuda sm90:\n"):
        select(dataclasses.replace(draft, head_size=100), platform, registry)
    assert select(AttentionRequest(**BASE), platform, registry).backend.name == "FLASH_ATTN"
    assert select(draft, platform, registry, "TRITON_ATTN").backend.name == "TRITON_ATTN"


def test_a_denied_backend_is_refused_by_name_too(default: Registry) -> None:
    registry = load_registry("default", [{"choices": [{"deny": "FLASH_ATTN", "because": "it crashes here"}]}])
    with pytest.raises(NoBackendError, match="denied: it crashes here") as caught:
        select(AttentionRequest(**BASE), at("sm90", default), registry, "FLASH_ATTN")
    assert caught.value.selection.alternatives == (
        "FLASHINFER",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
        "TORCH_SDPA",
        "TREE_ATTN",
    )


def test_a_later_overlay_speaks_after_an_earlier_one(default: Registry) -> None:
    overlays = [{"choices": [{"require": "TRITON_ATTN"}]}, {"choices": [{"prefer": "FLASHINFER"}]}]
    request, platform = AttentionRequest(**BASE), at("sm90", default)
    assert select(request, platform, load_registry("default", overlays)).backend.name == "FLASHINFER"
    assert select(request, platform, load_registry("default", overlays[::-1])).backend.name == "TRITON_ATTN"


# requests by name ----------------------------------------------------------------------------------------------------

HERE = Platform(platform="gpu", arch="g1")
STRICT = {"when": {"asked": "by_name", "head_size": {"min": 65}}, "reject": "by name it is asked for its layout"}
LAX = {"when": {"asked": "automatic", "head_size": {"min": 257}}, "reject": "the order asks for its layout"}
NAMED = {"A": tiny.row(rules=[STRICT]), "B": tiny.row(rules=[LAX]), "C": tiny.row()}

# overlay, backend asked for, head size, backend chosen, reasons against the first
BY_NAME: list[tuple[str, dict[str, Any], str | None, int, str | None, str]] = [
    ("the order", {}, None, 300, "A", ""),
    ("by name", {}, "A", 64, "A", ""),
    ("by name, refused", {}, "A", 65, None, STRICT["reject"]),
    ("by name, where the order refuses", {}, "B", 300, "B", ""),
    ("required", {"require": "A"}, None, 64, "A", ""),
    ("required, refused", {"require": "A"}, None, 65, None, STRICT["reject"]),
    ("preferred", {"prefer": "B"}, None, 300, "B", ""),
    ("preferred, refused; the others are the order's", {"prefer": "A"}, None, 300, "C", STRICT["reject"]),
    ("denied: the others are the order's", {"deny": "A"}, None, 300, "C", "denied by the overlay"),
]


@pytest.mark.parametrize(("choice", "backend", "size", "chosen", "why"), [c[1:] for c in BY_NAME], ids=lambda c: str(c))
def test_rules_may_be_for_requests_by_name_or_for_the_order(
    choice: dict[str, Any], backend: str | None, size: int, chosen: str | None, why: str
) -> None:
    overlays = [{"choices": [choice]}] if choice else []
    registry = tiny.load(NAMED, vocabulary=tiny.ASKED, overlays=overlays)
    selection = evaluate(AttentionRequest(head_size=size), HERE, registry, backend)
    assert (selection.backend.name if selection.backend else None) == chosen
    assert "; ".join(r.text for r in selection.candidates[0].reasons) == why


def test_alternatives_are_asked_for_by_name() -> None:
    registry = tiny.load(
        {"A": tiny.row(rules=[STRICT]), "B": tiny.row(rules=[LAX]), "D": tiny.row(capabilities={"head_sizes": 1})},
        {"gpu": [{"name": "all", "order": ["D", "B"]}]},
        vocabulary=tiny.ASKED,
    )
    assert evaluate(AttentionRequest(head_size=300), HERE, registry).alternatives == ("B",)


def test_derived_facets_know_who_asks() -> None:
    registry = tiny.load({"A": tiny.row()}, vocabulary=tiny.ASKED)
    request = AttentionRequest(head_size=1, kv_dtype="fp8")
    assert evaluate(request, HERE, registry).derived["strict"][0] is None
    assert evaluate(request, HERE, registry, "A").derived["strict"][0] is True
    preferring = tiny.load({"A": tiny.row()}, vocabulary=tiny.ASKED, overlays=[{"choices": [{"prefer": "A"}]}])
    assert evaluate(request, HERE, preferring).derived["strict"][0] is True


def test_nobody_says_in_a_request_who_asks() -> None:
    registry = tiny.load({"A": tiny.row()}, vocabulary=tiny.ASKED)
    with pytest.raises(
        RequestError, match=r"^extra names 'asked', which belongs to the selection and cannot be given$"
    ):
        evaluate(AttentionRequest(head_size=1, extra={"asked": "by_name"}), HERE, registry)


# refusals ------------------------------------------------------------------------------------------------------------


def test_the_error_is_the_whole_trace_with_the_nearest_and_the_alternatives() -> None:
    rows = {
        "A": tiny.row(capabilities={"head_sizes": {"max": 64}, "kv_dtypes": "auto"}),
        "B": tiny.row(capabilities={"head_sizes": [64, 128]}, requires={"flags": ["fast"]}),
        "LATE": tiny.row(only_on_request="it is slow"),
    }
    registry = tiny.load(rows, {"gpu": [{"name": "all", "order": ["A", "B"]}]})
    request = AttentionRequest(head_size=100, kv_dtype="fp8")
    with pytest.raises(NoBackendError) as caught:
        select(request, Platform(platform="gpu", arch="g1"), registry)
    assert _without_lines(caught.value) == (
        "No backend accepts this request on gpu g1 (order `gpu/all`, priorities.yaml):\n"
        "  A  kv_dtype is fp8; supported: auto  [backends.yaml]\n"
        "     head_size is 100; supported: up to 64  [backends.yaml]\n"
        "  B  flag fast is off  [backends.yaml]\n"
        "     head_size is 100; supported: 64, 128  [backends.yaml]\n"
        "  help: would accept it if asked for by name: LATE"
    )
    assert caught.value.selection.alternatives == ("LATE",)
    with pytest.raises(NoBackendError) as caught:
        select(
            dataclasses.replace(request, features=frozenset({"sinks"})), Platform(platform="gpu", arch="g1"), registry
        )
    assert str(caught.value).splitlines()[-1] == "  help: the nearest is A, with 3 reasons against it"
    assert caught.value.selection.nearest is caught.value.selection.candidates[0]
    with pytest.raises(NoBackendError) as caught:
        select(
            dataclasses.replace(request, features=frozenset({"sinks"})),
            Platform(platform="gpu", arch="g1"),
            registry,
            "LATE",
        )
    assert str(caught.value).splitlines()[-1] == "  help: no other backend accepts it either"
    with pytest.raises(NoBackendError) as caught:
        select(request, Platform(platform="npu", arch="n1"), registry)
    assert str(caught.value) == f"{registry.title} has no order for npu n1."


def test_a_refusal_looks_for_alternatives_only_when_it_is_read(
    default: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    judge = selector._select
    monkeypatch.setattr(selector, "_select", lambda *args: asked.append(args[3]) or judge(*args))
    registry = dataclasses.replace(default)
    request = AttentionRequest(**BASE, **features("sinks"))
    with pytest.raises(NoBackendError) as caught:
        select(request, at("sm120", default), registry, "FLASH_ATTN")
    assert asked == ["FLASH_ATTN"]
    refused = caught.value.selection
    assert "would accept it: FLASHINFER, TRITON_ATTN, FLEX_ATTENTION" in str(caught.value)
    assert len(asked) > 3
    # and once
    seen = len(asked)
    assert refused.alternatives == ("FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
    assert refused.to_dict()["alternatives"] == ["FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"]
    assert len(asked) == seen
    with pytest.raises(dataclasses.FrozenInstanceError):
        refused.alternatives = ()
    again = evaluate(request, at("sm120", default), dataclasses.replace(default), "FLASH_ATTN")
    assert again == refused
    assert select(request, at("sm90", default), default).alternatives == ()
    # a copy carries them
    copy = pickle.loads(pickle.dumps(again))
    seen = len(asked)
    assert copy.alternatives == refused.alternatives
    assert len(asked) == seen


def _without_lines(error: NoBackendError) -> str:
    return re.sub(r"\.yaml:\d+", ".yaml", str(error))


CONDITIONS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("flags on", {"flags": ["fast"]}, ["flag fast is off"]),
    ("flags off", {"without": ["slow"]}, ["flag slow is on; needs it off"]),
    ("flags only", {"flags": {"only": ["fast"]}}, ["flag slow is on; needs it off"]),
    ("features on", {"features": ["alibi"]}, ["only for requests with alibi"]),
    ("features off", {"without": ["sinks"]}, ["not for requests with sinks"]),
    ("features only", {"features": {"only": ["alibi"]}}, ["not for requests with sinks"]),
    ("a package", {"packages": ["lib"]}, ["package lib is not installed"]),
    ("a version of a package", {"packages": ["lib>=2"]}, ["package lib is not installed; needs >=2"]),
    ("an old package", {"packages": ["old>=2"]}, ["package old is version 1.0; needs >=2"]),
    ("a package of no known version", {"packages": ["odd>=2"]}, ["package odd is version unknown; needs >=2"]),
    ("a value", {"head_size": {"min": 200}}, ["head_size is 128; needs 200 or more"]),
    ("a value that is not given", {"block_size": {"min": 16}}, ["block_size is not given; needs 16 or more"]),
    ("a boolean", {"eager": True}, ["eager is false; needs true"]),
    ("a derived value", {"quantized": True}, ["quantized is false (vocabulary.yaml:*); needs true"]),
    (
        "one of two",
        {"any": [{"arch": "g2"}, {"flags": ["fast"]}]},
        ["needs arch g2 or flag fast"],
    ),
    ("none of", {"not": {"arch": "g1"}}, ["not for arch g1"]),
    ("several", {"arch": "g2", "flags": ["fast"]}, ["arch is g1; needs g2", "flag fast is off"]),
]


@pytest.mark.parametrize(("condition", "reasons"), [c[1:] for c in CONDITIONS], ids=[c[0] for c in CONDITIONS])
@pytest.mark.parametrize("place", ["requires", "when", "if"])
def test_an_unmet_condition_is_said_part_by_part(place: str, condition: dict[str, Any], reasons: list[str]) -> None:
    variants = [{"name": "V", "when": condition}] if place == "when" else []
    backend = tiny.row(
        requires=condition if place == "requires" else None, variants=variants, capabilities={"features": ["sinks"]}
    )
    entry = {"backend": "A", "if": condition} if place == "if" else "A"
    vocabulary = {
        "flags": {"fast": "l", "slow": "l"},
        "packages": {"lib": {"legend": "l"}, "old": {"legend": "l"}, "odd": {"legend": "l"}},
    }
    registry = tiny.load({"A": backend}, {"gpu": [{"name": "all", "order": [entry]}]}, vocabulary=vocabulary)
    packages = {"old": "1.0", "odd": "unknown"}
    platform = Platform(platform="gpu", arch="g1", flags={"slow"}, packages=packages)
    request = AttentionRequest(head_size=128, features={"sinks"}, extra={"eager": False})
    candidate = evaluate(request, platform, registry).candidates[0]
    assert [re.sub(r"yaml:\d+", "yaml:*", r.text) for r in candidate.reasons] == reasons
    assert {r.kind for r in candidate.reasons} == {{"if": "order", "when": "variant"}.get(place, place)}


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"kv_dtype": "fp8_e4m4"}, "kv_dtype names 'fp8_e4m4', which {} does not know; did you mean `fp8_e4m3`?"),
    ({"dtype": "bf16"}, "dtype names 'bf16', which {} does not know; "),
    ({"attention": "mha2"}, "attention names 'mha2', which {} does not know; did you mean `mha`?"),
    ({"attn_type": "decodr"}, "attn_type names 'decodr', which {} does not know; did you mean `decoder`?"),
    ({"role": "targt"}, "role names 'targt', which {} does not know; did you mean `target`?"),
    ({"phase": "prefil"}, "phase names 'prefil', which {} does not know; did you mean `prefill`?"),
    (features("sink", "alibi"), "features names 'sink', which {} does not know; did you mean `sinks`?"),
    ({"extra": {"run_kv_dtype": "fp8"}}, "run_kv_dtype is no facet of {}; did you mean `kv_dtype`?"),
    ({"extra": {"arch": "sm90"}}, "extra names 'arch', which belongs to the platform and cannot be given"),
    ({"extra": {"kv_quantized": True}}, "extra names 'kv_quantized', which is derived from others and cannot be given"),
]


@pytest.mark.parametrize(("change", "message"), UNKNOWN, ids=[case[1][:30] for case in UNKNOWN])
def test_unknown_words_are_named_with_the_nearest(default: Registry, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        select(AttentionRequest(**{**BASE, **change}), at("sm90", default), default)
    assert str(caught.value).startswith(message.format(default.title))


WRONG_PLATFORMS: list[tuple[dict[str, Any], str]] = [
    ({"platform": "cuda", "arch": "gfx942"}, "arch is gfx942, which belongs to platform rocm, not cuda"),
    ({"platform": "cuda", "arch": "sm91"}, "arch names 'sm91', which {} does not know; did you mean `sm90`?"),
    ({"platform": "rcom", "arch": "gfx942"}, "platform names 'rcom', which {} does not know; did you mean `rocm`?"),
    (
        {"platform": "rocm", "arch": "gfx942", "flags": {"aitr"}},
        "flags names 'aitr', which {} does not know; did you mean `aiter`?",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_PLATFORMS, ids=[case[1][:30] for case in WRONG_PLATFORMS])
def test_a_platform_that_cannot_be(default: Registry, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        select(AttentionRequest(**BASE), Platform(**fields), default)
    assert str(caught.value).startswith(message.format(default.title))


@pytest.mark.parametrize("name", ["FLASH_ATN", "", "flash_attn"])
def test_an_unknown_backend(default: Registry, name: str) -> None:
    with pytest.raises(RequestError, match=f"^unknown backend '{name}'; "):
        select(AttentionRequest(**BASE), at("sm90", default), default, name)


EXTRA: list[tuple[Any, Any, str | None]] = [
    ("eager", True, None),
    ("eager", 1, None),
    ("eager", "yes", "eager names 'yes', which {} does not know; known: False, True"),
    ("ranks", 4, None),
    ("ranks", 0, None),
    ("ranks", -1, "ranks is -1; expected an integer of at least 0"),
    ("ranks", "4", "ranks is '4'; expected an integer of at least 0"),
    ("eager", None, None),
]


@pytest.mark.parametrize(("facet", "value", "message"), EXTRA, ids=str)
def test_facets_that_a_registry_declares_are_checked(facet: str, value: Any, message: str | None) -> None:
    # each value decides something, so that one of the wrong type would go wrong there
    rules = [{"when": {"ranks": {"min": 9}}, "reject": "r"}, {"when": {"eager": False}, "reject": "e"}]
    registry = tiny.load({"A": tiny.row(rules=rules)})
    request = AttentionRequest(head_size=1, extra={facet: value})
    if message is None:
        assert select(request, Platform(platform="gpu", arch="g1"), registry).backend
    else:
        with pytest.raises(RequestError) as caught:
            select(request, Platform(platform="gpu", arch="g1"), registry)
        assert str(caught.value) == message.format(registry.title)


# running -------------------------------------------------------------------------------------------------------------


def test_to_run_asks_for_a_module_that_loads(monkeypatch: pytest.MonkeyPatch, default: Registry) -> None:
    package, good = types.ModuleType("kernels_of_a_test"), types.ModuleType("kernels_of_a_test.good")
    monkeypatch.setitem(sys.modules, "kernels_of_a_test", package)
    monkeypatch.setitem(sys.modules, "kernels_of_a_test.good", good)
    overlay = {
        "backends": {
            "FLASHINFER": {"module": "kernels_of_a_test.missing"},
            "TRITON_ATTN": {"module": "kernels_of_a_test.good"},
        }
    }
    registry = load_registry("default", [overlay], trust=["kernels_of_a_test"])
    request, platform = AttentionRequest(**BASE), at("sm90", default)
    answer = select(request, platform, registry, to_run=True)
    assert answer.backend.name == "TRITON_ATTN"
    assert answer.backend.load() is good
    knowledge = f"FLASH_ATTN has no kernel module in {registry.title}: the row is knowledge only"
    missing = "No module named 'kernels_of_a_test.missing'; 'kernels_of_a_test' is not a package"
    said = {c.name: [r.text for r in c.reasons] for c in answer.candidates}
    assert said["FLASH_ATTN"] == [f"cannot be run: ImportError: {knowledge}"]
    assert said["FLASHINFER"] == [f"cannot be run: ModuleNotFoundError: {missing}"]
    # the question without it is another one, and is remembered apart
    assert select(request, platform, registry).backend.name == "FLASH_ATTN"
    with pytest.raises(ImportError, match="knowledge only"):
        select(request, platform, registry).backend.load()


# the answer as a value -----------------------------------------------------------------------------------------------


def test_answers_are_remembered_by_everything_that_was_asked() -> None:
    registry = load_registry("default")
    request, platform = AttentionRequest(**BASE), at("sm90", registry)
    first = select(request, platform, registry)
    assert select(AttentionRequest(**BASE), at("sm90", registry), registry) is first
    others = [
        select(dataclasses.replace(request, kv_dtype="fp8"), platform, registry),
        select(request, at("sm90 +aiter", registry), registry),
        select(request, at("sm90 -vllm", registry), registry),
        select(request, platform, registry, "TRITON_ATTN"),
    ]
    assert len({id(s) for s in [first, *others]}) == 5
    assert len(registry.cache) == 5


def test_a_changed_copy_of_a_registry_does_not_share_its_answers() -> None:
    registry = load_registry("default")
    request, platform = AttentionRequest(**BASE), at("sm90", registry)
    select(request, platform, registry)
    copy = dataclasses.replace(registry, orders={})
    assert evaluate(request, platform, copy).backend is None


def test_the_memory_is_bounded() -> None:
    registry = tiny.load({"A": tiny.row()})
    platform = Platform(platform="gpu", arch="g1")
    for size in range(1, _CACHE_LIMIT + 10):
        select(AttentionRequest(head_size=size), platform, registry)
    assert len(registry.cache) <= _CACHE_LIMIT


def test_threads_agree() -> None:
    registry = load_registry("default")
    questions = [(AttentionRequest(**{**BASE, **r[2]}), at(r[1], registry)) for r in ROWS]
    alone = load_registry("default")
    expected = [evaluate(*q, alone).to_dict() for q in questions]
    start = threading.Barrier(8)

    def ask(_: int) -> list[dict[str, Any]]:
        start.wait()
        return [evaluate(*q, registry).to_dict() for q in questions]

    with ThreadPoolExecutor(8) as pool:
        assert all(answers == expected for answers in pool.map(ask, range(8)))


def test_it_is_json(default: Registry) -> None:
    for row in ROWS:
        data = evaluate(AttentionRequest(**{**BASE, **row[2]}), at(row[1], default), default).to_dict()
        assert json.loads(json.dumps(data)) == data
    data = evaluate(AttentionRequest(**BASE, **features("sinks")), at("gfx942", default), default).to_dict()
    assert data["backend"] == {"name": "TRITON_ATTN", "variant": None}
    assert data["order"]["name"] == "rocm/mha"
    assert data["derived"]["kv_quantized"]["value"] is False
    assert data["candidates"][0]["reasons"][0]["text"] == "emulates sinks (slow); TRITON_ATTN serves them natively"
    assert data["candidates"][0]["reasons"][0]["where"].startswith("registry/backends.yaml:")


def test_derived_facets_tell_the_case_that_spoke(default: Registry) -> None:
    selection = evaluate(AttentionRequest(**BASE, kv_dtype="fp8"), at("sm90", default), default)
    value, where = selection.derived["kv_quantized"]
    assert value is True
    assert where == default.derived["kv_quantized"].cases[-1][2]


def test_selections_travel_between_processes(default: Registry) -> None:
    request, platform = AttentionRequest(**BASE, **features("sinks")), at("gfx942", default)
    selection = select(request, platform, default)
    copy = pickle.loads(pickle.dumps(selection))
    assert copy == selection
    assert copy.registry.cache == {}
    # the copy of the registry answers as the original does
    assert select(request, at("sm120", default), copy.registry).backend.name == "FLASHINFER"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(NoBackendError, match="sinks is not supported") as caught:
            pool.submit(select, request, at("sm120", default), default, "FLASH_ATTN").result()
        assert caught.value.selection.alternatives == ("FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")


def test_the_default_registry_is_used_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    answer = attnreg.select(AttentionRequest(**BASE), Platform(platform="cuda", arch="sm90"))
    assert answer.registry.name == "default"
    assert answer.backend.name == "FLASH_ATTN"
