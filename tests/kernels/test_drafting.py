"""Speculative decoding as DFlash drafts, by selections of an AMD GPU: the same tokens as without a draft."""

from __future__ import annotations

import pytest
import torch
from support.layers import drafting
from support.layers.drafting import Loop, Model

from attnreg import AttentionRequest, Platform, Registry, select
from attnreg.runtime.interface import Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKAGES = {"torch": "2.13", "triton": "3.7", "aiter": "0.1"}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def amd(arch: str, *flags: str) -> Platform:
    return Platform(platform="rocm", arch=arch, flags=flags, packages=PACKAGES)


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "layout"),
    [("gfx942", "fp8", "SPLIT"), ("gfx950", "fp8", "NHD"), ("gfx90a", "auto", "SPLIT")],
)
def test_drafting_changes_no_token(default: Registry, arch: str, kv_dtype: str, layout: Layout) -> None:
    torch.manual_seed(1)
    here = amd(arch)
    chosen = [drafting.select(default, here, kv_dtype, draft=draft) for draft in (False, True)]
    assert [s.backend.name if s.backend else None for s in chosen] == ["ROCM_ATTN", "ROCM_ATTN"]
    target, draft = (Model(2 - i, s, layout, DEVICE) for i, s in enumerate(chosen))
    if kv_dtype == "fp8":
        encoding = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
        assert {layer.cache.key.dtype for layer in (*target.layers, *draft.layers)} == {encoding}
    loop = Loop(target, draft, block=4, device=DEVICE)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    plain = loop.plain(prompt, 20)
    tokens, accepted = loop.drafted(prompt, 20)
    assert tokens == plain
    # some drafts are right and some are not, and the target repeats no single token
    assert 0 < sum(accepted) < 3 * len(accepted)
    assert len(set(plain[len(prompt) :])) > 3


def test_each_side_is_asked_for_by_itself(default: Registry) -> None:
    here = amd("gfx950", "aiter", "aiter_mha")
    target = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, kv_dtype="fp8")
    draft = AttentionRequest(
        head_size=128, num_heads=32, num_kv_heads=8, kv_dtype="fp8", role="draft", features=["non_causal"]
    )
    refused = {c.name: [r.text for r in c.reasons] for c in select(draft, here, default).candidates}
    assert refused["ROCM_AITER_UNIFIED_ATTN"] == ["non_causal is not supported"]
    assert refused["ROCM_ATTN"] == []
    accepted = {c.name for c in select(target, here, default).candidates if not c.reasons}
    assert {"ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN"} <= accepted
