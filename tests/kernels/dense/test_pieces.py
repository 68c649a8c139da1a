"""How a batch becomes dense calls."""

from __future__ import annotations

import pytest
from support.layers.layers import spec

from attnreg import Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels.dense import pieces
from attnreg.kernels.dense.pieces import DensePlan
from attnreg.runtime.interface import BatchMetadata


def shapes(plan: DensePlan) -> list[tuple[int, int, int]]:
    """Requests, queries and keys of each call."""
    return [(*piece.rows.shape, piece.places.offsets.shape[1]) for piece in plan.pieces]


def test_a_prompt_is_one_causal_call_without_a_mask() -> None:
    (piece,) = pieces.plan(spec(), BatchMetadata.build([7]), scores=False).pieces
    assert (piece.causal, piece.visible) == (True, None)


def test_tokens_of_like_contexts_share_a_call() -> None:
    batch = BatchMetadata.build([1] * 5, [9, 15, 12, 40, 1])
    assert shapes(pieces.plan(spec(), batch, scores=False)) == [(3, 1, 15), (1, 1, 40), (1, 1, 1)]
    alone = pieces.plan(spec(features={"batch_invariant"}), batch, scores=False)
    assert shapes(alone) == [(1, 1, 9), (1, 1, 15), (1, 1, 12), (1, 1, 40), (1, 1, 1)]


def test_keys_that_no_query_sees_are_not_gathered() -> None:
    batch = BatchMetadata.build([1, 3], [100, 100])
    assert shapes(pieces.plan(spec(sliding_window=4), batch, scores=False)) == [(1, 1, 4), (1, 3, 6)]
    both_sides = BatchMetadata.build([2], [2], causal=False)
    assert shapes(pieces.plan(spec(sliding_window=1), both_sides, scores=False)) == [(1, 2, 2)]


def test_long_prompts_are_cut_where_scores_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SCORES", 2 * 10 * 4)
    batch = BatchMetadata.build([10])
    # causal: the first queries see fewer keys
    assert shapes(pieces.plan(spec(), batch, scores=True)) == [(1, 4, 4), (1, 4, 8), (1, 2, 10)]
    assert shapes(pieces.plan(spec(), batch, scores=False)) == [(1, 10, 10)]


def test_cut_or_alone_the_answers_are_right(default: Registry, cpu: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SCORES", 500)
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
