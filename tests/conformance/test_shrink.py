"""A refuted case is shrunk to the fewest features, the plainest values and the smallest sizes that fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.layers.altered import altered, burst

from attnreg import Platform, Registry, loader
from attnreg.conformance.claims import Claims
from attnreg.conformance.shrink import MOST_TRIES, explains, shrunk
from attnreg.conformance.trial import Case
from attnreg.conformance.verify import verify
from attnreg.runtime.interface import AttentionSpec


@pytest.fixture
def claims(default: Registry, cpu: Platform) -> Claims:
    return Claims("CPU_ATTN", cpu, default)


def case_of(claims: Claims, *features: str, **settings: Any) -> Case:
    base = {**claims._base, "heads": (4, 2), "lengths": "mixed", **settings, **dict.fromkeys(features, True)}
    case = claims.case(base)
    assert case is not None
    return case


GUILTY: list[tuple[str, ...]] = [
    (),
    ("sinks",),
    ("sinks", "softcap"),
    ("lse", "sinks", "softcap"),
    ("alibi", "lse", "sinks", "softcap"),
]


@pytest.mark.parametrize("guilty", GUILTY, ids=len)
def test_the_features_that_fail_together_are_found(claims: Claims, guilty: tuple[str, ...]) -> None:
    case = case_of(claims, "alibi", "lse", "sinks", "sliding_window", "softcap", dtype="bfloat16", head_size=80)
    tried: list[Case] = []

    def fails(candidate: Case) -> bool:
        tried.append(candidate)
        assert claims.accepts(candidate.request)
        return candidate.request.features >= {*guilty}

    smallest = shrunk(case, claims, fails)
    assert smallest.request.features == {*guilty}
    assert (smallest.lengths, smallest.storage, smallest.request.dtype) == ("single", "NHD", "float32")
    assert (smallest.request.num_heads, smallest.request.head_size) == (1, min(claims.dimensions["head_size"]))
    assert len(tried) == len(set(tried)) <= MOST_TRIES


def test_a_value_that_fails_is_kept(claims: Claims) -> None:
    case = case_of(claims, "sinks", dtype="bfloat16", heads=(6, 1), lengths="decode")
    smallest = shrunk(case, claims, lambda c: c.request.dtype == "bfloat16" and c.lengths == "decode")
    assert (smallest.request.dtype, smallest.lengths, smallest.request.features) == ("bfloat16", "decode", frozenset())
    # no other case fails
    assert shrunk(case, claims, lambda c: False) == case


def test_a_case_with_the_same_features_is_explained(claims: Claims) -> None:
    assert explains(case_of(claims, "sinks"), case_of(claims, "sinks", "lse"))
    assert not explains(case_of(claims, "sinks"), case_of(claims, "lse"))


def wider(spec: AttentionSpec) -> AttentionSpec:
    """A window that is one key too wide."""
    return spec if spec.sliding_window is None else replace(spec, sliding_window=spec.sliding_window + 1)


def without_cap(spec: AttentionSpec) -> AttentionSpec:
    """A cap that is ignored beside a window."""
    return replace(spec, softcap=None) if spec.sliding_window is not None else spec


FAULTS: list[tuple[Callable[..., Any], set[str]]] = [
    (wider, {"sliding_window"}),
    (without_cap, {"sliding_window", "softcap"}),
]


@pytest.mark.slow(reason="runs the cases of a kernel")
@pytest.mark.parametrize(("fault", "guilty"), FAULTS)
def test_verify_prints_the_smallest_case_of_a_planted_fault(
    default: Registry, cpu: Platform, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any], guilty: set[str]
) -> None:
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(spec=fault))
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims")
    assert evidence.problems
    (smallest,) = evidence.smallest
    words = {"sliding_window": "sliding window", "softcap": "softcap", "sinks": "sinks", "lse": "lse"}
    assert {name for name, word in words.items() if f" · {word}" in smallest} == guilty
    assert smallest.startswith("1 head of 16 · float32 · ")
    assert f"  smallest case that fails: {smallest}" in [*evidence.lines()]


@pytest.mark.slow(reason="runs the cases of a kernel")
def test_a_kernel_that_raises_is_shrunk_to_the_plain_case(
    default: Registry, cpu: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(after=burst))
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims")
    (smallest,) = evidence.smallest
    assert smallest.endswith("RuntimeError: out of shared memory")
