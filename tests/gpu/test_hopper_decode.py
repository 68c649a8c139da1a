"""HOPPER_ATTN on a GPU of SM 9.0: its kernel for few queries over 8-bit floats, against float64, amid poison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.kernel_trials import Case, at_odd_addresses, check, trial_of

from attnreg.conformance.proof import attend, compare, examine
from attnreg.kernels.triton import plans
from attnreg.kernels.triton.planned import batches
from attnreg.runtime.interface import Layout

if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    from attnreg.kernels.hopper import attention as hopper_attn
    from attnreg.kernels.hopper import decode_plans
else:
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

TOKENS = Case(
    [1, 1, 0, 1, 1, 1], [3000, 17, 50, 1, 1029, 64], heads=(8, 2), head_size=128, dtype=torch.bfloat16, kv_dtype="fp8"
)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches of the kernel that a test plans."""
    # batches alike share what runs them
    plans._launches.cache_clear()
    seen: list[Any] = []
    planned = decode_plans.planned

    def counted(*arguments: Any) -> Any:
        found = planned(*arguments)
        seen.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(decode_plans, "planned", counted)
    return seen


@pytest.fixture(params=[None, 1, 3, "in a graph"], ids=["chosen", "whole", "3 splits", "in a graph"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    if request.param == "in a graph":
        # the launches that a graph captures, whose programs share keys out
        monkeypatch.setattr(batches, "is_captured", lambda query: True)
        return None
    monkeypatch.setattr(hopper_attn.HopperPlan, "splits", request.param)
    split: int | None = request.param
    return split


def verify(case: Case, launches: list[Any]) -> None:
    check(case, "cuda", module=hopper_attn)
    assert launches


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 128])
def test_head_sizes(head_size: int, dtype: torch.dtype, kv_dtype: str, launches: list[Any]) -> None:
    verify(replace(TOKENS, head_size=head_size, dtype=dtype, kv_dtype=kv_dtype), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("heads", [(8, 8), (12, 4), (6, 2), (16, 1), (64, 8), (40, 8), (15, 1)])
def test_groups(heads: tuple[int, int], launches: list[Any]) -> None:
    verify(replace(TOKENS, heads=heads), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_blocks(block_size: int, layout: Layout, launches: list[Any]) -> None:
    verify(replace(TOKENS, block_size=block_size, layout=layout), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("window", [1, 16, 40, 100, 128, 1000])
def test_windows(window: int, launches: list[Any]) -> None:
    verify(replace(TOKENS, window=window, features=frozenset({"sinks"})), launches)
    several = replace(TOKENS, queries=[4, 2, 0, 1, 3, 4], heads=(4, 1), window=window)
    verify(several, launches)
    verify(replace(several, causal=False), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("causal", [True, False])
def test_several_queries(causal: bool, launches: list[Any]) -> None:
    verify(replace(TOKENS, queries=[4, 2, 0, 1, 3, 4], causal=causal), launches)
    verify(replace(TOKENS, queries=[2, 2, 0, 1, 2, 2], heads=(16, 2), causal=causal), launches)
    verify(replace(TOKENS, queries=[4, 2, 3, 1], keys=[2, 2, 0, 9], causal=False), launches)


@pytest.mark.usefixtures("splits")
def test_scores_and_scales(launches: list[Any]) -> None:
    verify(replace(TOKENS, softcap=20.0, features=frozenset({"sinks"})), launches)
    verify(replace(TOKENS, features=frozenset({"sinks", "per_head_quant_scales"})), launches)
    verify(replace(TOKENS, window=(100, 0), causal=False), launches)


@pytest.mark.usefixtures("splits")
def test_many_requests(launches: list[Any]) -> None:
    lengths = [(i * 37) % 900 for i in range(300)]
    verify(replace(TOKENS, queries=[min(1, n) for n in lengths], keys=lengths), launches)


def test_tokens_beside_prompts(launches: list[Any]) -> None:
    verify(replace(TOKENS, queries=[1, 300, 1, 20, 1, 1], keys=[3000, 300, 50, 1000, 1029, 64]), launches)


def test_batch_invariance(launches: list[Any]) -> None:
    verify(replace(TOKENS, features=frozenset({"batch_invariant"})), launches)


def test_batch_invariance_of_rows_at_odd_addresses() -> None:
    trial = trial_of(replace(TOKENS, features=frozenset({"batch_invariant"})), "cuda", module=hopper_attn)
    assert examine(at_odd_addresses(trial)).problem is None


def test_a_graph_is_replayed_with_other_lengths(launches: list[Any]) -> None:
    trial = trial_of(TOKENS, "cuda", module=hopper_attn)
    assert trial.cache is not None
    # the slots of the new keys hold NaN until they are written
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    attend(trial, trial.batch, trial.query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = attend(trial, trial.batch, trial.query)
    trial.batch.seq_lens.copy_(torch.tensor([2900, 5, 20, 1, 1000, 64]))
    graph.replay()
    assert launches
    # the reference reads the lengths on the device
    assert compare(trial, output, lse)[2] is None
