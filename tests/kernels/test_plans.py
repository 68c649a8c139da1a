"""What plans remember: launches are shared by batches that are alike in all that they depend on, tensors by none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import sanitized
from support.layers.kernel_trials import Case, trial_of

from attnreg.conformance.proof import attend, compare, memory_like
from attnreg.kernels.triton import plans
from attnreg.kernels.triton.plans import AttentionPlan
from attnreg.kernels.triton.schedule import ALIKE, KeyLengths, schedule
from attnreg.kernels.triton.splits.merge import PlannedMerge
from attnreg.kernels.triton.target import target_for
from attnreg.kernels.triton.tiles import Shape
from attnreg.runtime.interface import BatchMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BASE = Case([1, 20, 3], [40, 150, 7], features=frozenset({"mm_prefix"}))
SPEC = BASE.spec


def batch_of(queries: list[int], keys: list[int], **changes: Any) -> BatchMetadata:
    table = torch.zeros(len(keys), 1 + max(keys) // 16, dtype=torch.int32, device=DEVICE)
    return replace(BatchMetadata.build(queries, keys, device=DEVICE, block_table=table), **changes)


def test_alike_batches_share_their_launches_and_no_tensor() -> None:
    first, second = batch_of([1, 20], [40, 150]), batch_of([1, 20], [33, 160])
    one, other = AttentionPlan(SPEC, first), AttentionPlan(SPEC, second)
    assert one.launches is other.launches
    for plan, batch in ((one, first), (other, second)):
        tensors = [x for x in plan._tensors if isinstance(x, torch.Tensor)]
        assert list(map(id, tensors)) == list(map(id, (batch.query_start_loc, batch.seq_lens, batch.block_table)))
    held = [x for planned in one.launches for x in (*planned.numbers.values(), *vars(planned).values())]
    assert not any(isinstance(x, torch.Tensor) for x in held)


def test_a_batch_that_differs_in_anything_has_launches_of_its_own() -> None:
    ranges = torch.zeros(2, 1, 2, dtype=torch.int32, device=DEVICE)
    batches = [
        batch_of([1, 20], [40, 150]),
        batch_of([20, 1], [40, 150]),
        batch_of([1, 20, 0], [40, 150, 0]),
        batch_of([1, 20], [40, 150], max_query_len=40),
        batch_of([1, 20], [40, 150], max_seq_len=257),
        batch_of([1, 20], [40, 150], causal=False),
        batch_of([1, 20], [40, 150], causal=torch.tensor([True, False], device=DEVICE)),
        batch_of([1, 20], [40, 150], mm_prefix=ranges),
        BatchMetadata.build([1, 20], [40, 150], device=DEVICE),
        BatchMetadata.build([1, 20], device=DEVICE),
    ]
    specs = [SPEC, replace(SPEC, softmax_scale=1.0), replace(SPEC, features=SPEC.features | {"batch_invariant"})]
    planned = [AttentionPlan(specs[0], batch) for batch in batches]
    planned += [AttentionPlan(spec, batches[0]) for spec in specs[1:]]
    planned.append(AttentionPlan(SPEC, batches[0], splits=3))
    assert len({id(plan.launches) for plan in planned}) == len(planned)
    # and those of today's batch are made as if none had been before
    again = [AttentionPlan(specs[0], batch).launches for batch in batches]
    plans._launches.cache_clear()
    for before, batch in zip(again, batches, strict=True):
        anew = AttentionPlan(specs[0], batch).launches
        assert [(x.chosen, x.requests, x.numbers, x.variant) for x in before] == [
            (x.chosen, x.requests, x.numbers, x.variant) for x in anew
        ]


def test_causality_by_request_is_each_batchs_own() -> None:
    flags = torch.tensor([True, False], device=DEVICE)
    first, second = (batch_of([1, 2], [40, 15], causal=causal) for causal in (flags, ~flags))
    one, other = AttentionPlan(SPEC, first), AttentionPlan(SPEC, second)
    assert one.launches is other.launches
    for plan, batch in ((one, first), (other, second)):
        assert isinstance(batch.causal, torch.Tensor)
        assert batch.causal.data_ptr() in [x.data_ptr() for x in plan._tensors if isinstance(x, torch.Tensor)]


def test_other_memory_in_the_place_of_truth_values_is_read() -> None:
    flags = torch.tensor([True, False], device=DEVICE)
    plan, other = AttentionPlan(SPEC, batch_of([1, 2], [40, 15], causal=flags)), ~flags
    flags.data = other
    assert other.data_ptr() in [x.data_ptr() for x in plan._batch() if x is not None]


def test_queries_changed_in_place_are_planned_for() -> None:
    batch = batch_of([1, 20], [40, 150])
    before = AttentionPlan(SPEC, batch).launches
    batch.query_start_loc_cpu[1] = 17
    assert AttentionPlan(SPEC, batch).launches is not before


def test_strided_queries_of_the_host_are_read_by_their_stride() -> None:
    batch = batch_of([1, 20], [40, 150])
    spread = torch.zeros(6, dtype=torch.int32)
    spread[::2] = batch.query_start_loc_cpu
    strided = replace(batch, query_start_loc_cpu=spread[::2])
    assert AttentionPlan(SPEC, strided).launches is AttentionPlan(SPEC, batch).launches


def test_one_plans_launches_compute_with_anothers_tensors() -> None:
    """Two batches of one plan's launches, in turns: each is computed with its own lengths, blocks and ranges."""
    ranges = [[[2, 9], [17, 20]], [[0, 0], [4, 6]], [[0, 5], [0, 0]]]
    trials = [
        trial_of(replace(BASE, queries=[1, 20, 3], keys=keys, ranges=ranges), DEVICE)
        for keys in ([40, 150, 7], [60, 148, 9])
    ]
    for trial in trials:
        trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    assert trials[0].layer.plan(trials[0].batch).launches is trials[1].layer.plan(trials[1].batch).launches
    for trial in trials * 2:
        assert compare(trial, *attend(trial, trial.batch, trial.query)).problem is None


