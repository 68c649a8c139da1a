"""The indexer's reference, against its formula written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnreg.runtime.interface import BatchError, BatchMetadata
from attnreg.runtime.mla import indexer
from attnreg.runtime.mla.indexer import choose_tokens

HEADS, SIZE = 3, 8


def arguments(queries: list[int], lengths: list[int], paged: bool, causal: Any = True) -> dict[str, Any]:
    torch.manual_seed(sum(lengths))
    tokens, blocks = sum(queries), [-(-n // 4) for n in lengths]
    table = torch.full((len(lengths), 30), 2**30, dtype=torch.int32)
    ids = torch.randperm(sum(blocks) + 2).int()
    for i, count in enumerate(blocks):
        table[i, :count], ids = ids[:count], ids[count:]
    batch = BatchMetadata.build(queries, lengths, block_table=table if paged else None, causal=causal)
    keys = torch.randn(sum(blocks) + 2, 4, SIZE) if paged else torch.randn(sum(lengths), SIZE)
    return {
        "query": torch.randn(tokens + 1, HEADS, SIZE, dtype=torch.float64),
        "weights": torch.randn(tokens + 1, HEADS, dtype=torch.float64),
        "keys": keys.double(),
        "batch": batch,
    }


def written_out(query: Tensor, weights: Tensor, keys: Tensor, batch: BatchMetadata, topk: int, scale: float) -> Tensor:
    chosen = torch.full((len(query), topk), -1, dtype=torch.int32)
    starts, first = batch.query_start_loc.tolist(), 0
    for i, length in enumerate(batch.seq_lens.tolist()):
        for row in range(starts[i], starts[i + 1]):
            causal = bool(batch.causal[i]) if isinstance(batch.causal, Tensor) else batch.causal
            end = length - starts[i + 1] + row + 1 if causal else length
            scores = []
            for k in range(end):
                key = keys[first + k] if batch.block_table is None else keys[batch.block_table[i, k // 4], k % 4]
                score = sum(float(weights[row, h]) * max(0.0, scale * float(query[row, h] @ key)) for h in range(HEADS))
                scores.append((-score, k))
            for place, (_, k) in enumerate(sorted(scores)[:topk]):
                chosen[row, place] = k
        first += length
    return chosen


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("causal", [True, False, [True, False, True, False]])
@pytest.mark.parametrize("topk", [1, 5, 40])
def test_the_highest_scores_of_the_keys_that_a_query_sees(paged: bool, causal: Any, topk: int, monkeypatch) -> None:
    given = arguments([3, 0, 1, 6], [3, 5, 20, 11], paged, causal)
    expected = written_out(**given, topk=topk, scale=0.3)
    assert torch.equal(choose_tokens(**given, topk=topk, scale=0.3), expected)
    monkeypatch.setattr(indexer, "_SCORES", 60)
    assert torch.equal(choose_tokens(**given, topk=topk, scale=0.3), expected)


def test_of_equal_scores_the_earlier() -> None:
    given = arguments([1], [9], True)
    chosen = choose_tokens(**(given | {"weights": torch.zeros(2, HEADS)}), topk=4, scale=1.0)
    assert chosen.tolist() == [[0, 1, 2, 3], [-1] * 4]


def test_the_device_is_right_where_the_host_knows_bounds(monkeypatch) -> None:
    given = arguments([2, 1], [9, 6], True)
    expected = choose_tokens(**given, topk=4, scale=1.0)
    lengths = given["batch"].seq_lens + 13
    more = replace(given["batch"], seq_lens_cpu=lengths, max_seq_len=int(lengths.max()))
    monkeypatch.setattr(BatchMetadata, "host_lens", property(lambda batch: batch.seq_lens_cpu))
    assert torch.equal(choose_tokens(**(given | {"batch": more}), topk=4, scale=1.0), expected)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"topk": 0}, "topk is 0; expected an integer of at least 1"),
        ({"weights": torch.zeros(4, 2)}, r"weights is \[4, 2\] float32; expected \[4, 3\] of a floating type"),
        ({"keys": torch.zeros(9, 8)}, r"keys is \[9, 8\] float32; expected \[any, any, 8\]"),
        ({"query": torch.zeros(2, 3, 8), "weights": torch.zeros(2, 3)}, "query has 2 rows; the batch has 3 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(BatchError, match=error):
        choose_tokens(**({"topk": 2, "scale": 1.0} | arguments([2, 1], [9, 6], True) | changes))
