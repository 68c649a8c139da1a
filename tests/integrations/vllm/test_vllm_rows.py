"""Layers of vLLM 0.33.0 as requests: the bundled registry decides as vLLM does, and what a layer is described by."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from engine import CAPABILITIES, Engine, SwitchOn, missing, recorded

import attnreg
from attnreg.integrations.vllm.layers import describe as describe_asked

# torch and vLLM warn of their own future
pytestmark = pytest.mark.filterwarnings("default")


ROCM_ROWS = Path(__file__).with_name("rocm_rows.py")
SWITCHES = ("has_sink", "has_sliding_window", "use_mm_prefix", "use_non_causal", "use_batch_invariant", "use_dcp")
SWITCHES += ("use_mla", "use_sparse", "use_per_head_quant_scales", "use_kv_connector", "use_pcp", "use_rswa")
SWITCHES += ("use_adaptive_verification",)


# the bundled registry decides as vLLM does ---------------------------------------------------------------------------


def swept() -> list[dict[str, Any]]:
    """What the recorded rows leave out: FlashAttention's version and TRT-LLM's kernels as the user configures them."""
    off = dict.fromkeys(SWITCHES, False) | {"attn_type": "decoder", "num_heads": None, "run_kv_cache_dtype": None}
    rows = []
    for arch, size, kv_dtype, version, trtllm, on, model in itertools.product(
        ("sm80", "sm90", "sm100"),
        (64, 80, 128, 256, 512),
        ("auto", "fp8", "nvfp4"),
        (None, 2, 3, 4),
        (None, False),
        ((), ("has_sink",), ("has_sliding_window",), ("has_sink", "has_sliding_window"), ("use_mm_prefix",)),
        (None, {"num_heads": 64, "num_kv_heads": 8, "hf": {}}),
    ):
        row = {"arch": arch, "head_size": size, "dtype": "bfloat16", "kv_cache_dtype": kv_dtype, "block_size": None}
        row |= {"flash_attn_version": version, "use_trtllm_attention": trtllm, "model": model}
        rows.append(off | row | dict.fromkeys(on, True))
    return rows


@pytest.fixture
def every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rows were recorded every package was there, and vLLM is simulated so here; the plugin looks itself."""
    monkeypatch.setattr(
        "attnreg.integrations.vllm.decider.installed_packages", lambda known: dict.fromkeys(known, "99")
    )


@pytest.mark.usefixtures("every_package")
def test_recorded_configurations_get_the_same_backend(engine: Engine, switch_on: SwitchOn) -> None:
    rows = recorded("cuda")
    inputs = [row["in"] for row in rows]
    # the simulation is faithful: vLLM answers here as it did where the rows were recorded
    own = engine.answers(inputs)
    assert own == [row["out"]["chosen"] for row in rows]
    switch_on()
    assert engine.answers(inputs) == own
    assert len(rows) > 2000
    assert len(set(own)) > 15


