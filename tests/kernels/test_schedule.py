"""How batches become launches."""

from __future__ import annotations

import pytest

from attnreg.kernels.triton.schedule import INVARIANT_SPLIT, choose_splits, schedule
from attnreg.kernels.triton.target import target_for
from attnreg.kernels.triton.tiles import Shape

H200 = target_for("cuda", 90, 132)
PLAIN = Shape(0, False, 4, 128, 128, 2, 2, True, False, 0, False)


def plan(query_lens, max_seq_len=8192, shape=PLAIN, **options):
    return schedule(
        H200, shape, query_lens, num_kv_heads=8, max_query_len=max(query_lens), max_seq_len=max_seq_len, **options
    )


def test_short_and_long_requests_are_launched_apart() -> None:
    (short, long) = plan([1, 2000, 3])
    assert (short.min_query_len, short.max_query_len, short.one_tile, short.tiles) == (1, 3, True, 3)
    assert (long.min_query_len, long.max_query_len, long.one_tile) == (17, 2000, False)
    assert len(plan([1, 1, 0])) == 1
    assert plan([0, 0]) == []


def test_a_batch_that_fills_the_device_is_not_split() -> None:
    assert [one.splits for one in plan([1] * 64)] == [1]


@pytest.mark.parametrize(("requests", "keys"), [(1, 8192), (1, 32768), (8, 8192), (3, 100_000)])
def test_a_small_batch_is_split_to_fill_it(requests: int, keys: int) -> None:
    (one,) = plan([1] * requests, keys)
    assert 256 <= requests * 8 * one.splits <= 4 * 528


def test_a_window_bounds_the_splits() -> None:
    assert [one.splits for one in plan([1], 100_000, PLAIN._replace(window=128))] == [1]


def test_invariance_depends_on_the_request_alone() -> None:
    alone, together = plan([1], batch_invariant=True), plan([1] * 200 + [5], 100_000, batch_invariant=True)
    assert alone[0].config == together[0].config
    assert {one.min_split for one in alone + together} == {INVARIANT_SPLIT}
    assert [(one.min_query_len, one.max_query_len) for one in together] == [(1, 1), (2, 5)]


def test_splits_are_whole_waves() -> None:
    # 320 programs are 1.2 waves of 264: in one piece, the second wave is nearly idle
    assert choose_splits(320, 8192, 256, 64, 264) > 1
    assert choose_splits(1, 0, 256, 64, 264) == 1
