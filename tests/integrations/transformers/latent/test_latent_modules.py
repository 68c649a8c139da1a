"""What keeps a module expanded, so that no change of its kv_b_proj is missed; and weights that change after a call."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.models.latent_models import BOTH, EXPANDED, MODELS, attentions, both, phases, v3, v32
from support.models.small_models import by, close, tokens
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attnreg.integrations.transformers as attention
from attnreg import Registry, load_registry
from attnreg.integrations.transformers.forms.releases import CACHE
from attnreg.runtime.interface import UnclaimedError

IDS = tokens(12)["input_ids"]


def stepwise(model: Any) -> Tensor:
    """The logits of a prompt and of two tokens after it."""
    cache = DynamicCache(config=model.config)
    parts = ((0, 10), (10, 11), (11, 12))
    return torch.cat([model(IDS[:, a:b], **{CACHE: cache}).logits for a, b in parts], 1)


def explained(model: Any) -> str:
    """The explanation of a model on one line."""
    return " ".join(attention.explanation(model).split())


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank beside it, as PEFT wraps one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(4, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, 4) * 0.3)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


class Quantised(Adapted):
    """A linear layer whose weight is stored as bytes."""

    @property
    def weight(self) -> Tensor:
        return (self.base_layer.weight * 16).to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) / 16).T


class Halved(nn.Linear):
    """A linear layer whose class computes otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def replaced(make: Callable[[nn.Linear], nn.Module]) -> Callable[[nn.Module], None]:
    def change(module: Any) -> None:
        module.kv_b_proj = make(module.kv_b_proj)

    return change


def halved(linear: nn.Linear) -> nn.Module:
    made = Halved(linear.in_features, linear.out_features, bias=False)
    made.weight = linear.weight
    return made


def biased(module: Any) -> None:
    module.kv_b_proj.bias = nn.Parameter(torch.randn(module.kv_b_proj.out_features))


def hooked(module: Any) -> None:
    module.kv_b_proj.register_forward_hook(lambda module, args, out: out * 0.5)


def hooked_before(module: Any) -> None:
    module.kv_b_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def replaced_forward(module: Any) -> None:
    # as accelerate does
    forward = module.kv_b_proj.forward
    module.kv_b_proj.forward = lambda x: forward(x) * 0.5


def parametrized(module: Any) -> None:
    nn.utils.parametrizations.orthogonal(module.kv_b_proj)


