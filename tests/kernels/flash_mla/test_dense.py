"""FLASHMLA against a stand-in with the schema that vLLM's wheel registers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from support.layers.mla import latent_spec, refuses, refuses_packed_keys
from support.stand_ins import fake_aiter, fake_varlen

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import upstream
from attnreg.kernels.triton import cache
from attnreg.kernels.upstream import UpstreamError
from attnreg.loader import unloadable
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, SpecError, UnclaimedError
from attnreg.selection.selector import evaluate

MODULE = "attnreg.kernels.flash_mla.dense"
H200 = Platform(platform="cuda", arch="sm90", packages=tuple((name, "") for name in ("torch", "triton", "vllm")))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    sys.modules.pop(MODULE, None)
    monkeypatch.setattr(cache, "_write", fake_aiter.write)
    monkeypatch.setattr(upstream, "_load_library", lambda package, pattern: None)
    with fake_varlen.registered("_flashmla_C", fake_varlen.FLASH_MLA, "dense_decode_fwd", fake_varlen.flash_mla):
        yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def test_every_claim_holds(fake: ModuleType) -> None:
    (evidence,) = verify(["FLASHMLA/dense"], platform=H200, device="cpu")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert "lse" in evidence.claims["features"]


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (latent_spec(block_size=128), UnclaimedError, "block_size 128: the kernel is compiled for"),
        (latent_spec(head_size=512, head_size_v=448), UnclaimedError, "head sizes 512 and 448"),
        (latent_spec(kv_dtype="fp8"), UnclaimedError, "queries and latents must have one dtype"),
        (latent_spec(latent=False), SpecError, "not MLA in its latent form"),
    ],
)
def test_other_layers_are_refused(fake: ModuleType, spec: AttentionSpec, error: type[Exception], words: str) -> None:
    refuses(fake, spec, error, words)


def test_a_batch_without_a_cache_is_refused(fake: ModuleType) -> None:
    refuses_packed_keys(fake, latent_spec())


def test_layers_of_a_batch_share_what_the_kernel_works_out(fake: ModuleType) -> None:
    table = torch.zeros(2, 1, dtype=torch.int32)
    plan = fake.plan(latent_spec(), BatchMetadata.build([1, 1], [5, 9], block_table=table))
    assert (plan.queries, plan.causal, plan.schedule) == (1, False, [None, None])
    assert fake.plan(latent_spec(), BatchMetadata.build([2, 2], [5, 9], block_table=table)).causal
    mixed = fake.plan(latent_spec(), BatchMetadata.build([1, 2], [5, 9], block_table=table))
    assert (mixed.requests, mixed.queries, mixed.seq_lens.tolist()) == (3, 1, [5, 8, 9])


def test_without_the_library_the_next_backend_is_taken(default: Registry) -> None:
    sys.modules.pop(MODULE, None)
    with pytest.raises(UpstreamError, match=r"_flashmla_C\.dense_decode_fwd"):
        importlib.import_module(MODULE)
    request = AttentionRequest(attention="mla", head_size=576, num_heads=16, num_kv_heads=1, block_size=64)
    chosen = evaluate(request, H200, default, unloadable=unloadable).chosen
    assert chosen is not None
    assert chosen.name == "HOPPER_MLA"
