"""A cache that GPUs share, over NCCL: the result of one GPU, and of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.layers.ranks import Failure, Ranks
from support.layers.sharded import Case, alone, own_heads, replayed, sharded

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
    pytest.mark.filterwarnings("default"),
]

STEPS = (
    ((70, 1, 300), (70, 1, 300)),
    ((1, 1, 1), (71, 2, 301)),
    ((4, 4, 4), (75, 6, 305)),
    ((1, 0, 2), (76, 6, 307)),
)
LAYER = {"head_size": 128, "num_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16", "block_size": 16}
CASES = {
    "plain": Case(),
    "blocks": Case(interleave=16),
    "by head": Case(by_head=True),
    "sinks and window": Case(
        request={"features": {"sinks", "sliding_window"}}, numbers={"sinks": (32,), "sliding_window": 50}
    ),
    "sinks": Case(request={"features": {"sinks"}}, numbers={"sinks": (32,)}),
    "8-bit cache": Case(request={"kv_dtype": "fp8_e4m3"}),
    "8-bit output": Case(request={"features": {"fp8_output"}}, numbers={"out_scale": (1,)}),
}


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    group = Ranks(request.param, "nccl")
    yield group
    group.close()


def on_gpu(case: Case, **changes: object) -> Case:
    major, minor = torch.cuda.get_device_capability()
    features = {*case.request.get("features", ()), "lse"}
    return replace(
        case,
        backend="TRITON_ATTN",
        platform={"platform": "cuda", "arch": f"sm{major}{minor}"},
        device="cuda",
        request={**LAYER, **case.request, "features": features},
        **{"steps": STEPS, **changes},
    )


@pytest.mark.parametrize("name", CASES)
def test_gpus_give_what_one_gives(ranks: Ranks, name: str) -> None:
    case = on_gpu(CASES[name])
    expected, found = alone(case), ranks.run(sharded, case)
    precision = 0.13 if "fp8_output" in case.request["features"] else 2e-2
    for rank, steps in enumerate(found):
        assert not isinstance(steps, Failure), steps
        own = own_heads(case, rank, ranks.world_size)
        for (output, lse), (exact, exact_lse) in zip(steps, expected, strict=True):
            torch.testing.assert_close(output, exact[:, own], rtol=precision, atol=precision)
            torch.testing.assert_close(lse, exact_lse[own], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("queries", [1, 4])
def test_a_captured_step_is_replayed_with_other_lengths(ranks: Ranks, by_head: bool, queries: int) -> None:
    each = (queries,) * 3
    steps = tuple((each, tuple(max(queries, x) for x in keys)) for keys in ((100, 4, 900), (20, 5, 901), (1, 80, 902)))
    for found in ranks.run(replayed, on_gpu(Case(by_head=by_head), steps=steps)):
        assert not isinstance(found, Failure), found
        for eager, replay in zip(*found, strict=True):
            torch.testing.assert_close(replay, eager, rtol=1e-2, atol=1e-2)
