"""Claims become cases, which hold every value and every pair that a row accepts."""

from __future__ import annotations

from itertools import combinations

import pytest

import attnreg
from attnreg import Platform, Registry
from attnreg.conformance.claims import PROVABLE, Claims
from attnreg.conformance.refusals import refusals
from attnreg.conformance.trial import LENGTHS, ON_GPU

HOPPER = Platform(platform="cuda", arch="sm90")


def test_every_value_and_every_pair_of_features_is_in_some_case(claims: Claims) -> None:
    cases = claims.cases("claims")
    assert cases == claims.cases("claims")
    assert len({c.seed for c in cases}) == len(cases)
    assert len({c.words for c in cases}) == len(cases)
    for facet in ("attn_type", "dtype", "kv_dtype", "block_size", "head_size", "head_size_v"):
        assert {getattr(c.request, facet) for c in cases} >= set(claims.dimensions[facet]), facet
    assert {c.storage for c in cases} == set(claims.dimensions["storage"])
    assert {c.lengths for c in cases} == set(claims.dimensions["lengths"])
    claimed = PROVABLE & claims.dimensions.keys()
    assert claimed == PROVABLE - {"fp8_output", "fp8_query"}
    for pair in combinations(sorted(claimed), 2):
        # a layer has one window
        if pair == ("asymmetric_window", "sliding_window"):
            continue
        assert any(c.request.features >= set(pair) for c in cases), pair


def test_every_pair_of_values_that_is_accepted_is_in_some_case(claims: Claims) -> None:
    cases = claims.cases("pairs")
    for dtype in claims.dimensions["dtype"]:
        for kv_dtype in claims.dimensions["kv_dtype"]:
            assert any((c.request.dtype, c.request.kv_dtype) == (dtype, kv_dtype) for c in cases)
        for feature in PROVABLE & claims.dimensions.keys():
            assert any(c.request.dtype == dtype and feature in c.request.features for c in cases)
    # where the row's rule speaks there is no case, and right beside it there is
    cross = [c.request.features for c in cases if c.request.attn_type == "encoder_decoder"]
    assert {"alibi", "chunk", "mm_prefix", "sliding_window"}.isdisjoint(frozenset().union(*cross))
    assert frozenset().union(*cross) >= {"lse", "sinks", "softcap", "batch_invariant"}


def test_sizes_at_the_edges_of_a_claim_are_tried(default: Registry) -> None:
    flex = Claims("FLEX_ATTENTION", HOPPER, default)
    assert {16, 512} <= set(flex.dimensions["head_size"])
    assert not {1, 8} & set(flex.dimensions["head_size"])
    assert ("head_size=15", None) in list(refusals(flex))
    assert ("head_size=513", None) in list(refusals(flex))


def test_widths_of_values_are_tried_at_the_edges_of_a_claim(default: Registry) -> None:
    flex = Claims("FLEX_ATTENTION", HOPPER, default)
    # 64 is as wide as the keys of plain cases, so its case has others
    assert set(flex.dimensions["head_size_v"]) == {None, 16, 32, 64, 128, 512}
    assert {c.request.head_size_v for c in flex.cases("claims")} >= {16, 512}
    tried = dict(refusals(flex))
    assert {"head_size_v=15": tried["head_size_v=15"], "head_size_v=513": tried["head_size_v=513"]} == {
        "head_size_v=15": None,
        "head_size_v=513": None,
    }


def test_values_as_wide_as_the_keys_are_tried_and_others_refused(default: Registry) -> None:
    amd = Claims("ROCM_ATTN", Platform(platform="rocm", arch="gfx942"), default)
    assert amd.dimensions["head_size_v"] == (None,)
    assert {name: said for name, said in refusals(amd) if name.startswith("head_size_v")} == {
        "head_size_v=63": None,
        "head_size_v=65": None,
    }


