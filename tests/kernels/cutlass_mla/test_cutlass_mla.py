"""CUTLASS_MLA against a stand-in with the schemas that vLLM's wheel registers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.layers.mla import latent_spec, refuses
from support.stand_ins import fake_aiter, fake_varlen

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import upstream
from attnreg.kernels.triton import cache
from attnreg.kernels.upstream import UpstreamError
from attnreg.loader import unloadable
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, SpecError, UnclaimedError
from attnreg.selection.selector import evaluate

MODULE = "attnreg.kernels.cutlass_mla.dense"
B200 = Platform(platform="cuda", arch="sm100", packages=tuple((name, "") for name in ("torch", "triton", "vllm")))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    sys.modules.pop(MODULE, None)
    monkeypatch.setattr(cache, "_write", fake_aiter.write)
    monkeypatch.setattr(upstream, "_load_library", lambda package, pattern: None)
    decode, size = "sm100_cutlass_mla_decode", "sm100_cutlass_mla_get_workspace_size"
    with (
        fake_varlen.registered("_C", fake_varlen.CUTLASS_MLA, decode, fake_varlen.cutlass_mla),
        fake_varlen.registered(
            "_C", fake_varlen.CUTLASS_WORKSPACE, size, lambda *a: 64, key="CompositeExplicitAutograd"
        ),
    ):
        yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def latents(**changes: Any) -> AttentionSpec:
    return latent_spec(**{"block_size": 128} | changes)


def test_every_claim_holds(fake: ModuleType) -> None:
    (evidence,) = verify(["CUTLASS_MLA/dense"], platform=B200, device="cpu", size="claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert "lse" in evidence.claims["features"]


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (
            latents(block_size=64),
            UnclaimedError,
            "block_size 64: the kernel is compiled for 576 and 512, and blocks of 128",
        ),
        (latents(num_heads=160), UnclaimedError, "num_heads 160: the kernel has 128"),
        (latents(kv_dtype="fp8"), UnclaimedError, "queries and latents must have one dtype"),
        (latents(latent=False), SpecError, "not MLA in its latent form"),
    ],
)
def test_other_layers_are_refused(fake: ModuleType, spec: AttentionSpec, error: type[Exception], words: str) -> None:
    refuses(fake, spec, error, words)


def test_every_query_is_a_request_of_its_own(fake: ModuleType) -> None:
    batch = BatchMetadata.build([2, 1], [9, 4], block_table=torch.tensor([[0], [1]], dtype=torch.int32))
    plan = fake.plan(latents(), batch)
    assert (plan.requests, plan.queries, plan.seq_lens.tolist()) == (3, 1, [8, 9, 4])
    assert plan.block_table.flatten().tolist() == [0, 0, 1]


def test_without_the_library_is_a_reason_and_it_runs_where_it_is_named(default: Registry, fake: ModuleType) -> None:
    request = AttentionRequest(attention="mla", head_size=576, num_heads=16, num_kv_heads=1, block_size=128)
    named = evaluate(request, B200, default, "CUTLASS_MLA/dense", unloadable=unloadable).chosen
    assert named is not None
    assert named.title == "CUTLASS_MLA/dense"
    automatic = evaluate(request, B200, default, unloadable=unloadable).chosen
    assert automatic is not None
    assert automatic.name == "TRITON_MLA"


def test_a_changed_schema_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.modules.pop(MODULE, None)
    monkeypatch.setattr(upstream, "_load_library", lambda package, pattern: None)
    words = fake_varlen.CUTLASS_MLA.replace("page_table", "block_table")
    with (
        fake_varlen.registered("_C", words, "sm100_cutlass_mla_decode", fake_varlen.cutlass_mla),
        pytest.raises(UpstreamError, match=r"has no parameter `page_table` any more, and now requires `block_table`"),
    ):
        importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)
