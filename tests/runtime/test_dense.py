"""Attention over whole score matrices, against PyTorch's own and at its edges."""

from __future__ import annotations

import torch

from attnreg.runtime.dense import attend_by_scores, scores_of


def test_grouped_heads_are_those_of_torch() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 4)
    seen = torch.rand(2, 1, 5, 7) > 0.3
    scores = scores_of(query, key, scale=0.3, softcap=None).masked_fill_(~seen, -torch.inf)
    out, lse = attend_by_scores(scores.clone(), value, None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_numbers_of_16_bits_are_computed_with_in_32() -> None:
    query, key, value = (torch.randn(1, 1, n, 8).bfloat16() for n in (2, 3, 3))
    scores = scores_of(query, key, scale=1.0, softcap=2.0)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, 2 * torch.tanh(query.float() @ key.float().mT / 2))
    assert attend_by_scores(scores, value, None)[0].dtype == torch.float32


def test_a_row_without_a_key_is_zero_and_its_lse_that_of_its_sink() -> None:
    value = torch.ones(1, 1, 2, 3)
    scores = torch.tensor([[[[0.0, 0.0], [-torch.inf, -torch.inf]]]])
    out, lse = attend_by_scores(scores.clone(), value, None)
    assert out[0, 0, :, 0].tolist() == [1, 0]
    assert lse[0, 0].tolist() == [torch.tensor(2.0).log(), -torch.inf]
    # exp(sink) is 2
    out, lse = attend_by_scores(scores, value, torch.tensor([[2.0]]).log())
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([0.5, 0.0]))
    torch.testing.assert_close(lse[0, 0], torch.tensor([4.0, 2.0]).log())