TARGETS = [target_for("cuda", 90, 132), target_for("cuda", 80, 108), target_for("hip", "gfx942", 304)]


@given(
    target=st.sampled_from(TARGETS),
    queries=st.lists(st.integers(0, 70), min_size=1, max_size=20),
    keys=st.integers(1, 10**6),
    group=st.sampled_from([1, 4, 8]),
    wide=st.sampled_from([64, 128, 256, 512]),
    window=st.sampled_from([0, 128, 1000]),
    quantised=st.booleans(),
    extras=st.booleans(),
    invariant=st.booleans(),
)
def test_lengths_that_plans_take_for_alike_are_split_alike(
    target: Any, queries: list[int], keys: int, group: int, wide: int, window: int, quantised: bool, extras: bool,
    invariant: bool,
) -> None:  # fmt: skip
    shape = Shape(0, False, group, wide, wide, 2, 1 if quantised else 2, True, False, window, extras)
    bounds = {"num_kv_heads": 8, "max_query_len": max(queries), "batch_invariant": invariant}
    most = -(-keys // ALIKE) * ALIKE
    of_keys, of_most = (schedule(target, shape, queries, keys=KeyLengths.alike(n), **bounds) for n in (keys, most))
    if invariant:
        assert of_most == of_keys
    # the splits of the longest lengths are the best for all of them, but for one share of keys
    for one, other in zip(of_keys, of_most, strict=True):
        assert other._replace(splits=one.splits) == one
        assert (one.splits == 1) == (other.splits == 1) or keys < 4096


def test_under_a_sanitizer_the_parts_of_split_keys_begin_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    # what the plugin replaces is put back
    monkeypatch.setattr(knobs.compilation, "listener", knobs.compilation.listener)
    monkeypatch.setattr(PlannedMerge, "parts", staticmethod(PlannedMerge.parts))
    sanitized.pytest_configure()
    trial = trial_of(replace(BASE, keys=[40, 1500, 7]), DEVICE)
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    assert PlannedMerge.parts(trial.query, 24, 3).memory.isnan().all()
    assert compare(trial, *attend(trial, trial.batch, trial.query)).problem is None


def test_a_cache_is_moved_to_memory_that_is_laid_out_alike() -> None:
    cache = torch.zeros(1000, dtype=torch.bfloat16, device=DEVICE).as_strided((3, 4, 5), (200, 7, 1), 3)
    moved = memory_like(cache)
    assert (moved.shape, moved.stride(), moved.dtype) == (cache.shape, cache.stride(), cache.dtype)
    assert moved.data_ptr() % 16 == cache.data_ptr() % 16 == 6
    assert moved.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr()
