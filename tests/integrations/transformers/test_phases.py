"""Where an order tells prompts from generated tokens, each goes to its own backend, over the same cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.small_models import by, tokens
from transformers import GenerationConfig

import attnreg.integrations.transformers as attention
from attnreg import Registry, load_registry
from attnreg.integrations.transformers.batches import phase_of

NEW = 5
PROMPTS, TOKENS, MIXED = "TORCH_SDPA", "CPU_ATTN", "CPU_ATTN"
ORDERS = {
    "cpu": [
        {"name": "prompts", "when": {"attention": "mha", "phase": "prefill"}, "order": [PROMPTS]},
        {"name": "tokens", "when": {"attention": "mha", "phase": "decode"}, "order": [TOKENS]},
        {"name": "both", "order": [MIXED]},
    ]
}


@pytest.fixture
def by_phase() -> Registry:
    registry = load_registry("default", [{"orders": ORDERS}])
    attention.register(registry=registry)
    return registry


def ran(model: Any) -> Counter[tuple[str | None, str]]:
    """The calls of all layers by backend and phase."""
    calls = Counter[tuple[str | None, str]]()
    for run in attention.runs(model):
        calls[run.backend, run.asked.request.phase] += run.calls
    return calls


def generated(prompt: Any) -> Any:
    return lambda model: model.generate(**prompt, max_new_tokens=NEW, do_sample=False).tolist()


@pytest.mark.usefixtures("by_phase")
def test_generate() -> None:
    model, prompt = models.llama(), tokens(7)
    assert by("attnreg", model, generated(prompt)) == by("eager", model, generated(prompt))
    # the backend of tokens is that of both phases: its layers need no phase of their own
    assert ran(model) == {(PROMPTS, "prefill"): models.LAYERS, (TOKENS, "any"): models.LAYERS * (NEW - 1)}


@pytest.mark.usefixtures("by_phase")
def test_generate_of_a_padded_batch() -> None:
    model = models.llama()
    ids = tokens(9)["input_ids"].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    prompt = {"input_ids": ids, "attention_mask": mask}
    assert by("attnreg", model, generated(prompt)) == by("eager", model, generated(prompt))
    assert ran(model) == {(PROMPTS, "prefill"): models.LAYERS, (TOKENS, "any"): models.LAYERS * (NEW - 1)}


@pytest.mark.usefixtures("by_phase")
def test_both_backends_read_one_paged_cache() -> None:
    model = models.llama()
    prompts = [tokens(n)["input_ids"][0].tolist() for n in (6, 11)]
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)
    # the second prompt comes in parts, beside tokens of the first
    config = models.batching(use_cuda_graph=False, num_blocks=8, page_size=16, max_batch_tokens=8)

    def alone(model: Any) -> list[list[int]]:
        return [
            model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0, len(p) :].tolist()
            for p in prompts
        ]

    expected = by("eager", model, alone)
    model.set_attn_implementation("attnreg")
    with attention.continuous_batching(model):
        found = model.generate_batch(inputs=prompts, generation_config=greedy, continuous_batching_config=config)
    numbers = sorted(found, key=lambda name: int(name.rpartition("_")[2]))
    assert [found[name].generated_tokens for name in numbers] == expected
    calls = ran(model)
    assert calls.keys() == {(PROMPTS, "prefill"), (TOKENS, "any")}
    assert calls[TOKENS, "any"] > calls[PROMPTS, "prefill"] >= models.LAYERS
    pages = {run.asked.request.block_size for run in attention.runs(model)}
    assert pages == {16}


def test_a_backend_that_reads_no_such_pages_is_refused(default: Registry) -> None:
    pages = {"backends": {PROMPTS: {"capabilities": {"cache_layouts": "HND"}}}, "orders": ORDERS}
    attention.register(registry=load_registry("default", [pages]))
    model = models.llama()
    model.set_attn_implementation("attnreg")
    prompt = tokens(6)["input_ids"][0].tolist()
    greedy = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=-1)
    with attention.continuous_batching(model):
        found = model.generate_batch(inputs=[prompt], generation_config=greedy)
    (one,) = found.values()
    assert "cache_layout is NHD; supported: HND" in str(one.error)
    assert not one.generated_tokens


@pytest.mark.usefixtures("by_phase")
def test_the_explanation_tells_the_phases_apart() -> None:
    model = models.llama()
    model.set_attn_implementation("attnreg")
    before = attention.explanation(model)
    assert " · prefill" in before
    assert f"▸ {PROMPTS}" in before
    assert f"▸ {TOKENS}" in before


@pytest.mark.parametrize(
    ("lengths", "phase"), [([1, 1], "decode"), ([3, 2], "prefill"), ([3, 1], "any"), ([1, 0], "decode"), ([], "any")]
)
def test_the_phase_of_a_batch(lengths: list[int], phase: str) -> None:
    assert phase_of(lengths) == phase


def test_a_backend_that_is_named_serves_both(default: Registry) -> None:
    attention.register(registry=load_registry("default", [{"orders": ORDERS}]), backend="CPU_ATTN")
    model = models.llama()
    by("attnreg", model, generated(tokens(5)))
    assert {backend for backend, _ in ran(model)} == {"CPU_ATTN"}
