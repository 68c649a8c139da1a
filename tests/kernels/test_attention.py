"""TRITON_ATTN in Triton's interpreter, or on a GPU if there is one, against float64."""

from __future__ import annotations

import pytest
import torch
from support.layers.kernel_trials import Case, check, trial_of

from attnreg.conformance.proof import attend, examine
from attnreg.kernels.triton import plans, schedule
from attnreg.kernels.triton.tiles import Config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ALL, FP8 = frozenset({"sinks", "alibi"}), frozenset({"fp8_query", "fp8_output"})
CASES = {
    "one token each": Case([1, 1, 0, 1], [5, 33, 0, 300]),
    "no keys, with sinks": Case([2, 0], [0, 0], causal=False, features=frozenset({"sinks"})),
    "mixed lengths": Case([1, 20, 0, 3], [5, 33, 20, 150], dtype=torch.float32, features=frozenset({"sinks"})),
    "mixed lengths, not causal": Case([1, 20, 3], [5, 33, 150], causal=False),
    "edges of blocks": Case([16, 17, 1, 1], [16, 33, 48, 49]),
    "odd head size": Case([3, 18], [40, 50], head_size=80, heads=(7, 1)),
    "keys of 192, values of 128": Case([20, 3], [20, 3], (4, 4), head_size=192, head_size_v=128, block_size=None),
    "keys of 96, not causal": Case(
        [20, 3], [7, 60], (4, 4), head_size=96, head_size_v=64, block_size=None, causal=False
    ),
    "keys of 70, HND": Case([3, 18], [40, 50], head_size=70, head_size_v=64, layout="HND"),
    "keys of 576": Case([2, 18], [40, 50], (5, 1), head_size=576, head_size_v=512, dtype=torch.float32),
    "values narrower than keys": Case([3, 18], [40, 50], head_size=96, head_size_v=40),
    "heads that fill no tile": Case([2, 19], [40, 50], heads=(6, 2)),
    "more heads than a tile": Case([1, 2], [40, 30], heads=(160, 1), dtype=torch.float32),
    "HND": Case([3, 18], [40, 50], layout="HND"),
    "block of 48": Case([3, 18], [70, 50], block_size=48),
    "block of 128": Case([3, 18], [150, 50], block_size=128, dtype=torch.float32),
    "packed": Case([20, 5], [20, 5], block_size=None),
    "packed, own keys": Case([20, 3], [7, 60], block_size=None, causal=False, head_size_v=64),
    "window": Case([1, 40], [100, 90], window=30, features=ALL),
    "window, not causal": Case([1, 40], [100, 90], window=30, causal=False),
    "softcap": Case([1, 40], [100, 90], softcap=5.0),
    "ranges": Case(
        [1, 40], [70, 130], window=20, features=frozenset({"mm_prefix"}),
        ranges=[[[0, 0], [60, 70]], [[80, 120], [110, 140]]],
    ),
    "window, more after than before": Case([1, 40, 3], [100, 90, 64], window=(2, 21), causal=False),
    "window, all before": Case([1, 40, 3], [100, 90, 64], window=(-1, 3), causal=False, layout="HND"),
    "window, all after": Case([1, 40], [100, 90], window=(20, -1), causal=False, features=ALL),
    "chunks": Case([1, 40, 17], [100, 90, 64], chunk=33, layout="HND"),
    "chunks, not causal, softcap": Case([1, 40, 17], [100, 90, 64], chunk=16, causal=False, softcap=5.0),
    "chunks and a window": Case([1, 40, 17], [100, 90, 64], chunk=48, window=20, features=ALL),
    "causal by request": Case([1, 40, 17, 16], [100, 90, 64, 33], causal=[True, False, True, False]),
    "causal by request, window, packed": Case([40, 17], [40, 17], causal=[False, True], window=9, block_size=None),
    "ranges in a window": Case(
        [1, 40, 70], [70, 130, 90], window=20, features=frozenset({"mm_prefix", "mm_prefix_in_window"}),
        ranges=[[[0, 0], [40, 70]], [[80, 120], [110, 140]], [[0, 90], [3, 5]]],
    ),
    "ranges in a window, chunks": Case(
        [40, 70], [130, 90], window=20, chunk=32, features=frozenset({"mm_prefix", "mm_prefix_in_window"}),
        ranges=[[[80, 120], [110, 140]], [[0, 90], [3, 5]]],
    ),
    "tree": Case([1, 40, 17, 5], [100, 90, 64, 5], features=frozenset({"tree_mask"})),
    "tree, window, softcap, packed": Case([40, 17], [40, 17], window=9, softcap=5.0, block_size=None,
                                          features=frozenset({"tree_mask"})),
    "tree, not causal, sinks": Case([20, 3], [40, 17], causal=False, features=frozenset({"tree_mask", "sinks"})),
    "fp8 queries": Case([1, 40, 17], [100, 90, 64], features=frozenset({"fp8_query", "sinks"})),
    "fp8 queries and output, fp8 cache": Case([1, 40], [100, 90], kv_dtype="fp8", features=FP8),
    "fp8 of gfx942": Case([1, 40], [100, 90], kv_dtype="fp8", fnuz=True, features=FP8),
    "fp8 output": Case([1, 20, 0, 3], [5, 33, 20, 300], dtype=torch.float32, features=frozenset({"fp8_output"}) | ALL),
    "ranges in a window without a left side, chunks": Case(
        [40, 70], [130, 90], window=(-1, 2), chunk=3, causal=False, ranges=[[[80, 120], [110, 140]], [[0, 90], [3, 5]]],
        features=frozenset({"mm_prefix", "mm_prefix_in_window"}),
    ),
    "blocks of 1": Case([1, 20, 0, 3], [5, 33, 20, 150], block_size=1),
    "blocks of 4, window": Case([1, 40], [100, 90], block_size=4, window=30, layout="HND"),
    "blocks of 12, window, sinks": Case([1, 40], [100, 90], block_size=12, window=7, features=frozenset({"sinks"})),
    "blocks of 8, e4m3": Case([1, 20], [50, 33], block_size=8, kv_dtype="fp8_e4m3"),
    "e4m3": Case([1, 20], [50, 33], kv_dtype="fp8_e4m3", features=frozenset({"per_head_quant_scales"})),
    "e4m3, not causal, sinks": Case([3, 20], [50, 33], kv_dtype="fp8", causal=False, features=frozenset({"sinks"})),
    "e5m2 in float32": Case([1, 20], [50, 33], kv_dtype="fp8_e5m2", dtype=torch.float32, layout="HND"),
    "cache of another dtype": Case([1, 20], [50, 33], kv_dtype="float16", dtype=torch.float32),
    "e4m3 of gfx942": Case([1, 20], [50, 33], kv_dtype="fp8_e4m3", fnuz=True, dtype=torch.float32),
    "e5m2 of gfx942": Case([1, 20], [50, 33], kv_dtype="fp8_e5m2", fnuz=True, features=ALL),
    "split": Case([1, 20, 0, 3], [5, 133, 20, 150], layout="SPLIT", dtype=torch.float32, features=frozenset({"sinks"})),
    "split, not causal": Case([1, 20, 3, 16], [5, 133, 150, 64], layout="SPLIT", causal=False),
    "split, window": Case([1, 40, 2], [100, 190, 64], layout="SPLIT", window=30, features=ALL),
    "split, window, not causal": Case([1, 40], [100, 190], layout="SPLIT", window=70, causal=False, head_size=80),
    "split, block of 48": Case([3, 18], [170, 50], layout="SPLIT", block_size=48, softcap=5.0),
    "split, block of 128": Case([3, 18], [250, 150], layout="SPLIT", block_size=128, head_size=96, heads=(7, 1)),
    "split, e4m3": Case(
        [1, 20], [90, 133], layout="SPLIT", kv_dtype="fp8", features=frozenset({"per_head_quant_scales"})
    ),
    "split, e4m3 of gfx942, not causal": Case(
        [16, 20], [90, 133], layout="SPLIT", kv_dtype="fp8", fnuz=True, causal=False
    ),
    "invariant": Case([1, 20, 5], [1100, 33, 20], features=frozenset({"batch_invariant", "sinks"})),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_near_to_float64_as_rounding_allows(name: str) -> None:
    check(CASES[name], DEVICE)


@pytest.mark.parametrize("splits", [2, 7])
@pytest.mark.parametrize("name", ["window", "e4m3", "no keys, with sinks", "tree", "fp8 of gfx942"])
def test_splits_change_nothing_but_rounding(name: str, splits: int) -> None:
    check(CASES[name], DEVICE, config=Config(16, 16, 4, 2), splits=splits)


@pytest.mark.parametrize("config", [
    Config(16, 16, 4, 2, peel=True), Config(32, 32, 4, 2, peel=True), Config(16, 16, 4, 1, block_k=16),
    Config(16, 32, 4, 1, block_k=32, peel=True),
])  # fmt: skip
@pytest.mark.parametrize(
    "name",
    ["mixed lengths, not causal", "odd head size", "window", "ranges", "packed", "softcap", "tree", "fp8 queries"],
)
def test_loops_of_other_shapes_give_the_same(name: str, config: Config) -> None:
    check(CASES[name], DEVICE, config=config)


@pytest.mark.parametrize("heads", [(6, 6), (8, 4), (40, 2)])
@pytest.mark.parametrize("cached", [0, 20000, 40000])
def test_heads_side_by_side_change_nothing(heads: tuple[int, int], cached: int, monkeypatch) -> None:
    monkeypatch.setattr(schedule, "_CACHED", cached)
    # rows of several tiles, of as few queries as that takes
    queries = [40, 0, 19] if heads[0] < 40 else [3, 0, 1]
    case = Case(queries, [60, 3, 30], heads, block_size=None, causal=False, dtype=torch.float32)
    plans._launches.cache_clear()
    check(case, DEVICE, config=Config(16, 16, 4, 2))
    plans._launches.cache_clear()


def test_a_second_run_is_bitwise_the_same() -> None:
    trial = trial_of(CASES["mixed lengths"], DEVICE)
    examine(trial)
    first, second = (attend(trial, trial.batch, trial.query) for _ in range(2))
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(first, second, strict=True))


def test_an_empty_batch_launches_nothing() -> None:
    trial = trial_of(Case([0, 0], [16, 0]), DEVICE)
    examine(trial)
    assert not trial.layer.plan(trial.batch).launches
    assert attend(trial, trial.batch, trial.query)[0].isnan().all()
