"""What runs on an H200 refuted is not claimed, and what lies beside it is."""

from __future__ import annotations

from typing import Any

import pytest

from attnreg import AttentionRequest, Platform, Registry
from attnreg.selection.selector import evaluate

PACKAGES = {
    "torch": "2.11", "triton": "3.6", "vllm": "0.33.0", "flash-attn-4": "4.0.0b36", "flashinfer-python": "0.7.2",
    "ninja": "1.13", "kernels": "0.17.2", "nvcc": "13.0",
}  # fmt: skip
FA4, FA3, FA2 = "FLASH_ATTN/FA4-Hopper", "FLASH_ATTN/FA3", "FLASH_ATTN/FA2"
ENGINE = f"{FA3}-engine"
PROMPTS, MLA_PROMPTS = "FLASH_ATTN_PREFILL/FA3", {"attention": "mla", "phase": "prefill"}
NON_CAUSAL, SINKS, INVARIANT = frozenset({"non_causal"}), frozenset({"sinks"}), frozenset({"batch_invariant"})
WINDOW = frozenset({"sliding_window"})
# backend, what is refused, and what changes to be accepted
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (FA4, {"head_size": 40}, {"head_size": 48}),
    (FA4, {"head_size": 144}, {"attn_type": "encoder_only"}),
    (FA4, {"head_size": 176}, {"head_size": 192}),
    (FA4, {"head_size": 240}, {"head_size": 256}),
    (FA4, {"head_size": 96, "features": NON_CAUSAL}, {"features": frozenset()}),
    (FA4, {"head_size": 80, "features": NON_CAUSAL}, {"head_size": 112}),
    (FA4, {"head_size": 80, "attn_type": "encoder_decoder"}, {"head_size": 64}),
    (FA3, {"num_heads": 72, "features": SINKS}, {"num_heads": 64}),
    (ENGINE, {"head_size": 64, "features": INVARIANT}, {"head_size": 72}),
    (ENGINE, {"head_size": 96, "block_size": 144, "features": INVARIANT}, {"block_size": 128}),
    (ENGINE, {"head_size": 192, "block_size": 112, "features": INVARIANT}, {"head_size": 256}),
    (ENGINE, {"block_size": 176, "features": INVARIANT | NON_CAUSAL}, {"features": INVARIANT}),
    (ENGINE, {"head_size": 256, "features": INVARIANT | WINDOW}, {"head_size": 128}),
    (ENGINE, {"attn_type": "encoder", "features": INVARIANT | WINDOW}, {"attn_type": "decoder"}),
    (f"{PROMPTS}-engine", {**MLA_PROMPTS, "head_size": 64, "features": INVARIANT}, {"head_size": 192}),
    (f"{PROMPTS}-engine", {**MLA_PROMPTS, "head_size": 128, "features": INVARIANT}, {"features": frozenset()}),
    (PROMPTS, {**MLA_PROMPTS, "head_size": 256, "head_size_v": 128}, {"head_size": 192}),
    ("FLASHINFER/fa2", {"features": frozenset({"lse"})}, {"features": frozenset()}),
    (FA2, {"attn_type": "encoder_decoder"}, {"attn_type": "encoder"}),
    (FA2, {"features": frozenset({"alibi", "lse"})}, {"features": frozenset({"alibi"})}),
    (FA2, {"features": frozenset({"dcp", "lse"})}, {"features": frozenset({"lse"})}),
]


@pytest.mark.parametrize(("backend", "refuted", "change"), CASES)
def test_what_was_refuted_is_refused(
    default: Registry, backend: str, refuted: dict[str, Any], change: dict[str, Any]
) -> None:
    hopper = Platform(platform="cuda", arch="sm90", packages=tuple(PACKAGES.items()))
    plain = {"head_size": 128, "num_heads": 8, "num_kv_heads": 8, "block_size": 16, "dtype": "bfloat16"}

    def accepted(asked: dict[str, Any]) -> bool:
        return evaluate(AttentionRequest(**plain | asked), hopper, default, backend).backend is not None

    assert not accepted(refuted)
    assert accepted(refuted | change)
