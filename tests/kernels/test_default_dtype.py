"""Engines build models under a default dtype of their own, which is none of a layer's business."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from support.layers.kernel_trials import Case, trial_of
from torch import distributed

from attnreg import Attention, AttentionRequest, ContextParallel, Platform, select
from attnreg.conformance.proof import attend, compare
from attnreg.kernels import cpu_attn, flex_attention, triton_attn
from attnreg.runtime.interface import BatchMetadata

CASE = Case(
    [1, 5, 20], [40, 150, 20], dtype=torch.float32, softcap=1.01, window=30, features=frozenset({"sinks", "alibi"})
)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("module", [cpu_attn, flex_attention, triton_attn], ids=lambda m: m.__name__.rpartition(".")[2])
def test_results_do_not_depend_on_it(default: torch.dtype, module: ModuleType) -> None:
    trial = trial_of(CASE, "cpu", module=module)
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    expected = attend(trial, trial.batch, trial.query)
    assert compare(trial, *expected).problem is None
    torch.set_default_dtype(default)
    # another object has plans of its own
    found = attend(trial, dataclasses.replace(trial.batch), trial.query)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_group_of_one_rank_computes(default: torch.dtype, tmp_path: object) -> None:
    request = AttentionRequest(
        head_size=32, num_heads=4, num_kv_heads=2, dtype="float32", block_size=16, features=frozenset({"lse"})
    )
    platform = Platform(platform="cpu", arch="x86_64")
    layer = Attention.from_selection(select(request, platform, backend="CPU_ATTN", to_run=True))
    cache, table = layer.new_kv_cache(2), torch.tensor([[0], [1]], dtype=torch.int32)
    query, key = torch.randn(10, 4, 32), torch.randn(10, 2, 32)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        torch.set_default_dtype(default)
        parallel = ContextParallel(layer)
        batch = BatchMetadata.build([7, 3], [7, 3], block_table=table)
        output = parallel(query, key, key, cache, parallel.shard(batch))
    finally:
        torch.set_default_dtype(torch.float32)
        distributed.destroy_process_group()
    scores = torch.einsum("qhd,khd->hqk", query[:7].double(), key[:7].double().repeat_interleave(2, 1)) * 32**-0.5
    weights = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    exact = torch.einsum("hqk,khd->qhd", weights, key[:7].double().repeat_interleave(2, 1))
    torch.testing.assert_close(output[:7].double(), exact, atol=1e-5, rtol=1e-5)
