"""Uses of a model beyond a plain call: caches, masks, positions and switches, as by transformers' own functions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.models import small_models as models
from support.models.small_models import by, close
from torch import Tensor

import attnreg.integrations.transformers as attention
from attnreg import Registry, UnclaimedError
from attnreg.integrations.transformers.forms.releases import CACHE

DECODERS = [models.llama, models.gpt_oss, models.gemma2]
LOWEST = torch.finfo(torch.float32).min


def ids(batch: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    return torch.randint(5, 95, (batch, length), generator=torch.Generator().manual_seed(seed))


def prefix_of_a_cache(model: Any) -> Tensor:
    """Keys that no token made, as prefix tuning has them, and a mask that hides tokens after them."""
    torch.manual_seed(1)
    cache, size = transformers.DynamicCache(), (2, 2, 4, 16)
    for layer in range(2):
        cache.update(torch.randn(size), torch.randn(size), layer)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 4:6] = 0
    return model(ids(), **{CACHE: cache}, attention_mask=mask).logits[:, 6:]


def branches_of_a_cache(model: Any) -> Tensor:
    """A cache that is copied, cut, repeated and reordered between calls."""
    cache = transformers.DynamicCache()
    model(ids(), **{CACHE: cache})
    other = copy.deepcopy(cache)
    other.crop(-5)
    out = [model(ids(2, 3, seed=5), **{CACHE: x}).logits for x in (cache, other)]
    cache.batch_repeat_interleave(2)
    out.append(model(ids(4, 3, seed=8), **{CACHE: cache}).logits)
    cache.batch_select_indices(torch.tensor([3, 0]))
    out.append(model(ids(2, 3, seed=9), **{CACHE: cache}).logits)
    return torch.cat(out)


def turns_of_a_conversation(model: Any) -> Tensor:
    """A second turn that is padded on the left itself, so that padding lies between tokens."""
    cache = transformers.DynamicCache(config=model.config)
    first = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    model(ids(2, 6), attention_mask=first, **{CACHE: cache})
    both = torch.cat([first, torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])], 1)
    places = (both.cumsum(1) - 1)[:, 6:]
    return model(ids(2, 4, seed=4), attention_mask=both, position_ids=places, **{CACHE: cache}).logits[:, 2:]


def tokens_that_are_hidden_later(model: Any) -> Tensor:
    """Each step hides another token that earlier steps saw."""
    cache, mask = transformers.DynamicCache(config=model.config), torch.ones(2, 8, dtype=torch.long)
    out = [model(ids(2, 8), **{CACHE: cache}).logits[:, -1:]]
    for step in range(3):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        mask[1, step] = 0
        found = model(ids(2, 1, step), attention_mask=mask, **{CACHE: cache}, position_ids=torch.full((2, 1), 8))
        out.append(found.logits)
    return torch.cat(out, 1)


def a_static_cache_that_is_used_again(model: Any) -> Tensor:
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    out = [model(ids(2, n, n), **{CACHE: cache}).logits for n in (5, 3, 1)]
    cache.reset()
    return torch.cat([*out, model(ids(2, 4), **{CACHE: cache}).logits], 1)


def positions(places: list[int]) -> Callable[[Any], Tensor]:
    def run(model: Any) -> Tensor:
        return model(ids(), position_ids=torch.tensor([places, places]), use_cache=False).logits

    return run


def both_sides(model: Any) -> Tensor:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = mask[1, 9:] = mask[0, 0] = 0
    return model(ids(), attention_mask=mask).logits[mask.bool()]


def whole_mask(made: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    """A 4D mask, made of the booleans of a causal one with holes."""
    sees = torch.ones(12, 12, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    sees[1, :, 5:, 1:3] = False
    return lambda model: model(ids(), attention_mask=made(sees)).logits


def biased(sees: Tensor) -> Tensor:
    bias = torch.randn(2, 4, 12, 12, generator=torch.Generator().manual_seed(3))
    return bias.masked_fill(~sees, LOWEST)


USES: dict[str, Callable[[Any], Tensor]] = {
    "a prefix of a cache": prefix_of_a_cache,
    "branches of a cache": branches_of_a_cache,
    "turns of a conversation": turns_of_a_conversation,
    "tokens that are hidden later": tokens_that_are_hidden_later,
    "a static cache used again": a_static_cache_that_is_used_again,
    "padding on both sides": both_sides,
    "positions with gaps": positions([0, 1, 2, 5, 6, 7, 20, 21, 22, 40, 41, 42]),
    "positions with resets": positions([0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]),
    "positions that repeat": positions([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
    "positions backwards": positions([*range(11, -1, -1)]),
    "a mask of -inf": whole_mask(lambda sees: torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)),
    "a mask of biases for each head": whole_mask(biased),
    "a mask that is not contiguous": whole_mask(
        lambda sees: torch.zeros(sees.shape).masked_fill(~sees, LOWEST).transpose(2, 3).contiguous().transpose(2, 3)
    ),
    "embeddings of a stride": lambda model: (
        model(inputs_embeds=torch.randn(2, 64, 12, generator=torch.Generator().manual_seed(1)).transpose(1, 2)).logits
    ),
}


@pytest.mark.parametrize("make", DECODERS)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_is_as_by_eager(make: Callable[[], Any], use: Callable[[Any], Tensor]) -> None:
    model = make()
    expected = by("eager", model, use)
    found = by("attnreg", model, use)
    close(found, expected)


@pytest.mark.parametrize("side", ["left", "right", "both", "hole"])
@pytest.mark.parametrize("make", [models.bart, models.t5])
def test_both_masks_of_an_encoder_and_its_decoder(make: Callable[[], Any], side: str) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, {"left": [0, 1, 2], "right": [9, 10, 11], "both": [0, 10, 11], "hole": [3, 4]}[side]] = 0

    def run(model: Any) -> Tensor:
        more = {"decoder_input_ids": ids(2, 12, 4), "decoder_attention_mask": mask.flip(1)}
        return model(ids(), attention_mask=mask, **more).last_hidden_state[mask.flip(1).bool()]

    model = make()
    close(by("attnreg", model, run), by("eager", model, run))


@pytest.mark.parametrize("kind", [torch.long, torch.int32, torch.uint8])
def test_a_whole_mask_of_integers_is_refused(kind: torch.dtype) -> None:
    with pytest.raises(UnclaimedError, match=r"attention_mask of LlamaAttention is torch\.\w+ \[2, 1, 12, 12\]"):
        by("attnreg", models.llama(), whole_mask(lambda sees: sees.to(kind)))


def test_a_model_is_switched_to_and_fro_and_in_parts() -> None:
    model = models.gemma3_with_images()
    given = {"input_ids": ids(), "token_type_ids": torch.zeros(2, 12, dtype=torch.long)}
    expected = by("eager", model, lambda model: model(**given).logits)
    for names in ("attnreg", {"text_config": "attnreg", "vision_config": "eager"}, "sdpa", {"text_config": "attnreg"}):
        model.set_attn_implementation(names)
        with torch.inference_mode():
            close(model(**given).logits, expected)
    assert sum(run.calls for run in attention.runs(model)) == 3 * models.LAYERS
    assert model.model.vision_tower.config._attn_implementation == "sdpa"


def test_two_registrations_and_threads_do_not_meet(default: Registry) -> None:
    attention.register("other", default, backend="CPU_ATTN")
    first, second = models.gpt_oss(), models.gpt_oss()
    second.load_state_dict({k: v * 1.1 for k, v in first.state_dict().items()})
    prompts = [ids(1 + n % 3, 5 + n, n) for n in range(8)]
    run = lambda model: [model(prompt).logits for prompt in prompts]  # noqa: E731
    expected = [by("eager", model, run) for model in (first, second)]
    first.set_attn_implementation("attnreg")
    second.set_attn_implementation("other")
    found: dict[tuple[int, int], Tensor] = {}

    def attend(model: int, prompt: int) -> None:
        with torch.inference_mode():
            found[model, prompt] = (first, second)[model](prompts[prompt]).logits

    threads = [threading.Thread(target=attend, args=(m, p)) for m in (0, 1) for p in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (model, prompt), logits in found.items():
        close(logits, expected[model][prompt])
    assert len(found) == 16
    assert not attention.runs(second)
    assert not attention.runs(first, name="other")


@torch.no_grad()
def test_a_compiled_model_asks_for_each_mask_anew() -> None:
    model = models.llama()
    model.set_attn_implementation("attnreg")
    compiled = torch.compile(model, backend="eager")
    for hidden in range(4):
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, : 2 * hidden] = 0
        inputs = {"input_ids": ids(), "attention_mask": mask}
        expected = by("eager", copy.deepcopy(model), lambda model, inputs=inputs: model(**inputs).logits)
        close(compiled(**inputs).logits[mask.bool()], expected[mask.bool()])
