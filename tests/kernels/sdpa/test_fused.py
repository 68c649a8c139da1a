"""TORCH_SDPA's variants over PyTorch's fused kernels, against stand-ins that are registered as their operators."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.stand_ins import fake_varlen

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import reference
from attnreg.kernels.sdpa import record
from attnreg.kernels.upstream import UpstreamError, UpstreamOperator
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call
from attnreg.selection.selector import evaluate

OPERATORS = {"flash": record.FLASH, "cuDNN": record.CUDNN, "efficient": record.EFFICIENT}
FAKES: dict[str, Any] = {"flash": fake_varlen.flash, "cuDNN": fake_varlen.cudnn, "efficient": fake_varlen.efficient}
H200 = Platform(platform="cuda", arch="sm90")


@pytest.fixture
def fake() -> Iterator[None]:
    """All three operators run on a processor."""
    with ExitStack() as stack:
        for name, operator in OPERATORS.items():
            stack.enter_context(fake_varlen.registered("aten", None, operator.name, FAKES[name]))
        yield


@pytest.mark.parametrize("variant", OPERATORS)
def test_every_claim_holds(fake: None, variant: str) -> None:
    (evidence,) = verify([f"TORCH_SDPA/{variant}"], platform=H200, device="cpu")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"decoder", "encoder", "encoder_only"} == evidence.claims["attn_type"].keys()


@pytest.mark.parametrize("variant", OPERATORS)
def test_the_operator_of_this_pytorch_is_the_recorded_one(variant: str) -> None:
    assert OPERATORS[variant].load()


def test_a_changed_operator_is_a_reason() -> None:
    changed = UpstreamOperator(
        name="_flash_attention_forward", modules=("aten",), source=record.FLASH.source, defaults={"seqused_k": 0},
        passes=(*(name for name in record.FLASH.passes if name != "max_q"), "mask"),
    )  # fmt: skip
    words = "has no parameter `mask` any more, and now requires `max_q`, and has None as default of `seqused_k`"
    with pytest.raises(UpstreamError, match=re.escape(words)):
        changed.load()


def test_an_operator_that_is_gone_is_a_reason() -> None:
    gone = UpstreamOperator(
        name="_no_such_forward", modules=("aten",), source=record.FLASH.source, passes=(), defaults={}
    )
    with pytest.raises(UpstreamError, match=r"torch\.ops\.aten\._no_such_forward.*was written for v2\.15\.0"):
        gone.load()


def spec(**changes: Any) -> AttentionSpec:
    fields: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 16, "head_size_v": 16, "dtype": torch.bfloat16,
        "softmax_scale": 0.25,
    }  # fmt: skip
    return AttentionSpec(**(fields | changes))


@pytest.mark.parametrize("variant", ["flash", "cudnn", "efficient"])
def test_a_paged_batch_is_refused(fake: None, variant: str) -> None:
    module = importlib.import_module(f"attnreg.kernels.sdpa.{variant}")
    batch = BatchMetadata.build([2], [5], block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(BatchError, match="reads packed keys and values alone"):
        module.plan(spec(block_size=16), batch)


@pytest.mark.parametrize("variant", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("skip", [0, 3])
def test_rows_that_are_not_aligned_are_copied(
    fake: None, monkeypatch: pytest.MonkeyPatch, variant: str, skip: int
) -> None:
    module = importlib.import_module(f"attnreg.kernels.sdpa.{variant}")
    batch, wide = BatchMetadata.build([3]), torch.randn(3, 4, 19).bfloat16()
    query, key, output = wide[..., skip : skip + 16], torch.randn(3, 2, 16).bfloat16(), torch.empty(3, 4, 16).bfloat16()
    inner, given = getattr(module, f"_{variant}"), list[torch.Tensor]()

    def seen(**arguments: Any) -> Any:
        given.extend(arguments[name] for name in ("query", "key", "value"))
        return inner(**arguments)

    monkeypatch.setattr(module, f"_{variant}", seen)
    module.forward(spec(), module.plan(spec(), batch), Call(query, None, output, key, key))
    exact = reference.attention(spec(), batch, query, key=key, value=key).output
    torch.testing.assert_close(output.double(), exact, atol=2e-2, rtol=2e-2)
    assert all(x.data_ptr() % 16 == 0 and all(s * 2 % 16 == 0 for s in x.stride()[:-1]) for x in given)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [([3, 2], [0, 2], False), ([2, 3], [7, 3], True), ([3, 2], [3, 2], True)]
)
def test_what_cudnn_does_not_serve_runs_in_flash(fake: None, queries: list[int], keys: list[int], causal: bool) -> None:
    module = importlib.import_module("attnreg.kernels.sdpa.cudnn")
    layer, batch = spec(features=frozenset({"non_causal"})), BatchMetadata.build(queries, keys, causal=causal)
    query, key, value = (torch.randn(n, h, 16).bfloat16() for n, h in ((5, 4), (sum(keys), 2), (sum(keys), 2)))
    output = torch.full((5, 4, 16), torch.nan).bfloat16()
    module.forward(layer, module.plan(layer, batch), Call(query, None, output, key, value))
    exact = reference.attention(layer, batch, query, key=key, value=value).output
    torch.testing.assert_close(output.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({}, "cuDNN"),
        ({"features": {"sliding_window"}}, "flash"),
        ({"dtype": "float32"}, "efficient"),
        ({"head_size": 512}, "efficient"),
        ({"head_size": 20}, "gathered"),
        ({"block_size": 16}, "gathered"),
        ({"features": {"mm_prefix"}}, "gathered"),
    ],
)
def test_the_first_kernel_that_serves_a_request_runs(default: Registry, changes: dict[str, Any], variant: str) -> None:
    request = AttentionRequest(**{"head_size": 64, "num_heads": 4, "num_kv_heads": 2, "features": set(), **changes})
    backend = evaluate(request, H200, default, "TORCH_SDPA").backend
    assert backend is not None
    assert backend.variant == variant
