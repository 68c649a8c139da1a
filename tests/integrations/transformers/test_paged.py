"""Continuous batching of transformers through attnreg: the same tokens as each prompt by itself, by "eager"."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.models import small_models as models
from support.models.small_models import by, tokens
from torch import Tensor
from transformers import AttentionInterface, CompileConfig, GenerationConfig
from transformers.generation.continuous_batching import input_outputs

import attnreg.integrations.transformers as attention
from attnreg import Registry, UnclaimedError
from attnreg.integrations.transformers.forms.stand_ins import stand_ins
from attnreg.integrations.transformers.paged.batches import PagedGroup
from attnreg.integrations.transformers.paged.cache import Stored

# few tokens a step: the longest prompt comes in parts, beside tokens of others
SMALL = models.batching(use_cuda_graph=False, num_blocks=8, page_size=16, max_batch_tokens=8)
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
    copied, update = [], PagedGroup.update

    def recorded(self: PagedGroup, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        copied.append((self.layer, key.shape[2]))
        return update(self, key, value, kwargs)

    monkeypatch.setattr(PagedGroup, "update", recorded)
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
        # a model that runs by a name of transformers' own keeps its mask; releases differ in which of these has one
        for own in ("sdpa", "paged|eager"):
            config: Any = SimpleNamespace(_attn_implementation=own)
            assert input_outputs.attn_mask_is_needed(config) == needed(config)
        assert needed(config)
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


def prompts_of(*lengths: int) -> list[list[int]]:
    return [tokens(n)["input_ids"][0].tolist() for n in lengths]


@pytest.mark.parametrize("make", [models.llama, models.gemma2])
def test_forks_and_prompts_that_begin_alike(make: Callable[..., Any]) -> None:
    model, common = make(), tokens(33)["input_ids"][0].tolist()
    prompts = [[*common, 3, 4], [*common, 9], common[:20]]
    expected = by("eager", model, alone(prompts))
    with attention.continuous_batching(model):
        found = together(prompts, allow_block_sharing=True, page_size=8, num_blocks=40, max_batch_tokens=16)(model)
    assert found == expected


def test_layers_that_share_keys_read_those_of_the_layer_that_made_them() -> None:
    config = transformers.Gemma3nTextConfig(
        **{**models.GEMMA, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        num_kv_shared_layers=2, vocab_size_per_layer_input=128, hidden_size_per_layer_input=16, laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    torch.manual_seed(0)
    model, prompts = transformers.Gemma3nForCausalLM(config).eval(), prompts_of(5, 17)
    with attention.continuous_batching(model):
        assert together(prompts)(model) == by("eager", model, alone(prompts))


@pytest.mark.slow(reason="torch.compile")
def test_a_compiled_step() -> None:
    model, prompts = models.llama(num_hidden_layers=1), prompts_of(3)
    compiled = CompileConfig(backend="eager", fullgraph=False, dynamic=True)
    expected = by("eager", model, alone(prompts, 2))
    with attention.continuous_batching(model):
        assert together(prompts, 2, varlen_compile_config=compiled)(model) == expected
    assert attention.runs(model)


# before transformers 5.24 its own thread is in no inference mode, and fails
INFERENCE = [torch.inference_mode] if Version(transformers.__version__) >= Version("5.24") else []


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, *INFERENCE])
def test_modes_of_autograd(mode: Any) -> None:
    model, prompts = models.gemma2(), prompts_of(5, 17)
    expected = by("eager", model, alone(prompts))
    with mode(), attention.continuous_batching(model):
        assert together(prompts)(model) == expected


def test_another_model_in_the_block_keeps_its_mask_and_is_served_too() -> None:
    model, other, prompts = models.llama(), models.gemma2(), prompts_of(5, 17)
    expected = by("eager", model, alone(prompts)), by("eager", other, alone(prompts))
    other.set_attn_implementation("paged|eager")
    with attention.continuous_batching(model):
        assert input_outputs.attn_mask_is_needed(other.config)
        assert not input_outputs.attn_mask_is_needed(model.config)
        assert (together(prompts)(model), together(prompts)(other)) == expected
    assert attention.runs(other)
    assert other.config._attn_implementation == "paged|eager"


def test_blocks_in_blocks_and_blocks_that_end_out_of_turn(default: Registry) -> None:
    attention.register("second", default)
    model, other, prompts = models.llama(), models.gemma2(), prompts_of(5, 17)
    expected = by("eager", model, alone(prompts)), by("eager", other, alone(prompts))
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    before = interface["sdpa"], interface["paged|eager"], input_outputs.attn_mask_is_needed
    first, second = attention.continuous_batching(model), attention.continuous_batching(other, name="second")
    first.__enter__()
    with attention.continuous_batching(model, name="second"):
        pass
    second.__enter__()
    assert (together(prompts)(model), together(prompts)(other)) == expected
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == "eager"
    assert together(prompts)(other) == expected[1]
    second.__exit__(None, None, None)
    assert (interface["sdpa"], interface["paged|eager"], input_outputs.attn_mask_is_needed) == before
    # each model by the engine of its own block
    assert len(attention.runs(model)) == len(attention.runs(other, name="second")) == models.LAYERS
    assert attention.runs(other) == attention.runs(model, name="second") == ()


def test_parts_of_a_model_have_their_implementations_again() -> None:
    model = models.gemma3_with_images()
    model.set_attn_implementation({"": "sdpa", "text_config": "attnreg", "vision_config": "eager"})
    parts = model.config, model.config.text_config, model.config.vision_config
    before = [config._attn_implementation for config in parts]
    assert before == ["sdpa", "attnreg", "eager"]
    with contextlib.suppress(ZeroDivisionError), attention.continuous_batching(model):
        assert model.config.text_config._attn_implementation == "paged|eager"
        raise ZeroDivisionError
    assert [config._attn_implementation for config in parts] == before


def test_a_manager_that_outlives_its_block_generates_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, prompts = models.llama(), prompts_of(5, 17)
    expected = by("sdpa", model, alone(prompts))
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)

    def kept() -> list[list[int]]:
        found = model.generate_batch(
            prompts, generation_config=greedy, continuous_batching_config=SMALL, persistent_manager=True
        )
        return [one.generated_tokens for one in found.values() if one.generated_tokens]

    with attention.continuous_batching(model):
        assert sorted(kept()) == sorted(expected)
    assert kept() == []
    assert "was made within attnreg's continuous_batching" in caplog.text
    # another block serves it again; without it transformers makes a new one
    model.destroy_cached_continuous_batching_manager()
    assert sorted(kept()) == sorted(expected)
    # one that was made before the block has a cache that gathers: since 5.24 it is refused, not left to transformers
    ran = len(attention.runs(model))
    with attention.continuous_batching(model):
        found = kept()
    gathers = Version(transformers.__version__) >= Version("5.24")
    assert ("made before continuous_batching" in caplog.text) == gathers
    assert (found == []) == gathers
    assert ran == len(attention.runs(model)) or not gathers
    model.destroy_cached_continuous_batching_manager()


def test_a_class_that_reads_the_keys_of_the_paged_cache_is_refused() -> None:
    key = torch.zeros(1, 2, 3, 4)
    first, _ = stand_ins(Stored(None, key, key), key, key, 9)  # type: ignore[arg-type]
    assert first.shape == (1, 2, 9, 4)
    for read in (lambda: first * 2, lambda: torch.cat([first, key], 2), lambda: first.repeat_interleave(2, 1)):
        with pytest.raises(UnclaimedError, match="reads keys or values of the paged cache"):
            read()


def test_a_class_outside_the_interface_is_refused() -> None:
    config = transformers.BloomConfig(n_layer=2, n_head=4, vocab_size=100, hidden_size=64)
    model = transformers.BloomForCausalLM(config)
    with (
        pytest.raises(UnclaimedError, match=r"Bloom.* outside transformers' attention interface"),
        attention.continuous_batching(model),
    ):
        raise AssertionError("the block runs")
