"""FLASHINFER_MLA/dense against a stand-in with the recorded signature of FlashInfer's function."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from support.stand_ins.fake_flashinfer import MLA, Fake

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import reference
from attnreg.kernels.flashinfer import record
from attnreg.kernels.upstream import UpstreamError
from attnreg.loader import unloadable
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, KVCache, UnclaimedError
from attnreg.selection.selector import evaluate

PACKAGES = {"torch": "2.13", "flashinfer-python": "0.7.2", "flashinfer-cubin": "0.7.2"}
B200 = Platform(platform="cuda", arch="sm100", packages=tuple(PACKAGES.items()))
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=1, head_size=576, head_size_v=512, dtype=torch.bfloat16, softmax_scale=0.1,
    block_size=64, latent=True,
)  # fmt: skip


def test_every_claim_holds(fake: Fake) -> None:
    importlib.import_module(MLA)
    (evidence,) = verify(["FLASHINFER_MLA/dense"], platform=B200, device="cpu", size="claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"lse", "non_causal"} <= evidence.claims["features"].keys()
    assert {"320", "576"} <= evidence.claims["head_size"].keys()
    assert {call["backend"] for call in fake.calls} == {"trtllm-gen"}


def test_requests_are_taken_whole_where_the_kernels_mask_fits(fake: Fake) -> None:
    """They are causal, and take as many queries of each."""
    module = importlib.import_module(MLA)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    plan = module.plan(SPEC, BatchMetadata.build([2, 2], [5, 9], block_table=table))
    assert (plan.requests, plan.queries) == (2, 2)
    alike = module.plan(SPEC, BatchMetadata.build([2, 2], [5, 9], block_table=table, causal=False))
    assert (alike.requests, alike.queries, alike.seq_lens.tolist()) == (4, 1, [5, 5, 9, 9])
    mixed = module.plan(SPEC, BatchMetadata.build([1, 2], [5, 9], block_table=table))
    assert (mixed.requests, mixed.queries, mixed.seq_lens.tolist()) == (3, 1, [5, 8, 9])


@pytest.mark.parametrize("causal", [False, True])
def test_several_queries_of_each_request(fake: Fake, causal: bool) -> None:
    module = importlib.import_module(MLA)
    spec = dataclasses.replace(SPEC, features=frozenset({"lse"} | (set() if causal else {"non_causal"})))
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    batch = BatchMetadata.build([2, 2], [5, 70], block_table=table, causal=causal)
    cache = torch.randn(4, 64, 1, 576).bfloat16()
    stored = KVCache(cache, cache[..., :512])
    query, output, lse = (
        torch.randn(4, 4, 576).bfloat16(),
        torch.full((4, 4, 512), torch.nan).bfloat16(),
        torch.zeros(4, 4),
    )
    module.forward(spec, module.plan(spec, batch), Call(query, stored, output, None, None, lse))
    assert fake.calls[-1]["query"].shape[:2] == ((2, 2) if causal else (4, 1))
    exact = reference.attention(spec, batch, query, kv_cache=stored)
    torch.testing.assert_close(output.double(), exact.output, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), exact.lse, atol=1e-4, rtol=1e-4)


def test_what_the_kernels_do_not_take_is_refused(fake: Fake) -> None:
    module = importlib.import_module(MLA)
    with pytest.raises(BatchError, match="no block_table"):
        module.plan(SPEC, BatchMetadata.build([5]))
    wide = dataclasses.replace(SPEC, block_size=128)
    with pytest.raises(
        UnclaimedError, match=r"block_size 128: .* compiled for 576 and 512, 320 and 256, and blocks of 32"
    ):
        module.kv_cache_shape(wide, 1)


def test_a_function_that_changed_is_a_reason(fake: Fake) -> None:
    function = fake.mla.trtllm_batch_decode_with_kv_cache_mla
    kept = [p for name, p in function.__signature__.parameters.items() if name != "return_lse_base"]
    function.__signature__ = function.__signature__.replace(parameters=kept)
    with pytest.raises(UpstreamError, match=r"has no parameter `return_lse_base` any more \(.* for v0\.7\.4\)"):
        importlib.import_module(MLA)
    assert record.TRTLLM_MLA.defaults.keys().isdisjoint(record.TRTLLM_MLA.passes)


def test_it_runs_where_it_is_named(default: Registry, fake: Fake) -> None:
    request = AttentionRequest(attention="mla", head_size=576, num_heads=16, num_kv_heads=1, block_size=64)
    named = evaluate(request, B200, default, "FLASHINFER_MLA/dense", unloadable=unloadable).chosen
    assert named is not None
    assert named.title == "FLASHINFER_MLA/dense"
    automatic = evaluate(request, B200, default, unloadable=unloadable)
    assert automatic.chosen is not None
    assert automatic.chosen.name != "FLASHINFER_MLA"
    heads = AttentionRequest(attention="mla", head_size=576, num_heads=96, num_kv_heads=1, block_size=64)
    refused = evaluate(heads, B200, default, "FLASHINFER_MLA/dense").candidates[0]
    assert refused.reasons[0].text.startswith("num_heads is 96; supported: ")
