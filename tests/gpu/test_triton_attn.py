"""TRITON_ATTN compiled: every head size, caches past 2**31 elements, graphs, runs that are bitwise alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.layers.kernel_trials import NOWHERE, Case, check, trial_of

from attnreg.conformance.proof import attend, compare
from attnreg.runtime.interface import Layout

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
    pytest.mark.filterwarnings("default"),
]

EVERYTHING = frozenset({"sinks", "alibi", "per_head_quant_scales"})
MIXED = Case([1, 300, 0, 16, 1], [3000, 700, 50, 16, 1], heads=(8, 2), dtype=torch.bfloat16)


def run(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 128, 192, 256, 512])
def test_head_sizes(head_size: int, causal: bool, kv_dtype: str) -> None:
    run(replace(MIXED, head_size=head_size, causal=causal, kv_dtype=kv_dtype, features=EVERYTHING - {"alibi"}))


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [(8, 2), (12, 2)])
@pytest.mark.parametrize("sizes", [(64, 32), (128, 32), (96, 32), (40, 32), (512, 32), (32, 128), (128, 64), (64, 512)])
def test_values_of_another_size(sizes: tuple[int, int], heads: tuple[int, int], kv_dtype: str) -> None:
    # narrow values beside wide keys: an address that CUDA 12.8's ptxas lost
    case = replace(MIXED, heads=heads, head_size=sizes[0], head_size_v=sizes[1], kv_dtype=kv_dtype)
    run(case)
    run(replace(case, queries=[32, 2], keys=[4269, 41], dtype=torch.float16, block_size=48, causal=False))
    run(replace(case, features=frozenset({"fp8_query", "fp8_output"})))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 100, 1000])
def test_everything_at_once(window: int | None, dtype: torch.dtype) -> None:
    ranges = [[[10, 40], [2990, 3000]], [[410, 500], [480, 690]], [[0, 0], [0, 0]], [[3, 9], [0, 0]], [[0, 1], [0, 0]]]
    case = replace(MIXED, dtype=dtype, head_size=128, window=window, softcap=20.0, features=EVERYTHING | {"mm_prefix"})
    run(replace(case, ranges=ranges))
    run(replace(case, ranges=ranges, kv_dtype="fp8"))


@pytest.mark.parametrize("block_size", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND", "SPLIT"])
def test_blocks(block_size: int, layout: Layout) -> None:
    run(replace(MIXED, head_size=128, block_size=block_size, layout=layout))


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 160, 192, 224, 256])
def test_the_layout_of_amds_paged_attention(head_size: int, causal: bool, kv_dtype: str) -> None:
    case = replace(MIXED, head_size=head_size, causal=causal, kv_dtype=kv_dtype, layout="SPLIT")
    run(replace(case, features=frozenset({"alibi"}), window=None if causal else 200))
    run(replace(case, fnuz=True, softcap=20.0))


@pytest.mark.parametrize(("heads", "head_size"), [((32, 8), 128), ((16, 16), 64), ((71, 1), 64), ((14, 2), 80)])
@pytest.mark.parametrize("causal", [True, False])
def test_packed(heads: tuple[int, int], head_size: int, causal: bool) -> None:
    lengths = [700, 1, 0, 130]
    run(replace(MIXED, queries=lengths, keys=lengths, heads=heads, head_size=head_size, block_size=None, causal=causal))


def test_offsets_past_2_to_the_31() -> None:
    # 1.3 million blocks of 16 tokens with 2 heads of 64: 2.7e9 elements
    trial = trial_of(replace(MIXED, head_size=64), "cuda")
    small, blocks, table = trial.cache, 1_300_000, trial.batch.block_table
    assert small is not None
    assert table is not None
    trial.layer.write_kv(trial.key, trial.value, small, trial.batch)
    far = type(small)(*(torch.empty(blocks, *x.shape[1:], dtype=x.dtype, device="cuda") for x in small))
    for x, y in zip(small, far, strict=True):
        y[-len(x) :] = x
    table[table < NOWHERE] += blocks - len(small.key)
    trial.cache = far
    assert compare(trial, *attend(trial, trial.batch, trial.query)).problem is None


@pytest.mark.parametrize("features", [frozenset(), frozenset({"batch_invariant"})])
def test_two_runs_are_bitwise_the_same(features: frozenset[str]) -> None:
    runs = []
    for _ in range(2):
        trial = trial_of(replace(MIXED, head_size=128, features=features), "cuda")
        trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
        runs.append(attend(trial, trial.batch, trial.query))
        assert compare(trial, *runs[-1]).problem is None
    tokens = trial.batch.num_tokens
    (output, lse), (again, lse_again) = runs
    assert torch.equal(output[:tokens], again[:tokens])
    assert torch.equal(lse[:, :tokens], lse_again[:, :tokens])


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_batch_invariance_is_bitwise(kv_dtype: str) -> None:
    # a trial of such a layer runs each request alone too
    run(replace(MIXED, head_size=128, kv_dtype=kv_dtype, features=frozenset({"batch_invariant", "sinks"})))


@pytest.mark.parametrize("heads", [(6, 1), (8, 2)])
def test_parts_by_row_and_by_request_are_merged_alike(heads: tuple[int, int]) -> None:
    # alone, a request's parts lie by request; in the batch, they lie by row. In float32 every bit is seen
    queries, keys = [2, 5, 8, 16, 3, 7, 1, 11], [2, 1118, 8, 700, 2050, 40, 3000, 64]
    features = frozenset({"batch_invariant", "sinks", "lse"})
    for head_size in (64, 192):
        run(Case(queries, keys, heads=heads, head_size=head_size, dtype=torch.float32, features=features))


def test_a_graph_follows_the_lengths_on_the_device() -> None:
    case = Case([1] * 6, [4096] * 6, heads=(32, 8), head_size=128, dtype=torch.bfloat16)
    trial = trial_of(case, "cuda")
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    output, lse = attend(trial, trial.batch, trial.query)
    assert compare(trial, output, lse).problem is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trial.layer.attend(trial.query, trial.cache, trial.batch, output, lse=lse)
    # shorter requests, and one that is gone
    lengths = [4000, 17, 1, 300, 2049, 64]
    trial.batch.seq_lens.copy_(torch.tensor(lengths))
    trial.batch.seq_lens_cpu.copy_(torch.tensor(lengths))
    output.fill_(torch.nan)
    lse.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert compare(trial, output, lse).problem is None
