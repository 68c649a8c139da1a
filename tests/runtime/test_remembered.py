"""What validation remembers: a batch like one that fitted is looked at less closely, and a wrong one never passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnreg.runtime import arguments, validation
from attnreg.runtime.interface import BatchError, BatchMetadata, KVCache
from attnreg.runtime.layer import Attention
from attnreg.runtime.lengths import queries_of

Make = Callable[..., Attention]


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory of a device, which cannot be read without waiting for it; and nothing is remembered at first."""
    monkeypatch.setattr(BatchMetadata, "on_host", False)
    validation._LIKE.clear()
    yield
    validation._LIKE.clear()


def integers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch_of(queries: list[int], keys: list[int], blocks: int = 4) -> BatchMetadata:
    table = torch.zeros(len(keys), blocks, dtype=torch.int32)
    slots = torch.arange(sum(queries)) if sum(queries) else torch.zeros(0, dtype=torch.int64)
    return BatchMetadata.build(queries, keys, block_table=table, slot_mapping=slots)


def problems_of(layer: Attention, batch: BatchMetadata) -> tuple[str, ...]:
    try:
        validation.validate_batch(layer.spec, batch)
    except BatchError as e:
        return e.problems
    return ()


CHANGES: list[dict[str, Any]] = [
    {"seq_lens_cpu": integers(1, 1)}, {"seq_lens_cpu": integers(5, -1)}, {"seq_lens_cpu": integers(5, 2**31 - 1)},
    {"seq_lens_cpu": integers(5, 1).double()}, {"query_start_loc_cpu": integers(0, 2)},
    {"query_start_loc_cpu": integers(0, 3, 2)}, {"query_start_loc_cpu": integers(1, 2, 3)},
    {"max_query_len": 1}, {"max_seq_len": 4}, {"seq_lens": integers(5, 1, 1)}, {"block_table": integers([0], [2])},
    {"query_start_loc": integers(0, 2, 3).long()}, {"block_table": integers(0, 1)},
    {"block_table": torch.zeros(4, 2, dtype=torch.int32).T}, {"slot_mapping": integers(3, 4, 8)},
    {"seq_lens": torch.empty(2, dtype=torch.int32, device="meta")}, {"block_table": None},
    {"query_start_loc_cpu": integers(0, 2, 3).to("meta")}, {"causal": False},
    {"causal": torch.tensor([True])}, {"causal": integers(1, 0)}, {"causal": torch.empty(2, device="meta").bool()},
]  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_a_wrong_batch_is_refused_after_right_ones_as_before(make: Make, changes: dict[str, Any]) -> None:
    layer = make(features={"non_causal"})
    right = batch_of([2, 1], [5, 1], blocks=2)
    wrong = replace(right, **changes)
    first = problems_of(layer, wrong)
    for _ in range(2):
        assert problems_of(layer, right) == ()
        assert problems_of(layer, wrong) == first
    # a batch that is right for all that is known of batches stays so for this layer alone
    assert bool(first) == (changes.get("causal") is not False)


def test_lengths_of_the_host_are_read_at_every_step(make: Make) -> None:
    layer, draw = make(), random.Random(5)
    for _ in range(300):
        n = draw.randint(0, 4)
        queries = [draw.choice([0, 1, 1, 2, 9]) for _ in range(n)]
        keys = [draw.choice([0, 1, q, q + 3, 16, 17, 40]) for q in queries]
        batch = batch_of(queries, keys)
        batch = replace(batch, max_seq_len=max(0, batch.max_seq_len + draw.choice([0, 0, 5, -1])))
        remembered = problems_of(layer, batch)
        validation._LIKE.clear()
        assert remembered == problems_of(layer, batch), (queries, keys)


