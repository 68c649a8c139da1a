"""What transformers does with caches while a model with latents generates, against eager."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.latent_models import BOTH, SPARSE, attentions, both, phases, v3, v32
from support.models.small_models import by, close, tokens
from torch import Tensor
from transformers import DynamicCache, StaticCache

import attnreg.integrations.transformers as attention
from attnreg import Platform, Registry
from attnreg.integrations.transformers import engine
from attnreg.integrations.transformers.forms.releases import CACHE
from attnreg.runtime.interface import UnclaimedError

BOTH_KINDS = pytest.mark.parametrize(("make", "ran"), [(v3, BOTH), (v32, SPARSE)], ids=["dense", "sparse"])


@pytest.fixture(autouse=True)
def always_latent(registered: None, default: Registry) -> None:
    """No layer of these tests may be expanded for a reason of its own."""
    attention.register(registry=default, latent=True)


def generating(new: int = 24, **more: Any) -> Callable[[Any], Tensor]:
    return lambda model: model.generate(**more, max_new_tokens=new, do_sample=False)  # type: ignore[no-any-return]


@BOTH_KINDS
@pytest.mark.parametrize(
    "more",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 4},
        {"use_cache": False},
    ],
    ids=["beams", "beams returned", "static", "prompt lookup", "no cache"],
)
def test_generation(make: Callable[[], Any], ran: set[Any], more: dict[str, Any]) -> None:
    model = make()
    lengths = (13,) if "prompt_lookup_num_tokens" in more else (17, 6)
    expected, found = both(model, generating(**tokens(*lengths), **more))
    assert torch.equal(found, expected)
    assert phases(model) == (ran if more != {"use_cache": False} or ran == SPARSE else ran - {("mla", "decode")})


@BOTH_KINDS
def test_assisted_generation_crops_the_cache(make: Callable[[], Any], ran: set[Any]) -> None:
    model, assistant = make(), make(num_hidden_layers=1)
    inputs = tokens(13)

    def run(model: Any) -> Tensor:
        assistant.set_attn_implementation(model.config._attn_implementation)
        return model.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=assistant)  # type: ignore[no-any-return]

    expected, found = both(model, run)
    assert torch.equal(found, expected)
    assert phases(model) == ran


@BOTH_KINDS
def test_one_cache_in_two_conversations(make: Callable[[], Any], ran: set[Any]) -> None:
    model, first, more = make(), tokens(11)["input_ids"], torch.randint(3, 128, (2, 6))

    def run(model: Any) -> Tensor:
        cache = DynamicCache(config=model.config)
        model(first, **{CACHE: cache})
        model(first[:, :3], **{CACHE: cache})
        cache.crop(-2)
        copied = copy.deepcopy(cache)
        cache.batch_repeat_interleave(2)
        told = model(more, **{CACHE: cache}).logits
        cache.reorder_cache(torch.tensor([1, 0]))
        told = torch.cat([told, model(more, **{CACHE: cache}).logits], 1)
        cache.batch_select_indices(torch.tensor([1]))
        told = torch.cat([told[1:], model(more[:1, :1], **{CACHE: cache}).logits], 1)
        return torch.cat([told, model(more[1:], **{CACHE: copied}).logits], 1)

    expected, found = both(model, run)
    close(found, expected)


@pytest.mark.parametrize("lengths", [(60,), (60, 4, 9)], ids=["one text", "texts of several lengths"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_token_like_one_before_is_not_looked_at_in_full(
    lengths: tuple[int, ...], static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = v3(), tokens(*lengths)
    looked: list[int] = []

    def run(model: Any) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=80) if static else DynamicCache(config=model.config)
        ids, told, logits = inputs["input_ids"], inputs["attention_mask"], []
        # past the end of a block of 64
        for _ in range(7):
            looked.append(0)
            logits.append(model(ids, attention_mask=told, **{CACHE: cache}).logits[:, -1])
            ids, told = ids[:, :1] + 1, torch.cat([told, told.new_ones(len(told), 1)], 1)
        return torch.stack(logits, 1)

    def counted(*args: Any, **named: Any) -> Any:
        looked[-1] += 1
        return made(*args, **named)

    made = engine.TransformersCall
    monkeypatch.setattr(engine, "TransformersCall", counted)
    expected, found = both(model, run)
    close(found, expected)
    # a prompt, the first token, and those like it, of 2 layers
    assert looked[7:] == [2, 2, 0, 0, 0, 0, 0]
    decoded = [run for run in attention.runs(model) if run.asked.request.phase == "decode"]
    assert [run.calls for run in decoded] == [6, 6]


def test_a_static_cache_of_two_calls() -> None:
    model, ids = v3(), tokens(30)["input_ids"]

    def run(model: Any) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=100)
        parts = [model(ids[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 20), (20, 21), (21, 30))]
        return torch.cat(parts, 1)

    expected, found = both(model, run)
    close(found, expected)


@BOTH_KINDS
def test_a_model_is_copied_and_pickled(make: Callable[[], Any], ran: set[Any]) -> None:
    model, run = make(), generating(6, **tokens(9))
    expected, _ = both(model, run)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(by("attnreg", other, run), expected)
        assert phases(other) == ran


def test_compiled() -> None:
    model, ids = v3(num_hidden_layers=1), tokens(12)["input_ids"]
    expected, _ = both(model, lambda model: model(ids).logits)
    model.set_attn_implementation("attnreg")
    torch.compiler.reset()
    model.model.layers[0].self_attn.compile(backend="eager")
    with torch.no_grad():
        close(model(ids).logits, expected)
    assert phases(model) == {("mla", "prefill")}


def test_another_implementation_is_compiled_whole() -> None:
    model = v3(num_hidden_layers=1)
    expand = model.model.layers[0].self_attn.expand_kv
    latents = torch.randn(1, 1, 3, 32), torch.randn(1, 1, 3, 16)
    model.set_attn_implementation("sdpa")
    torch.compiler.reset()
    with torch.no_grad():
        for found, expected in zip(
            torch.compile(expand, backend="eager", fullgraph=True)(*latents), expand(*latents), strict=True
        ):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("make", [v3, v32])
def test_continuous_batching_is_refused(make: Callable[[], Any]) -> None:
    # transformers' paged cache has the width of rotary parts for keys and for values, and its own attention fails
    model = make()
    said = r"keys of 48 and values of 24.*model\.generate.*caches latents"
    with pytest.raises(UnclaimedError, match=said), attention.continuous_batching(model):
        pass
    assert model.config._attn_implementation != "paged|eager"


@pytest.mark.parametrize(
    ("make", "ran"), [(v3, {"TRITON_PREFILL", "TRITON_MLA"}), (v32, {"TRITON_MLA_SPARSE"})], ids=["dense", "sparse"]
)
def test_kernels_of_gpus(make: Callable[..., Any], ran: set[str]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU's kernels cannot run on the processor here: TRITON_INTERPRET is off")
    attention.register(platform=Platform(platform="cuda", arch="sm90"), latent=True)
    model, inputs = make(num_hidden_layers=1, dtype=torch.float16), tokens(70, 9)

    def run(model: Any) -> Tensor:
        more = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        return torch.stack(model.generate(**inputs, **more).logits)

    expected, found = both(model, run)
    assert float((found - expected).square().mean().sqrt()) < 0.002 * float(expected.abs().max())
    assert {run.backend for run in attention.runs(model)} == ran


def test_chosen_keys_past_a_text_are_none() -> None:
    # 6 keys are chosen of prompts with fewer: transformers' indexers choose padding and later keys too
    model, inputs = v32(), tokens(4, 2, 1)
    expected, found = both(model, generating(12, **inputs))
    assert torch.equal(found, expected)
    assert {run.asked.request.index_topk for run in attention.runs(model)} == {6}
    assert len(attentions(model)) == 2
