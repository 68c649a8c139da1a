"""FLASH_ATTN/FA2 against stand-ins for vLLM's operator and for the function of the package flash-attn."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from support.stand_ins import fake_aiter, fake_varlen

from attnreg import Platform
from attnreg.conformance.verify import verify
from attnreg.kernels import upstream
from attnreg.kernels.triton import cache
from attnreg.kernels.upstream import UpstreamError
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, UnclaimedError

MODULE = "attnreg.kernels.flash_attn.fa2"


@pytest.fixture(params=["vllm", "flash-attn"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One of the builds is installed, and the adapter has not been imported."""
    sys.modules.pop(MODULE, None)
    monkeypatch.setattr(cache, "_write", fake_aiter.write)
    if request.param == "vllm":
        monkeypatch.setattr(upstream, "_load_library", lambda package, pattern: None)
        with fake_varlen.registered("_vllm_fa2_C", fake_varlen.FA2_VLLM, "varlen_fwd", fake_varlen.fa2):
            yield "vllm"
    else:
        package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
        vars(interface)["flash_attn_varlen_func"] = fake_varlen.flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setitem(sys.modules, interface.__name__, interface)
        yield "flash-attn"
    sys.modules.pop(MODULE, None)


def test_every_claim_holds(build: str) -> None:
    names = {"torch": "2.11", "triton": "3.6", "flash-attn": "2.8.3"} | ({"vllm": "0.33.0"} if build == "vllm" else {})
    importlib.import_module(MODULE)
    ampere = Platform(platform="cuda", arch="sm80", packages=tuple(names.items()))
    (evidence,) = verify(["FLASH_ATTN/FA2"], platform=ampere, device="cpu", size="claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"alibi", "lse", "softcap", "sliding_window", "non_causal"} <= evidence.claims["features"].keys()
    assert ("16" in evidence.claims.get("block_size", {})) == (build == "vllm")


def test_pages_that_the_build_does_not_read_are_refused(build: str) -> None:
    module = importlib.import_module(MODULE)
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16, softmax_scale=0.125,
        block_size=16,
    )  # fmt: skip
    batch = BatchMetadata.build([1], [5], block_table=torch.zeros(1, 1, dtype=torch.int32))
    if build == "vllm":
        assert module.plan(spec, batch).block_table is not None
    else:
        with pytest.raises(UnclaimedError, match="block_size 16: the package flash-attn reads pages of a multiple of"):
            module.plan(spec, batch)


def test_queries_without_a_key_in_the_cache_are_refused(build: str) -> None:
    module = importlib.import_module(MODULE)
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16, softmax_scale=0.125,
        block_size=256,
    )  # fmt: skip
    table = torch.zeros(2, 1, dtype=torch.int32)
    module.plan(spec, BatchMetadata.build([1, 0], [5, 0], block_table=table))
    with pytest.raises(BatchError, match="a request has queries and no key in the cache: FLASH_ATTN/FA2 writes past"):
        module.plan(spec, BatchMetadata.build([1, 1], [5, 0], block_table=table, causal=False))


@pytest.mark.parametrize("queries", [[1, 1], [1, 0, 1]])
def test_one_query_a_request_is_folded_only_where_every_row_is_a_requests(build: str, queries: list[int]) -> None:
    """The kernel that folds a request's query into heads takes a row from each; a batch may have rows of none."""
    module = importlib.import_module(MODULE)
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16, softmax_scale=0.125,
        features=frozenset({"lse", "non_causal"}),
    )  # fmt: skip
    batch = BatchMetadata.build(queries, causal=False)
    query, key, value = (torch.randn(4, heads, 64).bfloat16() for heads in (4, 2, 2))
    output, lse = torch.full_like(query, torch.nan), torch.full((4, 4), torch.nan)
    module.forward(spec, module.plan(spec, batch), Call(query, None, output, key, value, lse))
    # each sees itself alone
    assert torch.equal(output[:2], value[:2].repeat_interleave(2, 1))
    scores = torch.einsum("qhd,qhd->hq", query.float(), key.float().repeat_interleave(2, 1)) * 0.125
    torch.testing.assert_close(lse[:, :2], scores[:, :2])
    assert output[2:].isnan().all()
    assert lse[:, 2:].isnan().all()


def test_without_a_build_both_reasons_are_given() -> None:
    sys.modules.pop(MODULE, None)
    with pytest.raises(UpstreamError, match=r"package vllm is not installed.*flash_attn.*(cannot be|has no)"):
        importlib.import_module(MODULE)
