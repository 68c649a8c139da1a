"""The float64 reference against sums written out by hand, and against PyTorch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnreg.kernels import reference
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, KVCache, LayerParams
from attnreg.runtime.masks import seen_by_position

# one query head of width 1 that scores each key by the key itself
ONE: dict[str, Any] = {
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_size": 1,
    "head_size_v": 1,
    "dtype": torch.float64,
    "softmax_scale": 1.0,
}


def spec(*features: str, **changes: Any) -> AttentionSpec:
    return AttentionSpec(**{**ONE, "features": frozenset(features), **changes})


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1)


def answer(
    layer: AttentionSpec,
    keys: list[float],
    values: list[float],
    queries: int = 1,
    *,
    causal: bool = True,
    **params: Any,
) -> tuple[list[float], list[float]]:
    """Output and LSE of the last queries of one request, all of them 1."""
    batch = BatchMetadata.build([queries], [len(keys)], causal=causal)
    found = reference.attention(
        layer,
        batch,
        torch.ones(queries, 1, 1, dtype=torch.float64),
        key=column(*keys),
        value=column(*values),
        params=LayerParams(**{name: torch.tensor([x], dtype=torch.float64) for name, x in params.items()}),
    )
    return found.output.flatten().tolist(), found.lse.flatten().tolist()


def test_weights_are_the_softmax_of_scaled_scores() -> None:
    out, lse = answer(spec(softmax_scale=0.5), [2.0, 4.0], [10.0, 20.0])
    assert lse == pytest.approx([math.log(math.exp(1) + math.exp(2))])
    assert out == pytest.approx([(10 * math.exp(1) + 20 * math.exp(2)) / (math.exp(1) + math.exp(2))])


def test_a_sink_is_in_the_denominator_and_the_lse_and_not_in_the_output() -> None:
    out, lse = answer(spec("sinks"), [0.0], [8.0], sinks=math.log(3))
    assert out == pytest.approx([8 / 4])
    assert lse == pytest.approx([math.log(4)])


@pytest.mark.parametrize("keys", [[], [0.0, 4.0]], ids=["no keys", "keys"])
def test_a_sink_of_infinity_takes_all_the_weight(keys: list[float]) -> None:
    layer = spec("sinks", attn_type="encoder_decoder")
    assert answer(layer, keys, keys, 1, causal=False, sinks=math.inf) == ([0.0], [math.inf])


def test_a_softcap_comes_before_alibi() -> None:
    # two keys, one and no step behind the query
    out, lse = answer(spec("softcap", "alibi", softcap=2.0), [3.0, 5.0], [1.0, 0.0], alibi_slopes=0.25)
    scores = [2 * math.tanh(1.5) - 0.25, 2 * math.tanh(2.5)]
    assert lse == pytest.approx([math.log(sum(map(math.exp, scores)))])
    assert out == pytest.approx([math.exp(scores[0] - lse[0])])


def test_alibi_is_the_distance_on_both_sides() -> None:
    _, lse = answer(spec("alibi", "non_causal"), [0.0, 0.0, 0.0], [0.0] * 3, 3, causal=False, alibi_slopes=1.0)
    expected = [math.log(sum(math.exp(-abs(p - k)) for k in range(3))) for p in range(3)]
    assert lse == pytest.approx(expected)


def test_a_row_without_a_key_is_zero_and_minus_infinity_or_the_sink() -> None:
    cross = {"attn_type": "encoder_decoder"}
    assert answer(spec(**cross), [], [], 1, causal=False) == ([0.0], [-math.inf])
    assert answer(spec("sinks", **cross), [], [], 1, causal=False, sinks=1.5) == ([0.0], [1.5])


@pytest.mark.parametrize(
    ("causal", "window", "ranges", "picture"),
    [
        # a row per query, the last three of five tokens
        (True, None, [], ["###..", "####.", "#####"]),
        (False, None, [], ["#####", "#####", "#####"]),
        (True, 2, [], [".##..", "..##.", "...##"]),
        (False, 2, [], [".###.", "..###", "...##"]),
        (True, 1, [], ["..#..", "...#.", "....#"]),
        (True, None, [(2, 5)], ["#####", "#####", "#####"]),
        (True, 1, [(0, 4)], ["####.", "####.", "....#"]),
        (True, 2, [(3, 3), (4, 2)], [".##..", "..##.", "...##"]),
        (True, 1, [(0, 2), (2, 4)], ["..##.", "..##.", "....#"]),
    ],
)
def test_which_keys_take_part(
    causal: bool, window: int | None, ranges: list[tuple[int, int]], picture: list[str]
) -> None:
    features = {"mm_prefix"} | ({"sliding_window"} if window else set())
    layer = spec(*features, sliding_window=window)
    batch = BatchMetadata.build(
        [3], [5], causal=causal, mm_prefix=torch.tensor([ranges], dtype=torch.int32).view(1, -1, 2)
    )
    visible = reference.visible_keys(layer, batch, 0)
    assert ["".join(".#"[int(v)] for v in row) for row in visible] == picture


@pytest.mark.parametrize(
    ("causal", "numbers", "features", "ranges", "picture"),
    [
        # a row per query, the last three of seven tokens
        (False, {"asymmetric_window": (1, 0)}, set(), [], ["...##..", "....##.", ".....##"]),
        (False, {"asymmetric_window": (0, 1)}, set(), [], ["....##.", ".....##", "......#"]),
        (False, {"asymmetric_window": (-1, 1)}, set(), [], ["######.", "#######", "#######"]),
        (False, {"asymmetric_window": (1, -1)}, set(), [], ["...####", "....###", ".....##"]),
        (True, {"asymmetric_window": (1, 2)}, set(), [], ["...##..", "....##.", ".....##"]),
        (True, {"chunk": 3}, set(), [], ["...##..", "...###.", "......#"]),
        (False, {"chunk": 3}, set(), [], ["...###.", "...###.", "......#"]),
        (True, {"chunk": 3, "sliding_window": 2}, set(), [], ["...##..", "....##.", "......#"]),
        (True, {"sliding_window": 2}, {"mm_prefix_in_window"}, [(1, 6)], ["...###.", "....##.", ".....##"]),
        (True, {"sliding_window": 2}, set(), [(1, 6)], [".#####.", ".#####.", ".....##"]),
        (True, {"chunk": 3, "sliding_window": 4}, {"mm_prefix_in_window"}, [(0, 6)], [".#####.", "..####.", "......#"]),
        ([True], {}, set(), [], ["#####..", "######.", "#######"]),
        ([False], {}, set(), [], ["#######"] * 3),
        ([False], {"sliding_window": 2}, set(), [], ["...###.", "....###", ".....##"]),
    ],
)
def test_windows_chunks_and_causality_by_request(
    causal: Any, numbers: dict[str, Any], features: set[str], ranges: list[tuple[int, int]], picture: list[str]
) -> None:
    layer = spec(*numbers, *features, *({"mm_prefix"} if ranges else ()), **numbers)
    prefix = torch.tensor([ranges], dtype=torch.int32).view(1, -1, 2) if ranges else None
    batch = BatchMetadata.build([3], [7], causal=causal, mm_prefix=prefix)
    visible = reference.visible_keys(layer, batch, 0)
    assert ["".join(".#"[int(v)] for v in row) for row in visible] == picture
    # the mask of the backends that compute it in PyTorch
    at = reference.positions(batch, 0)
    seen = seen_by_position(layer, batch, torch.tensor([[0]]), at[0].T, at[1][None])
    assert seen[0].equal(visible)


def test_a_tree_of_queries_sees_its_ancestors() -> None:
    # two requests; of the first the third query follows the first, beside the second
    tree = torch.tensor([[0, 1, 1], [1, 0, 1], [1, 0, 0], [0, 1, 1]], dtype=torch.bool)
    layer = spec("tree_mask")
    batch = BatchMetadata.build([3, 1], [5, 2], tree_mask=tree)
    for i, picture in enumerate((["###..", "####.", "###.#"], ["##"])):
        visible = reference.visible_keys(layer, batch, i)
        assert ["".join(".#"[int(v)] for v in row) for row in visible] == picture
        at = reference.positions(batch, i)
        assert seen_by_position(layer, batch, torch.tensor([[i]]), at[0].T, at[1][None])[0].equal(visible)


def test_grouped_heads_and_causal_prompts_are_those_of_torch() -> None:
    torch.manual_seed(0)
    layer = AttentionSpec(
        num_heads=6, num_kv_heads=2, head_size=8, head_size_v=4, dtype=torch.float64, softmax_scale=0.3
    )
    lengths = [5, 0, 3]
    q, k, v = (torch.randn(8, h, d, dtype=torch.float64) for h, d in ((6, 8), (2, 8), (2, 4)))
    found = reference.attention(layer, BatchMetadata.build(lengths), q, key=k, value=v)
    for rows in (slice(0, 5), slice(5, 8)):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x[rows].transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(found.output[rows], expected.transpose(0, 1))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_paged_cache_is_read_through_its_table_and_scaled(layout: str) -> None:
    layer = spec(block_size=2, kv_dtype="fp8_e5m2", kv_layout=layout)
    cache = torch.full((4, 2, 1, 1), math.nan)
    cache[3, :, 0, 0] = torch.tensor([1.0, 2.0])
    cache[1, 0, 0, 0] = 4.0
    stored = cache.to(torch.float8_e5m2) if layout == "NHD" else cache.transpose(1, 2).to(torch.float8_e5m2)
    batch = BatchMetadata.build([1], [3], block_table=torch.tensor([[3, 1, 7]], dtype=torch.int32))
    params = LayerParams(k_scale=torch.tensor([0.5]), v_scale=torch.tensor([3.0]))
    k, v = reference.request_kv(layer, batch, 0, KVCache(stored, stored), None, None, params)
    assert k.flatten().tolist() == [0.5, 1.0, 2.0]
    assert v.flatten().tolist() == [3.0, 6.0, 12.0]
