"""What vLLM 0.33.0 settles for a whole run before a layer is asked about: a backend, or FlashAttention's version."""

from __future__ import annotations

from typing import Any

import pytest

import attnreg
from attnreg.selection.selector import evaluate

REGISTRY = attnreg.load_registry("vllm-0.33.0", plugins=())
GEMMA = {"head_size": 256, "num_heads": 8, "num_kv_heads": 2, "model": "gemma4_text", "features": {"sliding_window"}}


def answer(arch: str, **changes: Any) -> tuple[str | None, list[str]]:
    """The backend of a layer, and which kernel it is said to run."""
    platform = attnreg.Platform(platform="rocm" if arch.startswith("gfx") else "cuda", arch=arch)
    selection = evaluate(attnreg.AttentionRequest(**{**GEMMA, **changes}), platform, REGISTRY)
    runs = [follows.text for follows in selection.consequences if follows.kind == "runs"]
    return selection.backend.name if selection.backend else None, runs


@pytest.mark.parametrize("model", ["gemma4", "gemma4_text", "gemma4_unified_text"])
@pytest.mark.parametrize("head_size", [256, 512])
def test_gemma4_runs_fa4_in_every_layer_on_hopper(model: str, head_size: int) -> None:
    said = ["FlashAttention 4, which vLLM sets for the whole run of this model as it is published"]
    assert answer("sm90", model=model, head_size=head_size) == ("FLASH_ATTN", said)


def test_an_fp8_run_on_hopper_leaves_each_layer_its_own_version() -> None:
    assert answer("sm90", kv_dtype="fp8") == ("FLASH_ATTN", [])
    assert answer("sm90", extra={"run_kv_dtype": "fp8"}) == ("FLASH_ATTN", [])


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm120", "gfx942"])
def test_without_fa4_gemma4_is_tritons(arch: str) -> None:
    assert answer(arch)[0] == "TRITON_ATTN"
    # and no other model's
    assert answer(arch, model="gemma3_text")[0] != "TRITON_ATTN"


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
def test_embedding_gemma2_is_tritons_everywhere(arch: str) -> None:
    assert answer(arch, model="embedding_gemma2_text")[0] == "TRITON_ATTN"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (2, "FlashAttention 2, by flash_attn_version"),
        (3, "FlashAttention 3, by flash_attn_version"),
        (4, "FlashAttention 4, by flash_attn_version"),
    ],
)
def test_the_users_version_is_said(asked: int, said: str) -> None:
    for model in ("gemma4_text", "llama", None):
        assert answer("sm90", model=model, extra={"flash_attn_version": asked})[1] == [said]


def test_a_version_that_does_not_serve_the_layer_is_said_too() -> None:
    backend, said = answer("sm100", model="llama", extra={"flash_attn_version": 4}, head_size=192)
    assert backend == "FLASH_ATTN"
    assert said == ["FlashAttention 2, because the version of flash_attn_version does not serve this layer"]


def test_nothing_is_said_where_nothing_was_settled() -> None:
    assert answer("sm90", model="llama") == ("FLASH_ATTN", [])
