"""FLASHINFER/XQA-rows and trtllm-gen-context against stand-ins with recorded signatures."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from support.stand_ins.fake_flashinfer import CONTEXT, FA3, XQA, Fake

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import reference
from attnreg.kernels.upstream import UpstreamError
from attnreg.loader import load_kernel, unloadable
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, KVCache
from attnreg.selection.selector import evaluate

PACKAGES = {"torch": "2.11", "flashinfer-python": "0.7.2", "flashinfer-cubin": "0.7.2"}
KERNELS = [("XQA-rows", XQA, "sm90"), ("XQA-rows", XQA, "sm120"), ("trtllm-gen-context", CONTEXT, "sm100")]
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16, softmax_scale=0.125, block_size=16
)


def gpu(arch: str) -> Platform:
    return Platform(platform="cuda", arch=arch, packages=tuple(PACKAGES.items()))


@pytest.mark.parametrize(("kernels", "module", "arch"), KERNELS)
def test_every_claim_holds(fake: Fake, kernels: str, module: str, arch: str) -> None:
    importlib.import_module(module)
    (evidence,) = verify([f"FLASHINFER/{kernels}"], platform=gpu(arch), device="cpu")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"sinks", "sliding_window", "non_causal"} <= evidence.claims["features"].keys()
    assert ("lse" in evidence.claims["features"]) == (module == CONTEXT)
    assert {call["kv_layout"] for call in fake.calls} == {"NHD", "HND"}


def of_cache(
    queries: list[int], keys: list[int], *, padding: int = 0
) -> tuple[BatchMetadata, Call, torch.Tensor, KVCache]:
    """A batch, its call with rows of padding, and the exact output."""
    torch.manual_seed(0)
    pages = [-(-n // 16) for n in keys]
    table = torch.full((len(keys), max(pages) + 1), 2**30, dtype=torch.int32)
    begin = 0
    for row, n in zip(table, pages, strict=True):
        row[:n] = torch.arange(begin, begin + n)
        begin += n
    batch = BatchMetadata.build(queries, keys, block_table=table)
    pair = KVCache(*torch.randn(2, begin, 16, 2, 64).bfloat16())
    query = torch.randn(sum(queries) + padding, 4, 64).bfloat16()
    exact = reference.attention(SPEC, batch, query, pair).output
    return batch, Call(query, pair, torch.full_like(query, torch.nan)), exact, pair


@pytest.mark.parametrize("module", [XQA, CONTEXT])
def test_tokens_prompts_and_requests_without_keys_go_together(fake: Fake, module: str) -> None:
    kernels = importlib.import_module(module)
    batch, call, exact, _ = of_cache([1, 0, 5, 1, 20], [40, 7, 30, 0, 20], padding=2)
    kernels.forward(SPEC, kernels.plan(SPEC, batch), call)
    torch.testing.assert_close(call.output[:27].double(), exact, atol=2e-2, rtol=2e-2)
    assert (call.output[6] == 0).all()
    assert call.output[27:].isnan().all()


@pytest.mark.parametrize("module", [XQA, CONTEXT])
def test_packed_keys_are_copied_to_pages(fake: Fake, module: str) -> None:
    kernels = importlib.import_module(module)
    for queries in ([3, 0, 20], [0, 0]):
        batch = BatchMetadata.build(queries, causal=True)
        query, key, value = (torch.randn(sum(queries) + 1, n, 64).bfloat16() for n in (4, 2, 2))
        output = torch.full_like(query, torch.nan)
        kernels.forward(SPEC, kernels.plan(SPEC, batch), Call(query, None, output, key, value))
        exact = reference.attention(SPEC, batch, query, key=key, value=value).output
        torch.testing.assert_close(output[:-1].double(), exact, atol=2e-2, rtol=2e-2)
        assert output[-1].isnan().all()
    # a query without a key looks at one
    batch = BatchMetadata.build([2], [0], causal=False)
    query, key = torch.randn(2, 4, 64).bfloat16(), torch.randn(0, 2, 64).bfloat16()
    output = torch.full_like(query, torch.nan)
    kernels.forward(SPEC, kernels.plan(SPEC, batch), Call(query, None, output, key, key))
    assert (output == 0).all()


def test_xqa_has_one_query_of_each_request(fake: Fake) -> None:
    kernels = importlib.import_module(XQA)
    batch, call, _, _ = of_cache([3, 1], [20, 9])
    kernels.forward(SPEC, kernels.plan(SPEC, batch), call)
    (given,) = fake.calls
    assert given["seq_lens"].tolist() == [18, 19, 20, 9]
    assert given["block_tables"][:, 0].tolist() == [0, 0, 0, 2]


def test_xqa_counts_in_memory_of_its_own(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels of FlashInfer leave numbers in theirs; its counters have to begin, and end, as zeros."""
    given: list[Any] = []
    for module in (XQA, FA3):
        kernels = importlib.import_module(module)
        batch, call, _, _ = of_cache([1], [20])
        kernels.forward(SPEC, kernels.plan(SPEC, batch), call)
        key = "workspace_buffer" if module == XQA else "float_workspace_buffer"
        given += [c[key] for c in fake.calls if key in c]
    assert len({x.data_ptr() for x in given}) == 2
    assert not given[0].any()


@pytest.mark.parametrize("module", [XQA, CONTEXT])
def test_what_the_kernels_cannot_read_is_refused(fake: Fake, module: str) -> None:
    kernels = importlib.import_module(module)
    table = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(BatchError, match=f"causal is by request; {kernels.BACKEND} has one mask"):
        kernels.plan(SPEC, BatchMetadata.build([3], [20], block_table=table, causal=[True]))
    batch, call, _, pair = of_cache([1], [20])
    odd = KVCache(pair.key, torch.zeros(*pair.key.shape[:3], 128).bfloat16()[..., :64])
    with pytest.raises(BatchError, match=r"kv_cache has strides .* needs the same strides for keys and values"):
        kernels.forward(SPEC, kernels.plan(SPEC, batch), call._replace(kv_cache=odd))
    assert call.output.isnan().all()


@pytest.mark.parametrize(("kernels", "module", "arch"), KERNELS)
def test_it_runs_where_it_is_named(default: Registry, fake: Fake, kernels: str, module: str, arch: str) -> None:
    request = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, block_size=16)
    chosen = evaluate(request, gpu(arch), default, f"FLASHINFER/{kernels}", unloadable=unloadable).backend
    assert chosen is not None
    assert f"FLASHINFER/{kernels}" == load_kernel(chosen.registry, chosen.title).BACKEND
    automatic = evaluate(request, gpu(arch), default, unloadable=unloadable).chosen
    assert automatic is None or automatic.title != f"FLASHINFER/{kernels}"
    both = AttentionRequest(head_size=128, features={"non_causal", "sliding_window"})
    refused = evaluate(both, gpu(arch), default, f"FLASHINFER/{kernels}").candidates[0]
    assert "windows over earlier keys only" in refused.reasons[0].text


@pytest.mark.parametrize(("module", "name"), [(XQA, "sinks"), (CONTEXT, "causal")])
def test_a_function_that_changed_is_a_reason(fake: Fake, module: str, name: str) -> None:
    function = (
        fake.decode.xqa_batch_decode_with_kv_cache if module == XQA else fake.prefill.trtllm_batch_context_with_kv_cache
    )
    signature = function.__signature__
    function.__signature__ = signature.replace(parameters=[p for n, p in signature.parameters.items() if n != name])
    with pytest.raises(UpstreamError, match=f"has no parameter `{name}` any more"):
        importlib.import_module(module)
