"""Speculative decoding on a GPU, by selections of an AMD GPU: target and draft each over an fp8 cache."""

from __future__ import annotations

import pytest
import torch
from support.layers import drafting

from attnreg import Platform, Registry
from attnreg.runtime.interface import Layout

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize(("arch", "layout"), [("gfx942", "SPLIT"), ("gfx950", "SPLIT"), ("gfx950", "NHD")])
def test_drafting_changes_no_token(default: Registry, arch: str, layout: Layout) -> None:
    torch.manual_seed(1)
    platform = Platform(platform="rocm", arch=arch)
    chosen = [drafting.select(default, platform, "fp8", draft=draft) for draft in (False, True)]
    assert [s.backend.name if s.backend else None for s in chosen] == ["ROCM_ATTN", "ROCM_ATTN"]
    target, draft = (drafting.Model(2 - i, s, layout, "cuda") for i, s in enumerate(chosen))
    loop = drafting.Loop(target, draft, block=4, device="cuda")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    tokens, accepted = loop.drafted(prompt, 60)
    assert tokens == loop.plain(prompt, 60)
    assert 0 < sum(accepted) < 3 * len(accepted)
