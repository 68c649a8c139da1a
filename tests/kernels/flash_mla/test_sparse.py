"""FLASHMLA_SPARSE against a stand-in with the schema that vLLM's wheel registers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.layers.mla import latent_spec, refuses, refuses_packed_keys
from support.stand_ins import fake_varlen

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import upstream
from attnreg.kernels.mla import torch_sparse
from attnreg.kernels.upstream import UpstreamError
from attnreg.loader import unloadable
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchMetadata,
    Call,
    KVCache,
    SpecError,
    UnclaimedError,
)
from attnreg.selection.selector import evaluate

MODULE = "attnreg.kernels.flash_mla.sparse"
H200 = Platform(platform="cuda", arch="sm90", packages=tuple((name, "") for name in ("torch", "triton", "vllm")))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    sys.modules.pop(MODULE, None)
    monkeypatch.setattr(upstream, "_load_library", lambda package, pattern: None)
    schema, function = fake_varlen.FLASH_MLA_SPARSE, fake_varlen.flash_mla_sparse
    with fake_varlen.registered("_flashmla_C", schema, "sparse_prefill_fwd", function):
        yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def sparse(**changes: Any) -> AttentionSpec:
    return latent_spec(**{"sparse": True} | changes)


def test_every_claim_holds(fake: ModuleType) -> None:
    (evidence,) = verify(["FLASHMLA_SPARSE/bfloat16"], platform=H200, device="cpu")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert evidence.cases > 5
    assert "lse" in evidence.claims["features"]


@pytest.mark.parametrize(("heads", "chosen"), [(4, 0), (4, 5), (64, 128), (100, 300)])
def test_heads_and_chosen_tokens_are_padded(fake: ModuleType, heads: int, chosen: int) -> None:
    spec = sparse(num_heads=heads)
    key = torch.randn(7, 64, 1, 576).bfloat16()
    # what nobody chose may hold anything
    key[0, 0] = torch.nan
    table = torch.tensor([[3, 1, 0], [2, 6, 0]], dtype=torch.int32)
    batch = BatchMetadata.build([3, 1], [150, 1], block_table=table)
    indices = torch.full((6, chosen), -1, dtype=torch.int32)
    for row in range(3):
        picked = torch.randperm(148 + row)[:chosen]
        # keys of the third block, one of which is NaN, are left out
        picked = picked[picked < 128].int()
        indices[row, chosen - len(picked) :] = picked
    query, output = torch.randn(6, heads, 576).bfloat16(), torch.full((6, heads, 512), torch.nan).bfloat16()
    lse, other_lse = torch.full((2, heads, 6), torch.nan)
    call = Call(query, KVCache(key, key[..., :512]), output, lse=lse, indices=indices)
    fake.forward(spec, fake.plan(spec, batch), call)
    expected = torch.zeros(6, heads, 512).bfloat16()
    other = call._replace(output=expected, lse=other_lse)
    torch_sparse.forward(spec, torch_sparse.plan(spec, batch), other)
    torch.testing.assert_close(output[:4], expected[:4], atol=2e-2, rtol=2e-2)
    # the query that chose nothing, and padding
    assert (output[3] == 0).all()
    assert output[4:].isnan().all()
    torch.testing.assert_close(lse, other_lse, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert (lse[:, 3] == -torch.inf).all()


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (sparse(head_size=512), UnclaimedError, "head sizes 512 and 512, 4 heads: the kernel is compiled for 576 and"),
        (sparse(num_heads=129), UnclaimedError, "129 heads: the kernel is compiled for"),
        (sparse(dtype=torch.float16), UnclaimedError, "it computes bfloat16"),
        (sparse(kv_dtype="fp8"), UnclaimedError, "it computes bfloat16"),
        (sparse(sparse=False), SpecError, "not sparse MLA"),
    ],
)
def test_other_layers_are_refused(fake: ModuleType, spec: AttentionSpec, error: type[Exception], words: str) -> None:
    refuses(fake, spec, error, words)


def test_a_batch_without_a_cache_is_refused(fake: ModuleType) -> None:
    refuses_packed_keys(fake, sparse())


def test_it_runs_where_it_is_named(fake: ModuleType, default: Registry) -> None:
    request = AttentionRequest(
        attention="mla_sparse", head_size=576, num_heads=128, num_kv_heads=1, block_size=64, index_topk=2048
    )
    named = evaluate(request, H200, default, "FLASHMLA_SPARSE/bfloat16", unloadable=unloadable).chosen
    automatic = evaluate(request, H200, default, unloadable=unloadable).chosen
    assert named is not None
    assert automatic is not None
    assert (named.title, automatic.name) == ("FLASHMLA_SPARSE/bfloat16", "HOPPER_MLA_SPARSE")


def test_without_the_library_there_is_a_reason() -> None:
    sys.modules.pop(MODULE, None)
    with pytest.raises(UpstreamError, match=r"_flashmla_C\.sparse_prefill_fwd"):
        importlib.import_module(MODULE)
