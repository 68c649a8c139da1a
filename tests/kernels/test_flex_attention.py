"""Which tiles flex_attention visits."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers.layers import spec
from support.suite.examples import examples

from attnreg.kernels import flex_attention, reference
from attnreg.runtime.interface import BatchMetadata

lengths = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 12)).map(lambda p: (p[0], sum(p))), min_size=1, max_size=5
)


@examples(60)
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
