"""How a batch becomes dense calls, which tiles flex_attention visits, and how the cache is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnreg import Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import flex_attention, reference
from attnreg.kernels.dense import gathered
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, KVCache, LayerParams
from attnreg.runtime.layer import Attention

Make = Callable[..., Attention]


def spec(**changes: Any) -> AttentionSpec:
    plain: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "head_size_v": 8, "softmax_scale": 1.0}
    features = {name for name in ("sliding_window", "softcap") if changes.get(name)} | changes.pop("features", set())
    return AttentionSpec(**{**plain, "dtype": torch.float32, "features": frozenset(features), **changes})


# dense calls ---------------------------------------------------------------------------------------------------------


def shapes(plan: gathered.Plan) -> list[tuple[int, int, int]]:
    """Requests, queries and keys of each call."""
    return [(*piece.rows.shape, piece.places.offsets.shape[1]) for piece in plan.pieces]


def test_a_prompt_is_one_causal_call_without_a_mask() -> None:
    (piece,) = gathered.plan(spec(), BatchMetadata.build([7]), scores=False).pieces
    assert (piece.causal, piece.visible) == (True, None)


def test_tokens_of_like_contexts_share_a_call() -> None:
    batch = BatchMetadata.build([1] * 5, [9, 15, 12, 40, 1])
    assert shapes(gathered.plan(spec(), batch, scores=False)) == [(3, 1, 15), (1, 1, 40), (1, 1, 1)]
    alone = gathered.plan(spec(features={"batch_invariant"}), batch, scores=False)
    assert shapes(alone) == [(1, 1, 9), (1, 1, 15), (1, 1, 12), (1, 1, 40), (1, 1, 1)]


def test_keys_that_no_query_sees_are_not_gathered() -> None:
    batch = BatchMetadata.build([1, 3], [100, 100])
    assert shapes(gathered.plan(spec(sliding_window=4), batch, scores=False)) == [(1, 1, 4), (1, 3, 6)]
    both_sides = BatchMetadata.build([2], [2], causal=False)
    assert shapes(gathered.plan(spec(sliding_window=1), both_sides, scores=False)) == [(1, 2, 2)]


def test_long_prompts_are_cut_where_scores_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "SCORES", 2 * 10 * 4)
    batch = BatchMetadata.build([10])
    # causal: the first queries see fewer keys
    assert shapes(gathered.plan(spec(), batch, scores=True)) == [(1, 4, 4), (1, 4, 8), (1, 2, 10)]
    assert shapes(gathered.plan(spec(), batch, scores=False)) == [(1, 10, 10)]


def test_cut_or_alone_the_answers_are_right(default: Registry, cpu: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "SCORES", 500)
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims")
    assert evidence.problems == []


# tiles ---------------------------------------------------------------------------------------------------------------

lengths = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 12)).map(lambda p: (p[0], sum(p))), min_size=1, max_size=5
)


@settings(max_examples=60)
@given(
    lengths=lengths,
    causal=st.booleans(),
    window=st.none() | st.integers(1, 6),
    ranges=st.none() | st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=2, max_size=2),
    sinks=st.booleans(),
)
def test_a_tile_is_left_out_or_taken_whole_only_where_that_is_right(
    lengths: list[tuple[int, int]], causal: bool, window: int | None, ranges: list[Any] | None, sinks: bool
) -> None:
    tile = flex_attention.TILE
    flex_attention.TILE = 4
    try:
        features = {word for word, there in (("sinks", sinks), ("mm_prefix", ranges is not None)) if there}
        layer = spec(sliding_window=window, features=features)
        prefix = None if ranges is None else torch.tensor([ranges] * len(lengths), dtype=torch.int32)
        batch = BatchMetadata.build(*zip(*lengths, strict=True), causal=causal, mm_prefix=prefix)
        plan = flex_attention.plan(layer, batch)
        if plan.mask is None:
            assert not any(q and k for q, k in lengths)
            return
        rows, columns = torch.arange(len(plan.query.request)), torch.arange(len(plan.key.request))
        visible = plan.mask.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], columns[None, :])
        tiles = visible.view(len(rows) // 4, 4, len(columns) // 4, 4)
        some, full = tiles.any(3).any(1), tiles.all(3).all(1)
        counts, indices, full_counts, full_indices = plan.mask.as_tuple()[2:6]
        for row in range(len(rows) // 4):
            partly = set(indices[0, 0, row, : counts[0, 0, row]].tolist())
            wholly = set(full_indices[0, 0, row, : full_counts[0, 0, row]].tolist())
            assert partly | wholly >= set(some[row].nonzero().flatten().tolist())
            assert wholly <= set(full[row].nonzero().flatten().tolist())
            assert not partly & wholly
        # and what the mask lets through is what the contract says
        for i, (q, k) in enumerate(lengths):
            here = visible[(plan.query.request == i).nonzero(), (plan.key.request == i).nonzero().T]
            wanted = reference.visible_keys(layer, batch, i)
            assert torch.equal(here, wanted[:, k - here.shape[1] :]) or not q
            assert not wanted[:, : k - here.shape[1]].any() or not q
    finally:
        flex_attention.TILE = tile


# the cache -----------------------------------------------------------------------------------------------------------


def written(layer: Attention, slots: list[int], *rows: list[float]) -> KVCache:
    """A poisoned cache of two blocks of four after rows of constants went to slots."""
    cache = layer.new_kv_cache(2)
    for tensor in cache:
        tensor.view(torch.uint8).fill_(0x7F) if layer.spec.quantised else tensor.fill_(torch.nan)
    key, value = (torch.tensor(r)[:, None, None].expand(-1, 2, 16).contiguous() for r in rows)
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = BatchMetadata.build([0], [0], block_table=table, slot_mapping=torch.tensor(slots, dtype=torch.int64))
    layer.write_kv(key, value, cache, batch)
    return cache


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1]])
def test_without_a_slot_nothing_is_written(make: Make, slots: list[int]) -> None:
    cache = written(make(), slots, [1.0] * len(slots), [2.0] * len(slots))
    assert all(tensor.isnan().all() for tensor in cache)


def test_rows_without_a_slot_are_passed_over(make: Make) -> None:
    cache = written(make(), [-1, 5, -7, 2], [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
    assert cache.key[..., 0, 0].nan_to_num(0).tolist() == [[0, 0, 4, 0], [0, 2, 0, 0]]
    assert cache.value[..., 1, 7].nan_to_num(0).tolist() == [[0, 0, 8, 0], [0, 6, 0, 0]]


@pytest.mark.parametrize(("word", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_a_quantised_cache_is_scaled_and_saturates(make: Make, word: str, largest: float) -> None:
    layer = make(kv_dtype=word, k_scale=torch.tensor(0.5), v_scale=torch.tensor([2.0]))
    cache = written(layer, [0, 1, 2], [1.0, 1e6, -1e6], [1.0, 1e6, -1e6])
    assert cache.key.float()[0, :3, 0, 0].tolist() == [2.0, largest, -largest]
    assert cache.value.float()[0, :3, 0, 0].tolist() == [0.5, largest, -largest]
    assert cache.key.float().isfinite().sum() == 3 * 2 * 16


def test_scales_of_each_head(make: Make) -> None:
    scale = torch.tensor([1.0, 4.0])
    layer = make(kv_dtype="fp8", k_scale=scale, features={"per_head_quant_scales"})
    cache = written(layer, [0], [8.0], [8.0])
    assert cache.key.float()[0, 0, :, 0].tolist() == [8.0, 2.0]
    assert cache.value.float()[0, 0, :, 0].tolist() == [8.0, 8.0]
    # changed in place, as a calibration does
    scale.fill_(2.0)
    assert isinstance(layer.params, LayerParams)
    assert layer.params.k_scale is not None
    assert layer.params.k_scale.tolist() == [2.0, 2.0]
