"""FLASH_ATTN/FA4 against a stand-in with the signature of flash-attn-4's function."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.stand_ins import fake_aiter, fake_varlen

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import reference
from attnreg.kernels.flash_attn import record
from attnreg.kernels.triton import cache
from attnreg.kernels.upstream import UpstreamError
from attnreg.loader import unloadable
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, LayerParams
from attnreg.selection.selector import evaluate

MODULE = "attnreg.kernels.flash_attn.fa4"
INTERFACE = "flash_attn.cute.interface"


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    sys.modules.pop(MODULE, None)
    monkeypatch.setattr(cache, "_write", fake_aiter.write)
    for name in ("flash_attn", "flash_attn.cute", INTERFACE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[INTERFACE])["_flash_attn_fwd"] = fake_varlen.fa4
    yield sys.modules[INTERFACE]
    sys.modules.pop(MODULE, None)


def gpu(arch: str) -> Platform:
    return Platform(platform="cuda", arch=arch, packages=(("torch", "2.13"), ("triton", ""), ("flash-attn-4", "4.0")))


@pytest.mark.parametrize(("name", "arch", "width"), [("FA4", "sm100", 128), ("FA4-Hopper", "sm90", 256)])
def test_every_claim_holds(interface: ModuleType, name: str, arch: str, width: int) -> None:
    importlib.import_module(MODULE)
    (evidence,) = verify([f"FLASH_ATTN/{name}"], platform=gpu(arch), device="cpu", size="claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"sinks", "lse", "softcap", "sliding_window", "non_causal"} <= evidence.claims["features"].keys()
    assert str(width) in evidence.claims["head_size"]
    assert set(evidence.claims["block_size"]) == {"16", "32", "48", "64"}


def test_the_record_is_the_whole_signature() -> None:
    """So a parameter that a release adds with a default is seen to be one that nobody has read."""
    known = {*record.FA4.passes, *record.FA4.defaults}
    assert known == set(inspect.signature(fake_varlen.fa4).parameters)
    assert record.FA4.defaults.keys().isdisjoint(record.FA4.passes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_of_any_dtype_go_to_the_kernel(interface: ModuleType, dtype: torch.dtype) -> None:
    module = importlib.import_module(MODULE)
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16, softmax_scale=0.125,
        features=frozenset({"sinks", "lse"}),
    )  # fmt: skip
    # the last request has no keys
    batch = BatchMetadata.build([3, 38, 2], [3, 38, 0], causal=False)
    params = LayerParams(sinks=torch.randn(4).to(dtype))
    query, key, value = (torch.randn(45, n, 64).bfloat16() for n in (4, 2, 2))
    output, lse = torch.full((45, 4, 64), torch.nan).bfloat16(), torch.full((4, 45), torch.nan)
    module.forward(spec, module.plan(spec, batch), Call(query, None, output, key, value, lse, params))
    exact = reference.attention(spec, batch, query, key=key, value=value, params=params)
    torch.testing.assert_close(output[:43].double(), exact.output, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, :43].double(), exact.lse, atol=1e-4, rtol=1e-4)
    assert output[43:].isnan().all()
    assert lse[:, 43:].isnan().all()


def test_rows_that_are_not_aligned_are_refused(interface: ModuleType) -> None:
    module = importlib.import_module(MODULE)
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16, softmax_scale=0.125
    )
    batch = BatchMetadata.build([3])
    query = torch.randn(3 * 4 * 64 + 1).bfloat16()[1:].view(3, 4, 64)
    key, value = (torch.randn(3, 2, 64).bfloat16() for _ in range(2))
    with pytest.raises(BatchError, match=r"query has strides .* FLASH_ATTN/FA4 loads vectors of 16 bytes"):
        module.forward(spec, module.plan(spec, batch), Call(query, None, torch.empty_like(query), key, value))


def _without(name: str) -> Any:
    signature = inspect.signature(fake_varlen.fa4)
    kept = [p for p in signature.parameters.values() if p.name != name]

    def changed(*args: Any, **given: Any) -> Any: ...

    vars(changed)["__signature__"] = signature.replace(parameters=kept)
    return changed


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (None, r"flash_attn has no flash_attn\.cute\.interface\._flash_attn_fwd any more"),
        (_without("learnable_sink"), r"has no parameter `learnable_sink` any more .*written for 4\.0\.0b36"),
    ],
)
def test_a_release_that_changed_is_a_reason(
    default: Registry, interface: ModuleType, function: Any, words: str
) -> None:
    vars(interface)["_flash_attn_fwd"] = function
    with pytest.raises(UpstreamError, match=words):
        importlib.import_module(MODULE)


def test_it_runs_where_it_is_named(default: Registry, interface: ModuleType) -> None:
    request = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, block_size=16)
    for arch, name in (("sm100", "FLASH_ATTN/FA4"), ("sm90", "FLASH_ATTN/FA4-Hopper")):
        named = evaluate(request, gpu(arch), default, name, unloadable=unloadable).chosen
        assert named is not None
        assert named.title == name
        automatic = evaluate(request, gpu(arch), default, unloadable=unloadable).chosen
        assert automatic is not None
        assert automatic.name != "FLASH_ATTN"
    pages = AttentionRequest(head_size=128, block_size=128)
    refused = evaluate(pages, gpu("sm100"), default, "FLASH_ATTN/FA4").candidates[0]
    assert refused.reasons[0].text == "block_size is 128; supported: 16, 32, 48, 64"
