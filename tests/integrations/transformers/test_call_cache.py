"""A call like one before: nothing is found anew, whatever the call depends on is seen, and no key is copied."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.small_models import by, close, tokens
from support.models.transformers_calls import Layer
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface, masking_utils
from transformers.cache_utils import Cache as Layers

import attnreg.integrations.transformers as attention
from attnreg import UnclaimedError
from attnreg.integrations.transformers import engine
from attnreg.integrations.transformers.masks import MaskSource, lazy_mask
from attnreg.kernels import cpu_attn
from attnreg.runtime.interface import Call


def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, by: str = "attnreg", **more: Any) -> Tensor:
    out: Tensor = AttentionInterface()[by](layer, q, k, v, mask, **more)[0]  # type: ignore[no-untyped-call]
    return out


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were looked at in full."""
    calls: list[Any] = []
    made = engine.TransformersCall

    def recorded(*arguments: Any) -> Any:
        calls.append(arguments)
        return made(*arguments)

    monkeypatch.setattr(engine, "TransformersCall", recorded)
    return calls


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("make", [models.llama, models.gpt_oss, models.gemma2])
def test_each_module_is_looked_at_once(make: Callable[[], Any], cache: str | None, looked_at: list[Any]) -> None:
    model, inputs = make(), tokens(7, 3)
    greedy: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    by("attnreg", model, lambda model: model.generate(**inputs, **greedy))
    assert len(looked_at) == models.LAYERS
    assert [run.calls for run in attention.runs(model)] == [9] * models.LAYERS
    by("attnreg", model, lambda model: model.generate(**inputs, **greedy))
    assert len(looked_at) == models.LAYERS
    assert [run.calls for run in attention.runs(model)] == [18] * models.LAYERS


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("lengths", [(7,), (7, 7), (7, 3, 1)])
def test_keys_are_read_in_transformers_cache(
    lengths: tuple[int, ...], cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = models.llama(), tokens(*lengths)
    places, forward = [], cpu_attn.forward

    def seen(spec: Any, plan: Any, call: Call) -> None:
        assert call.key is not None
        places.append(call.key.untyped_storage().data_ptr())
        forward(spec, plan, call)

    updated, update = [], Layers.update

    def recorded(self: Any, *arguments: Any, **more: Any) -> Any:
        found = update(self, *arguments, **more)
        updated.append(found[0].untyped_storage().data_ptr())
        return found

    monkeypatch.setattr(cpu_attn, "forward", seen)
    monkeypatch.setattr(Layers, "update", recorded)
    by(
        "attnreg",
        model,
        lambda model: model.generate(**inputs, max_new_tokens=4, do_sample=False, cache_implementation=cache),
    )
    assert places == updated
    assert len(places) == 4 * models.LAYERS


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("make", [models.llama, models.gemma2, models.gpt_oss])
def test_of_a_mask_the_host_sees_a_few_numbers_a_token(
    make: Callable[[], Any], cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make(), tokens(7, 3)
    masks_read: list[MaskSource] = []
    for name in ("_padding", "dense"):
        read = getattr(MaskSource, name)
        monkeypatch.setattr(MaskSource, name, lambda self, read=read: masks_read.append(self) or read(self))
    greedy: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    found = by("attnreg", model, lambda model: model.generate(**inputs, **greedy))
    # queries of padding are in the prompt alone
    assert {source.queries for source in masks_read} == {7}
    assert torch.equal(found, by("eager", model, lambda model: model.generate(**inputs, **greedy)))


# transformers 5.18 passes its mask of chunks an argument that the mask does not take
STATIC = pytest.mark.skipif(
    "block_sequence_ids" in inspect.signature(masking_utils.create_masks_for_generate).parameters
    and "block_sequence_ids" not in inspect.signature(masking_utils.create_chunked_causal_mask).parameters,
    reason="this transformers makes no mask of chunks for a static cache",
)


@pytest.mark.parametrize("cache", [None, pytest.param("static", marks=STATIC)], ids=["dynamic", "static"])
def test_tokens_in_chunks_are_one_layer(cache: str | None) -> None:
    model, inputs = models.llama4(), tokens(13, 9)
    greedy: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": cache}
    expected, found = (
        by(name, model, lambda model: model.generate(**inputs, **greedy)) for name in ("eager", "attnreg")
    )
    assert torch.equal(found, expected)
    # the prompt has chunks, which no batch can say; a token sees the last keys
    runs = [(run.layer_idx, run.backend, run.asked.window, run.calls) for run in attention.runs(model)]
    assert runs == [(0, None, None, 1), (0, "CPU_ATTN", None, 23), (1, "CPU_ATTN", None, 24)]


def test_what_a_call_depends_on_is_seen(looked_at: list[Any]) -> None:
    torch.manual_seed(3)
    layer = Layer()
    layer.num_key_value_groups = 2
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 6, 16), torch.randn(2, 2, 6, 16)
    rows: dict[str, Any] = {"q_length": 1, "kv_length": 6, "q_offset": 5}
    more: list[dict[str, Any]] = [
        {}, {"scaling": 0.5}, {"scaling": 1}, {"scaling": torch.tensor(0.25)}, {"softcap": 3.0},
        {"s_aux": torch.ones(4)},
    ]  # fmt: skip
    with torch.no_grad():
        first = [attend(layer, q, k, v, lazy_mask(2, **rows), **one) for one in more]
        seen = len(looked_at)
        again = [attend(layer, q, k, v, lazy_mask(2, **rows), **one) for one in more]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(not torch.equal(a, first[0]) for a in first[1:3] + first[4:])
        # 0.25 is the default, and a tensor is read anew
        assert torch.equal(first[3], first[0])
        assert len(looked_at) - seen == 1
        with pytest.raises(UnclaimedError, match="scaling is True; expected a number"):
            attend(layer, q, k, v, lazy_mask(2, **rows), scaling=True)
        # a window, padding, other sinks
        for mask, sees in (
            (lazy_mask(2, **rows, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])), 2),
            (lazy_mask(2, **rows), 0),
        ):
            hidden = torch.ones(2, 1, 1, 6, dtype=torch.bool)
            hidden[1, ..., :sees] = False
            expected = attend(layer, q, k, v, hidden, by="sdpa")
            torch.testing.assert_close(attend(layer, q, k, v, mask), expected, atol=1e-6, rtol=1e-6)
        sinks = torch.full((4,), 2.0)
        assert not torch.equal(attend(layer, q, k, v, lazy_mask(2, **rows), s_aux=sinks), first[5])
        # and what is unknown is refused, whatever was found before
        with pytest.raises(UnclaimedError, match="passes alibi to its attention"):
            attend(layer, q, k, v, lazy_mask(2, **rows), alibi=torch.ones(4))


