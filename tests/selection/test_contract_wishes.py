"""What the field's contracts have beside the plain call: each is served by TRITON_ATTN, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.registries.asking import at

from attnreg import AttentionRequest, Registry, RequestError
from attnreg.runtime.interface import SpecError
from attnreg.runtime.layer import Attention
from attnreg.selection.selector import evaluate

PLAIN: dict[str, Any] = {"head_size": 128, "num_heads": 32, "num_kv_heads": 8}
SERVED: list[dict[str, Any]] = [
    {"features": {"asymmetric_window"}},
    {"features": {"causal_by_request"}},
    {"features": {"mm_prefix", "mm_prefix_in_window", "sliding_window"}},
    {"features": {"fp8_query"}, "kv_dtype": "fp8"},
    {"features": {"fp8_output"}},
    {"features": {"chunk"}},
    {"features": {"tree_mask"}},
    *({"block_size": size} for size in (1, 4, 8)),
]
REFUSED = [
    ({"kv_dtype": word}, f"kv_dtype is {word}; supported: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2")
    for word in ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")
]


def words(value: Any) -> str:
    """A test's name, whatever the order of a set."""
    if isinstance(value, dict):
        return " ".join(f"{name} {words(of)}" for name, of in value.items())
    return ", ".join(sorted(value)) if isinstance(value, set) else str(value)


@pytest.mark.parametrize("asked", SERVED, ids=words)
def test_served(default: Registry, asked: dict[str, Any]) -> None:
    chosen = evaluate(AttentionRequest(**PLAIN, **asked), at("sm90", default), default, "TRITON_ATTN").chosen
    assert chosen is not None
    assert chosen.emulates == ()


@pytest.mark.parametrize(("asked", "reason"), REFUSED, ids=words)
def test_refused_by_name(default: Registry, asked: dict[str, Any], reason: str) -> None:
    selection = evaluate(AttentionRequest(**PLAIN, **asked), at("sm90", default), default)
    # no backend of any order has it, and each says so
    assert selection.backend is None
    assert reason in [r.text for c in selection.candidates for r in c.reasons if c.name == "TRITON_ATTN"]
    assert all(any("kv_dtype" in r.facets for r in c.reasons) for c in selection.candidates)


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_format_that_has_no_meaning_here_is_no_word(default: Registry, word: str) -> None:
    with pytest.raises(RequestError, match=f"kv_dtype.*'?{word}"):
        evaluate(AttentionRequest(**PLAIN, kv_dtype=word), at("sm90", default), default)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_by_request_are_refused(default: Registry, name: str) -> None:
    request = AttentionRequest(**PLAIN, dtype="float32", kv_dtype="fp8", features={"per_head_quant_scales"})
    selection = evaluate(request, at("x86_64", default), default)
    with pytest.raises(SpecError, match=rf"{name} is .*; scales that differ by request are not served"):
        Attention.from_selection(selection, **{name: torch.ones(3, 8)})  # type: ignore[arg-type]