def pruned(module: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(module.kv_b_proj, "weight", amount=0.5)


def other_method(module: Any) -> None:
    def expand_kv(self: Any, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        key, value = kind.expand_kv(self, latent, rope)
        return key, value * 2

    kind = type(module)
    module.__class__ = type("Other", (kind,), {"expand_kv": expand_kv})


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "adapter": (replaced(Adapted), "Adapted, whose weight attnreg does not read"),
    "quantised": (replaced(Quantised), "Quantised, whose weight attnreg does not read"),
    "subclass": (replaced(halved), "Halved, whose weight attnreg does not read"),
    "bias": (biased, "its kv_b_proj has a bias"),
    "hook": (hooked, "hooks run with its kv_b_proj"),
    "hook before": (hooked_before, "hooks run with its kv_b_proj"),
    "forward replaced": (replaced_forward, "hooks run with its kv_b_proj"),
    "parametrized": (parametrized, "ParametrizedLinear, whose weight attnreg does not read"),
    "pruned": (pruned, "hooks run with its kv_b_proj"),
}


@pytest.mark.parametrize("after", [False, True], ids=["at first", "after a call"])
@pytest.mark.parametrize(("change", "why"), CHANGES.values(), ids=list(CHANGES))
def test_what_its_call_does_besides_keeps_a_module_expanded(
    change: Callable[[Any], None], why: str, after: bool
) -> None:
    model = v3()
    if after:
        both(model, stepwise)
        attention.register()
    for module in attentions(model):
        change(module)
    expected, found = both(model, stepwise)
    close(found, expected)
    assert phases(model) == EXPANDED
    told = explained(model)
    assert (
        f"layers 0–1: keys are expanded from their latents, because its kv_b_proj is a {__name__}" in told
        or why in told
    )
    assert why.split(",")[0] in told.replace(" ", "").replace("", "") or why in told
    attention.register(latent=True)
    with pytest.raises(UnclaimedError, match="its keys would be expanded from their latents, because "):
        both(model, stepwise)


def test_a_method_that_computes_something_else() -> None:
    model = v3()
    for module in attentions(model):
        other_method(module)
    expected, found = both(model, stepwise)
    close(found, expected)


def test_the_method_of_a_class_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = v3()
    kind: Any = type(attentions(model)[0])
    # attnreg's method may be there already, of another test's model
    original = inspect.unwrap(kind.expand_kv)

    def expand_kv(self: Any, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        key, value = original(self, latent, rope)
        return key, value * 1.01

    monkeypatch.setattr(kind, "expand_kv", expand_kv)
    # as attnreg finds it in a class of a version to come
    model.set_attn_implementation("eager")
    model.set_attn_implementation("attnreg")
    assert kind.expand_kv is not expand_kv
    expected, found = both(model, stepwise)
    close(found, expected)
    assert phases(model) == EXPANDED
    assert "its expand_kv computes other keys than kv_b_proj of the latents" in explained(model)


def test_a_class_that_expands_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # as transformers did before it cached latents
    model = v3()
    kind: Any = type(attentions(model)[0])
    with torch.no_grad():
        expected = by("eager", model, stepwise)
    monkeypatch.setattr(kind, "expand_kv", inspect.unwrap(vars(kind)["expand_kv"]))
    # no model is built or set after that
    model.config._attn_implementation = "attnreg"
    with torch.no_grad():
        close(stepwise(model), expected)
    assert phases(model) == EXPANDED
    assert "they come expanded: its cache holds every head's, or no expand_kv made them" in explained(model)
    attention.register(latent=True)
    with torch.no_grad(), pytest.raises(UnclaimedError, match="they come expanded"):
        stepwise(model)


def reads(self: Any, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    key, value = type(self).__mro__[1].expand_kv(self, latent, rope)  # type: ignore[attr-defined]
    return key, value.mul_(2)


def test_an_operation_between_the_method_and_attention() -> None:
    # what reads lazy keys gets the expanded ones, and may write into them
    model = v3()
    for module in attentions(model):
        kind = type(module)
        module.__class__ = type("Reading", (kind,), {"expand_kv": reads})
    expected, found = both(model, stepwise)
    close(found, expected)
    assert phases(model) == EXPANDED


@pytest.mark.parametrize("make", [v3, v32])
def test_weights_that_change_after_a_call(make: Callable[..., Any]) -> None:
    attention.register(latent=True)
    other = make()
    with torch.no_grad():
        for module in attentions(other):
            module.kv_b_proj.weight.mul_(-1.5)
    weights = other.state_dict()
    expected, _ = both(other, stepwise)
    for load in (
        lambda model: model.load_state_dict(weights),
        lambda model: model.load_state_dict(copy.deepcopy(weights), assign=True),
        lambda model: [a.kv_b_proj.weight.data.mul_(-1.5) for a in attentions(model)],
        lambda model: [
            setattr(module, "kv_b_proj", source.kv_b_proj)
            for module, source in zip(attentions(model), attentions(other), strict=True)
        ],
    ):
        model = make()
        both(model, stepwise)
        load(model)
        close(both(model, stepwise)[1], expected)


def _weight_in_place(module: Any) -> None:
    module.kv_b_proj.weight.data.mul_(-1.5)


def _weight_elsewhere(module: Any) -> None:
    # as a model that is moved gets it
    module.kv_b_proj.weight.data = module.kv_b_proj.weight.data * -1.5


def _weight_anew(module: Any) -> None:
    module.kv_b_proj.weight = nn.Parameter(module.kv_b_proj.weight * -1.5)


def _weight_apart(module: Any) -> None:
    weight = module.kv_b_proj.weight
    weight.data = weight.data.mul(-1.5).t().contiguous().t()


def _linear_anew(module: Any) -> None:
    linear = nn.Linear(module.kv_b_proj.in_features, module.kv_b_proj.out_features, bias=False)
    linear.load_state_dict(module.kv_b_proj.state_dict())
    module.kv_b_proj = linear
    _weight_in_place(module)


def _scale(module: Any) -> None:
    module.scaling = 0.3


@pytest.mark.parametrize("make", [v3, v32])
@pytest.mark.parametrize(
    "change",
    [
        _weight_in_place, _weight_elsewhere, _weight_anew, _weight_apart, _linear_anew, _scale, biased, hooked,
        hooked_before, replaced_forward, replaced(Adapted), replaced(Quantised), other_method,
    ],
)  # fmt: skip
def test_what_changes_between_two_tokens(make: Callable[..., Any], change: Callable[[Any], None]) -> None:
    def run(model: Any) -> Tensor:
        model = copy.deepcopy(model)
        cache, logits = DynamicCache(config=model.config), []
        for i, (begin, end) in enumerate(((0, 8), (8, 9), (9, 10), (10, 11), (11, 12))):
            if i == 3:
                torch.manual_seed(0)
                for module in attentions(model):
                    change(module)
            logits.append(model(IDS[:, begin:end], **{CACHE: cache}).logits)
        return torch.cat(logits, 1)

    expected, found = both(make(), run)
    close(found, expected)
    unchanged, _ = both(make(), stepwise)
    assert not torch.allclose(unchanged[:, -1], expected[:, -1], atol=1e-3)


class Other(TorchFunctionMode):
    """Computes other products of linear layers, as an emulation of another format does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.5 if func is nn.functional.linear else out


@pytest.mark.parametrize("how", ["forward", "linear", "mode"])
def test_products_that_something_else_computes_between_two_tokens(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, linear = nn.Linear.forward, nn.functional.linear

    def run(model: Any) -> Tensor:
        cache = DynamicCache(config=model.config)
        first = model(IDS[:, :10], **{CACHE: cache}).logits
        with monkeypatch.context() as patched, Other() if how == "mode" else nullcontext():
            if how == "forward":
                patched.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 1.5)
            elif how == "linear":
                patched.setattr(nn.functional, "linear", lambda *given: linear(*given) * 1.5)
            return torch.cat([first, model(IDS[:, 10:11], **{CACHE: cache}).logits], 1)

    expected, found = both(v3(), run)
    close(found, expected)


@pytest.mark.parametrize("more", [{}, {"softcap": 0.5}, {"sliding_window": 3}], ids=str)
def test_what_a_call_has_beside_one_before_is_looked_at(more: dict[str, Any]) -> None:
    attention.register()
    function = ALL_ATTENTION_FUNCTIONS["attnreg"]

    def last(before: str) -> Tensor:
        """The logits of a token whose calls have more, after others that were computed so."""
        model, cache = v3(), DynamicCache(config=v3().config)
        model.set_attn_implementation(before)
        for begin, end in ((0, 10), (10, 11)):
            model(IDS[:, begin:end], **{CACHE: cache})
        model.set_attn_implementation("attnreg")
        ALL_ATTENTION_FUNCTIONS.register("attnreg", lambda *given, **known: function(*given, **known, **more))
        try:
            logits: Tensor = model(IDS[:, 11:12], **{CACHE: cache}).logits
        finally:
            ALL_ATTENTION_FUNCTIONS.register("attnreg", function)
        return logits

    with torch.no_grad():
        close(last("attnreg"), last("eager"))


def test_a_dtype_that_changes_after_a_call() -> None:
    attention.register(latent=True)
    model = v3(dtype=torch.bfloat16)
    both(model, stepwise)
    model.float()
    expected, found = both(model, stepwise)
    close(found, expected)
    model.double()
    # no backend of attnreg computes in float64, expanded or not
    attention.register()
    with pytest.raises(Exception, match="float64"):
        both(model, stepwise)


def test_sizes_that_are_changed_by_hand() -> None:
    model = v3()
    both(model, stepwise)
    for module in attentions(model):
        module.scaling = 0.3
    expected, found = both(model, stepwise)
    close(found, expected)
    assert 0.3 in {run.asked.scale for run in attention.runs(model)}


def test_autocast() -> None:
    model = MODELS["deepseek_v2"]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = both(model, stepwise)
    assert phases(model) == EXPANDED
    error = float((found.float() - expected.float()).square().mean().sqrt())
    assert error < 0.02 * float(expected.abs().max())
    assert "autocast is on" in explained(model)


def test_gradients_are_refused_and_attention_is_expanded() -> None:
    model = v3()
    model.set_attn_implementation("attnreg")
    out = stepwise(model)
    close(out.detach(), both(model, stepwise)[0])
    assert "it is called with gradients" in explained(model)
    with pytest.raises(RuntimeError, match="attnreg computes no gradients"):
        out.sum().backward()


@pytest.mark.parametrize("trained", ["kv_b_proj", "q_b_proj", "kv_a_layernorm"])
def test_a_gradient_of_one_weight_alone(trained: str) -> None:
    model = v3()
    model.set_attn_implementation("attnreg")
    model.requires_grad_(False)
    getattr(attentions(model)[1], trained).weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="attnreg computes no gradients"):
        stepwise(model).sum().backward()


def test_weights_of_attention_are_refused() -> None:
    with pytest.raises(UnclaimedError, match="output_attentions"):
        both(v3(), lambda model: model(IDS, output_attentions=True))


def test_latents_may_be_turned_off() -> None:
    attention.register(latent=False)
    model = v3()
    expected, found = both(model, stepwise)
    close(found, expected)
    assert phases(model) == EXPANDED
    assert "latents" not in attention.explanation(model)


def test_a_backend_by_name_serves_as_it_can(default: Registry) -> None:
    attention.register(backend="CPU_ATTN")
    model = v3()
    expected, found = both(model, stepwise)
    close(found, expected)
    assert phases(model) == EXPANDED
    # in the latent form prompts too
    attention.register(backend="TORCH_MLA")
    expected, found = both(model, stepwise)
    close(found, expected)
    assert phases(model) == {("mla", "decode")}


def test_a_registry_without_backends_of_mla() -> None:
    deny = {"deny": ["TORCH_MLA", "CPU_MLA"], "because": "not trusted"}
    attention.register(registry=load_registry("default", [{"choices": [deny]}]))
    model = v3()
    expected, found = both(model, stepwise)
    close(found, expected)
    assert phases(model) == EXPANDED
    assert "no backend of MLA serves it in its latent form" in explained(model)


def test_both_phases_are_explained(caplog: pytest.LogCaptureFixture) -> None:
    model = v3()
    model.set_attn_implementation("attnreg")
    before = attention.explanation(model)
    assert "prefill" in before
    assert [before.count(f"▸ {name}") for name in ("TORCH_MLA", "TORCH_PREFILL")] == [1, 1]
    with caplog.at_level(logging.INFO, "attnreg.integrations.transformers"):
        both(model, stepwise)
    assert {"TORCH_MLA", "TORCH_PREFILL"} <= {word for record in caplog.records for word in record.message.split()}
    after = explained(model)
    assert "attention mla · phase prefill" in after
    assert "phase decode · kv_lora_rank 32" in after
    assert "2 calls" in after
    assert phases(model) == BOTH