def test_a_module_that_is_changed_is_looked_at_again() -> None:
    torch.manual_seed(3)
    layer = Layer()
    layer.num_key_value_groups = 2
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
    with torch.no_grad():
        for causal in (True, False, True):
            layer.is_causal = causal
            found = attend(layer, q[:, :, :1], k, v)
            torch.testing.assert_close(found, attend(layer, q[:, :, :1], k, v, by="sdpa"), atol=1e-6, rtol=1e-6)
            found = attend(layer, q, k, v, is_causal=causal)
            torch.testing.assert_close(found, attend(layer, q, k, v, by="sdpa", is_causal=causal), atol=1e-6, rtol=1e-6)
    kinds = {(run.asked.request.attn_type, run.asked.window) for run in attention.runs(layer)}
    assert kinds == {("decoder", None), ("encoder_only", None), ("encoder_decoder", None)}


def test_an_attribute_beside_an_argument_is_seen() -> None:
    torch.manual_seed(3)
    layer = Layer()
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)
    with torch.no_grad():
        for causal in (True, False):
            layer.is_causal = causal
            attend(layer, q, k, v, is_causal=False)
    assert {run.asked.request.attn_type for run in attention.runs(layer)} == {"decoder", "encoder_decoder"}


def test_numbers_are_refused_after_calls_with_equal_ones() -> None:
    layer, mask = Layer(), lazy_mask(1, 1, 6, q_offset=5)
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)
    with torch.no_grad():
        for name, value in (("scaling", 1), ("sliding_window", 1), ("softcap", 1)):
            for _ in range(2):
                attend(layer, q, k, v, mask, **{name: value})
            with pytest.raises(UnclaimedError, match=f"{name} is True"):
                attend(layer, q, k, v, mask, **{name: True})