@pytest.mark.usefixtures("every_package")
def test_swept_configurations_get_the_same_backend(engine: Engine, switch_on: SwitchOn) -> None:
    rows = swept()
    own = engine.answers(rows)
    switch_on()
    assert engine.answers(rows) == own
    assert {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", None} < set(own)


@pytest.mark.parametrize(
    ("arch", "aiter"), sorted({(row["in"]["arch"], row["in"]["aiter"]) for row in recorded("rocm")})
)
def test_amd_gpus_get_the_same_backends(arch: str, aiter: str) -> None:  # noqa: A002
    if reason := missing():
        pytest.skip(reason)
    done = subprocess.run([sys.executable, ROCM_ROWS, arch, aiter], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    own, ours = json.loads(done.stdout.splitlines()[-1])
    rows = [row for row in recorded("rocm") if (row["in"]["arch"], row["in"]["aiter"]) == (arch, aiter)]
    assert own == [row["out"]["chosen"] for row in rows]
    assert ours == own


# what a layer is described by ----------------------------------------------------------------------------------------


def test_every_word_of_vllm_is_known(engine: Engine) -> None:
    from vllm.config.cache import KV_CACHE_DTYPES
    from vllm.v1.attention.backend import AttentionType

    words = attnreg.load_registry("vllm-0.33.0").vocabulary.facets
    assert set(KV_CACHE_DTYPES) <= set(words["kv_dtype"].words)
    assert {kind.value for kind in AttentionType} <= set(words["attn_type"].words)
    assert set(CAPABILITIES) < set(words["arch"].words)


def describe(engine: Engine, row: dict[str, Any], platform: Any = None) -> tuple[Any, Any]:
    with engine.row(row) as (asked, num_heads):
        registry = attnreg.load_registry("vllm-0.33.0")
        return describe_asked(platform or engine.platform, asked, num_heads, registry, {"triton": "3.7.1"})


def test_the_model_and_the_run_are_read_from_vllms_configuration(engine: Engine) -> None:
    row = next(row for row in swept() if row["model"] and row["flash_attn_version"] == 4)
    row |= {"kv_cache_dtype": "auto", "run_kv_cache_dtype": "turboquant_k8v4", "use_dcp": True}
    row["model"] = {"num_heads": 64, "num_kv_heads": 8, "attn_type": "hybrid"}
    row["model"]["hf"] = {"model_type": "llama", "attn_logit_softcapping": 50.0, "kv_lora_rank": 512}
    request, platform = describe(engine, row)
    assert (request.model, request.kv_lora_rank, request.role) == ("llama", 512, "target")
    assert dict(request.extra) == {
        "flash_attn_version": 4,
        # the ranks that share a cache are counted, not guessed
        "gathered_heads": 128,
        "is_diffusion": False,
        "model_head_size": row["head_size"],
        "model_softcap": True,
        "run_kv_dtype": "turboquant_k8v4",
    }
    assert (platform.platform, platform.arch, platform.flags) == ("cuda", row["arch"], frozenset())
    assert platform.packages == (("triton", "3.7.1"),)


@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        ({}, set()),
        ({"VLLM_ROCM_USE_AITER": "1"}, {"aiter", "aiter_mha", "aiter_mla"}),
        ({"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MHA": "0"}, {"aiter", "aiter_mla"}),
        ({"VLLM_ROCM_USE_AITER_MLA": "1", "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}, {"flash_attn_triton"}),
    ],
)
def test_amd_gpus_and_their_switches(
    environment: dict[str, str], flags: set[str], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm = ModuleType("vllm.platforms.rocm")
    rocm._GCN_ARCH = "gfx942:sramecc+:xnack-"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", rocm)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _, platform = describe(engine, swept()[0], SimpleNamespace(_enum=SimpleNamespace(name="ROCM")))
    assert (platform.platform, platform.arch, platform.flags) == ("rocm", "gfx942", flags)


def test_processors_are_described(engine: Engine) -> None:
    _, platform = describe(engine, swept()[0], SimpleNamespace(_enum=SimpleNamespace(name="CPU")))
    assert platform == attnreg.Platform(platform="cpu", arch=platform.arch, packages={"triton": "3.7.1"})


def test_a_gpu_or_a_platform_that_the_registry_does_not_know_is_refused(
    engine: Engine, switch_on: SwitchOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import PlatformEnum

    switch_on()
    engine.platform.capability = engine.platform.capability._replace(minor=7)
    with pytest.raises(ValueError, match=r"attnreg \(vllm-0\.33\.0@\w+\): arch names 'sm97', which"):
        engine.backend()
    monkeypatch.setattr(engine.platform, "_enum", PlatformEnum.OOT)
    with pytest.raises(ValueError, match=r"attnreg \(vllm-0\.33\.0@\w+\): arch names 'oot', which"):
        engine.backend()
