"""What the tables of older releases of vLLM say otherwise than the newer ones."""

from __future__ import annotations

from typing import Any

import pytest

import attnreg
from attnreg import AttentionRequest, Platform
from attnreg.request import with_extra
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection


def asked(release: str, arch: str, **facets: Any) -> Selection:
    """The selection of a release for a bfloat16 layer."""
    layer = AttentionRequest(**with_extra({"head_size": 128, "dtype": "bfloat16", **facets}))
    return evaluate(layer, Platform(platform="cuda", arch=arch), attnreg.load_registry(f"vllm-{release}"))


def stored(release: str, arch: str, **facets: Any) -> Any:
    """How the layer stores its cache after the start."""
    chosen = asked(release, arch, **facets)
    assert chosen.start is not None
    return chosen.start.facts["kv_dtype"]


@pytest.mark.parametrize("release", ["0.20.0", "0.22.0"])
@pytest.mark.parametrize("model", ["falcon", "mimo_v2_flash"])
def test_models_that_do_not_tell_their_layers_keep_a_plain_cache(release: str, model: str) -> None:
    # FlashAttention 2 reads no fp8 cache
    facets = {"head_size_v": 64, "kv_dtype": "fp8", "model": model}
    assert stored(release, "sm80", **facets) == "auto"
    assert asked(release, "sm80", **facets).backend is not None


@pytest.mark.parametrize(
    ("release", "heads", "stops"),
    [
        ("0.20.0", 20, True),
        ("0.26.0", 3, True),
        ("0.26.0", 4, False),
        ("0.28.0", 3, False),
        ("0.28.0", 20, True),
        ("0.30.0", 20, False),
    ],
)
def test_the_query_heads_that_aiters_kernels_for_mla_take(release: str, heads: int, stops: bool) -> None:
    layer = AttentionRequest(head_size=576, dtype="bfloat16", attention="mla", num_heads=heads)
    instinct = Platform(platform="rocm", arch="gfx942")
    assert evaluate(layer, instinct, attnreg.load_registry(f"vllm-{release}"), "ROCM_AITER_MLA").fails == stops


@pytest.mark.parametrize("release", ["0.25.0", "0.26.0"])
def test_when_an_fp8_cache_of_mla_stops_on_turing(release: str) -> None:
    chosen = asked(release, "sm75", dtype="float16", attention="mla", head_size=576, kv_dtype="fp8")
    assert chosen.fails
    # since 0.26 the constructor asks
    assert any("builds the layer" in warning for warning in chosen.warnings) == (release == "0.26.0")
