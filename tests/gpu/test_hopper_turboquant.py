"""TURBOQUANT's kernel for SM 9.0 on such a GPU, against float64, amid poison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.kernel_trials import Case, at_odd_addresses, check, trial_of

from attnreg.conformance.proof import attend, compare, examine
from attnreg.kernels import reference
from attnreg.kernels.triton import plans
from attnreg.kernels.triton.planned import batches
from attnreg.runtime.interface import BatchMetadata

if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    from attnreg.kernels.hopper.packed import attention as hopper_turboquant
    from attnreg.kernels.hopper.packed import plans as packed_plans
else:
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

# of each kind of format; and the presets that are of the same kind as one of these
KINDS = tuple(f"turboquant_{name}" for name in ("4bit_nc", "k8v4", "4bit_ub", "k3v4_nc", "3bit_nc", "3bit_ub"))
PRESETS = (*KINDS, "turboquant_4bit_ls", "turboquant_3bit_ls")
TOKENS = Case(
    [1, 1, 0, 1, 1, 1], [3000, 17, 50, 1, 1029, 64], heads=(8, 2), head_size=128, dtype=torch.bfloat16,
    kv_dtype="turboquant_4bit_nc",
)  # fmt: skip
SEVERAL = replace(TOKENS, queries=[4, 2, 0, 1, 3, 4])


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches of the kernel that a test plans."""
    # batches alike share what runs them
    plans._launches.cache_clear()
    seen: list[Any] = []
    launch = packed_plans.FewQueries.launch

    def counted(*arguments: Any) -> Any:
        seen.append(launch(*arguments))
        return seen[-1]

    monkeypatch.setattr(packed_plans.FewQueries, "launch", counted)
    return seen


