"""The tables of vLLM for Intel GPUs and processors, held against what each release's own classes chose there.

`tools/record/vllm_platforms.py` recorded the rows: layers, vision towers and the prompts of MLA, with and without a
name of a backend.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.platform_parity import difference, recorded

import attnreg
from attnreg.selection.selector import evaluate

RELEASES = ("0.33.0", *(f"0.{minor}.0" for minor in range(32, 19, -1)), "0.22.1")


@pytest.mark.parametrize("release", RELEASES)
def test_each_row_is_decided_alike(release: str) -> None:
    registry = attnreg.load_registry(f"vllm-{release}", plugins=())
    rows = recorded(release)
    wrong = [(json.dumps(row), text) for row in rows if (text := difference(row, registry))]
    assert not wrong
    # rows of both platforms, chosen and refused
    counts = Counter((row["in"]["arch"][:2], "chosen" in row["out"]) for row in rows)
    assert min(counts[arch, chosen] for arch in ("xe", "x8") for chosen in (True, False)) > 2
    assert len(rows) > 90


def asked(release: str, arch: str, **facets: object) -> attnreg.Selection:
    platform = attnreg.Platform(platform="xpu" if arch.startswith("xe") else "cpu", arch=arch)
    layer = attnreg.AttentionRequest(**{"head_size": 128, "dtype": "bfloat16", **facets})  # type: ignore[arg-type]
    return evaluate(layer, platform, attnreg.load_registry(f"vllm-{release}", plugins=()))


@pytest.mark.parametrize(
    ("release", "arch", "head_size", "stops"),
    [
        ("0.32.0", "x86_64", 128, True),
        ("0.32.0", "x86_64_avx512", 128, False),
        ("0.32.0", "x86_64_avx512", 80, True),
        ("0.28.0", "aarch64", 128, True),
        ("0.21.0", "x86_64_amx", 128, False),
    ],
)
def test_processors_that_read_no_fp8_cache_stop_after_the_choice(
    release: str, arch: str, head_size: int, stops: bool
) -> None:
    chosen = asked(release, arch, head_size=head_size, kv_dtype="fp8")
    assert chosen.backend is not None
    assert (chosen.backend.name, chosen.fails) == ("CPU_ATTN", stops)


@pytest.mark.parametrize(("release", "backend"), [("0.33.0", None), ("0.31.0", None), ("0.30.0", "TRITON_ATTN")])
def test_batch_invariant_runs_on_intel_gpus_refuse_a_quantised_cache_since_0_31(
    release: str, backend: str | None
) -> None:
    features = frozenset({"batch_invariant"})
    chosen = asked(release, "xe2", kv_dtype="fp8", features=features)
    assert (chosen.backend and chosen.backend.name) == backend
    assert (chosen.start is not None and chosen.start.refusal is not None) == (backend is None)


def test_prompts_of_mla_on_processors_are_not_known_of_0_28() -> None:
    mla = {"attention": "mla", "head_size": 576}
    assert asked("0.28.0", "x86_64", phase="prefill", **mla).unknown
    chosen = asked("0.28.0", "x86_64", **mla).backend
    assert chosen is not None
    assert chosen.name == "CPU_MLA"
    # before 0.28 there is no MLA
    assert asked("0.27.0", "x86_64", **mla).backend is None


@pytest.mark.parametrize(
    ("release", "arch", "attention", "kv_dtype", "known"),
    [
        ("0.33.0", "xe2", "mha", "nvfp4", False),
        ("0.33.0", "xe2", "mha", "int8_per_token_head", False),
        ("0.33.0", "xe2", "mha", "fp8", True),
        ("0.33.0", "xe2", "mla", "turboquant_k8v4", False),
        # before 0.33 processors take any KV dtype unasked
        ("0.33.0", "x86_64_avx512", "mha", "int8_per_token_head", True),
        ("0.28.0", "x86_64_avx512", "mha", "int8_per_token_head", False),
        ("0.20.0", "x86_64_avx512", "mha", "nvfp4", False),
        ("0.20.0", "xe2", "mha", "nvfp4", False),
    ],
)
def test_a_kv_dtype_that_nobody_is_asked_about_is_not_known(
    release: str, arch: str, attention: str, kv_dtype: str, known: bool
) -> None:
    sizes = {"head_size": 576} if attention == "mla" else {}
    assert bool(asked(release, arch, attention=attention, kv_dtype=kv_dtype, **sizes).unknown) != known


def test_batch_invariant_runs_on_intel_gpus_refuse_weights_of_any_quantisation() -> None:
    features = frozenset({"batch_invariant"})
    chosen = asked("0.33.0", "xe2", features=features, extra=(("quantised_checkpoint", True),))
    assert chosen.start is not None
    assert chosen.start.refusal is not None
    assert chosen.backend is None
    plain = asked("0.33.0", "xe2", features=features).backend
    assert plain is not None
    assert plain.name == "TRITON_ATTN"
