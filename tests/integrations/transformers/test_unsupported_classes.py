"""Classes that compute attention by themselves, and queries that are padding: no number differs in silence."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import attnreg.integrations.transformers as attention
from attnreg import Registry, UnclaimedError

TINY: dict[str, Any] = {"vocab_size": 100, "hidden_size": 64, "initializer_range": 0.3}
OUTSIDE: dict[str, Any] = {
    "Bloom": (transformers.BloomForCausalLM, transformers.BloomConfig(n_layer=2, n_head=4, **TINY)),
    "MPT": (transformers.MptForCausalLM, transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=100)),
    # these look the name up in a table of their own
    "Falcon": (
        transformers.FalconForCausalLM,
        transformers.FalconConfig(num_hidden_layers=2, num_attention_heads=4, **TINY),
    ),
    # its module has layers on the interface too
    "GIT": (
        transformers.GitForCausalLM,
        transformers.GitConfig(
            vision_config={
                "hidden_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "intermediate_size": 64,
            },
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            **TINY,
        ),
    ),
}


class Heir(transformers.BloomForCausalLM):  # type: ignore[misc]
    """A class whose own module has no attention."""


OUTSIDE["a class that inherits"] = Heir, OUTSIDE["Bloom"][1]
GPT_J = (
    transformers.GPTJForCausalLM,
    transformers.GPTJConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, vocab_size=100),
)
INSIDE = Version(transformers.__version__) >= Version("5.24")
OUTSIDE |= {} if INSIDE else {"GPT-J": GPT_J}


@pytest.mark.parametrize(("cls", "config"), OUTSIDE.values(), ids=OUTSIDE)
def test_a_class_outside_the_interface_runs_by_its_own_code_and_says_so(
    cls: Any, config: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnreg.integrations.transformers.unsupported_classes._told", set())
    torch.manual_seed(0)
    eager = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with caplog.at_level(logging.WARNING, "attnreg.integrations.transformers"):
        ours = cls._from_config(copy.deepcopy(config), attn_implementation="attnreg").eval()
    assert "computes attention by itself, outside transformers' attention interface" in caplog.text
    ours.load_state_dict(eager.state_dict())
    ids = torch.arange(3, 15)[None].expand(2, -1)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    with torch.no_grad():
        found, expected = (m(input_ids=ids, attention_mask=mask).logits for m in (ours, eager))
    assert torch.equal(found[mask.bool()], expected[mask.bool()])
    assert attention.runs(ours) == ()
    # and no backend is named for layers that it does not run
    text = attention.explanation(ours)
    assert f"note: {cls.__name__}" in text
    assert " runs by attn_implementation 'eager'" in text
    assert "CPU_ATTN" not in text


@pytest.mark.skipif(not INSIDE, reason="GPT-J is outside the interface before transformers 5.24")
def test_a_class_that_came_inside_is_served() -> None:
    cls, config = GPT_J
    model = randomised(cls._from_config(copy.deepcopy(config), attn_implementation="eager"))
    ids = torch.arange(3, 15)[None].expand(2, -1)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    found = []
    for name in ("eager", "attnreg"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append(model(input_ids=ids, attention_mask=mask).logits[mask.bool()])
    assert torch.allclose(*found, atol=2e-5 * float(found[0].abs().max()))
    assert {run.backend for run in attention.runs(model)} == {"CPU_ATTN"}


def test_without_dense_attention_such_a_class_is_refused(default: Registry) -> None:
    attention.register(registry=default, dense=False)
    cls, config = OUTSIDE["Bloom"]
    with pytest.raises(UnclaimedError, match=r"Bloom.* computes attention by itself, .*load it with .eager."):
        cls._from_config(copy.deepcopy(config), attn_implementation="attnreg")


def randomised(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


ENCODER: dict[str, Any] = {"vocab_size": 120, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "config", "side"),
    [
        (transformers.SiglipTextModel, transformers.SiglipTextConfig(**ENCODER), "right"),
        (transformers.CLIPTextModel, transformers.CLIPTextConfig(**ENCODER, eos_token_id=2), "right"),
        (transformers.BertModel, transformers.BertConfig(**ENCODER), "right"),
        (transformers.BertModel, transformers.BertConfig(**ENCODER), "left"),
    ],
    ids=["SigLIP, pooled at the last position", "CLIP, all states", "BERT", "BERT, pooled at padding"],
)
def test_queries_that_are_padding_are_what_pytorchs_attention_makes_of_them(cls: Any, config: Any, side: str) -> None:
    model = randomised(cls._from_config(config, attn_implementation="eager"))
    ids = torch.randint(5, 110, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, slice(5, None) if side == "right" else slice(None, 11)] = 0
    outputs = []
    for name in ("sdpa", "attnreg"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            outputs.append(model(input_ids=ids, attention_mask=mask))
    for theirs, ours in zip(*(o.to_tuple() for o in outputs), strict=True):
        assert torch.allclose(theirs, ours, atol=2e-5 * float(theirs.abs().max()))