@pytest.fixture(params=[None, 1, 3, "in a graph"], ids=["chosen", "whole", "3 splits", "in a graph"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    if request.param == "in a graph":
        # the launches that a graph captures, whose programs share keys out
        monkeypatch.setattr(batches, "is_captured", lambda query: True)
        return None
    monkeypatch.setattr(packed_plans.HopperPackedPlan, "splits", request.param)
    split: int | None = request.param
    return split


def verify(case: Case, launches: list[Any]) -> None:
    check(case, "cuda", module=hopper_turboquant)
    assert launches


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("kv_dtype", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 128])
def test_presets(head_size: int, dtype: torch.dtype, kv_dtype: str, launches: list[Any]) -> None:
    verify(replace(TOKENS, head_size=head_size, dtype=dtype, kv_dtype=kv_dtype), launches)
    verify(replace(SEVERAL, head_size=head_size, dtype=dtype, kv_dtype=kv_dtype), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pages", [1, 2, 4])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("kv_dtype", ["turboquant_4bit_nc", "turboquant_3bit_nc"])
def test_shapes(
    kv_dtype: str, head_size: int, pages: int, late: bool, monkeypatch: pytest.MonkeyPatch, launches: list[Any]
) -> None:
    monkeypatch.setattr(packed_plans.HopperPackedPlan, "shape", packed_plans.KeyWalk(pages, 2, late))
    verify(replace(TOKENS, kv_dtype=kv_dtype, head_size=head_size), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("head_size", [36, 80, 96, 124])
@pytest.mark.parametrize("kv_dtype", [name for name in PRESETS if name.endswith(("ub", "ls"))])
def test_padded_heads(kv_dtype: str, head_size: int, launches: list[Any]) -> None:
    verify(replace(TOKENS, kv_dtype=kv_dtype, head_size=head_size), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("heads", [(8, 8), (12, 4), (6, 2), (16, 1), (64, 8), (40, 8), (15, 1)])
def test_groups(heads: tuple[int, int], launches: list[Any]) -> None:
    verify(replace(TOKENS, heads=heads), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 256])
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_blocks(kv_dtype: str, block_size: int, launches: list[Any]) -> None:
    verify(replace(TOKENS, block_size=block_size, kv_dtype=kv_dtype), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("window", [1, 16, 40, 100, 128, 1000])
def test_windows(window: int, launches: list[Any]) -> None:
    verify(replace(TOKENS, window=window, features=frozenset({"sinks"})), launches)
    several = replace(SEVERAL, heads=(4, 1), window=window)
    verify(several, launches)
    verify(replace(several, causal=False), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_several_queries(kv_dtype: str, causal: bool, launches: list[Any]) -> None:
    several = replace(SEVERAL, kv_dtype=kv_dtype, causal=causal)
    verify(several, launches)
    verify(replace(several, queries=[2, 2, 0, 1, 2, 2], heads=(16, 2)), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_scores(kv_dtype: str, launches: list[Any]) -> None:
    verify(replace(TOKENS, kv_dtype=kv_dtype, softcap=20.0, features=frozenset({"sinks"})), launches)
    verify(replace(TOKENS, kv_dtype=kv_dtype, window=(100, 0), causal=False), launches)


@pytest.mark.usefixtures("splits")
def test_many_requests(launches: list[Any]) -> None:
    lengths = [(i * 37) % 900 for i in range(300)]
    verify(replace(TOKENS, queries=[min(1, n) for n in lengths], keys=lengths), launches)


def test_tokens_beside_prompts(launches: list[Any]) -> None:
    verify(replace(TOKENS, queries=[1, 300, 1, 20, 1, 1], keys=[3000, 300, 50, 1000, 1029, 64]), launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("keys", [2, 3, 5, 9])
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_few_keys(kv_dtype: str, keys: int, launches: list[Any]) -> None:
    """Where values nearly cancel, nothing hides that the weights of codes are float16."""
    case = replace(TOKENS, queries=[1] * 200, keys=[keys] * 200, dtype=torch.float16, kv_dtype=kv_dtype)
    verify(case, launches)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("size", [1e-4, 1.0, 500.0])
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_values_of_all_sizes_follow_each_other(kv_dtype: str, size: float, launches: list[Any]) -> None:
    """The scales of values become factors of weights, which are float16."""
    trial = trial_of(replace(TOKENS, kv_dtype=kv_dtype), "cuda", module=hopper_turboquant)
    cache, batch = trial.cache, trial.batch
    assert cache is not None
    slots = torch.arange(len(cache.value) * 16, device="cuda")
    value = torch.randn(len(slots), 2, 128, device="cuda")
    value *= torch.empty(len(slots), 2, 1, device="cuda").uniform_(-8, 3).exp2() * size
    key = torch.randn(len(slots), 2, 128, device="cuda")
    trial.layer.write_kv(key.bfloat16(), value.bfloat16(), cache, storing(batch, slots))
    output, _ = attend(trial, batch, trial.query)
    exact = reference.attention(trial.layer.spec, batch, trial.query, cache)
    error = (output[: batch.num_tokens].double() - exact.output).norm() / exact.output.norm()
    assert float(error) < 4e-3
    assert launches


def storing(batch: BatchMetadata, slots: torch.Tensor) -> BatchMetadata:
    """A batch that only stores, at these slots."""
    assert batch.block_table is not None
    return BatchMetadata.build([0], [1], device="cuda", block_table=batch.block_table[:1], slot_mapping=slots)


@pytest.mark.parametrize("kv_dtype", PRESETS)
def test_a_marked_row_is_seen(kv_dtype: str, launches: list[Any]) -> None:
    case = replace(TOKENS, queries=[1, 1], keys=[300, 300], kv_dtype=kv_dtype)
    trial = trial_of(case, "cuda", module=hopper_turboquant)
    cache, batch = trial.cache, trial.batch
    assert cache is not None
    assert batch.block_table is not None
    trial.layer.write_kv(trial.key, trial.value, cache, batch)
    # the value of key 100 of the first request, in its first KV head
    value = torch.zeros(1, 2, 128, device="cuda", dtype=torch.bfloat16)
    value[0, 0, 5] = torch.inf
    slot = batch.block_table[0, 100 // 16].long() * 16 + 100 % 16
    trial.layer.write_kv(torch.zeros_like(value), value, cache, storing(batch, slot[None]))
    output, _ = attend(trial, batch, trial.query)
    assert output[0, :4].isnan().all()
    assert output[0, 4:].isfinite().all()
    assert output[1].isfinite().all()
    assert launches


@pytest.mark.parametrize("kv_dtype", PRESETS)
def test_batch_invariance(kv_dtype: str, launches: list[Any]) -> None:
    verify(replace(TOKENS, kv_dtype=kv_dtype, features=frozenset({"batch_invariant"})), launches)


def test_batch_invariance_of_rows_at_odd_addresses() -> None:
    trial = trial_of(replace(TOKENS, features=frozenset({"batch_invariant"})), "cuda", module=hopper_turboquant)
    assert examine(at_odd_addresses(trial)).problem is None


@pytest.mark.parametrize("kv_dtype", PRESETS)
def test_a_result_is_repeated(kv_dtype: str, launches: list[Any]) -> None:
    trial = trial_of(replace(TOKENS, kv_dtype=kv_dtype), "cuda", module=hopper_turboquant)
    assert trial.cache is not None
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    tokens = trial.batch.num_tokens
    first, lse = attend(trial, trial.batch, trial.query)
    for _ in range(20):
        again, lse_again = attend(trial, trial.batch, trial.query)
        assert torch.equal(first[:tokens], again[:tokens])
        assert torch.equal(lse[:, :tokens], lse_again[:, :tokens])
    assert launches


@pytest.mark.parametrize("kv_dtype", PRESETS)
def test_a_graph_is_replayed_with_other_lengths(kv_dtype: str, launches: list[Any]) -> None:
    trial = trial_of(replace(TOKENS, kv_dtype=kv_dtype), "cuda", module=hopper_turboquant)
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


@pytest.mark.parametrize("offset", [2, 8])
def test_queries_that_are_not_loaded_by_16_bytes(offset: int, launches: list[Any]) -> None:
    trial = trial_of(TOKENS, "cuda", module=hopper_turboquant)
    assert trial.cache is not None
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    exact, _ = attend(trial, trial.batch, trial.query)
    memory = torch.empty(trial.query.numel() + 8, dtype=trial.query.dtype, device="cuda")
    query = memory[offset // 2 : offset // 2 + trial.query.numel()].view(trial.query.shape)
    query.copy_(trial.query)
    output, _ = attend(trial, trial.batch, query)
    assert launches
    tokens = trial.batch.num_tokens
    assert torch.allclose(output[:tokens].float(), exact[:tokens].float(), atol=2e-2)


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_one_part_of_many_keys_is_as_exact_as_many(
    kv_dtype: str, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # sums of 64k codes that are never negative, of which the values are a small rest
    case = replace(TOKENS, queries=[1], keys=[65_536], heads=(4, 1), kv_dtype=kv_dtype)
    errors = []
    for splits in (1, 32):
        monkeypatch.setattr(packed_plans.HopperPackedPlan, "splits", splits)
        plans._launches.cache_clear()
        trial = trial_of(case, "cuda", module=hopper_turboquant)
        assert trial.cache is not None
        trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
        output, _ = attend(trial, trial.batch, trial.query)
        exact = reference.attention(trial.layer.spec, trial.batch, trial.query, trial.cache).output
        errors.append(float((output[: len(exact)].double() - exact).norm() / exact.norm()))
    assert launches
    assert errors[0] < 1.5 * errors[1]
