"""Attention over whole score matrices, against PyTorch's own and at its edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnreg.runtime import dense
from attnreg.runtime.dense import attend_by_scores, attend_by_sdpa, keep_nan, scores_of
from attnreg.runtime.interface import BatchMetadata
from attnreg.runtime.layer import Attention


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


@pytest.mark.parametrize(
    ("size", "masked", "queries", "grouped"),
    [(16, False, 7, True), (16, True, 7, False), (320, False, 7, False), (320, True, 7, False), (16, True, 1, True)],
)
def test_cuda_gets_no_groups_that_its_math_kernel_alone_takes(
    size: int, masked: bool, queries: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, queries, size), torch.randn(2, 2, 7, size), torch.randn(2, 2, 7, size)
    mask = torch.rand(2, 1, queries, 7) > 0.3 if masked else None
    given = []

    def attend(*tensors: Tensor, **more: Any) -> Tensor:
        given.append((more["enable_gqa"], tensors[1].shape[1]))
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **more)

    monkeypatch.setattr(dense, "scaled_dot_product_attention", attend)
    out = attend_by_sdpa(query, key, value, mask=mask, scale=0.3)
    assert given == [(grouped, 2 if grouped else 6)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected)


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


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA"])
def test_a_query_that_is_no_number_gives_none(make: Callable[..., Attention], backend: str, number: float) -> None:
    torch.manual_seed(0)
    layer = make(backend, features={"sliding_window"}, sliding_window=3)
    query, key, value = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    expected = layer(query, key, value, None, BatchMetadata.build([6, 3]))
    query[4, 1], query[7, 3] = number, number
    found = layer(query, key, value, None, BatchMetadata.build([6, 3]))
    lost = torch.zeros(9, 4, dtype=torch.bool)
    lost[4, 1] = lost[7, 3] = True
    assert found[lost].isnan().all()
    assert torch.equal(found[~lost], expected[~lost])


def test_large_numbers_are_numbers_and_a_row_without_a_key_stays_zero() -> None:
    # their sum is infinite in float16
    query = torch.full((1, 1, 2, 8), 6e4, dtype=torch.float16)
    output = torch.zeros(1, 1, 2, 8, dtype=torch.float16)
    assert torch.equal(keep_nan(output, query), output)
    query[0, 0, :, 3] = torch.nan
    seen = torch.tensor([[[[True, False], [False, False]]]])
    assert keep_nan(output, query, seen).isnan().all(-1)[0, 0].tolist() == [True, False]
    assert keep_nan(output, query).isnan().all()


def test_under_vmap_a_query_that_is_no_number_gives_none_too() -> None:
    query, output = torch.randn(3, 1, 2, 5, 8), torch.zeros(3, 1, 2, 5, 4)
    query[2, 0, 1, 4, 7] = torch.nan
    found = torch.vmap(keep_nan)(output, query)
    assert found[2, 0, 1, 4].isnan().all()
    assert int(found.isnan().sum()) == 4


def test_nothing_is_written_to_a_cache_without_blocks(make: Callable[..., Attention]) -> None:
    layer = make("CPU_ATTN", block_size=16)
    table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([-1])
    batch = BatchMetadata.build([1], [0], block_table=table, slot_mapping=slots)
    query, key = torch.randn(1, 4, 16), torch.randn(1, 2, 16)
    assert not layer(query, key, key, layer.new_kv_cache(0), batch).any()