def test_lengths_changed_in_place_are_validated_anew(make: Make) -> None:
    layer = make()
    batch = batch_of([2, 1], [5, 1])
    layer.plan(batch)
    batch.seq_lens_cpu[1] = 30
    with pytest.raises(BatchError, match="max_seq_len is 5; a request has 30"):
        layer.plan(batch)
    # by an array that shares the memory, of which PyTorch counts no change
    batch.seq_lens_cpu.numpy()[1] = 2
    layer.plan(batch)
    batch.query_start_loc_cpu.numpy()[1] = -1
    with pytest.raises(BatchError, match="expected prefix sums"):
        layer.plan(batch)


def test_other_memory_in_the_place_of_a_tensors_is_seen(make: Make) -> None:
    layer = make()
    batch = batch_of([2, 1], [5, 1])
    layer.plan(batch)
    batch.seq_lens_cpu.set_(integers(7, 1))  # type: ignore[call-overload]
    with pytest.raises(BatchError, match="max_seq_len is 5; a request has 7"):
        layer.plan(batch)
    batch.seq_lens_cpu.set_(integers(5))  # type: ignore[call-overload]
    with pytest.raises(BatchError, match="query_start_loc_cpu has 3 elements for 1 requests"):
        layer.plan(batch)


def test_calls_of_alike_batches_share_what_fitted_and_others_do_not(make: Make) -> None:
    layer = make()
    cache = KVCache(torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16))

    def accepted(batch: BatchMetadata, rows: int) -> bool:
        q, k = torch.ones(rows, 4, 16), torch.ones(rows, 2, 16)
        try:
            layer.forward(q, k, k, cache, batch)
        except BatchError as e:
            assert "rows; the batch has" in str(e)  # noqa: PT017 (a call that fits raises nothing)
            return False
        return True

    for _ in range(2):
        assert accepted(batch_of([1, 1], [5, 1]), 2)
        assert accepted(batch_of([1, 1], [6, 2]), 2)
        assert not accepted(batch_of([2, 1], [5, 1]), 2)
        assert accepted(batch_of([2, 1], [5, 1]), 3)
        assert not accepted(batch_of([1, 1, 1], [5, 1, 1]), 2)
        assert accepted(batch_of([1, 1], [5, 1]), 3)
    same = [arguments.Fit.of(layer.spec, batch_of([1, 1], keys))[1].accepted for keys in ([5, 1], [9, 3])]
    assert same[0] is same[1]


def test_what_is_remembered_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MOST_REMEMBERED", 5)
    layer = make()
    for n in range(1, 20):
        layer.plan(batch_of([1] * n, [1] * n))
        assert len(validation._LIKE) <= 5


def test_threads_validate_and_plan_at_once(make: Make) -> None:
    layer = make()

    def work(seed: int) -> int:
        draw, wrong = random.Random(seed), 0
        for _ in range(100):
            queries = [draw.randint(1, 3) for _ in range(draw.randint(1, 4))]
            keys = [q + draw.randint(-1, 9) for q in queries]
            expected = any(k < q and k for q, k in zip(queries, keys, strict=True))
            wrong += bool(problems_of(layer, batch_of(queries, keys))) != expected
            queries_of.cache_clear()
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) == 0
    shared = batch_of([2, 1], [5, 1])
    with ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(lambda _: layer.plan(shared), range(50)))
    assert len(plans) == 50


def test_a_tree_that_fitted_other_lengths_is_refused(make: Make) -> None:
    spec = replace(make().spec, features=frozenset({"tree_mask"}))

    def problems(queries: list[int], **changes: Any) -> tuple[str, ...]:
        batch = replace(batch_of(queries, [8, 8]), tree_mask=torch.ones(3, 2, dtype=torch.bool), **changes)
        try:
            validation.validate_batch(spec, batch)
        except BatchError as e:
            return e.problems
        return ()

    for _ in range(2):
        assert problems([2, 1]) == ()
        assert "the batch has 4 tokens" in str(problems([2, 2]))
        assert "up to 3 queries" in str(problems([2, 1], max_query_len=3))
