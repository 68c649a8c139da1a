"""Arguments that attnreg refuses rather than drop, gradients among them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.models.transformers_calls import Layer, call
from torch import Tensor
from torch.autograd import forward_ad
from transformers import AttentionInterface

import attnreg.integrations.transformers as attention
from attnreg import Platform, Registry, UnclaimedError
from attnreg.integrations.transformers.masks import lazy_mask


@pytest.mark.parametrize(
    "more",
    [
        {"dropout": 0.1},
        {"output_attentions": True},
        {"block_indices": torch.zeros(1)},
        {"logit_cap": 3.0},
        {"bias": torch.zeros(1)},
        {"bias": [torch.zeros(1)]},
        {"window": 3},
        {"window_size": (2, 0)},
        {"use_alibi": True},
        {"temperature": 2},
        {"block_mask": object()},
        {"relative_bias": {"a": 1}},
        {"note": "x"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_may_mean_something_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UnclaimedError, match=next(iter(more))):
        call(**more)


def test_what_means_nothing_passes_and_so_does_what_the_caller_says_means_nothing(default: Registry) -> None:
    position_ids = torch.arange(3)[None]
    assert call(position_ids=position_ids, use_cache=True, softcap=None, note=None).shape == (1, 3, 4, 16)
    attention.register(registry=default, ignore=("logit_cap", "note"))
    assert call(logit_cap=3.0, note="x").shape == (1, 3, 4, 16)


@pytest.mark.parametrize("name", ["indices", "output_attentions", "window", "sinks"])
def test_what_changes_the_result_cannot_be_ignored_and_is_not_offered_to_be(default: Registry, name: str) -> None:
    with pytest.raises(ValueError, match=f"ignore names {name}, which changes what attention computes"):
        attention.register(registry=default, ignore=(name,))
    if name != "indices":
        with pytest.raises(UnclaimedError) as caught:
            call(**{name: torch.ones(4)})
        assert "register(ignore" not in str(caught.value)


def test_a_name_that_transformers_takes_for_a_flash_kernel_is_refused(default: Registry) -> None:
    with pytest.raises(ValueError, match="'my_flash_attnreg' holds `flash`"):
        attention.register("my_flash_attnreg", registry=default)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention", "paged|eager"])
def test_a_name_of_transformers_own_is_refused(default: Registry, name: str) -> None:
    with pytest.raises(ValueError, match=f"the name {re.escape(repr(name))} is taken in transformers"):
        attention.register(name, registry=default)
    attention.register("attnreg", registry=default)


MEANINGLESS: list[tuple[dict[str, Any], str]] = [
    ({"name": 3}, "name is 3; expected a text"),
    ({"name": ""}, "name is ''; expected a text"),
    ({"registry": "default"}, "registry is 'default'; expected a Registry, as load_registry returns it"),
    ({"platform": "cuda"}, "platform is 'cuda'; expected a Platform"),
    ({"platform": Platform(platform="cuda", arch="sm91")}, "sm91"),
    ({"backend": 3}, "backend is 3; expected the name of a backend"),
    ({"backend": "CPU_ATN"}, "unknown backend 'CPU_ATN'; did you mean `CPU_ATTN`"),
    ({"ignore": "grid_thw"}, "ignore is 'grid_thw'; expected names of arguments, such as ('grid_thw',)"),
    ({"ignore": (3,)}, "ignore is (3,); expected names of arguments"),
]


@pytest.mark.parametrize(("given", "message"), MEANINGLESS)
def test_what_means_nothing_is_refused_when_it_is_registered(
    default: Registry, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        attention.register(**{"registry": default, **given})


TRAINED: dict[str, Tensor] = {
    "s_aux": torch.zeros(4),
    "position_bias": torch.zeros(1, 4, 3, 3),
    "sinks": torch.zeros(1, 4, 3, 1),
    "attention_mask": torch.zeros(1, 1, 3, 3),
    "scaling": torch.tensor(0.25),
    "softcap": torch.tensor(9.0),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_gradient_of_another_argument_alone_is_refused_too(name: str) -> None:
    out = call(**{name: TRAINED[name].clone().requires_grad_()})
    with pytest.raises(RuntimeError, match="attnreg computes no gradients"):
        out.sum().backward()


def test_there_is_no_gradient_and_who_asks_for_one_is_told() -> None:
    out = call(train=True)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match="attnreg computes no gradients; train with another attn_implementation"):
        out.sum().backward()


BOOLS, ONES = torch.ones(1, 1, 3, 3, dtype=torch.bool), torch.ones(1, 1, 3, 3)
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": ONES.long()}, r"is torch\.int64 \[1, 1, 3, 3\]; expected bool or float \[1, 4, 3, 3\]"),
    ({"attention_mask": torch.ones(1, 3)}, r"is torch\.float32 \[1, 3\]; expected bool or float \[1, 4, 3, 3\]"),
    ({"attention_mask": torch.ones(1, 1, 3, 5)}, r"is torch\.float32 \[1, 1, 3, 5\]; expected bool or float"),
    ({"attention_mask": {"full_attention": ONES}}, r"is dict; expected bool or float \[1, 4, 3, 3\]"),
    ({"position_bias": BOOLS}, r"is torch\.bool \[1, 1, 3, 3\]; expected float \[1, 4, 3, 3\]"),
    ({"position_bias": [ONES]}, "is list; expected float"),
    ({"s_aux": torch.ones(3)}, r"is torch\.float32 \[3\]; expected float \[4\]"),
    ({"s_aux": 1.0}, "is float; expected float"),
    ({"sinks": torch.ones(4)}, r"is torch\.float32 \[4\]; expected float \[1, 4, 3, 1\]"),
    ({"indices": torch.ones(3, 2).long()}, r"is torch\.int64 \[3, 2\]; expected int \[1, 3, any\]"),
    ({"indices": torch.ones(1, 3, 2).bool()}, r"is torch\.bool \[1, 3, 2\]; expected int"),
    ({"scaling": torch.rand(4)}, r"is of shape \[4\]; expected a number"),
    ({"scaling": "0.5"}, "is '0.5'; expected a number"),
    ({"softcap": True}, "is True; expected a number"),
    ({"sliding_window": 2.5}, r"is 2\.5; expected an integer"),
    ({"sliding_window": (2, 0)}, r"is \(2, 0\); expected an integer"),
]


@pytest.mark.parametrize(("more", "said"), MISFITS, ids=[f"{next(iter(m))} {s}" for m, s in MISFITS])
def test_an_argument_of_another_kind_or_shape_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UnclaimedError, match=f"^{next(iter(more))} (of Layer )?{said}"):
        call(**more)


def test_boundaries_of_sequences_that_the_mask_does_not_tell_apart_are_refused() -> None:
    assert call(cu_seq_lens_q=torch.tensor([0, 3])).shape == (1, 3, 4, 16)
    with pytest.raises(
        UnclaimedError, match="passes cu_seq_lens_q of 2 sequences to its attention, and the mask has 1"
    ):
        call(cu_seq_lens_q=torch.tensor([0, 1, 3]), cu_seq_lens_k=torch.tensor([0, 1, 3]))
    # beside what no batch can express, and under a mask that none can
    sequences = {"cu_seq_lens_q": torch.tensor([0, 1, 3])}
    for more in (
        {"position_bias": torch.zeros(1, 4, 3, 3)},
        {"indices": torch.arange(3).expand(1, 3, -1)},
        {"sinks": torch.zeros(1, 4, 3, 1)},
        {"attention_mask": lazy_mask(1, 3, 3, mask_function=lambda b, h, q, k: (k <= q) & (k != q - 2))},
    ):
        with pytest.raises(UnclaimedError, match="passes cu_seq_lens_q of 2 sequences"):
            call(**sequences, **more)
    apart = lazy_mask(1, 3, 3, mask_function=lambda b, h, q, k: (k <= q) & ((k > 0) == (q > 0)))
    assert call(**sequences, attention_mask=apart).shape == (1, 3, 4, 16)
    with pytest.raises(UnclaimedError, match="passes cu_seq_lens_q of 2 sequences"):
        call(cu_seq_lens_q=torch.tensor([0, 2, 3]), attention_mask=apart)
    # packed position_ids make a mask that does
    assert call(cu_seq_lens_q=torch.tensor([0, 1, 3]), attention_mask=BOOLS.tril()).shape == (1, 3, 4, 16)


def test_layers_that_share_a_mask_compare_boundaries_with_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, compare = [], torch.bucketize
    monkeypatch.setattr(torch, "bucketize", lambda *args, **more: found.append(1) or compare(*args, **more))
    apart = lazy_mask(1, 3, 3, mask_function=lambda b, h, q, k: (k <= q) & ((k > 0) == (q > 0)))
    boundaries = torch.tensor([0, 1, 3])
    for _ in range(3):
        call(cu_seq_lens_q=boundaries, attention_mask=apart)
    assert len(found) == 1


# of torch itself, which compiles decompositions for forward mode
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["query", "key", "value", "s_aux"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_tangent_is_refused_that_a_kernel_would_drop(name: str, grad: bool) -> None:
    tensors = {key: torch.randn(1, heads, 3, 16) for key, heads in (("query", 4), ("key", 2), ("value", 2))}
    tensors["s_aux"] = torch.randn(4)
    attend = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        attend(Layer(), **tensors, is_causal=True)
        tensors[name] = forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
        with pytest.raises(UnclaimedError, match="no derivatives in forward mode; train with another"):
            attend(Layer(), **tensors, is_causal=True)
