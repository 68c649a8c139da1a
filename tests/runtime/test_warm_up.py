"""Batches for a warm-up run in any layer, within their bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnreg
from attnreg import AttentionRequest, BatchError
from attnreg.runtime.warm_up import lengths_of, warm_up_batches

SMALL = {"max_num_tokens": 40, "max_num_reqs": 3, "max_seq_len": 70}
USUAL = 8192, 256, 32768


def layer_of(backend: str = "", **changes: Any) -> attnreg.Attention:
    fields: dict[str, Any] = {
        "head_size": 32, "num_heads": 4, "num_kv_heads": 2, "dtype": "float32", "block_size": 16,
    } | changes  # fmt: skip
    here = attnreg.detect(attnreg.load_registry().vocabulary)
    return attnreg.Attention.from_selection(
        attnreg.select(AttentionRequest(**fields), here, backend=backend or None, to_run=True)
    )


@pytest.mark.parametrize("features", [set(), {"non_causal"}, {"causal_by_request", "non_causal"}, {"mm_prefix"}])
def test_a_layer_runs_them_and_its_cache_stays_as_it_is(features: set[str]) -> None:
    layer = layer_of("CPU_ATTN", features=features)
    cache = layer.new_kv_cache(1)
    cache.key.normal_(), cache.value.normal_()
    before = cache.key.clone(), cache.value.clone()
    query, key, value = (torch.randn(40, n, 32) for n in (4, 2, 2))
    seen = []
    for batch in warm_up_batches(layer.spec, **SMALL, device="cpu"):
        n = batch.num_tokens
        assert layer.forward(query[:n], key[:n], value[:n], cache, batch).isfinite().all()
        seen.append((batch.num_reqs, batch.max_query_len, batch.max_seq_len, batch.causal))
    assert all(torch.equal(a, b) for a, b in zip(cache, before, strict=True))
    assert max(n for n, *_ in seen) == 3
    assert {1, 16, 40} <= {q for _, q, _, _ in seen}
    assert max(k for _, _, k, _ in seen) == 70
    assert ({False} <= {c for *_, c in seen if isinstance(c, bool)}) == ("non_causal" in features)
    assert any(isinstance(c, torch.Tensor) for *_, c in seen) == ("causal_by_request" in features)


def test_a_layer_without_a_cache_has_prompts_alone() -> None:
    layer = layer_of("CPU_ATTN", attn_type="encoder_only", block_size=None)
    batches = [*warm_up_batches(layer.spec, **SMALL, device="cpu")]
    assert all(b.block_table is b.slot_mapping is None and b.causal is False for b in batches)
    for batch in batches:
        rows = torch.randn(batch.num_tokens, 4, 32)
        layer.forward(rows, rows[:, :2], rows[:, 2:], None, batch)


def test_both_forms_of_mla_are_warmed() -> None:
    request = AttentionRequest(
        attention="mla", head_size=80, head_size_v=64, num_heads=4, num_kv_heads=1, block_size=16, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24, dtype="float32", features={"lse"},
    )  # fmt: skip
    here = attnreg.detect(attnreg.load_registry().vocabulary)
    decode, prompts = (attnreg.select(r, here, to_run=True) for r in (request, request.expanded()))
    mla = attnreg.MLAAttention(decode, prompts, kv_b_proj=torch.randn(4 * 56, 64), workspace_tokens=64)
    cache = mla.new_kv_cache(1).normal_()
    query, latent, rope = torch.randn(40, 4, 48), torch.randn(40, 64), torch.randn(40, 16)
    for batch in warm_up_batches(mla.decode.spec, **SMALL, device="cpu"):
        n = batch.num_tokens
        assert mla(query[:n], latent[:n], rope[:n], cache, batch).isfinite().all()


def test_batches_keep_to_their_bounds() -> None:
    for tokens, reqs, seq_len in ((1, 1, 1), (5, 9, 3), (700, 2, 64), USUAL):
        for lengths in lengths_of(tokens, reqs, seq_len, cached=True):
            assert 1 <= len(lengths) <= reqs
            assert sum(q for q, _ in lengths) <= tokens
            assert all(1 <= q <= k <= seq_len for q, k in lengths)
    # so few that a layer runs them in seconds
    assert 0 < len(lengths_of(*USUAL, cached=True)) < 2000
    assert lengths_of(1, 1, 1, cached=True) == [((1, 1),)]


def test_bounds_that_are_none_are_refused() -> None:
    layer = layer_of("CPU_ATTN")
    with pytest.raises(BatchError, match=r"max_num_tokens is 0; .*\n.*max_seq_len is 2.5; expected an integer"):
        next(warm_up_batches(layer.spec, max_num_tokens=0, max_num_reqs=1, max_seq_len=2.5))  # type: ignore[arg-type]
