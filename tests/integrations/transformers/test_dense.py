"""Prefixes, biases and masks of any kind: ranges where they are ranges, and dense attention where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.small_models import by, close, tokens
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnreg.integrations.transformers as attention
from attnreg import NoBackendError, Registry, UnclaimedError
from attnreg.integrations.transformers import dense
from attnreg.runtime import dense as runtime_dense


def logits(**inputs: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(**inputs).logits


def states(**inputs: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(**inputs).last_hidden_state


def image_and_text(*, prefix: int) -> dict[str, Any]:
    """Two prompts with an image each, the second padded. The prefix ends at a position (PaliGemma), or is the image."""
    torch.manual_seed(2)
    ids, mask = torch.randint(3, 99, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    ids[:, 3 : 3 + models.IMAGE_TOKENS] = models.IMAGE_TOKEN
    ids[1, 0] = mask[1, 0] = 0
    types = (torch.arange(14) >= prefix).long().expand(2, -1) if prefix else (ids == models.IMAGE_TOKEN).long()
    return {
        "input_ids": ids, "attention_mask": mask, "token_type_ids": types, "pixel_values": torch.randn(2, 3, 28, 28)
    }  # fmt: skip


@pytest.mark.parametrize(("make", "prefix"), [(models.gemma3_with_images, 0), (models.pali_gemma, 9)])
def test_images_that_see_themselves_are_ranges(make: Callable[[], Any], prefix: int) -> None:
    model, inputs = make(), image_and_text(prefix=prefix)
    rows = inputs["attention_mask"].bool()
    expected, found = (by(name, model, logits(**inputs)) for name in ("eager", "attnreg"))
    close(found[rows], expected[rows])
    runs = {run.module.split(".")[1]: run for run in attention.runs(model)}
    assert "mm_prefix" in runs["language_model"].asked.request.features
    assert runs["vision_tower"].asked.request.role == "vision"
    assert all(run.backend for run in attention.runs(model))


def test_an_image_wider_than_the_window_is_dense(caplog: pytest.LogCaptureFixture) -> None:
    # a range knows no window, and Gemma's window also cuts what an image sees of itself
    model, inputs = models.gemma3_with_images(), image_and_text(prefix=0)
    model.config.text_config.sliding_window = 3
    rows = inputs["attention_mask"].bool()
    expected, found = (by(name, model, logits(**inputs)) for name in ("eager", "attnreg"))
    close(found[rows], expected[rows])
    text = [run for run in attention.runs(model) if "language_model" in run.module]
    why = "its mask is neither causal, windowed nor a prefix"
    assert [(run.backend, run.dense) for run in text] == [(None, why), ("CPU_ATTN", "")]
    assert [r.message for r in caplog.records if "dense" in r.message] == [
        f"dense attention, through PyTorch, for target layers (4/2 heads of 16, float32, KV cache auto): {why}"
    ]
    assert f"note: layer 0: dense attention, through PyTorch, because {why}" in attention.explanation(model, width=200)


def test_a_bias_is_added_densely_or_refused_with_the_reasons(default: Registry) -> None:
    model, inputs = models.t5(), tokens(11, 6, left=False)
    inputs["decoder_input_ids"] = tokens(5, 5)["input_ids"]
    expected, found = (by(name, model, states(**inputs)) for name in ("eager", "attnreg"))
    close(found, expected)
    model.set_attn_implementation("attnreg")
    if model.encoder.config._attn_implementation != "attnreg":
        pytest.skip("this transformers sets the attention of T5 as a whole, and not of its stacks")
    assert {run.dense for run in attention.runs(model)} == {"a bias is added to its scores"}
    attention.register(registry=default, dense=False)
    with pytest.raises(NoBackendError, match=r"CPU_ATTN +score_bias is not supported"):
        by("attnreg", model, states(**inputs))


@pytest.mark.parametrize("bias", ["use_relative_position_bias", "use_shared_relative_position_bias"])
def test_a_bias_that_a_mask_is_added_to_is_a_bias_where_the_mask_hides_nothing(bias: str) -> None:
    model = models.beit(**{bias: True})
    for name, parameter in model.named_parameters():
        if "bias_table" in name:
            torch.nn.init.normal_(parameter, std=2.0, generator=torch.Generator().manual_seed(2))
    images = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    expected, found = (by(name, model, states(pixel_values=images)) for name in ("eager", "attnreg"))
    close(found, expected)


@pytest.mark.parametrize("make", [models.llama, models.gpt_oss, models.gemma2])
def test_any_mask_is_obeyed(make: Callable[[], Any], default: Registry) -> None:
    model, inputs = make(), tokens(11, 11)
    torch.manual_seed(3)
    mask = torch.rand(2, 1, 11, 11) < 0.4
    mask |= torch.eye(11, dtype=torch.bool)
    inputs["attention_mask"] = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected, found = (by(name, model, logits(**inputs)) for name in ("eager", "attnreg"))
    close(found, expected)
    assert {run.dense for run in attention.runs(model)} == {"its mask is given as a tensor"}
    attention.register(registry=default, dense=False)
    with pytest.raises(
        UnclaimedError, match=r"its mask is given as a tensor, and dense attention is off \(dense=False"
    ):
        by("attnreg", model, logits(**inputs))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("make", [models.llama, models.gpt_oss, models.gemma2, models.bert])
def test_a_mask_that_hides_nothing_needs_no_dense_attention(make: Callable[[], Any], dtype: torch.dtype) -> None:
    """It is the whole mask: causality and windows would be in it."""
    model, inputs = make(), {"input_ids": tokens(11, 11)["input_ids"]}
    shown = torch.zeros(2, 1, 11, 11)

    def run(mask: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        return lambda model: model(**inputs, attention_mask=mask)[0]

    expected = by("eager", model, run(shown))
    found = by("attnreg", model, run(torch.ones(2, 1, 11, 11, dtype=torch.bool) if dtype == torch.bool else shown))
    close(found, expected)
    assert {(run.dense, run.asked.request.features & {"sliding_window"}) for run in attention.runs(model)} == {
        ("", frozenset())
    }
    # a single key that is hidden makes it another mask
    shown[1, 0, 3, 2] = torch.finfo(torch.float32).min
    close(by("attnreg", model, run(shown)), by("eager", model, run(shown)))
    assert {run.dense for run in attention.runs(model)} == {"", "its mask is given as a tensor"}


def test_padding_between_tokens() -> None:
    inputs = tokens(11, 11)
    inputs["attention_mask"][0, 4:6] = 0
    rows = inputs["attention_mask"].bool()
    for make, densely in ((models.llama, False), (models.gemma3, True)):
        model = make()
        expected, found = (by(name, model, logits(**inputs)) for name in ("eager", "attnreg"))
        close(found[rows], expected[rows])
        assert any(run.dense for run in attention.runs(model)) is densely


@pytest.mark.parametrize("keys", [1, 5])
def test_a_mask_of_any_strides_is_one_that_cuda_takes(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    strides: list[int] = []

    def attend(*tensors: Tensor, attn_mask: Tensor, **more: Any) -> Tensor:
        strides.append(attn_mask.stride(-1))
        return scaled_dot_product_attention(*tensors, attn_mask=attn_mask, **more)

    monkeypatch.setattr(runtime_dense, "scaled_dot_product_attention", attend)
    query, key, value = torch.randn(2, 4, 3, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)
    mask = (torch.rand(2, 1, keys, 3) < 0.7).transpose(2, 3)
    for given in (mask, mask[:, :, :, :1].expand(-1, -1, -1, keys)):
        more: dict[str, Any] = {"bias": None, "scale": 0.25, "softcap": None, "sinks": None}
        found = dense.dense_attention(query, key, value, mask=given, **more)
        torch.testing.assert_close(found, dense.dense_attention(query, key, value, mask=given.clone(), **more))
    assert set(strides) == {1}


@pytest.mark.parametrize("columns", [1, 9])
def test_the_keys_of_a_mask_lie_side_by_side(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    strides = []

    def given(*tensors: Any, attn_mask: Any, **more: Any) -> Any:
        # as PyTorch's kernels for CUDA look at it
        strides.append(attn_mask.expand(2, 4, 3, 9).stride(-1))
        return scaled_dot_product_attention(*tensors, attn_mask=attn_mask, **more)

    monkeypatch.setattr(runtime_dense, "scaled_dot_product_attention", given)
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    mask = torch.ones(columns, 3, 1, 2, dtype=torch.bool).permute(3, 2, 1, 0)
    found = dense.dense_attention(query, key, value, mask=mask, bias=None, scale=1.0, softcap=None, sinks=None)
    assert strides == [1]
    assert found.shape == (2, 3, 4, 8)


def test_a_query_that_is_no_number_gives_none_under_a_bias() -> None:
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    query[0, 1, 2] = torch.inf
    bias = torch.randn(1, 2, 3, 3)
    found = dense.dense_attention(query, key, value, mask=None, bias=bias, scale=1.0, softcap=None, sinks=None)
    lost = found.isnan().all(-1)
    assert lost[0].tolist() == [[False, False], [False, False], [False, True]]
    assert torch.equal(found.isnan().any(-1), lost)
