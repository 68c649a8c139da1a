"""Layers that repeat the call of the layer before them: by TRITON_ATTN in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.small_models import by, tokens
from support.models.transformers_calls import Layer
from torch import Tensor
from torch.autograd import forward_ad
from transformers import AttentionInterface
from transformers import masking_utils as theirs

import attnreg.integrations.transformers as attention
from attnreg import Platform, Registry
from attnreg.integrations.transformers import engine
from attnreg.integrations.transformers.masks import lazy_mask
from attnreg.kernels import triton_attn
from attnreg.runtime.interface import Call, UnclaimedError
from attnreg.selection.selector import evaluate

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def triton(registered: None, default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    # the interpreter stands for a device that this machine may lack
    monkeypatch.setattr(engine, "evaluate", lambda *given, unloadable: evaluate(*given))
    attention.register(registry=default, platform=Platform(platform="cuda", arch="sm80"), backend="TRITON_ATTN")


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls that were not repeated."""
    calls: list[Call] = []

    def recorded(made: Any) -> Any:
        return lambda plan, call: calls.append(call) or made(plan, call)

    for name in ("run", "repeat"):
        monkeypatch.setattr(triton_attn.TritonPlan, name, recorded(getattr(triton_attn.TritonPlan, name)))
    return calls


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    ("make", "kinds"), [(models.llama, 1), (models.gemma2, 2), (models.gpt_oss, 2)], ids=["alike", "in turn", "sinks"]
)
def test_one_layer_of_a_kind_is_looked_at(
    make: Callable[..., Any], kinds: int, cache: str | None, looked_at: list[Call]
) -> None:
    model, inputs = make(head_dim=32), tokens(7, 3)
    greedy: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
    found = by("attnreg", model, lambda model: model.generate(**inputs, **greedy))
    # the prompt has rows of padding, which no call repeats
    assert len(looked_at) == models.LAYERS + 4 * kinds
    assert torch.equal(found, by("eager", model, lambda model: model.generate(**inputs, **greedy)))


def test_a_call_that_is_not_alike_is_looked_at(looked_at: list[Call]) -> None:
    torch.manual_seed(3)
    layers = [Layer() for _ in range(2)]
    for layer in layers:
        layer.num_key_value_groups = 2
    attend, expect = (AttentionInterface()[name] for name in ("attnreg", "sdpa"))  # type: ignore[no-untyped-call]
    mask = lazy_mask(2, 1, 6, q_offset=5)

    def tensors(heads_last: bool = False, size: int = 32) -> list[Tensor]:
        q, k, v = torch.randn(2, 4, 1, size), torch.randn(2, 2, 6, size), torch.randn(2, 2, 6, size)
        return [q, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))] if heads_last else [q, k, v]

    again = [tensors() for _ in range(3)]
    rows: list[tuple[list[Tensor], dict[str, Any], int]] = [
        (again[0], {}, 1), (again[1], {}, 0), (again[2], {}, 0),
        # other strides, other sizes, a scale, memory that is not aligned, and the first once more
        (tensors(heads_last=True), {}, 1), (tensors(size=64), {}, 1), (tensors(), {"scaling": 0.5}, 1),
        ([torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in tensors()], {"scaling": 0.5}, 0),
        (again[0], {}, 1), (again[1], {}, 0),
        # the first keys of a longer cache: the same sizes, and other places
        ([tensors()[0], *torch.randn(2, 2, 2, 9, 32)[:, :, :, :6]], {}, 1), (again[2], {}, 1), (again[1], {}, 0),
        # what autograd records is looked at in full, and computed alike
        ([x.clone().requires_grad_() for x in again[0]], {}, 1), (again[1], {}, 1),
    ]  # fmt: skip
    with torch.no_grad():
        for i, (given, more, calls) in enumerate(rows):
            before = len(looked_at)
            found = attend(layers[i % 2], *given, mask, **more)[0]
            assert len(looked_at) - before == calls, i
            expected = expect(layers[i % 2], *given, None, **more)[0]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# PyTorch loads its rules for derivatives by torch.jit
@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
def test_derivatives_are_refused_after_repeated_calls(place: int, looked_at: list[Call]) -> None:
    layer, mask = Layer(), lazy_mask(1, 1, 6, q_offset=5)
    attend = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]

    def tensors() -> list[Tensor]:
        return [torch.randn(1, 4, 1, 32), torch.randn(1, 4, 6, 32), torch.randn(1, 4, 6, 32)]

    def repeats() -> None:
        with torch.no_grad():
            for _ in range(3):
                before = len(looked_at)
                attend(layer, *tensors(), mask)
        assert len(looked_at) == before

    for _ in range(2):
        repeats()
        given = tensors()
        given[place].requires_grad_()
        with pytest.raises(RuntimeError, match="attnreg computes no gradients"):
            attend(layer, *given, mask)[0].sum().backward()
        with torch.no_grad(), forward_ad.dual_level():
            given = tensors()
            given[place] = forward_ad.make_dual(given[place], torch.ones_like(given[place]))
            with pytest.raises(UnclaimedError, match="no derivatives in forward mode"):
                attend(layer, *given, mask)


def test_a_scale_is_repeated_with_its_type(looked_at: list[Call]) -> None:
    layer, mask = Layer(), lazy_mask(1, 1, 6, q_offset=5)
    attend = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]
    given = torch.randn(1, 4, 1, 32), torch.randn(1, 4, 6, 32), torch.randn(1, 4, 6, 32)
    with torch.no_grad():
        for _ in range(3):
            before = len(looked_at)
            attend(layer, *given, mask, scaling=1)
        assert len(looked_at) == before
        # equal to 1, and no number
        with pytest.raises(UnclaimedError, match="scaling is True; expected a number"):
            attend(layer, *given, mask, scaling=True)


def test_a_window_of_another_call_is_not_repeated() -> None:
    torch.manual_seed(3)
    layers = [Layer() for _ in range(3)]
    attend, expect = (AttentionInterface()[name] for name in ("attnreg", "sdpa"))  # type: ignore[no-untyped-call]
    rows: dict[str, Any] = {"kv_length": 6, "q_offset": 5}
    whole, narrow = (
        lazy_mask(1, 1, **rows),
        lazy_mask(1, 1, **rows, mask_function=theirs.sliding_window_causal_mask_function(3)),
    )
    hidden = torch.tensor([[[[False, False, False, True, True, True]]]])
    with torch.no_grad():
        # one layer has seen both masks, of which others have run those of its kind
        for mask, seen in ((whole, None), (narrow, hidden), (whole, None), (narrow, hidden)):
            for layer in layers:
                given = torch.randn(1, 4, 1, 32), torch.randn(1, 4, 6, 32), torch.randn(1, 4, 6, 32)
                expected = expect(layer, *given, seen)[0]
                torch.testing.assert_close(attend(layer, *given, mask)[0], expected, atol=1e-5, rtol=1e-5)