def test_counts_of_heads_and_layouts_are_tried_as_a_row_claims_them(cpu: Platform) -> None:
    claim = {"num_heads": {"max": 24}, "num_kv_heads": [1, 3, 5], "cache_layouts": "NHD"}
    registry = attnreg.load_registry("default", [{"backends": {"CPU_ATTN": {"capabilities": claim}}}])
    claims = Claims("CPU_ATTN", cpu, registry)
    assert set(claims.dimensions["heads"]) == {(1, 1), (6, 1), (3, 3), (24, 1), (5, 5)}
    assert set(claims.dimensions["storage"]) == {"NHD", "fused", "packed"}
    asked = ("num_", "cache_layout")
    assert {name: said for name, said in refusals(claims) if name.startswith(asked)} == dict.fromkeys(
        [
            "num_heads=25",
            "num_heads=26",
            "num_kv_heads=2",
            "num_kv_heads=4",
            "num_kv_heads=6",
            "cache_layout=HND",
            "cache_layout=SPLIT",
        ]
    )


def test_a_claim_of_everything_refuses_nothing(claims: Claims) -> None:
    tried = [name.partition("=")[0] for name, _ in refusals(claims)]
    assert not {"head_size", "head_size_v", "block_size", "num_heads", "num_kv_heads"} & set(tried)


def test_a_backend_that_accepts_nothing_plain(default: Registry, cpu: Platform) -> None:
    with pytest.raises(LookupError, match=r"^it accepts no plain request on cpu x86_64: arch is x86_64; needs sm100"):
        Claims("FLASH_ATTN", cpu, default).cases()


def test_a_claim_that_no_run_can_prove_is_said_to_be_unproven(cpu: Platform) -> None:
    overlay = {"backends": {"CPU_ATTN": {"capabilities": {"add": {"features": ["dcp"]}}}}}
    registry = attnreg.load_registry("default", [overlay])
    assert Claims("CPU_ATTN", cpu, registry).unproven == {"dcp"}


def test_prompts_have_cases_of_every_cache_that_they_claim(default: Registry, cpu: Platform) -> None:
    claims = Claims("TORCH_PREFILL", cpu, default)
    cached = [case.request for case in claims.cases("claims") if case.storage == "latents"]
    assert {r.kv_dtype for r in cached} >= {"float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"}
    assert all("lse" in r.features for r in cached)
    assert any("kv_connector" in r.features for r in cached)


def test_batches_of_a_gpu_are_longer(default: Registry) -> None:
    on_gpu = Claims("HOPPER_ATTN", HOPPER, default, ON_GPU)
    cases = on_gpu.cases("claims")
    assert {c.lengths for c in cases} == set(ON_GPU)
    # in every layout of a cache, and without one
    assert {c.storage for c in on_gpu.cases("pairs") if c.lengths == "long"} == set(on_gpu.dimensions["storage"])


def test_a_feature_that_goes_with_some_sizes_alone_is_tried_with_them(default: Registry) -> None:
    cases = Claims("FLASH_ATTN/FA3-engine", HOPPER, default).cases("claims")
    sizes = {c.request.head_size for c in cases if "batch_invariant" in c.request.features}
    assert sizes
    assert min(sizes) > 64


def test_a_feature_of_one_dtype_and_attention_type_alone_is_tried_with_both(default: Registry) -> None:
    requests = [case.request for case in Claims("TORCH_SDPA", HOPPER, default).cases("claims")]
    assert any("lse" in request.features for request in requests)


def test_a_row_without_a_paged_cache_is_tried_as_a_decoder_too(default: Registry) -> None:
    for variant in ("cuDNN", "flash", "efficient"):
        cases = Claims(f"TORCH_SDPA/{variant}", HOPPER, default).cases("claims")
        assert any("non_causal" in case.request.features for case in cases), variant


@pytest.mark.parametrize(("lengths", "varied"), [(LENGTHS, "mixed"), (ON_GPU, "long")])
def test_bits_are_compared_where_requests_differ_most(default: Registry, lengths: tuple[str, ...], varied: str) -> None:
    cases = Claims("TRITON_ATTN", HOPPER, default, lengths).cases("pairs")
    found = {c.lengths for c in cases if "batch_invariant" in c.request.features}
    assert found == {"decode", varied}
