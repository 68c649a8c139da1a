"""transformers' mask functions, read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.transformers_calls import Layer
from transformers import AttentionInterface
from transformers import masking_utils as theirs

from attnreg import UnclaimedError
from attnreg.integrations.transformers import mask_patterns, masks
from attnreg.integrations.transformers.batches import VarlenBatch, mask_batch
from attnreg.integrations.transformers.mask_patterns import Ranged, known_band
from attnreg.integrations.transformers.masks import BooleanMask, LazyMask, lazy_mask
from attnreg.runtime.masks import Band

Function = Callable[..., Any]


def every_other(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (key % 2 == query % 2)


@pytest.mark.parametrize(
    ("function", "sight"),
    [
        (theirs.causal_mask_function, Band(True, None)),
        (theirs.bidirectional_mask_function, Band(False, None)),
        (theirs.sliding_window_causal_mask_function(1), Band(True, 1)),
        (theirs.sliding_window_causal_mask_function(4096), Band(True, 4096)),
        (theirs.sliding_window_causal_mask_function(131072), Band(True, 131072)),
        (theirs.sliding_window_bidirectional_mask_function(5), Band(False, 6)),
        (theirs.and_masks(theirs.causal_mask_function, theirs.causal_mask_function), Band(True, None)),
        # a part that is not transformers' own: the whole mask decides
        (theirs.and_masks(theirs.causal_mask_function, lambda *_: torch.tensor(True)), None),
        (every_other, None),
    ],
)
def test_functions_of_transformers_own_parts_are_read_from_them(function: Function, sight: Band | None) -> None:
    assert known_band(function) == sight


def test_a_reading_is_held_against_the_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    monkeypatch.setattr(mask_patterns, "_bands", {})
    agrees = mask_patterns._agrees
    monkeypatch.setattr(mask_patterns, "_agrees", lambda *given: held.append(given) or agrees(*given))
    for window in (3, 4, 3, 4):
        mask = lazy_mask(1, 8, 8, mask_function=theirs.sliding_window_causal_mask_function(window))
        assert mask.source.meaning() == Band(True, window)
    assert len(held) == 2
    # parts that came to mean something else are believed no more
    monkeypatch.setattr(mask_patterns, "_bands", {})
    monkeypatch.setattr(mask_patterns, "_WINDOW", mask_patterns._WINDOW_BOTH)
    assert known_band(theirs.sliding_window_bidirectional_mask_function(5)) is None


WIDTH, START = 3, torch.tensor([0, 4])


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: (b == 0) | (k >= 4) | (k == q),
        lambda b, h, q, k: (k >= START[b]) | (k == q),
        lambda b, h, q, k: (q < 100) | (q > 200) | (q - k < 8),
        lambda b, h, q, k: q - k != 150,
        every_other,
    ],
    ids=["by the batch", "by a global tensor", "between the ends", "one distance", "every other"],
)
def test_what_no_batch_can_say_is_never_taken_for_a_band(function: Function) -> None:
    mask = lazy_mask(2, 300, 300, mask_function=theirs.and_masks(theirs.causal_mask_function, function))
    assert mask.source.meaning() is None
    expected = theirs.sdpa_mask(
        2, 300, 300, mask_function=theirs.and_masks(theirs.causal_mask_function, function), allow_is_causal_skip=False
    )
    assert torch.equal(mask.whole(), expected.expand(2, 1, 300, 300))


def test_nothing_is_remembered_of_a_function_that_reads_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    function = theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: q - k < WIDTH)
    assert lazy_mask(1, 20, 20, mask_function=function).source.meaning() == Band(True, 3)
    monkeypatch.setitem(globals(), "WIDTH", 6)
    assert lazy_mask(1, 20, 20, mask_function=function).source.meaning() == Band(True, 6)


def test_a_mask_too_large_to_be_looked_through_is_no_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "LARGEST", 99)
    function = theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: q - k < 3)
    assert lazy_mask(1, 10, 10, mask_function=function).source.meaning() is None
    assert lazy_mask(1, 10, 10).source.meaning() == Band(True, None)


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
    # and without an image there is only the sight
    block = theirs.blockwise_overlay(image(*[-1] * 10))
    assert lazy_mask(1, 10, 10, mask_function=theirs.or_masks(base, block)).source.meaning() == Band(True, window)


def test_packed_sequences_are_no_batch_of_ours() -> None:
    function = theirs.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1]]))
    source = lazy_mask(1, 5, 5, mask_function=theirs.and_masks(theirs.causal_mask_function, function)).source
    assert mask_batch(source, crossed=False) == "its mask is neither causal, windowed nor a prefix"


def padded(*rows: str, queries: int, begin: int | None = None, **more: Any) -> VarlenBatch | str:
    mask = torch.tensor([[c == "1" for c in row] for row in rows])
    keys = mask.shape[1]
    offset = keys - queries if begin is None else begin
    source = lazy_mask(len(rows), queries, keys, q_offset=offset, attention_mask=mask, **more).source
    return mask_batch(source, crossed=False)


def test_padding_is_left_out_of_queries_and_keys() -> None:
    varlen = padded("00111", "11111", "11100", "00000", queries=3)
    assert isinstance(varlen, VarlenBatch)
    assert varlen.query_lens == [3, 3, 1, 0]
    assert varlen.seq_lens == [3, 5, 3, 0]
    assert varlen.queries is not None
    assert varlen.queries.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert varlen.first_keys == [2, 0, 0, 0]
    assert varlen.tokens is not None
    assert varlen.tokens[1].tolist() == [2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    whole = padded("111", "111", queries=3)
    assert isinstance(whole, VarlenBatch)
    assert whole.queries is None
    assert whole.tokens is None


def test_what_a_static_cache_has_not_filled_is_no_key() -> None:
    varlen = padded("1111100000", queries=2, begin=3)
    assert isinstance(varlen, VarlenBatch)
    assert (varlen.seq_lens, varlen.key_stop, varlen.tokens) == ([5], 5, None)


def test_a_window_counts_positions_so_padding_may_not_lie_between() -> None:
    window = theirs.sliding_window_causal_mask_function(2)
    assert isinstance(padded("0111", "1110", queries=4, mask_function=window), VarlenBatch)
    assert padded("1101", queries=4, mask_function=window) == (
        "its padding lies between tokens, where a window or a prefix counts"
    )
    assert isinstance(padded("1101", queries=4), VarlenBatch)


OWN: dict[str, dict[str, Any]] = {
    # the query at the place of a key that is padding is none itself, and sees other keys than the others
    "of another text": {
        "mask_function": lambda b, h, q, k: (q > 0) | (k > 2),
        "attention_mask": torch.tensor([[False] + [True] * 5] * 2),
        "layer": "cross",
    },
    # a static cache of which three keys are none yet
    "of a prefix": {"mask_function": theirs.or_masks(theirs.causal_mask_function, lambda b, h, q, k: k < 5), "q": 3},
    "of padding before a prefix": {
        "mask_function": theirs.or_masks(theirs.causal_mask_function, lambda b, h, q, k: (q < 1) & (k > 1)),
        "attention_mask": torch.tensor([[False] + [True] * 5] * 2),
        "q": 3,
    },
    # integers, of a class that asks for its mask by itself
    "of integers": {"mask_function": every_other, "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])},
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_what_is_computed_is_the_whole_mask(own: dict[str, Any]) -> None:
    more = {name: value for name, value in own.items() if name not in ("layer", "q")}
    queries, layer = own.get("q", 6), Layer()
    layer.is_cross_attention, layer.is_causal = own.get("layer") == "cross", False
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 4, 6, 16), torch.randn(2, 4, 6, 16)
    mask = lazy_mask(2, queries, 6, **more)
    found = AttentionInterface()["attnreg"](layer, q, k, v, mask)[0]  # type: ignore[no-untyped-call]
    scores = (q @ k.mT / 4).masked_fill(~mask.whole().bool(), -torch.inf)
    expected = scores.softmax(-1).nan_to_num() @ v
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-6, rtol=1e-6)


def test_cross_attention_keeps_all_queries() -> None:
    mask = torch.tensor([[True, True, False]])
    source = lazy_mask(1, 3, 3, mask_function=theirs.bidirectional_mask_function, attention_mask=mask).source
    varlen = mask_batch(source, crossed=True)
    assert isinstance(varlen, VarlenBatch)
    assert (varlen.crossed, varlen.queries, varlen.seq_lens) == (True, None, [2])
    # of other lengths it is no self-attention, whatever the layer says
    source = lazy_mask(1, 2, 3, mask_function=theirs.bidirectional_mask_function).source
    varlen = mask_batch(source, crossed=False)
    assert isinstance(varlen, VarlenBatch)
    assert varlen.crossed


def test_a_lazy_mask_is_the_mask_to_whoever_looks_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    padding = torch.tensor([[False, True, True, True], [True, True, True, True]])
    arguments = {"mask_function": theirs.sliding_window_causal_mask_function(2), "attention_mask": padding}
    mask = lazy_mask(2, 4, 4, **arguments, dtype=torch.float32, allow_is_causal_skip=True, local_size=2)
    same = mask.contiguous().to("cpu").detach().clone()
    assert isinstance(same, LazyMask)
    assert same.source is mask.source
    assert (mask.shape, mask.dtype, mask.source.memo) == ((2, 1, 4, 4), torch.bool, {})
    whole = theirs.sdpa_mask(2, 4, 4, **arguments, allow_is_causal_skip=False)
    assert type(mask[:, :, 1:]) is BooleanMask
    assert torch.equal((mask & True).whole(), whole)
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(whole, 0.0, -1.0))
    elsewhere = mask.to("meta")
    assert isinstance(elsewhere, LazyMask)
    assert elsewhere.device == elsewhere.source.device == torch.device("meta")
    assert repr(mask) == "LazyMask((2, 1, 4, 4), Band(causal=True, window=2))"


# A mask of booleans that is added to scores leaves no causality and no padding, and nothing would say so.
NUMBERS: dict[str, Function] = {
    "added": lambda mask: torch.zeros(2, 4, 4, 4) + mask,
    "added after a cut": lambda mask: torch.zeros(2, 4, 4, 3) + mask[:, :, :, :3],
    "added after logic": lambda mask: torch.zeros(2, 4, 4, 4) + (mask & True),
    "added in place": lambda mask: torch.zeros(2, 1, 4, 4).add_(mask),
    "multiplied": lambda mask: mask * -1e9,
    "converted": lambda mask: mask.to(torch.float32),
    "turned round": lambda mask: 1.0 - mask,
    "compared with 0": lambda mask: mask == 0,
    "filled with -inf": lambda mask: mask.masked_fill(torch.ones(4, 4, dtype=torch.bool), -torch.inf),
    "chosen beside numbers": lambda mask: torch.where(torch.ones(4, 4, dtype=torch.bool), mask, -1.0),
    "beside numbers that were made booleans": lambda mask: torch.cat(
        [mask, torch.zeros(2, 1, 4, 2).to(mask.dtype)], -1
    ),
    "beside zeros of its kind": lambda mask: torch.cat([mask, mask.new_zeros(2, 1, 4, 2)], -1),
    "padded": lambda mask: torch.nn.functional.pad(mask, (1, 0), value=0.0),
    "copied into numbers": lambda mask: torch.zeros(2, 1, 4, 4).copy_(mask),
    "summed": lambda mask: mask.sum(-1),
    "its bytes": lambda mask: mask.view(torch.uint8),
    "logic with an integer": lambda mask: mask & 1,
    "as what to leave out": lambda mask: torch.randn(2, 1, 4, 4).masked_fill(mask, -torch.inf),
    "as what to leave out, chosen": lambda mask: torch.where(mask[:, :, 1:], torch.tensor(-1e9), torch.zeros(3, 4)),
    "as what to leave out, twice negated": lambda mask: torch.zeros(2, 1, 4, 4).masked_fill(~~mask, -1e9),
    "the largest": lambda mask: mask.amax(-1),
}


def test_a_mask_is_added_where_it_hides_nothing() -> None:
    bias, padding = torch.randn(1, 4, 3, 3), torch.tensor([[True] * 3, [True, True, False]])
    both = {"mask_function": theirs.bidirectional_mask_function}
    for told in (None, padding[:1].expand(2, -1)):
        mask = lazy_mask(2, 3, 3, attention_mask=told, **both)
        for added in (bias + mask, mask + bias):
            assert type(added) is torch.Tensor
            assert torch.equal(added, bias.expand(2, 4, 3, 3))
    for mask in (
        lazy_mask(2, 3, 3, attention_mask=padding, **both),
        lazy_mask(2, 3, 3),
        lazy_mask(2, 3, 3, **both) & True,
    ):
        with pytest.raises(UnclaimedError, match="reads attnreg's mask as numbers"):
            bias + mask
    with pytest.raises(UnclaimedError, match="reads attnreg's mask as numbers"):
        # twice the bias
        torch.add(lazy_mask(2, 3, 3, **both), bias, alpha=2)


@pytest.mark.parametrize("read", NUMBERS.values(), ids=NUMBERS)
def test_a_mask_that_is_read_as_numbers_raises(read: Function) -> None:
    with pytest.raises(UnclaimedError, match="reads attnreg's mask as numbers"):
        read(lazy_mask(2, 4, 4))


WRITES: dict[str, Function] = {
    "filled": lambda mask: mask.masked_fill_(torch.ones(4, 4, dtype=torch.bool).triu(), False),
    "a part filled": lambda mask: mask[:, :, 1:].masked_fill_(torch.ones(3, 4, dtype=torch.bool), False),
    "assigned": lambda mask: mask.__setitem__((slice(None), 0, 1), False),
    "a part of a copy": lambda mask: (mask & True).__setitem__((0, 0, 1), False),
    "by logic in place": lambda mask: mask.logical_and_(torch.zeros(4, 4, dtype=torch.bool)),
    "as an output": lambda mask: torch.logical_not(torch.ones(2, 1, 4, 4, dtype=torch.bool), out=mask),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_mask_that_is_written_into_raises(write: Function) -> None:
    mask = lazy_mask(2, 4, 4)
    with pytest.raises(UnclaimedError, match=r"writes into attnreg's mask|reads attnreg's mask as numbers"):
        write(mask)
    assert torch.equal(mask.whole(), lazy_mask(2, 4, 4).whole())


def test_what_changes_after_a_mask_was_made_does_not_change_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    # a static cache advances its position before layers read the mask
    position, padding = torch.tensor(2), torch.tensor([[True, True, True, False]])
    mask = lazy_mask(1, 2, 4, q_offset=position, attention_mask=padding)
    expected = theirs.sdpa_mask(1, 2, 4, q_offset=2, attention_mask=padding.clone(), allow_is_causal_skip=False)
    position += 2
    padding.zero_()
    assert (mask.source.begin, mask.source.meaning()) == (2, Band(True, None))
    assert torch.equal(mask.whole(), expected)
    own = lazy_mask(1, 9, 9, mask_function=lambda b, h, q, k: (q >= k) & (q - k < WIDTH))
    monkeypatch.setitem(globals(), "WIDTH", 6)
    assert own.source.meaning() == Band(True, 3)


LOGIC: dict[str, Function] = {
    "both": lambda mask: mask & torch.ones(4, 4, dtype=torch.bool).triu(),
    "neither": lambda mask: ~mask,
    "every": lambda mask: mask.all(-1),
    "a part": lambda mask: mask[1:, 0, :, :2].transpose(1, 2).unsqueeze(0).expand(3, -1, -1, -1).clone(),
    "next to another": lambda mask: torch.cat([mask, mask], -1),
    "filled by a condition": lambda mask: mask.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(), False),
    "says where": lambda mask: torch.arange(32.0).view(2, 1, 4, 4).masked_fill(~mask, -torch.inf),
    "says where, with others": lambda mask: torch.zeros(2, 1, 4, 4).masked_fill(~mask | ~mask[:, :, :1], -1e9),
    "says where to count": lambda mask: torch.zeros(2, 1, 4, 4).masked_fill(mask, 1.0),
    "chooses": lambda mask: torch.arange(32.0).view(2, 1, 4, 4)[mask],
    "of attention": lambda mask: torch.nn.functional.scaled_dot_product_attention(
        *torch.randn(3, 2, 2, 4, 8, generator=torch.Generator().manual_seed(1)).unbind(), attn_mask=mask
    ),
}


@pytest.mark.parametrize("use", LOGIC.values(), ids=LOGIC)
def test_a_mask_that_is_read_as_booleans_is_the_mask(use: Function) -> None:
    mask = lazy_mask(2, 4, 4)
    found, expected = use(mask), use(mask.whole())
    assert torch.equal(found.whole() if isinstance(found, BooleanMask) else found, expected)


def test_a_mask_tells_whether_it_is_empty() -> None:
    assert bool(lazy_mask(1, 4, 4).any())
    assert not bool(lazy_mask(1, 4, 4).all())


def test_rows_of_padding_see_what_their_mask_says_and_not_what_fits_the_others() -> None:
    # tokens see all before them; the last two positions, which are padding, see the first key alone
    own = theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: (q < 2) | (k == 0))
    padding = torch.tensor([[True, True, False, False]])
    varlen = mask_batch(lazy_mask(1, 4, 4, mask_function=own, attention_mask=padding).source, crossed=False)
    assert isinstance(varlen, VarlenBatch)
    assert varlen.padding_queries is not None
    assert varlen.padding_queries.mask[0, 0].tolist() == [[True, False, False, False]] * 2


def a_chunk(b: Any, h: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (key // 8 == query // 8)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("begin", [0, 7, 8, 13, 23])
def test_one_query_that_sees_the_last_keys_needs_no_window(begin: int, static: bool) -> None:
    # a window of another width for each token would be another layer, and compile another kernel
    told = torch.ones(2, begin + 1, dtype=torch.bool)
    told[1, : min(10, begin)] = False
    keys = 32 if static else begin + 1
    mask = lazy_mask(2, 1, keys, q_offset=begin, mask_function=a_chunk, attention_mask=told)
    varlen = mask_batch(mask.source, crossed=False)
    assert isinstance(varlen, VarlenBatch)
    starts = [max(begin // 8 * 8, first) for first in (0, min(10, begin))]
    assert (varlen.band, varlen.first_keys, varlen.key_stop) == (Band(True, None), starts, begin + 1)
    assert (varlen.query_lens, varlen.seq_lens) == ([1, 1], [begin + 1 - first for first in starts])
    seen = torch.arange(keys) >= torch.tensor(starts)[:, None]
    seen &= torch.arange(keys) <= begin
    assert torch.equal(mask.whole()[:, 0, 0], seen)


@pytest.mark.parametrize("function", [every_other, lambda b, h, q, k: (k <= q) & (k != 3), lambda b, h, q, k: k != q])
def test_one_query_that_sees_other_keys_is_no_end(function: Function) -> None:
    mask = lazy_mask(2, 1, 12, q_offset=9, mask_function=function)
    assert mask.source.seen_from is None
    assert mask_batch(mask.source, crossed=False) == "its mask is neither causal, windowed nor a prefix"
