"""What the tables of older releases of vLLM say otherwise than the newer ones."""

from __future__ import annotations

import pytest

import attnreg
from attnreg import AttentionRequest, Platform
from attnreg.selection.selector import evaluate


@pytest.mark.parametrize(("model", "backend"), [("falcon", "FLASH_ATTN"), ("mimo_v2_flash", "FLASH_ATTN_DIFFKV")])
def test_models_that_do_not_tell_their_layers_keep_a_plain_cache(model: str, backend: str) -> None:
    # FlashAttention 2 reads no fp8 cache
    ampere = Platform(platform="cuda", arch="sm80")
    layer = AttentionRequest(head_size=128, head_size_v=64, dtype="bfloat16", kv_dtype="fp8", model=model)
    chosen = evaluate(layer, ampere, attnreg.load_registry("vllm-0.20.0"))
    assert chosen.backend is not None
    assert chosen.start is not None
    assert (chosen.backend.name, chosen.start.facts["kv_dtype"]) == (backend, "auto")
