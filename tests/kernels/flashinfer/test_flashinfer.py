"""The adapters for FlashInfer's kernels for prompts of MLA, against a stand-in with the recorded signatures."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.layers.mla import filled_cache, mla_spec
from support.stand_ins.fake_flashinfer import MODULES, Fake

from attnreg import AttentionRequest, Platform, Registry
from attnreg.kernels import reference
from attnreg.kernels.flashinfer import record
from attnreg.kernels.mla import reference as mla_reference
from attnreg.kernels.upstream import UpstreamError
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, SpecError, UnclaimedError
from attnreg.runtime.mla.interface import MLASpec
from attnreg.runtime.mla.prompts import ExpandedPrompts
from attnreg.selection.selector import evaluate

ROWS = {"TRTLLM_RAGGED": MODULES[0], "FLASHINFER_PREFILL": MODULES[1]}
PROMPT = AttentionRequest(
    attention="mla", phase="prefill", head_size=192, head_size_v=128, num_heads=16, num_kv_heads=16,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip


def expanded(**changes: Any) -> AttentionSpec:
    fields: dict[str, Any] = {
        "num_heads": 3, "num_kv_heads": 3, "head_size": 192, "head_size_v": 128, "dtype": torch.bfloat16,
        "softmax_scale": 0.07, "features": frozenset({"lse"}),
    }  # fmt: skip
    return AttentionSpec(**(fields | changes))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [([5, 3], [5, 3]), ([5, 0, 3], [9, 4, 3]), ([2, 1, 4], [7, 0, 4]), ([0, 2], [0, 0]), ([], []), ([3, 2], [20, 2])],
)
def test_requests_of_any_lengths(
    fake: Fake, row: str, causal: bool, with_lse: bool, queries: list[int], keys: list[int]
) -> None:
    module = importlib.import_module(ROWS[row])
    spec = expanded(attn_type="decoder" if causal else "encoder_decoder")
    batch = BatchMetadata.build(queries, keys, causal=causal)
    n = sum(queries)
    # the parts of a wider tensor, and two rows of padding
    query = torch.randn(n + 2, 5, 200).bfloat16()[:, 1:4, :192]
    key, value = torch.randn(sum(keys), 3, 192).bfloat16(), torch.randn(sum(keys), 3, 256).bfloat16()[..., 128:]
    for wide in (False, True):
        memory = torch.full((n + 2, 4 if wide else 3, 128), torch.nan).bfloat16()
        output, lse = memory[:, :3], torch.full((3, n + 2), torch.nan)
        call = Call(query, None, output, key, value, lse if with_lse else None)
        module.forward(spec, module.plan(spec, batch), call)
        exact = reference.attention(spec, batch, query, key=key, value=value)
        torch.testing.assert_close(output[:n].double(), exact.output, atol=2e-2, rtol=2e-2)
        assert output[n:].isnan().all()
        assert memory[:, 3:].isnan().all()
        if with_lse:
            torch.testing.assert_close(lse[:, :n].double(), exact.lse, atol=1e-4, rtol=1e-4)
            assert lse[:, n:].isnan().all()


@pytest.mark.parametrize("row", ROWS)
def test_prompts_with_context(fake: Fake, row: str) -> None:
    module = importlib.import_module(ROWS[row])
    latent = mla_spec(2, block_size=16).latent
    spec = MLASpec(latent=latent, qk_nope_head_dim=176, v_head_dim=128)
    queries, lengths = [3, 0, 5, 4], [20, 9, 5, 60]
    cache, table = filled_cache(spec, lengths)
    batch = BatchMetadata.build(queries, lengths, block_table=table)
    weight = (torch.randn(2 * 304, 64) * 0.1).bfloat16()
    query, new = torch.randn(12, 2, 192).bfloat16(), [torch.randn(12, n).bfloat16() for n in (64, 16)]
    output, lse = torch.full((12, 2, 128), torch.nan).bfloat16(), torch.full((2, 12), torch.nan)
    ExpandedPrompts(spec, module, weight, workspace_tokens=32)(query, *new, cache, batch, output, lse=lse)
    exact = mla_reference.attention(spec, batch, query, cache, weight, new=(new[0], new[1]), decode_queries=0)
    torch.testing.assert_close(output.double(), exact.output, atol=5e-2, rtol=5e-2)
    torch.testing.assert_close(lse.double(), exact.lse, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("row", ROWS)
def test_what_no_kernel_computes_is_refused(fake: Fake, row: str) -> None:
    module = importlib.import_module(ROWS[row])
    batch = BatchMetadata.build([3])
    with pytest.raises(UnclaimedError, match=r"head sizes 96 and 64: the kernels are compiled for 192/128"):
        module.plan(expanded(head_size=96, head_size_v=64), batch)
    with pytest.raises(SpecError, match=r"num_kv_heads is 1; .* every one of the 3 heads has keys"):
        module.plan(expanded(num_kv_heads=1), batch)
    with pytest.raises(BatchError, match="causal is by request"):
        module.plan(expanded(), BatchMetadata.build([3], causal=[True]))
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(BatchError, match="the batch has a block_table"):
        module.plan(expanded(), BatchMetadata.build([3], block_table=table))
    with pytest.raises(BatchError, match="key_rows is given"):
        module.plan(expanded(), BatchMetadata.build([3], [3], key_starts=[4], key_rows=9))
    with pytest.raises(BatchError, match="no cache to write to"):
        module.write_kv(expanded(), None, None, None, None)


# the record ----------------------------------------------------------------------------------------------------------


def without(parameter: str) -> Callable[[inspect.Signature], inspect.Signature]:
    return lambda s: s.replace(parameters=[p for name, p in s.parameters.items() if name != parameter])


@pytest.mark.parametrize(
    ("row", "function", "parameter", "says"),
    [
        ("TRTLLM_RAGGED", "trtllm_ragged_attention_deepseek", "bmm1_scale", "has no parameter `bmm1_scale` any more"),
        ("FLASHINFER_PREFILL", "BatchPrefillWithRaggedKVCacheWrapper", "backend", "has no parameter `backend` any"),
        ("FLASHINFER_PREFILL", "plan", "head_dim_vo", "Wrapper.plan has no parameter `head_dim_vo` any more"),
        ("FLASHINFER_PREFILL", "run", "return_lse", "Wrapper.run has no parameter `return_lse` any more"),
    ],
)  # fmt: skip
def test_a_function_that_changed_is_a_reason(fake: Fake, row: str, function: str, parameter: str, says: str) -> None:
    wrapper = fake.prefill.BatchPrefillWithRaggedKVCacheWrapper
    changed = getattr(wrapper, function, None) or getattr(fake.prefill, function)
    changed.__signature__ = without(parameter)(changed.__signature__)
    with pytest.raises(UpstreamError, match=re.escape(says) + r".* \(the adapter was written for v0\.7\.4\)"):
        importlib.import_module(ROWS[row])


def test_the_record_names_the_release_that_was_read() -> None:
    source = r"https://github\.com/[\w-]+/flashinfer/blob/v[\d.]+/flashinfer/prefill\.py"
    for value in (record.TRTLLM_RAGGED, record.WRAPPER, record.PLAN, record.RUN):
        assert re.fullmatch(source, value.source)
        assert value.defaults.keys().isdisjoint(value.passes)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm110", "sm120"])
def test_other_architectures_are_rejected_with_the_reason(default: Registry, row: str, arch: str) -> None:
    selection = evaluate(PROMPT, Platform(platform="cuda", arch=arch), default, row)
    assert f"arch is {arch}; needs sm100 or sm103" in [r.text for r in selection.candidates[0].reasons]
    assert evaluate(PROMPT, Platform(platform="cuda", arch="sm100"), default, row).backend is not None
