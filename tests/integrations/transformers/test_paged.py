"""Continuous batching of transformers through attnreg: the same tokens as each prompt by itself, by "eager"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import small_models as models
from support.small_models import by, tokens
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

import attnreg.integrations.transformers as attention

# few tokens a step: the longest prompt comes in parts, beside tokens of others
SMALL = ContinuousBatchingConfig(
    auto_switch_to_flash=False, use_cuda_graph=False, num_blocks=8, page_size=16, max_batch_tokens=8
)
NEW = 6


def alone(prompts: list[list[int]]) -> Callable[[Any], list[list[int]]]:
    return lambda model: [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def together(prompts: list[list[int]]) -> Callable[[Any], list[list[int]]]:
    def generate(model: Any) -> list[list[int]]:
        greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)
        found = model.generate_batch(inputs=prompts, generation_config=greedy, continuous_batching_config=SMALL)
        by_number = sorted(found.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
        return [one.generated_tokens for one in by_number]

    return generate


# models with a softcap or with sinks are among them: transformers refuses them its sdpa
@pytest.mark.parametrize("make", [models.llama, models.gemma2, models.gpt_oss])
def test_tokens_of_a_batch_that_changes(make: Callable[[], Any]) -> None:
    model = make()
    prompts = [tokens(n)["input_ids"][0].tolist() for n in (5, 17, 9)]
    expected = by("eager", model, alone(prompts))
    model.set_attn_implementation("attnreg")
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    before = {name: interface[name] for name in ("sdpa", "paged|eager")}
    with attention.continuous_batching(model):
        assert together(prompts)(model) == expected
    assert model.config._attn_implementation == "attnreg"
    assert {name: interface[name] for name in before} == before
    runs = attention.runs(model)
    assert {run.backend for run in runs} == {"CPU_ATTN"}
    assert len(runs) == models.LAYERS
    # what ran through attnreg is told of a model that stands on another implementation otherwise
    model.set_attn_implementation("eager")
    text = attention.explanation(model)
    assert "CPU_ATTN" in text
    assert "decides nothing" not in text


def test_sdpa_without_a_paged_cache_stays_transformers_own() -> None:
    model, inputs = models.llama(), tokens(7)
    with attention.continuous_batching():
        by("sdpa", model, lambda model: model(**inputs))
    assert attention.runs(model) == ()
    with contextlib.suppress(ZeroDivisionError), attention.continuous_batching(model):
        assert model.config._attn_implementation == "paged|eager"
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
