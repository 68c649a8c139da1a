"""What a spec and a batch refuse to be."""

from __future__ import annotations

import pickle
import re
from copy import copy
from typing import Any

import pytest
import torch

from attnreg import AttentionRequest
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, SpecError, paged_cache_shape
from attnreg.runtime.lengths import LONGEST

REQUEST: dict[str, Any] = {"head_size": 64, "num_heads": 8, "num_kv_heads": 2, "block_size": 16}


def test_a_spec_is_its_request_and_the_numbers_that_it_only_names() -> None:
    request = AttentionRequest(**REQUEST, kv_dtype="fp8_e5m2", features={"softcap", "sinks"})
    spec = AttentionSpec.from_request(request, softcap=30.0)
    assert (spec.softmax_scale, spec.head_size_v, spec.dtype) == (0.125, 64, torch.bfloat16)
    assert (spec.cache_dtype, spec.quantised, spec.features) == (torch.float8_e5m2, True, {"softcap", "sinks"})
    assert spec == AttentionSpec.from_request(request, softcap=30.0)
    assert hash(spec) == hash(AttentionSpec.from_request(request, softcap=30.0))
    assert AttentionSpec.from_request(AttentionRequest(head_size=8, num_heads=3)).num_kv_heads == 3


@pytest.mark.parametrize(
    ("request_fields", "numbers", "message"),
    [
        ({"attention": "mha_sparse"}, {}, "attention is mha_sparse; this contract is for mha, mla and mla_sparse"),
        ({"num_heads": None}, {}, "num_heads is not given"),
        ({"dtype": "float8"}, {}, "dtype is float8; layers compute in float16, bfloat16, float32"),
        ({"kv_dtype": "nvfp4"}, {}, "kv_dtype is nvfp4; caches here hold auto, float16"),
        ({}, {"sliding_window": 4}, "sliding_window is 4 and the request does not ask for sliding_window"),
        ({"features": {"softcap"}}, {}, "softcap is None and the request asks for softcap; give it"),
        ({"features": {"softcap"}}, {"softcap": 0.0}, "softcap is 0.0; expected more than 0"),
        ({"features": {"softcap"}}, {"softcap": 1e5}, "softcap is 100000.0; expected up to 4096, past which scores"),
        ({"features": {"sliding_window"}}, {"sliding_window": -1}, "sliding_window is -1; expected more than 0"),
        (
            {"features": {"sliding_window", "asymmetric_window", "non_causal"}},
            {"sliding_window": (1, 2)},
            "a layer has a sliding_window or an asymmetric_window, not both; ask for one of the features",
        ),
        (
            {"features": {"asymmetric_window"}},
            {},
            "asymmetric_window is None and the request asks for asymmetric_window; give sliding_window=(left, right)",
        ),
        (
            {"features": {"non_causal"}},
            {"sliding_window": (1, 2)},
            "asymmetric_window is (1, 2) and the request does not ask for asymmetric_window; add the feature",
        ),
        (
            {"features": {"sliding_window"}},
            {"sliding_window": (1, -5)},
            "sliding_window is (1, -5); expected keys before",
        ),
        (
            {"features": {"sliding_window"}},
            {"sliding_window": (-1, -1)},
            "sliding_window is not given, or is -1, which is every key, and the request asks for sliding_window; give",
        ),
        ({"features": {"chunk"}}, {}, "chunk is None and the request asks for chunk; give it"),
        ({"features": {"mm_prefix_in_window"}}, {}, "mm_prefix_in_window bounds the ranges of mm_prefix by a window"),
        ({"features": {"softcap"}}, {"softcap": 1e-45}, "softcap is 1e-45; expected 2**-60 or more"),
        ({}, {"softmax_scale": float("nan")}, "softmax_scale is nan; expected more than 0"),
        ({}, {"softmax_scale": 1e30}, "softmax_scale is 1e+30; expected 2**-60 to 2**60"),
        ({}, {"softmax_scale": 1e-45}, "softmax_scale is 1e-45; expected 2**-60 to 2**60"),
        ({}, {"kv_layout": "DNH"}, "kv_layout is 'DNH'; expected NHD, HND, SPLIT"),
        (
            {"attn_type": "encoder_decoder", "features": {"alibi"}},
            {},
            "alibi has no meaning for encoder_decoder attention",
        ),
    ],
)
def test_a_spec_that_contradicts_itself(request_fields: dict[str, Any], numbers: dict[str, Any], message: str) -> None:
    request = AttentionRequest(**{**REQUEST, **request_fields})
    with pytest.raises(SpecError, match=re.escape(message)):
        AttentionSpec.from_request(request, **numbers)


