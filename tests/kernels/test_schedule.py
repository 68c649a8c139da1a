"""How batches become launches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attnreg.kernels.triton.schedule import (
    CONSTANTS,
    INVARIANT_SPLIT,
    Costs,
    KeyLengths,
    choose_splits,
    schedule,
)
from attnreg.kernels.triton.target import target_for
from attnreg.kernels.triton.tiles import Shape

H200 = target_for("cuda", 90, 132)
PLAIN = Shape(0, False, 4, 128, 128, 2, 2, True, False, 0, False)


def plan(query_lens, max_seq_len=8192, shape=PLAIN, **options):
    keys = KeyLengths.alike(max_seq_len)
    return schedule(H200, shape, query_lens, num_kv_heads=8, max_query_len=max(query_lens), keys=keys, **options)


def test_short_and_long_requests_are_launched_apart() -> None:
    (short, long) = plan([1, 2000, 3])
    assert (short.min_query_len, short.max_query_len, short.one_tile) == (1, 3, True)
    assert (long.min_query_len, long.max_query_len, long.one_tile) == (4, 2000, False)
    block_q = long.config.block_m // long.heads
    assert (short.tiles(3, 2004), long.tiles(3, 2004)) == (3, 2004 // block_q + 3)
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
    # within a window no part has fewer keys than 256; elsewhere 256 keys are cut in four
    assert [one.splits for one in plan([1], 100_000, PLAIN._replace(window=1024))] == [5]
    assert [one.splits for one in plan([1], 256)] == [4]


def test_invariance_depends_on_the_request_alone() -> None:
    alone, together = plan([1], batch_invariant=True), plan([1] * 200 + [5], 100_000, batch_invariant=True)
    assert alone[0].config == together[0].config
    assert {one.min_split for one in alone + together} == {INVARIANT_SPLIT}
    assert [(one.min_query_len, one.max_query_len) for one in together] == [(1, 1), (2, 5)]


@pytest.mark.parametrize("shape", [PLAIN, PLAIN._replace(group=1), PLAIN._replace(group=12, block_d=512)])
def test_invariant_requests_of_a_class_share_their_code(shape: Shape) -> None:
    """What a tile is compiled for is alike, whatever other requests of the class are in the batch."""
    code: dict[int, set[Any]] = {}
    for longest in (1, 2, 3, 16, 17, 20, 100, 200, 3000):
        for one in plan([1, longest], 9000, shape, batch_invariant=True):
            code.setdefault(one.min_query_len, set()).add((one.config, one.heads, one.one_tile, one.splits > 1))
    assert {shortest: len(found) for shortest, found in code.items()} == {1: 1, 2: 1, 17: 1}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("query_lens", [[1] * 40, [24, 2], [24, 24], [0, 0], [3, 16], [1, 2000]])
@pytest.mark.parametrize("bound", [1, 5, 16, 17, 40, 3000])
def test_the_launches_serve_every_length_within_the_bound_once(
    query_lens: list[int], bound: int, invariant: bool
) -> None:
    bound = max(bound, *query_lens)
    launches = schedule(
        H200,
        PLAIN,
        query_lens,
        num_kv_heads=8,
        max_query_len=bound,
        keys=KeyLengths.alike(8192),
        batch_invariant=invariant,
    )
    served = [n for one in launches for n in range(one.min_query_len, one.max_query_len + 1)]
    assert served == list(range(1, bound + 1))


@pytest.mark.parametrize(
    ("kv_heads", "keys", "at_once"),
    [(8, 4096, 8), (8, 10240, 4), (128, 4096, 8), (7, 4096, 7), (7, 8192, 1), (3, 2**20, 1)],
)
def test_heads_run_side_by_side_while_a_cache_holds_their_keys(kv_heads: int, keys: int, at_once: int) -> None:
    shape = PLAIN._replace(block_d=192, block_dv=128) if kv_heads == 128 else PLAIN
    (launch,) = schedule(H200, shape, [2000], num_kv_heads=kv_heads, max_query_len=2000, keys=KeyLengths.alike(keys))
    assert launch.kv_heads_at_once == at_once
    # of a window, the keys that a tile sees
    (launch,) = schedule(
        H200, shape._replace(window=128), [2000], num_kv_heads=kv_heads, max_query_len=2000, keys=KeyLengths.alike(keys)
    )
    assert launch.kv_heads_at_once == min(kv_heads, 16)


def test_the_parts_of_split_keys_stay_small() -> None:
    # parts in float32 of a head of 128, with their sums
    part = 129 * 4
    for query_lens in ([1] * 255 + [131_072], [1, *[100] * 255], [1] * 256, [1], [4] * 3 + [2000], [17] * 4):
        rows = sum(query_lens)
        for one in plan(query_lens, 131_072):
            slots = min(rows, one.max_query_len * len(query_lens))
            assert one.splits == 1 or slots * 32 * one.splits * part <= 4 * 2 * 132 * 128 * part
    # 64 heads, as stated in the contract
    for query_lens, most in (([1] * 256, 2**28 * 1.01), ([4] * 256, 2**28 * 1.01), ([16] * 256, 2**30 * 1.01)):
        launches = plan(query_lens, 131_072, batch_invariant=True)
        rows = sum(query_lens)
        held = [min(rows, one.max_query_len * 256) * 64 * one.splits * part for one in launches if one.splits > 1]
        assert max(held) <= most


def test_splits_are_whole_waves() -> None:
    costs = Costs(100, 1, 0.01)
    # 320 programs are 1.2 waves of 264: in one piece, the second wave is nearly idle
    assert choose_splits(320, ((1, 8192),), 1280, 64, 132, 2, costs)[0] > 1
    # one of 64 programs more than fits at once would run beside nothing
    assert choose_splits(64, ((1, 8448),), 256, 128, 132, 2, costs) == (4, 128)
    assert choose_splits(1, ((1, 0),), 4, 64, 132, 2, costs) == (1, 64)


def test_each_constant_says_where_it_was_measured() -> None:
    assert all(re.fullmatch(r"NVIDIA H200, 2026-\d\d-\d\d", constant.measured) for constant in CONSTANTS.values())
    assert all(constant.because for constant in CONSTANTS.values())
