"""Models under autocast: the numbers of PyTorch's attention, whatever dtypes a class mixes in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from support.models import small_models as models
from support.models.small_models import tokens
from support.models.transformers_calls import Layer
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers_sweep import tiny
from transformers_sweep.compare import difference, first_that_runs
from transformers_sweep.scenarios import floats

import attnreg.integrations.transformers as attention
from attnreg.integrations.transformers.forms.releases import CACHE
from attnreg.integrations.transformers.masks import lazy_mask

LOW = [torch.bfloat16, torch.float16]
# their classes pass queries, keys and values of several dtypes to one call
FAMILIES = [
    "axk1", "blt_patcher", "dia", "embedding_gemma2", "embedding_gemma2_text", "esmc", "gemma4_vision",
    "glm4_moe_lite", "glm5_next_vision", "glm_ocr_vision", "kimi_k25", "longcat_flash", "openai_privacy_filter",
    "pe_audio", "timesfm2_5", "ultravbert", "videoprism",
]  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def alike(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Assert that two results differ by the rounding of a few operations at most."""
    assert found.dtype == expected.dtype
    found, expected = found.float(), expected.float()
    assert float((found - expected).abs().max()) <= 8 * torch.finfo(dtype).eps * float(expected.abs().max())


@pytest.mark.slow("models of several architectures, built and run")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_is_as_by_sdpa_or_eager(family: str) -> None:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    cls = next(iter(tiny.classes(family).values()))
    model, _, given, _ = first_that_runs(cls, family)

    def run(name: str) -> dict[str, Tensor]:
        model.set_attn_implementation(name)
        with torch.autocast("cpu", torch.bfloat16):
            return floats(model(**given))

    found = run("attnreg")
    assert attention.runs(model)
    others = ("sdpa", "eager") if model._supports_sdpa else ("eager",)
    assert min(difference(run(name), found) for name in others) < 0.05


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("make", [models.llama, models.gemma3, models.deepseek_v3, models.modern_bert, models.bart])
def test_a_model_is_as_by_sdpa(make: Callable[[], Any], dtype: torch.dtype) -> None:
    model, inputs = make(), tokens(11, 6, 1, left=False)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(11, 11, 11)["input_ids"]
    outs = []
    for name in ("sdpa", "attnreg"):
        model.set_attn_implementation(name)
        with torch.autocast("cpu", dtype):
            outs.append(model(**inputs)[0])
    alike(outs[1], outs[0], dtype)
    assert {run.asked.request.dtype for run in attention.runs(model)} == {str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("make", [models.llama, models.deepseek_v3])
def test_a_cache_of_another_dtype_than_autocast(make: Callable[[], Any], before: bool, after: bool) -> None:
    model, ids = make(), tokens(9, 9)["input_ids"]

    def steps(name: str) -> Tensor:
        model.set_attn_implementation(name)
        cache = DynamicCache(config=model.config)
        with torch.autocast("cpu", torch.float16, enabled=before):
            model(ids[:, :6], **{CACHE: cache})
        with torch.autocast("cpu", torch.float16, enabled=after):
            return torch.cat([model(ids[:, i : i + 1], **{CACHE: cache}).logits for i in range(6, 9)], 1)

    alike(steps("attnreg"), steps("sdpa"), torch.float16)


SEES = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "lazy": lazy_mask(1, 5, 5),
    "booleans": SEES.clone(),
    "numbers": torch.zeros(1, 1, 5, 5).masked_fill(~SEES, torch.finfo(torch.float32).min),
}
MIXED = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float16),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtypes", MIXED)
@pytest.mark.parametrize("more", [{}, {"position_bias": torch.ones(1, 4, 5, 5).tril()}], ids=["", "bias"])
def test_a_call_of_any_dtypes_is_as_by_sdpa(mask: str, dtypes: Any, more: dict[str, Any]) -> None:
    torch.manual_seed(3)
    layer = Layer()
    layer.num_key_value_groups = 2
    given = [torch.randn(1, heads, 5, 16).to(dtype) for heads, dtype in zip((4, 2, 2), dtypes, strict=True)]
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    with torch.autocast("cpu", torch.bfloat16):
        outs = [interface[n](layer, *given, MASKS[mask], is_causal=True, **more)[0] for n in ("sdpa", "attnreg")]
    assert outs[0].dtype == torch.bfloat16
    alike(outs[1], outs[0], torch.bfloat16)


def test_scores_with_sinks_and_a_softcap_stay_exact() -> None:
    # what accumulates in float32 does so under autocast, too
    torch.manual_seed(3)
    given = [torch.randn(1, heads, 5, 16).bfloat16() for heads in (4, 2, 2)]
    attend = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]
    more = {"s_aux": torch.randn(4), "softcap": 2.0, "is_causal": True}
    for mask in (None, MASKS["numbers"]):
        expected = attend(Layer(), *given, mask, **more)[0]
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(attend(Layer(), *given, mask, **more)[0], expected)


def test_a_gradient_is_refused_as_ever() -> None:
    given = [torch.randn(1, heads, 5, 16).requires_grad_() for heads in (4, 2, 2)]
    attend = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        out = attend(Layer(), *given, None, is_causal=True)[0]
        with pytest.raises(RuntimeError, match="attnreg computes no gradients"):
            out.sum().backward()


def test_autocast_for_another_device_casts_nothing() -> None:
    given = [torch.randn(1, heads, 5, 16) for heads in (4, 2, 2)]
    attend = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]
    expected = attend(Layer(), *given, None, is_causal=True)[0]
    before = torch.is_autocast_enabled("xpu")
    torch.set_autocast_enabled("xpu", True)
    try:
        assert torch.equal(attend(Layer(), *given, None, is_causal=True)[0], expected)
    finally:
        torch.set_autocast_enabled("xpu", before)