@pytest.mark.parametrize(
    ("window", "attn_type", "features", "number", "sides"),
    [
        ((127, 0), "decoder", {"sliding_window"}, 128, None),
        # no query of a causal layer sees later keys, whatever the second number is
        ([127, -1], "decoder", {"sliding_window"}, 128, None),
        ((-1, -1), "decoder", set(), None, None),
        ((-1, 0), "decoder", set(), None, None),
        ((3, 3), "encoder_only", {"sliding_window"}, 4, None),
        ((127, 0), "decoder", {"asymmetric_window", "non_causal"}, None, (127, 0)),
        ((3, 3), "encoder", {"asymmetric_window"}, None, (3, 3)),
        ((-1, 5), "decoder", {"asymmetric_window", "causal_by_request"}, None, (-1, 5)),
    ],
)
def test_a_window_of_two_sides_is_a_number_where_one_says_it(
    window: Any, attn_type: str, features: set[str], number: int | None, sides: tuple[int, int] | None
) -> None:
    request = AttentionRequest(**REQUEST, attn_type=attn_type, features=features)
    spec = AttentionSpec.from_request(request, sliding_window=window)
    assert (spec.sliding_window, spec.asymmetric_window) == (number, sides)
    assert spec.sides(causal=True)[1] == 0


@pytest.mark.parametrize(
    ("window", "sides"),
    [
        (LONGEST - 1, (LONGEST - 2, LONGEST - 2)),
        (LONGEST, (-1, -1)),
        (2 * LONGEST, (-1, -1)),
        ((LONGEST - 2, 2 * LONGEST), (LONGEST - 2, -1)),
        ((LONGEST - 1, 3), (-1, 3)),
    ],
)
def test_a_side_wider_than_any_request_is_none(window: Any, sides: tuple[int, int]) -> None:
    features = {"non_causal", "asymmetric_window" if isinstance(window, tuple) else "sliding_window"}
    spec = AttentionSpec.from_request(AttentionRequest(**REQUEST, features=features), sliding_window=window)
    assert spec.sides(causal=False) == sides
    assert spec.sides(causal=True) == (sides[0], 0)
    assert pickle.loads(pickle.dumps(spec)).sides(causal=False) == copy(spec).sides(causal=False) == sides


def test_the_sides_of_a_window_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # plans ask for them for each request
    spec = AttentionSpec.from_request(AttentionRequest(**REQUEST, features={"sliding_window"}), sliding_window=8)
    monkeypatch.setattr("attnreg.runtime.spec.LONGEST", 0)
    assert spec.sides(causal=False) == (7, 7)


def test_head_counts_of_a_spec_made_by_hand() -> None:
    counts = {"num_heads": 3, "num_kv_heads": 2, "head_size": 8, "head_size_v": 8}
    with pytest.raises(SpecError, match="num_heads is 3 and num_kv_heads is 2; the second must divide the first"):
        AttentionSpec(**counts, dtype=torch.float32, softmax_scale=1.0)
    with pytest.raises(SpecError, match="head_size_v is 0; expected at least 1"):
        AttentionSpec(**{**counts, "head_size_v": 0}, dtype=torch.float32, softmax_scale=1.0)


@pytest.mark.parametrize("fnuz", [False, True])
def test_queries_and_outputs_in_8_bits(fnuz: bool) -> None:
    e4m3 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    both = AttentionSpec.from_request(AttentionRequest(**REQUEST, features={"fp8_query", "fp8_output"}), fnuz=fnuz)
    assert (both.query_dtype, both.output_dtype, both.cache_dtype) == (e4m3, e4m3, torch.bfloat16)
    none = AttentionSpec.from_request(AttentionRequest(**REQUEST), fnuz=fnuz)
    assert (none.query_dtype, none.output_dtype) == (torch.bfloat16, torch.bfloat16)


def test_the_shape_of_a_cache() -> None:
    request = AttentionRequest(**REQUEST, head_size_v=32, kv_dtype="fp8")
    shape = paged_cache_shape(AttentionSpec.from_request(request), 5)
    assert shape == ((5, 16, 2, 64), (5, 16, 2, 32), torch.float8_e4m3fn)
    assert paged_cache_shape(AttentionSpec.from_request(request, kv_layout="HND"), 5).key == (5, 2, 16, 64)
    with pytest.raises(SpecError, match="block_size is not given"):
        paged_cache_shape(AttentionSpec.from_request(AttentionRequest(head_size=64, num_heads=2)), 5)


def test_a_batch_from_its_lengths() -> None:
    batch = BatchMetadata.build([2, 0, 1], [5, 0, 1])
    assert batch.query_start_loc.tolist() == [0, 2, 2, 3]
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (3, 3, 2, 5)
    assert batch.key_start_loc is not None
    assert batch.key_start_loc.tolist() == [0, 5, 5, 6]
    same = BatchMetadata.build([2, 1])
    assert (same.key_start_loc, same.seq_lens.tolist(), same.paged) == (None, [2, 1], False)
    assert BatchMetadata.build([], []).num_tokens == 0
