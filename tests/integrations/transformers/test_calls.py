"""Single calls: without a mask, with what may mean something, and in a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.small_models import by, close, tokens
from support.models.transformers_calls import Layer, call
from torch import Tensor
from transformers import AttentionInterface

import attnreg.integrations.transformers as attention
from attnreg import Registry, UnclaimedError
from attnreg.integrations.transformers.masks import lazy_mask


def logits(**inputs: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(**inputs).logits


@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    # the second: a static cache that is not full, whose first keys count; the last: queries behind the last key
    [
        *((5, 5, True), (5, 8, True), (1, 8, True), (1, 8, False)),
        *((5, 8, False), (5, 5, False), (8, 5, False), (8, 5, True)),
    ],
)
def test_calls_without_a_mask_mean_what_they_mean_to_transformers(queries: int, keys: int, causal: bool) -> None:
    torch.manual_seed(4)
    layer = Layer()
    layer.is_causal = causal
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 8)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    layer.num_key_value_groups = 2
    expected, found = (interface[name](layer, q, k, v, None, is_causal=causal)[0] for name in ("sdpa", "attnreg"))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert found.is_contiguous()


@pytest.mark.parametrize("layer", [Layer(), torch.nn.Module()], ids=["by its attribute", "by default"])
def test_a_causal_module_without_a_mask_is_refused(layer: torch.nn.Module) -> None:
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    q = torch.randn(1, 4, 5, 16)
    with pytest.raises(UnclaimedError, match="passes no mask to its attention, and its attribute says"):
        interface["attnreg"](layer, q, q, q, None)
    # one query is the last token either way
    assert interface["attnreg"](layer, q[:, :, :1], q, q, None)[0].shape == (1, 1, 4, 16)


def test_a_window_without_a_mask(default: Registry) -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    found = interface["attnreg"](Layer(), q, k, v, None, sliding_window=2, is_causal=True)[0]
    near = torch.ones(6, 6, dtype=torch.bool).tril().triu(-1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, near, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-6, rtol=1e-6)
    # and beside a bias, where it is dense
    bias = torch.zeros(1, 4, 6, 6)
    found = interface["attnreg"](Layer(), q, k, v, None, sliding_window=2, position_bias=bias, is_causal=True)[0]
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-6, rtol=1e-6)


def test_sinks_that_are_made_for_each_call() -> None:
    q, layer = torch.zeros(1, 2, 1, 16), Layer()
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    for weight in (1.0, 3.0):
        out = interface["attnreg"](layer, q, q, torch.ones_like(q), None, s_aux=torch.full((2,), weight).log())[0]
        torch.testing.assert_close(out, torch.full((1, 1, 2, 16), 1 / (1 + weight)))


def test_a_bias_without_a_mask() -> None:
    torch.manual_seed(4)
    q, k, bias = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 5, 16), torch.randn(1, 4, 5, 5)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    for causal in (True, False):
        expected, found = (
            interface[name](Layer(), q, k, k, None, position_bias=bias, is_causal=causal)[0]
            for name in ("sdpa", "attnreg")
        )
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_queries_under_padding_get_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **more: empty(*args, **more).fill_(torch.nan))
    padding = torch.tensor([[False, False, True, True], [True, True, True, True]])
    q, k = torch.randn(2, 4, 4, 16), torch.randn(2, 2, 4, 16)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    found = interface["attnreg"](Layer(), q, k, k, lazy_mask(2, 4, 4, attention_mask=padding))[0]
    assert (found[0, :2] == 0).all()
    assert found.isfinite().all()


def test_queries_that_a_batch_shares_are_dense() -> None:
    torch.manual_seed(4)
    layer = Layer()
    layer.is_causal = False
    q, k = torch.randn(1, 4, 3, 16), torch.randn(2, 4, 6, 16)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    found = interface["attnreg"](layer, q, k, k, None)[0]
    torch.testing.assert_close(found, interface["sdpa"](layer, q, k, k, None)[0], atol=1e-6, rtol=1e-6)
    (run,) = attention.runs(layer)
    assert run.dense == "its queries and keys are of different batches"


def test_the_keys_that_an_indexer_chose_are_those_that_take_part() -> None:
    chosen = torch.tensor([[[0, 0], [1, 1], [0, 2]]])
    torch.manual_seed(1)
    out = call(indices=chosen)
    torch.manual_seed(1)
    query, key, value = (torch.randn(size) for size in ((1, 4, 3, 16), (1, 2, 3, 16), (1, 2, 3, 16)))
    sees = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sees, enable_gqa=True)
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_each_query_may_have_its_own_sink(causal: bool) -> None:
    torch.manual_seed(2)
    layer, sinks = Layer(), torch.randn(1, 4, 3, 1)
    sinks[0, 1, 2] = torch.inf
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    found = interface["attnreg"](layer, q, k, v, None, sinks=sinks, is_causal=causal)[0]
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    if causal:
        scores = scores.masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), -torch.inf)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    # it takes all the weight
    weights[0, 1, 2] = 0
    torch.testing.assert_close(found, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2), atol=1e-6, rtol=1e-6)
    (run,) = attention.runs(layer)
    assert run.dense == "each of its queries has its own sink"
    assert "sinks" in run.asked.request.features


def test_a_name_that_is_not_registered() -> None:
    with pytest.raises(LookupError, match="'nobody' is not registered; call "):
        attention.runs(models.llama(), name="nobody")


def test_a_compiled_model_is_the_same() -> None:
    model, inputs = models.llama(), tokens(7, 4)
    expected = by("attnreg", model, logits(**inputs))
    found = by("attnreg", model, lambda model: torch.compile(model, backend="eager")(**inputs).logits)
    rows = inputs["attention_mask"].bool()
    close(found[rows], expected[rows])
