"""FLASHINFER/fa2 and fa3 against a stand-in with the recorded signatures of FlashInfer's two wrappers for prompts."""

from __future__ import annotations

import dataclasses
import importlib
import re

import pytest
import torch
from support.stand_ins.fake_flashinfer import FA2, FA3, Fake

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels.flashinfer import record
from attnreg.kernels.upstream import UpstreamError
from attnreg.loader import load_kernel, unloadable
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, KVCache
from attnreg.selection.selector import evaluate

PACKAGES = {"torch": "2.11", "flashinfer-python": "0.7.2", "flashinfer-cubin": "0.7.2"}
AMPERE = Platform(platform="cuda", arch="sm80", packages=tuple(PACKAGES.items()))
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16, softmax_scale=0.125, block_size=16
)


@pytest.mark.parametrize(("kernels", "module", "arch"), [("fa2", FA2, "sm80"), ("fa3", FA3, "sm90")])
def test_every_claim_holds(fake: Fake, kernels: str, module: str, arch: str) -> None:
    importlib.import_module(module)
    gpu = dataclasses.replace(AMPERE, arch=arch)
    (evidence,) = verify([f"FLASHINFER/{kernels}"], platform=gpu, device="cpu", size="claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"softcap", "sliding_window", "non_causal"} <= evidence.claims["features"].keys()
    # fa2's sums are of rounded weights
    assert ("lse" in evidence.claims["features"]) == (kernels == "fa3")
    assert {call["kv_layout"] for call in fake.calls if "kv_layout" in call} == {"NHD", "HND"}
    # its sub-backend is named in each call
    assert {call["backend"] for call in fake.calls if "backend" in call} == {kernels}


def test_the_device_knows_the_lengths(fake: Fake) -> None:
    """What the host knows of a cache may be bounds; a wrapper plans by the lengths themselves."""
    module = importlib.import_module(FA2)
    batch = BatchMetadata.build([1, 1], [20, 5], block_table=torch.arange(4, dtype=torch.int32).view(2, 2))
    batch = dataclasses.replace(batch, seq_lens_cpu=torch.full_like(batch.seq_lens, 32))
    planned = module.plan(SPEC, batch)
    assert planned.wrapper.planned["paged_kv_indices"].tolist() == [0, 1, 2]
    assert planned.wrapper.planned["paged_kv_last_page_len"].tolist() == [4, 5]


def test_what_the_kernels_cannot_read_is_refused(fake: Fake) -> None:
    module = importlib.import_module(FA2)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(BatchError, match="causal is by request; FLASHINFER/fa2 has one mask"):
        module.plan(SPEC, BatchMetadata.build([3], causal=[True]))
    planned = module.plan(SPEC, BatchMetadata.build([1], [5], block_table=table))
    key, value = torch.zeros(1, 16, 2, 64).bfloat16(), torch.zeros(1, 16, 2, 128).bfloat16()[..., :64]
    query, output = torch.zeros(1, 4, 64).bfloat16(), torch.full((1, 4, 64), torch.nan).bfloat16()
    with pytest.raises(BatchError, match=r"kv_cache has strides .* needs the same strides for keys and values"):
        module.forward(SPEC, planned, Call(query, KVCache(key, value), output, None, None, None))
    assert output.isnan().all()


CHANGED = [("plan", "window_left"), ("run", "paged_kv_cache"), ("", "backend")]


@pytest.mark.parametrize(("method", "parameter"), CHANGED)
def test_a_wrapper_that_changed_is_a_reason(fake: Fake, method: str, parameter: str) -> None:
    wrapper = fake.prefill.BatchPrefillWithPagedKVCacheWrapper
    changed = getattr(wrapper, method) if method else wrapper
    signature = changed.__signature__
    changed.__signature__ = signature.replace(
        parameters=[p for name, p in signature.parameters.items() if name != parameter]
    )
    says = rf"has no parameter `{parameter}` any more \(the adapter was written for v0\.7\.4\)"
    with pytest.raises(UpstreamError, match=says):
        importlib.import_module(FA2)


def test_the_record_passes_nothing_twice() -> None:
    for value in (record.PAGED_WRAPPER, record.PAGED_PLAN, record.PAGED_RUN, record.PLAN_MHA):
        assert value.defaults.keys().isdisjoint(value.passes)
        assert re.fullmatch(
            r"https://github\.com/flashinfer-ai/flashinfer/blob/\S+/flashinfer/prefill\.py", value.source
        )


def test_it_runs_where_it_is_named(default: Registry, fake: Fake) -> None:
    request = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, block_size=16)
    (said,) = [
        c for c in evaluate(request, AMPERE, default, unloadable=unloadable).candidates if c.name == "FLASHINFER"
    ]
    assert said.reasons[0].text == (
        "FLASHINFER/fa2 runs where it is named: on an H200 HOPPER_ATTN was measured to be as fast"
    )
    chosen = evaluate(request, AMPERE, default, "FLASHINFER/fa2", unloadable=unloadable).backend
    assert chosen is not None
    assert load_kernel(chosen.registry, chosen.title).BACKEND == "FLASHINFER/fa2"
    both = AttentionRequest(head_size=128, features={"non_causal", "sliding_window"})
    refused = evaluate(both, AMPERE, default, "FLASHINFER/fa2").candidates[0]
    assert "windows over earlier keys only" in refused.reasons[0].text
