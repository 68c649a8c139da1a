"""transformers' mask functions, read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils as theirs

from attnreg.integrations.transformers import masks
from attnreg.integrations.transformers.batches import Packed, packed_mask
from attnreg.integrations.transformers.masks import LazyMask, lazy_mask
from attnreg.integrations.transformers.meanings import Ranged, band_of, identity
from attnreg.runtime.masks import Band

Function = Callable[..., Any]


def every_other(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (key % 2 == query % 2)


def far_gap(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query - key != 2000)


def uneven(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query + 2) & (key > query - 8)


def early_only(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query < 1000)


@pytest.mark.parametrize(
    ("function", "band"),
    [
        (theirs.causal_mask_function, Band(True, None)),
        (theirs.bidirectional_mask_function, Band(False, None)),
        (theirs.sliding_window_causal_mask_function(1), Band(True, 1)),
        (theirs.sliding_window_causal_mask_function(4096), Band(True, 4096)),
        (theirs.sliding_window_causal_mask_function(131072), Band(True, 131072)),
        (theirs.sliding_window_bidirectional_mask_function(5), Band(False, 6)),
        (theirs.or_masks(theirs.causal_mask_function, lambda *_: torch.tensor(True)), Band(False, None)),
        (every_other, None),
        (far_gap, None),
        (uneven, None),
        (early_only, None),
        (lambda *_: torch.tensor(False), None),
    ],
)
def test_functions_of_positions_mean_what_they_do_whatever_they_are_called(
    function: Function, band: Band | None
) -> None:
    assert band_of(function) == band


def test_a_function_is_asked_once_and_again_where_it_holds_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(masks, "_bands", {})
    monkeypatch.setattr(masks, "band_of", lambda function: asked.append(function) or band_of(function))
    for window in (3, 4, 3, 4):
        mask = lazy_mask(1, 8, 8, mask_function=theirs.sliding_window_causal_mask_function(window))
        assert mask.source.meaning() == Band(True, window)
    assert len(asked) == 2
    # what holds a tensor is computed each time
    assert identity(theirs.blockwise_overlay(torch.zeros(1, 8))) is None


def image(*ids: int) -> torch.Tensor:
    return torch.tensor([ids])


@pytest.mark.parametrize("window", [None, 5])
def test_ranges_are_found_and_held_against_every_element(window: int | None) -> None:
    base = theirs.causal_mask_function if window is None else theirs.sliding_window_causal_mask_function(window)
    block = theirs.blockwise_overlay(image(-1, 0, 0, 0, -1, 1, 1, -1, -1, -1))
    source = lazy_mask(1, 10, 10, mask_function=theirs.or_masks(base, block)).source
    found = source.meaning()
    assert isinstance(found, Ranged)
    assert found.band == Band(True, window)
    assert found.ranges.tolist() == [[[1, 4], [5, 7]]]
    # one that has a hole is no range
    block = theirs.blockwise_overlay(image(0, -1, 0, -1, -1, -1, -1, -1, -1, -1))
    assert lazy_mask(1, 10, 10, mask_function=theirs.or_masks(base, block)).source.meaning() is None
    # and without an image there is only the band
    block = theirs.blockwise_overlay(image(*[-1] * 10))
    assert lazy_mask(1, 10, 10, mask_function=theirs.or_masks(base, block)).source.meaning() == Band(True, window)


def test_packed_sequences_are_no_batch_of_ours() -> None:
    function = theirs.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1]]))
    source = lazy_mask(1, 5, 5, mask_function=theirs.and_masks(theirs.causal_mask_function, function)).source
    assert packed_mask(source, crossed=False) == "its mask is neither causal, windowed nor a prefix"


def padded(*rows: str, queries: int, begin: int | None = None, **more: Any) -> Packed | str:
    mask = torch.tensor([[c == "1" for c in row] for row in rows])
    keys = mask.shape[1]
    offset = keys - queries if begin is None else begin
    source = lazy_mask(len(rows), queries, keys, q_offset=offset, attention_mask=mask, **more).source
    return packed_mask(source, crossed=False)


def test_padding_is_left_out_of_queries_and_keys() -> None:
    packed = padded("00111", "11111", "11100", "00000", queries=3)
    assert isinstance(packed, Packed)
    assert packed.batch.query_start_loc.tolist() == [0, 3, 6, 7, 7]
    assert packed.batch.seq_lens.tolist() == [3, 5, 3, 0]
    assert packed.queries is not None
    assert packed.queries.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert packed.keys is not None
    assert packed.keys[1].tolist() == [2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    whole = padded("111", "111", queries=3)
    assert isinstance(whole, Packed)
    assert whole.queries is None
    assert whole.keys is None


def test_what_a_static_cache_has_not_filled_is_no_key() -> None:
    packed = padded("1111100000", queries=2, begin=3)
    assert isinstance(packed, Packed)
    assert (packed.batch.seq_lens.tolist(), packed.key_stop, packed.keys) == ([5], 5, None)


def test_a_window_counts_positions_so_padding_may_not_lie_between() -> None:
    window = theirs.sliding_window_causal_mask_function(2)
    assert isinstance(padded("0111", "1110", queries=4, mask_function=window), Packed)
    assert padded("1101", queries=4, mask_function=window) == (
        "its padding lies between tokens, where a window or a prefix counts"
    )
    assert isinstance(padded("1101", queries=4), Packed)


def test_cross_attention_keeps_all_queries() -> None:
    mask = torch.tensor([[True, True, False]])
    source = lazy_mask(1, 3, 3, mask_function=theirs.bidirectional_mask_function, attention_mask=mask).source
    packed = packed_mask(source, crossed=True)
    assert isinstance(packed, Packed)
    assert (packed.crossed, packed.queries, packed.batch.seq_lens.tolist()) == (True, None, [2])
    # of other lengths it is no self-attention, whatever the layer says
    source = lazy_mask(1, 2, 3, mask_function=theirs.bidirectional_mask_function).source
    packed = packed_mask(source, crossed=False)
    assert isinstance(packed, Packed)
    assert packed.crossed


def test_a_lazy_mask_is_the_mask_to_whoever_looks_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    padding = torch.tensor([[False, True, True, True], [True, True, True, True]])
    arguments = {"mask_function": theirs.sliding_window_causal_mask_function(2), "attention_mask": padding}
    mask = lazy_mask(2, 4, 4, **arguments, dtype=torch.float32, allow_is_causal_skip=True, local_size=2)
    same = mask.contiguous().to("cpu").detach().clone()
    assert isinstance(same, LazyMask)
    assert same.source is mask.source
    assert (mask.shape, mask.dtype, mask.source.memo) == ((2, 1, 4, 4), torch.bool, {})
    whole = theirs.sdpa_mask(2, 4, 4, **arguments, allow_is_causal_skip=False)
    assert type(mask[:, :, 1:]) is torch.Tensor
    assert torch.equal(mask & True, whole)
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(whole, 0.0, -1.0))
    elsewhere = mask.to("meta")
    assert isinstance(elsewhere, LazyMask)
    assert elsewhere.device == elsewhere.source.device == torch.device("meta")
    assert repr(mask) == "LazyMask((2, 1, 4, 4), Band(causal=True, window=2))"
