"""The band of keys that a query sees, against the reference's own reading of the contract."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers.layers import spec

from attnreg.kernels import reference
from attnreg.runtime.interface import BatchMetadata
from attnreg.runtime.masks import Band, in_band, together

bands = st.builds(Band, st.booleans(), st.none() | st.integers(1, 6))


@given(bands, st.integers(0, 6), st.integers(0, 9))
def test_a_band_is_what_the_contract_says(band: Band, queries: int, earlier: int) -> None:
    batch = BatchMetadata.build([queries], [queries + earlier], causal=band.causal)
    query_at, key_at = reference.positions(batch, 0)
    wanted = reference.visible_keys(spec(sliding_window=band.window), batch, 0)
    assert torch.equal(band.sees(query_at, key_at).expand_as(wanted), wanted)
    if band.window is not None:
        window = torch.tensor(band.window)
        assert torch.equal(in_band(query_at, key_at, causal=band.causal, window=window), wanted)


@given(bands, st.integers(-9, 9), st.integers(0, 5))
def test_a_stretch_of_distances_touches_a_band_or_lies_in_it(band: Band, near: int, length: int) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    seen = band.sees(zero, zero - torch.arange(near, near + length + 1))
    ends = torch.tensor(near), torch.tensor(near + length)
    assert bool(band.touches(*ends)) == bool(seen.any())
    assert bool(band.covers(*ends)) == bool(seen.all())


def test_a_range_holds_its_begin_and_not_its_end() -> None:
    at = torch.arange(5)
    both = together(torch.tensor(1), torch.tensor(3), at[:, None], at)
    assert both.nonzero().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert not together(torch.tensor(3), torch.tensor(3), at[:, None], at).any()
