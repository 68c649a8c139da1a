"""Claims become cases, cases find faults, and the claims of every row that runs here hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnreg
from attnreg import Platform, Registry, RequestError, loader
from attnreg.conformance.bounds import ROUNDOFF, bounds
from attnreg.conformance.claims import PROVABLE, Claims
from attnreg.conformance.proof import prove
from attnreg.conformance.refusals import refusals
from attnreg.conformance.trial import lengths_of
from attnreg.conformance.verify import verify
from attnreg.kernels import cpu_attn
from attnreg.kernels.reference import attention
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache, LayerParams

HOPPER = Platform(platform="cuda", arch="sm90")


@pytest.fixture(scope="module")
def claims(default: Registry, cpu: Platform) -> Claims:
    return Claims("CPU_ATTN", cpu, default)


# the rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA"])
def test_what_runs_on_a_processor_does_what_its_row_claims(default: Registry, cpu: Platform, backend: str) -> None:
    (evidence,) = verify([backend], registry=default, platform=cpu)
    assert evidence.problems == []
    assert evidence.unproven == []
    row = default.backends[backend].variants[0]
    for facet, key in (("dtype", "dtypes"), ("kv_dtype", "kv_dtypes"), ("attn_type", "attn_types")):
        (claim,) = (c for c in row.claims if c.key == key)
        words = {w for w in default.vocabulary.words[key] if claim.matcher.matches(w)}
        assert evidence.claims[facet].keys() == words
    assert evidence.claims["features"].keys() == row.served


def test_the_logic_of_flex_attention(default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    # on a processor it runs without Triton, so nothing of it is interpreted
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (evidence,) = verify(["FLEX_ATTENTION"], registry=default, platform=HOPPER, device="cpu", size="claims")
    assert (evidence.problems, evidence.unproven) == ([], [])


# cases ---------------------------------------------------------------------------------------------------------------


def test_every_value_and_every_pair_of_features_is_in_some_case(claims: Claims) -> None:
    cases = claims.cases("claims")
    assert cases == claims.cases("claims")
    assert len({c.seed for c in cases}) == len(cases)
    assert len({c.words for c in cases}) == len(cases)
    for facet in ("attn_type", "dtype", "kv_dtype", "block_size", "head_size", "head_size_v"):
        assert {getattr(c.request, facet) for c in cases} >= set(claims.dimensions[facet]), facet
    assert {c.storage for c in cases} == set(claims.dimensions["storage"])
    assert {c.lengths for c in cases} == set(claims.dimensions["lengths"])
    for pair in combinations(sorted(PROVABLE), 2):
        assert any(c.request.features >= set(pair) for c in cases), pair


def test_every_pair_of_values_that_is_accepted_is_in_some_case(claims: Claims) -> None:
    cases = claims.cases("pairs")
    for dtype in claims.dimensions["dtype"]:
        for kv_dtype in claims.dimensions["kv_dtype"]:
            assert any((c.request.dtype, c.request.kv_dtype) == (dtype, kv_dtype) for c in cases)
        for feature in PROVABLE:
            assert any(c.request.dtype == dtype and feature in c.request.features for c in cases)
    # where the row's rule speaks there is no case, and right beside it there is
    cross = [c.request.features for c in cases if c.request.attn_type == "encoder_decoder"]
    assert {"alibi", "mm_prefix", "sliding_window"}.isdisjoint(frozenset().union(*cross))
    assert frozenset().union(*cross) >= {"lse", "sinks", "softcap", "batch_invariant"}


def test_sizes_at_the_edges_of_a_claim_are_tried(default: Registry) -> None:
    flex = Claims("FLEX_ATTENTION", HOPPER, default)
    assert {16, 512} <= set(flex.dimensions["head_size"])
    assert not {1, 8} & set(flex.dimensions["head_size"])
    assert ("head_size=15", None) in list(refusals(flex))
    assert ("head_size=513", None) in list(refusals(flex))


def test_widths_of_values_are_tried_at_the_edges_of_a_claim(default: Registry) -> None:
    flex = Claims("FLEX_ATTENTION", HOPPER, default)
    # of heads that are 64 wide
    assert set(flex.dimensions["head_size_v"]) == {None, 16, 32, 128, 512}
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
    with pytest.raises(LookupError, match="FLASH_ATTN accepts no plain request on cpu"):
        Claims("FLASH_ATTN", cpu, default).cases()


def test_a_claim_that_no_run_can_prove_is_said_to_be_unproven(cpu: Platform) -> None:
    overlay = {"backends": {"CPU_ATTN": {"capabilities": {"add": {"features": ["dcp"]}}}}}
    registry = attnreg.load_registry("default", [overlay])
    assert Claims("CPU_ATTN", cpu, registry).unproven == {"dcp"}


@pytest.mark.parametrize("attn_type", ["decoder", "encoder", "encoder_decoder"])
def test_lengths_hold_the_cases_that_break_kernels(attn_type: str) -> None:
    every = [pair for name in ("mixed", "decode", "prefill") for pair in lengths_of(name, 16, attn_type)]
    assert (0, 0) in every
    assert (1, 1) in every
    assert any(k % 16 == 1 and k > 1 for _, k in every)
    if attn_type == "decoder":
        assert any(q == 0 < k for q, k in every)
        assert any(1 < q < k for q, k in every)


# faults --------------------------------------------------------------------------------------------------------------


def altered(**changes: Any) -> Any:
    """CPU_ATTN with other answers: ``spec``, ``batch`` and ``params`` are functions of what it is told."""

    def told(name: str, value: Any) -> Any:
        return changes[name](value) if name in changes else value

    def plan(spec: AttentionSpec, batch: BatchMetadata) -> Any:
        return cpu_attn.plan(told("spec", spec), told("batch", batch)), batch

    def write_kv(spec: Any, plan: Any, key: Tensor, value: Tensor, kv_cache: KVCache, *, params: LayerParams) -> None:
        cpu_attn.write_kv(spec, cpu_attn.plan(spec, told("slots", plan[1])), key, value, kv_cache, params=params)
        changes.get("written", lambda *_: None)(plan[1], key, kv_cache)

    def forward(spec: Any, plan: Any, call: Call) -> None:
        call = call._replace(kv_cache=told("kv_cache", call.kv_cache), params=told("params", call.params))
        cpu_attn.forward(told("spec", spec), plan[0], call)
        changes.get("after", lambda *_: None)(plan[1], call.output, call.lse, call.kv_cache)

    return SimpleNamespace(kv_cache_shape=cpu_attn.kv_cache_shape, plan=plan, write_kv=write_kv, forward=forward)


def without(spec: AttentionSpec, **changes: Any) -> AttentionSpec:
    """A spec with other numbers, where it has them."""
    return replace(spec, **{k: v for k, v in changes.items() if getattr(spec, k) is not None})


def wider(spec: AttentionSpec) -> AttentionSpec:
    return spec if spec.sliding_window is None else replace(spec, sliding_window=spec.sliding_window + 1)


def past_the_end(batch: BatchMetadata) -> BatchMetadata:
    longer = (batch.seq_lens_cpu + 1) if batch.paged else batch.seq_lens_cpu
    return replace(batch, seq_lens_cpu=longer)


def remember(store: list[KVCache]) -> Callable[..., None]:
    return lambda batch, key, kv_cache: store.append(kv_cache)


def base_two(batch: BatchMetadata, output: Tensor, lse: Tensor | None, kv_cache: KVCache | None) -> None:
    if lse is not None:
        lse[:, : batch.num_tokens] /= torch.tensor(2.0).log()


def leave_empty_rows(batch: BatchMetadata, output: Tensor, *_: Any) -> None:
    empty = (batch.seq_lens_cpu == 0).repeat_interleave(batch.query_start_loc_cpu.diff())
    output[: batch.num_tokens][empty] = torch.nan


kept: list[KVCache] = []
FAULTS: dict[str, dict[str, Any]] = {
    "sinks are dropped": {"params": lambda p: replace(p, sinks=None)},
    "sinks of other heads": {"params": lambda p: replace(p, sinks=None if p.sinks is None else p.sinks.roll(1))},
    "the softcap is dropped": {"spec": lambda s: without(s, softcap=1e6)},
    "the window is one wider": {"spec": wider},
    "always causal": {"batch": lambda b: replace(b, causal=True)},
    "never causal": {"batch": lambda b: replace(b, causal=False)},
    "ranges are dropped": {"batch": lambda b: replace(b, mm_prefix=None)},
    "slopes of other heads": {
        "params": lambda p: replace(p, alibi_slopes=None if p.alibi_slopes is None else p.alibi_slopes.roll(1))
    },
    "a key too many": {"batch": past_the_end},
    "the scale is the default": {"spec": lambda s: replace(s, softmax_scale=1.01 * s.softmax_scale)},
    "values are not scaled": {"params": lambda p: replace(p, v_scale=None)},
    "scales of other heads": {"params": lambda p: replace(p, k_scale=None if p.k_scale is None else p.k_scale.roll(1))},
    "the LSE has base two": {"after": base_two},
    "empty rows are left": {"after": leave_empty_rows},
    "padding is written": {"after": lambda batch, output, *_: output[batch.num_tokens :].zero_()},
    "attention writes the cache": {"after": lambda b, o, lse, cache: cache and cache.key[0].zero_()},
    "unwanted rows go to slot 0": {"slots": lambda b: replace(b, slot_mapping=b.slot_mapping.clamp(min=0))},
    "the cache is rounded": {"written": lambda b, key, cache: cache.key.copy_(cache.key.half())},
    "the batch shows in the last digit": {"after": lambda b, output, *_: output.mul_(1 + 2e-7 * b.num_reqs)},
    "the cache that was written is read": {"written": remember(kept), "kv_cache": lambda c: c and kept[-1]},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(claims: Claims, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(**FAULTS[fault]))
    assert any(prove(case, claims.select(case.request)).problem for case in claims.cases("claims"))


def test_the_same_without_a_fault_is_found_to_be_right(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered())
    assert [prove(case, claims.select(case.request)).problem for case in claims.cases("claims")[:4]] == [None] * 4


def test_an_input_that_is_dropped_is_found(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {problem for _, problem in refusals(claims)} == {None}
    assert {name for name, _ in refusals(claims)} >= {
        "sinks",
        "softcap",
        "alibi_slopes",
        "sliding_window",
        "lse",
        "mm_prefix",
        "non_causal",
        "dcp=True",
    }
    monkeypatch.setattr("attnreg.runtime.layer._refuse_unasked", lambda *_: None)
    found = dict(refusals(claims))
    assert found["lse"] == "lse reached the kernels of CPU_ATTN, which was not selected for it"
    assert found["mm_prefix"] is not None
    assert found["non_causal"] is not None


# bounds --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bounds_are_near_what_the_dtype_can_hold(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_size=64, head_size_v=64, dtype=dtype, softmax_scale=0.125)
    batch = BatchMetadata.build([4], [32])
    q, k, v = (torch.randn(n, 2, 64).to(dtype) for n in (4, 32, 32))
    exact = attention(spec, batch, q, key=k, value=v)
    allowed, allowed_lse = bounds(spec, batch, exact, float(v.abs().max()))
    # rounding the exact answer is allowed, and no more than a small multiple of it relative to the values
    assert ((exact.output.to(dtype).double() - exact.output).abs() <= allowed).all()
    ordinary = 4 * ROUNDOFF[dtype] + 700 * ROUNDOFF[torch.float32] * float(exact.abs_score.max())
    assert (allowed <= ordinary * (exact.abs_output + exact.output.abs())).all()
    assert float(allowed_lse.max()) < 1e-3


# evidence ------------------------------------------------------------------------------------------------------------


def test_evidence_is_recorded_and_what_is_refuted_is_struck_from_it(
    default: Registry, cpu: Platform, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    (evidence,) = verify(
        ["CPU_ATTN"], registry=default, platform=cpu, size="claims", record=tmp_path, report=lambda *a: seen.append(a)
    )
    assert evidence.proven
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert (data["device"], data["platform"]) == ("cpu", "cpu")
    entry = data["backends"]["CPU_ATTN"]
    assert entry["for"] == "cpu x86_64"
    assert entry["cases"] == len(seen) == evidence.cases > 8
    assert entry["versions"]["torch"] == torch.__version__
    assert 0 < entry["claims"]["dtype"]["bfloat16"]["share"] <= 1
    assert entry["claims"]["features"]["sinks"]["cases"] >= 1

    verify(["TORCH_SDPA"], registry=default, platform=cpu, size="claims", record=tmp_path)
    assert json.loads((tmp_path / "cpu.json").read_text())["backends"].keys() == {"CPU_ATTN", "TORCH_SDPA"}
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(batch=past_the_end))
    (refuted,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims", record=tmp_path)
    assert not refuted.proven
    assert json.loads((tmp_path / "cpu.json").read_text())["backends"].keys() == {"TORCH_SDPA"}


def test_what_a_kernel_raises_refutes_the_claim(
    default: Registry, cpu: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: Any) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(after=burst))
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims")
    assert len(evidence.problems) == evidence.cases
    assert evidence.problems[0].endswith("RuntimeError: out of shared memory")


def test_only_what_runs_here_can_be_verified(default: Registry, cpu: Platform) -> None:
    with pytest.raises(
        RequestError, match=r"FLASH_ATTN cannot be verified here; with a kernel module there are: CPU_ATTN"
    ):
        verify(["FLASH_ATTN"], registry=default, platform=cpu)
