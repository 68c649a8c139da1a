"""A model that is asked for attention weights refuses, whichever way it is asked and whatever it would have done."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from attnreg import UnclaimedError

IDS = torch.arange(5, 15).view(2, 5)
SMALL: dict[str, Any] = {"vocab_size": 100, "pad_token_id": 0}
# gpt2 and bart collect what their attention modules return; llama passes the argument on to attention
MAKERS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **SMALL, **more
    ),
    "gpt2": lambda **more: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, **SMALL, **more),
    "bart": lambda **more: transformers.BartConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, **SMALL, **more
    ),
}  # fmt: skip
SAID = r"is asked for attention weights \(output_attentions\), and attnreg computes none"


def made(name: str, implementation: str = "attnreg", **more: Any) -> Any:
    config = MAKERS[name](**more)
    return transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()


def number_of_weights(found: Any) -> int:
    return sum(isinstance(x, Tensor) for key in found if "attentions" in key for x in found[key] or ())


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_weights_are_refused_by_the_model_and_its_copies(name: str, again: Callable[[Any], Any]) -> None:
    for model in (made(name), again(made(name))):
        with pytest.raises(UnclaimedError, match=SAID):
            model(IDS, output_attentions=True)
        assert number_of_weights(model(IDS, output_attentions=False)) == 0


def test_weights_are_refused_however_they_are_asked_for() -> None:
    model = made("gpt2")
    model.config._output_attentions = True
    with pytest.raises(UnclaimedError, match=SAID):
        model(IDS)
    with pytest.raises(UnclaimedError, match=SAID):
        made("gpt2", output_attentions=True)(IDS)
    with pytest.raises(UnclaimedError, match="output_cross_attentions"):
        made("gpt2")(IDS, output_cross_attentions=1)
    with pytest.raises(UnclaimedError, match=SAID):
        Positional._from_config(MAKERS["gpt2"](), attn_implementation="attnreg")(IDS, True)


class Positional(transformers.GPT2Model):  # type: ignore[misc]
    """A class whose callers may name nothing."""

    def forward(self, input_ids: Tensor, output_attentions: bool = False) -> Any:
        return super().forward(input_ids, output_attentions=output_attentions)


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_that_is_switched_to_eager_gives_weights_and_refuses_again_when_switched_back(name: str) -> None:
    model = made(name, "eager")
    given = number_of_weights(model(IDS, output_attentions=True))
    assert given >= 2
    for _ in range(2):
        model.set_attn_implementation("attnreg")
        with pytest.raises(UnclaimedError, match=SAID):
            model(IDS, output_attentions=True)
        model.set_attn_implementation("eager")
        assert number_of_weights(model(IDS, output_attentions=True)) == given


@torch.no_grad()
def test_a_compiled_model_refuses_too() -> None:
    model = torch.compile(made("gpt2"), backend="eager")
    torch.testing.assert_close(model(IDS)[0], model._orig_mod(IDS)[0])
    with pytest.raises(UnclaimedError, match=SAID):
        model(IDS, output_attentions=True)
