"""Continuous batching of transformers through attnreg: the same tokens as each prompt by itself, by "eager"."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import small_models as models
from support.small_models import by, tokens
from torch import Tensor
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import input_outputs

import attnreg.integrations.transformers as attention
from attnreg.integrations.transformers.paged.batches import Group

# few tokens a step: the longest prompt comes in parts, beside tokens of others
SMALL = ContinuousBatchingConfig(
    auto_switch_to_flash=False, use_cuda_graph=False, num_blocks=8, page_size=16, max_batch_tokens=8
)
NEW = 6
# prompts that fit into a step and one that does not; so many tokens that a ring of 8 is filled again and again
LONG = 21


def alone(prompts: list[list[int]], new: int = NEW) -> Callable[[Any], list[list[int]]]:
    return lambda model: [
        model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def together(prompts: list[list[int]], new: int = NEW, **config: Any) -> Callable[[Any], list[list[int]]]:
    def generate(model: Any) -> list[list[int]]:
        greedy = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)
        settings = dataclasses.replace(SMALL, **config)
        found = model.generate_batch(inputs=prompts, generation_config=greedy, continuous_batching_config=settings)
        by_number = sorted(found.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
        return [one.generated_tokens for one in by_number]

    return generate


# models with a softcap or with sinks are among them: transformers refuses them its sdpa
@pytest.mark.parametrize("make", [models.llama, models.gemma2, models.gpt_oss])
def test_tokens_of_a_batch_that_changes(make: Callable[..., Any]) -> None:
    model = make()
    prompts = [tokens(n)["input_ids"][0].tolist() for n in (5, 17, 9)]
    expected = by("eager", model, alone(prompts))
    model.set_attn_implementation("attnreg")
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    before = {name: interface[name] for name in ("sdpa", "paged|eager")}
    with attention.continuous_batching(model):
        assert together(prompts)(model) == expected
        # pages of a size that no kernel of a GPU has, and many prompts at once
        assert together(prompts, page_size=5, max_batch_tokens=64)(model) == expected
    assert model.config._attn_implementation == "attnreg"
    assert {name: interface[name] for name in before} == before
    runs = attention.runs(model)
    assert {run.backend for run in runs} == {"CPU_ATTN"}
    # once for each size of pages
    assert len(runs) == 2 * models.LAYERS
    # what ran through attnreg is told of a model that stands on another implementation otherwise
    model.set_attn_implementation("eager")
    text = attention.explanation(model)
    assert "CPU_ATTN" in text
    assert "decides nothing" not in text


# a window of two pages, of one, of no whole number, and below one
@pytest.mark.parametrize(("window", "page"), [(16, 8), (8, 8), (12, 8), (4, 8)])
@pytest.mark.parametrize("make", [models.gemma2, models.gpt_oss])
def test_a_ring_is_read_in_place_where_one_token_is_new(
    make: Callable[..., Any], window: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(sliding_window=window)
    prompts = [tokens(n)["input_ids"][0].tolist() for n in (5, 17, 1, 30)]
    expected = by("eager", model, alone(prompts, LONG))
    copied, update = [], Group.update

    def recorded(self: Group, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        copied.append((self.layer, key.shape[2]))
        return update(self, key, value, kwargs)

    monkeypatch.setattr(Group, "update", recorded)
    model.set_attn_implementation("attnreg")
    with attention.continuous_batching(model):
        assert together(prompts, LONG, page_size=page, num_blocks=40, max_batch_tokens=16)(model) == expected
    # of layers that keep every key nothing is copied, nor where each request has one token, if pages fit the window
    assert {layer for layer, _ in copied} == {0}
    steps = [new for _, new in copied]
    assert (sum(new <= 4 for new in steps) > 4) == (window % page != 0)


def test_no_mask_is_built_for_a_model_that_attnreg_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*given: Any, **more: Any) -> None:
        raise AssertionError("a mask is built, which nothing reads")

    monkeypatch.setattr(input_outputs, "build_attention_mask", build)
    model, needed = models.llama(), input_outputs.attn_mask_is_needed
    prompts = [tokens(n)["input_ids"][0].tolist() for n in (5, 17)]
    with attention.continuous_batching(model):
        assert [len(row) for row in together(prompts)(model)] == [NEW, NEW]
        # a model that runs by transformers' own name keeps its mask
        model.set_attn_implementation("sdpa")
        assert input_outputs.attn_mask_is_needed(model.config)
    assert input_outputs.attn_mask_is_needed is needed


def test_sdpa_without_a_paged_cache_stays_transformers_own() -> None:
    model, inputs = models.llama(), tokens(7)
    with attention.continuous_batching():
        by("sdpa", model, lambda model: model(**inputs))
    assert attention.runs(model) == ()
    with contextlib.suppress(ZeroDivisionError), attention.continuous_batching(model):
        assert model.config._attn_implementation == "paged|eager"
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_autocast_computes_in_the_dtype_of_the_cache(kept: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    model, prompts = models.qwen3().to(kept), [tokens(n)["input_ids"][0].tolist() for n in (5, 17)]
    # in the thread that transformers generates in
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    if kept == torch.bfloat16:
        expected = by("eager", model, alone(prompts))
        with attention.continuous_batching(model):
            assert together(prompts)(model) == expected
        return
    with attention.continuous_batching(model):
        together(prompts)(model)
    assert "computes in torch.bfloat16, and the paged cache keeps torch.float32" in caplog.text
