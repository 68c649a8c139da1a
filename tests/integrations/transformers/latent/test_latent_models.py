"""Models with latents against eager: logits, greedy tokens, what ran them, and what their caches hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.models.latent_models import (
    BASE,
    BOTH,
    DENSE,
    HEADS,
    MODELS,
    SPARSE,
    SPARSE_MODELS,
    attentions,
    both,
    made,
    phases,
    v3,
    v32,
)
from support.models.small_models import close, tokens
from torch import Tensor
from transformers import DynamicCache

import attnreg.integrations.transformers as attention
from attnreg import Registry
from attnreg.integrations.transformers.forms.releases import CACHE

NEW = 64


@pytest.fixture(autouse=True)
def always_latent(registered: None, default: Registry) -> None:
    """No layer of these tests may be expanded for a reason of its own."""
    attention.register(registry=default, latent=True)


def logits(**inputs: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(**inputs).logits


def greedy(new: int = NEW, **inputs: Any) -> Callable[[Any], Tensor]:
    return lambda model: model.generate(**inputs, max_new_tokens=new, do_sample=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [*MODELS.values(), *SPARSE_MODELS.values()], ids=[*MODELS, *SPARSE_MODELS])
def test_logits_and_tokens_are_those_of_eager(make: Callable[[], Any]) -> None:
    model, inputs = make(), tokens(21, 9, 1)
    sparse = hasattr(model.config, "index_topk")
    expected, found = both(model, logits(**inputs))
    real = inputs["attention_mask"].bool()
    close(found[real], expected[real])
    # a recurrent layer is slow on a processor
    expected, found = both(model, greedy(16 if model.config.model_type == "kimi_linear" else NEW, **inputs))
    assert torch.equal(found, expected)
    assert phases(model) == (SPARSE if sparse else BOTH)


@pytest.mark.parametrize("make", [v3, MODELS["minicpm3"]])
def test_right_padding(make: Callable[[], Any]) -> None:
    model, inputs = make(), tokens(21, 9, 1, left=False)
    expected, found = both(model, logits(**inputs))
    # padded queries see the keys before them, and are computed as by eager
    close(found, expected)
    assert phases(model) == BOTH


def in_steps(inputs: dict[str, Tensor], edges: list[int]) -> Callable[[Any], Tensor]:
    """The logits of a prompt that is computed from each edge to the next."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def run(model: Any) -> Tensor:
        cache = DynamicCache(config=model.config)
        return torch.cat(
            [
                model(ids[:, a:b], attention_mask=mask[:, :b], **{CACHE: cache}).logits.float()
                for a, b in pairwise(edges)
            ],
            1,
        )

    return run


def test_errors_in_bfloat16_are_those_of_eager() -> None:
    inputs = tokens(40, 23)
    real, run = inputs["attention_mask"].bool(), in_steps(inputs, [0, 36, 37, 38, 40])
    exact, _ = both(v3(), run)
    computed = both(v3(dtype=torch.bfloat16), run)
    eager, found = (float((x - exact)[real].square().mean().sqrt()) for x in computed)
    assert 0 < eager < 0.01 * float(exact.abs().max())
    assert found < 1.25 * eager


def test_sparse_layers_in_bfloat16_are_those_of_eager() -> None:
    # one layer: what an indexer chooses in the second would turn on the rounding of the first
    model, inputs = v32(num_hidden_layers=1, dtype=torch.bfloat16), tokens(40, 23)
    expected, found = both(model, in_steps(inputs, [0, 36, 37, 38, 40]))
    difference = (found - expected)[inputs["attention_mask"].bool()]
    assert float(difference.square().mean().sqrt()) < 0.005 * float(expected.abs().max())


@pytest.mark.parametrize("make", [v3, v32])
def test_prompts_in_chunks_and_padding_between_tokens(make: Callable[[], Any], default: Registry) -> None:
    # keys that an indexer chose for queries of padding are attended to densely
    attention.register(registry=default, latent=None if make is v32 else True)
    model, inputs = make(), tokens(90, 71)
    mask = inputs["attention_mask"]
    mask[0, 40:45] = 0
    # more queries than the latent form computes, fewer, one, and a part that ends where a block does
    expected, found = both(model, in_steps(inputs, [0, 50, 64, 65, 66, 90]))
    close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("make", [v3, v32])
def test_a_text_of_padding_alone(make: Callable[[], Any]) -> None:
    model, inputs = make(), tokens(21, 9, 4)
    inputs["attention_mask"][1] = 0
    expected, found = both(model, greedy(12, **inputs))
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("make", [v3, v32])
def test_inference_mode_and_float16(make: Callable[..., Any]) -> None:
    model, inputs = make(dtype=torch.float16, num_hidden_layers=1), tokens(40, 23)
    run = in_steps(inputs, [0, 36, 37, 40])
    # by eager an indexer's scores are added to numbers of masks, which rounds them
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        expected = run(model)
        model.set_attn_implementation("attnreg")
        difference = (run(model) - expected)[inputs["attention_mask"].bool()]
    assert float(difference.square().mean().sqrt()) < 0.001 * float(expected.abs().max())


def test_a_text_without_a_mask_or_a_cache() -> None:
    model = v3()
    ids = tokens(13)["input_ids"]
    expected, found = both(model, logits(input_ids=ids, use_cache=False))
    close(found, expected)
    one, other = both(model, logits(input_ids=ids[:, :1]))
    close(other, one)


@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_the_scale_of_yarn(mscale: float) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 32,
            "mscale": mscale, "mscale_all_dim": mscale, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
    model = v3(rope_parameters=yarn)
    expected, found = both(model, greedy(20, **tokens(50, 7)))
    assert torch.equal(found, expected)
    for run in attention.runs(model):
        assert math.isclose(run.asked.scale, 48**-0.5 * (0.1 * mscale * math.log(40) + 1) ** 2)


def test_bytes_per_token_at_the_sizes_of_deepseek_v3() -> None:
    sizes = {"kv_lora_rank": 512, "q_lora_rank": 24, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 1}
    model = made("DeepseekV3ForCausalLM", BASE, HEADS, DENSE, sizes, heads, dtype=torch.bfloat16)
    inputs = tokens(70)

    def cached(model: Any) -> Any:
        return model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)

    with torch.no_grad():
        model.set_attn_implementation("attnreg")
        cache = cached(model)[CACHE]
    (layer,) = cache.layers
    stored = sum(x.numel() * x.itemsize for x in (layer.keys, layer.values))
    # the last token is not cached; expanded keys and values would be 128 heads of 192 + 128
    assert stored == 73 * 1152
    assert 128 * (192 + 128) * 2 == 81_920
    assert phases(model) == BOTH
    (module,) = attentions(model)
    assert {run.asked.request.head_size for run in attention.runs(model)} == {192, 576}
    assert module.kv_b_proj.weight.shape == (128 * 256, 512)