def test_a_scale_that_changes_in_place_is_read_anew() -> None:
    layer, scale = Layer(), torch.tensor(0.25)
    q, k, v = torch.randn(2, 1, 4, 1, 16)[0], torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)
    with torch.no_grad():
        for value in (0.25, 0.5, 1.0):
            scale.fill_(value)
            for mask in (None, lazy_mask(1, 1, 6, q_offset=5)):
                expected = attend(layer, q, k, v, by="sdpa", scaling=value)
                found = attend(layer, q, k, v, mask, scaling=scale)
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_a_mask_is_for_its_own_numbers_of_queries_and_keys() -> None:
    torch.manual_seed(3)
    layer, mask = Layer(), lazy_mask(1, 1, 6, q_offset=5)
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)
    with torch.no_grad():
        for _ in range(2):
            attend(layer, q, k, v, mask)
        # the mask has one query, which stands for each, and six keys
        queries = torch.randn(1, 4, 2, 16)
        expected = attend(layer, queries, k, v, torch.ones(1, 1, 2, 6, dtype=torch.bool), by="sdpa")
        torch.testing.assert_close(attend(layer, queries, k, v, mask), expected, atol=1e-6, rtol=1e-6)
        with pytest.raises(UnclaimedError, match="attention_mask of Layer is"):
            attend(layer, q, k[:, :, :4], v[:, :, :4], mask)


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda run, q: torch.func.vmap(run)(q[None]),
    "jvp": lambda run, q: torch.func.jvp(run, (q,), (q,)),
    "make_fx": lambda run, q: make_fx(run)(q),
    "functionalize": lambda run, q: torch.func.functionalize(run)(q),
    "jit": lambda run, q: torch.jit.trace(run, (q,), check_trace=False),
}


# of torch.jit
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused_after_known_calls(transform: str, masked: bool) -> None:
    layer, mask = Layer(), lazy_mask(1, 1, 6, q_offset=5) if masked else None
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)

    def run(query: Tensor) -> Tensor:
        return attend(layer, query, k, v, mask)

    with torch.no_grad():
        for _ in range(3):
            run(q)
        with pytest.raises(UnclaimedError, match=r"transform|tracer|memory|forward mode"):
            TRANSFORMS[transform](run, q)


def test_many_lengths_without_a_mask_are_right() -> None:
    torch.manual_seed(3)
    layer = Layer()
    with torch.no_grad():
        for keys in [*range(2, 72), *range(2, 8)]:
            q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 4, keys, 16), torch.randn(1, 4, keys, 16)
            found, expected = (attend(layer, q, k, v, by=name) for name in ("attnreg", "sdpa"))
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert [run.calls for run in attention.runs(layer)] == [76]


def test_gradients_are_refused_the_second_time_too() -> None:
    layer, q = Layer(), torch.randn(1, 4, 3, 16, requires_grad=True)
    for _ in range(2):
        out = attend(layer, q, q, q, lazy_mask(1, 3, 3))
        with pytest.raises(RuntimeError, match="attnreg computes no gradients"):
            out.sum().backward()


def test_a_longer_prompt_after_tokens() -> None:
    model, inputs = models.llama(), tokens(9, 4)
    expected = by("eager", model, lambda model: model(**inputs).logits)
    for _ in range(2):
        by("attnreg", model, lambda model: model.generate(**tokens(5), max_new_tokens=3, do_sample=False))
        found = by("attnreg", model, lambda model: model(**inputs).logits)
        rows = inputs["attention_mask"].bool()
        close(found[rows], expected[rows])
