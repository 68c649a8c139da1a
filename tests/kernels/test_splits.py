"""How often keys are split, held against the times of an H200 by the number of splits (benchmarks/splits.py)."""

from __future__ import annotations

import json
import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.layers.kernel_trials import Case

from attnreg.kernels.hopper import decode_plans
from attnreg.kernels.hopper.packed import plans as packed_plans
from attnreg.kernels.triton.schedule import ALIKE, PARTS, SMALLEST_SPLIT, Costs, KeyLengths, choose_splits, costs_of
from attnreg.runtime.lengths import Lengths, starts_of

RECORD = ROOT / "benchmarks/results/splits.json"
COSTS = Costs(100, 1, 0.01)


def known(*lengths: int, longest: int = 0, queries: int = 1) -> KeyLengths:
    """What is known of requests of these lengths."""
    return of_batch([queries] * len(lengths), lengths, longest)


def of_batch(queries: Sequence[int], lengths: Sequence[int], longest: int = 0) -> KeyLengths:
    """What is known of requests of so many queries and keys each."""
    starts = starts_of(array("i", queries).tobytes())
    return KeyLengths.of(longest or max(lengths, default=0), Lengths.of(starts, array("i", lengths).tobytes()))


def costs_recorded(row: dict[str, Any], layer: str) -> Costs:
    columns, columns_v = row["columns"]
    per_sm = row["asked"][-1]
    if row["by"] == "schedule":
        return costs_of(columns, columns_v, per_sm)
    spec = Case([1], [1], heads=(2, 2), head_size=columns_v).spec
    return (packed_plans if layer.startswith("TurboQuant") else decode_plans).costs_of_split(spec, per_sm)


def test_the_splits_that_are_chosen_take_about_the_least_time() -> None:
    losses = defaultdict(list)
    for row in json.loads(RECORD.read_text(encoding="utf-8"))["figures"]:
        layer, _, _ = row["case"].partition(":")
        programs, groups, *facts = row["asked"]
        times = {int(splits): float(us) for splits, us in (one.split(":") for one in row["us"].split())}
        splits, _ = choose_splits(programs, tuple(map(tuple, groups)), *facts, costs_recorded(row, layer))
        near = min(times, key=lambda n: abs(n - splits))
        losses[layer].append(math.log(times[near] / min(times.values())))
    assert len(losses) == 14
    for layer, found in losses.items():
        assert math.exp(statistics.fmean(found)) < 1.05, layer
        assert math.exp(max(found)) < 1.3, layer
    assert math.exp(statistics.fmean(chain.from_iterable(losses.values()))) < 1.025


def test_what_is_known_of_lengths() -> None:
    assert known(5000) == KeyLengths(5120, ((1, 5120),))
    assert known(8200, 8000, 7900) == KeyLengths(8448, ((1, 8448),))
    # as many as each other, though not as many as the multiple above
    assert known(*[1026] * 64) == KeyLengths.alike(1280)
    # no request has more than the longest
    assert known(8200, 8200, 100, 100).few == ((1, 8448), (1, 8448), (1, 256), (1, 256))
    assert known(8192, 1000, 1000, 100) == KeyLengths(8192, ((1, 8192), (1, 1024), (1, 1024), (1, 256)))
    groups = known(65536, *[2000] * 63).few
    assert groups == ((1, 65536), (15, 2048), (16, 2048), (16, 2048), (16, 2048))
    # the next step's batch is split alike
    assert known(65537, *[2001] * 63).few[1:] == groups[1:]


def test_of_lengths_that_may_grow_nothing_is_known() -> None:
    # as where a graph is captured for lengths up to a bound
    assert known(17, 3, longest=8192) == KeyLengths.alike(8192)
    assert known(0, 0, longest=8192) == KeyLengths.alike(8192)
    # prompts are computed by other launches
    assert known(4096, 100, queries=17) == KeyLengths.alike(4096)
    assert of_batch([2048, 1], [8192, 300]) == KeyLengths(8192, ((1, 512),))
    assert of_batch([2048, 1], [8192, 0]) == KeyLengths(8192, ((1, 256),))


def test_requests_without_queries_have_no_keys_to_split() -> None:
    lengths = 65536, *[2000] * 20
    assert of_batch([1] * 21 + [0] * 43, [*lengths, *[0] * 40, 500, 65536, 1]) == known(*lengths)
    assert of_batch([1] * 8 + [0] * 56, [8192] * 8 + [0] * 56) == KeyLengths.alike(8192)
    assert of_batch([0, 0], [300, 7]) == KeyLengths.alike(512)
    assert of_batch([], []) == KeyLengths.alike(0)


def test_lengths_are_those_of_the_requests() -> None:
    # of a tensor of another type there are other numbers, and others of them
    with pytest.raises(ValueError, match="longer"):
        KeyLengths.of(300, Lengths.of(starts_of(array("i", [1, 1]).tobytes()), array("q", [300, 300]).tobytes()))


def test_a_long_request_is_cut_and_the_others_are_not() -> None:
    splits, least = choose_splits(512, known(65536, *[2000] * 63).few, 2048, 64, 132, 5, costs_of(256, 128, 5))
    assert 16 <= splits <= 33
    assert least >= 2000


@given(
    lengths=st.lists(st.integers(0, 200_000), min_size=1, max_size=40),
    more=st.integers(0, 5000),
    heads=st.sampled_from([1, 8, 128]),
    block_n=st.sampled_from([16, 64, 128]),
    per_sm=st.integers(1, 12),
)
def test_parts_have_memory_and_keys(lengths: list[int], more: int, heads: int, block_n: int, per_sm: int) -> None:
    keys = known(*lengths, longest=max(lengths) + more)
    assert keys.longest % ALIKE == 0
    assert keys.few[0][1] <= keys.longest
    assert len(keys.few) <= 5
    assert max(length for _, length in keys.few) == keys.few[0][1]
    rows = 4 * heads * len(lengths)
    splits, least = choose_splits(heads * len(lengths), keys.few, rows, block_n, 132, per_sm, COSTS)
    assert splits == 1 or splits * rows <= PARTS * 132
    assert least >= max(SMALLEST_SPLIT, block_n)
    assert splits == 1 or (splits - 1) * least < keys.longest


@pytest.mark.parametrize("most", [64, 65, 1000])
def test_many_splits_are_tried_by_steps(most: int) -> None:
    splits, _ = choose_splits(1, ((1, most * 256),), 1, 64, 132, 8, Costs(0, 0, 0))
    # all of them run at once
    assert splits >= 0.9 * most
