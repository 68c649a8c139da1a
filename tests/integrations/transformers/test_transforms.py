"""Transforms and tracers of PyTorch, which see no kernel: their calls are refused, and by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.transformers_calls import Layer
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface

import attnreg.integrations.transformers as attention
from attnreg import UnclaimedError

# of PyTorch's own transforms and of torch.jit
pytestmark = pytest.mark.filterwarnings("ignore")
IDS, PADDING = torch.arange(3, 12)[None], torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        out: Tensor = self.model(ids, attention_mask=padding, use_cache=False).logits
        return out


def export(run: Logits, strict: bool = False) -> Any:
    return torch.export.export(run, (IDS,), strict=strict)


def fake(run: Logits) -> Any:
    run = copy.deepcopy(run)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return run(mode.from_tensor(IDS))


def by_weights(transform: Any) -> Callable[[Logits], Any]:
    def transformed(run: Logits) -> Any:
        weights = dict(run.named_parameters())
        return transform(lambda w: torch.func.functional_call(run, w, (IDS,)).sum(), weights)

    return transformed


def ensemble(run: Logits) -> Any:
    weights = {name: torch.stack([x, x]) for name, x in run.named_parameters()}
    return torch.func.vmap(lambda w: torch.func.functional_call(run, w, (IDS,)))(weights)


TRANSFORMS: dict[str, Callable[[Logits], Any]] = {
    "grad": by_weights(lambda f, weights: torch.func.grad(f)(weights)),
    "vjp": by_weights(lambda f, weights: torch.func.vjp(f, weights)),
    "jacrev": by_weights(lambda f, weights: torch.func.jacrev(f)(weights)),
    "functionalize": lambda run: torch.func.functionalize(run)(IDS),
    "vmap": lambda run: torch.func.vmap(lambda ids: run(ids[None]))(IDS.repeat(2, 1)),
    "vmap of padding": lambda run: torch.func.vmap(lambda mask: run(IDS, mask[None]))(PADDING.repeat(2, 1)),
    "vmap of weights": ensemble,
    "export": export,
    "export of padding": lambda run: torch.export.export(run, (IDS, PADDING), strict=False),
    "FakeTensorMode": fake,
    "torch.jit.trace": lambda run: torch.jit.trace(run, (IDS,), check_trace=False),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("make", [models.llama, models.deepseek_v3])
@pytest.mark.parametrize("grad", [True, False])
def test_a_transformed_model_is_refused(make: Callable[[], Any], transform: str, grad: bool) -> None:
    model = make()
    model.set_attn_implementation("attnreg")
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(UnclaimedError, match=r'use attn_implementation="eager" or "sdpa"'),
    ):
        TRANSFORMS[transform](Logits(model))
    # and the model is as ever
    with torch.no_grad():
        model(IDS)
    assert attention.runs(model)


def test_a_strict_export_names_the_cure() -> None:
    model = models.llama()
    model.set_attn_implementation("attnreg")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="export with eager or sdpa"):
        export(Logits(model), strict=True)


def test_a_function_of_a_model_that_is_not_transformed_runs() -> None:
    model = models.llama()
    model.set_attn_implementation("attnreg")
    with torch.no_grad():
        expected = model(IDS).logits.sum()
        found = torch.func.vmap(lambda x: x * model(IDS).logits.sum())(torch.ones(2))
    torch.testing.assert_close(found, expected.repeat(2))


GIVEN: dict[str, Tensor] = {
    "query": torch.randn(1, 4, 3, 16),
    "key": torch.randn(1, 2, 3, 16),
    "value": torch.randn(1, 2, 3, 16),
    "attention_mask": torch.zeros(1, 1, 3, 3),
    "position_bias": torch.zeros(1, 4, 3, 3),
    "s_aux": torch.zeros(4),
}


class Wrapper(Tensor):
    """A subclass whose memory is that of another tensor, as DTensor's."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[x.inner if isinstance(x, Wrapper) else x for x in args], **(kwargs or {}))


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("wrap", ["vmap", "a subclass"])
def test_an_argument_that_alone_is_wrapped_is_refused(name: str, wrap: str) -> None:
    attend = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]

    def run(x: Tensor) -> Tensor:
        # a bias is no call with sinks
        own = {n: v for n, v in GIVEN.items() if n in ("query", "key", "value") or n == name}
        out: Tensor = attend(Layer(), **{"attention_mask": None, **own, name: x}, is_causal=True)[0]
        return out

    with torch.no_grad(), pytest.raises(UnclaimedError, match="has no memory of its own"):
        torch.func.vmap(run)(GIVEN[name].repeat(2, *[1] * GIVEN[name].ndim)) if wrap == "vmap" else run(
            Wrapper(GIVEN[name])
        )


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_tracer_that_sees_operations_alone_is_refused_without_a_mask(pre_dispatch: bool) -> None:
    # its tensors are real ones, and its graph would hold an output that nothing computes
    attend = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]
    query, key = GIVEN["query"], GIVEN["key"]
    with torch.no_grad(), pytest.raises(UnclaimedError, match="records this call, and sees no kernel"):
        make_fx(lambda query: attend(Layer(), query, key, key, None, is_causal=True)[0], pre_dispatch=pre_dispatch)(
            query
        )
