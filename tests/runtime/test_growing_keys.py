"""Packed keys that grow from step to step are recognised, and what else differs is seen: rows, strides, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnreg import BatchMetadata
from attnreg.kernels import reference, triton_attn
from attnreg.kernels.triton import plans
from attnreg.runtime import arguments, validation
from attnreg.runtime.arguments import Fit, Work
from attnreg.runtime.interface import BatchError, Call
from attnreg.runtime.layer import Attention

Make = Callable[..., Attention]
REQUESTS, HEADS, KV_HEADS, SIZE = 2, 4, 2, 16
ATTEND = Work(write=False, attend=True)


@pytest.fixture(autouse=True, params=["torch's comparison", "its stand-in"])
def on_a_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory of a device, which cannot be read without waiting for it; and nothing is remembered at first."""
    if request.param == "its stand-in":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    monkeypatch.setattr(BatchMetadata, "on_host", False)
    validation._LIKE.clear()
    plans._launches.cache_clear()
    yield
    validation._LIKE.clear()
    plans._launches.cache_clear()


def rows_of(x: Tensor) -> Tensor:
    """The rows of a rectangle [requests, heads, keys, size], from the first to the last one: [rows, heads, size]."""
    requests, heads, keys, size = x.shape
    return x.as_strided(((requests - 1) * heads * keys + keys, heads, size), (size, keys * size, 1))


def step(keys: int) -> BatchMetadata:
    """The batch of a decoded token, whose keys are in a rectangle."""
    apart = KV_HEADS * keys
    starts = [i * apart for i in range(REQUESTS)]
    return BatchMetadata.build([1] * REQUESTS, [keys] * REQUESTS, key_starts=starts, key_rows=starts[-1] + keys)


def counted(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(given) or original(*given))
    return calls


def planned(layer: Attention, keys: int) -> Fit:
    _, fit = Fit.of(layer.spec, step(keys))
    return fit


def test_a_step_with_more_keys_is_looked_at_and_bound_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = make(block_size=None)
    looked_at, bound = counted(Fit, "_problems", monkeypatch), counted(plans, "bound_launches", monkeypatch)
    for keys in (5, 6, 7, 30, 6):
        k, v = torch.randn(2, REQUESTS, KV_HEADS, keys, SIZE)
        query, batch = torch.randn(REQUESTS, HEADS, SIZE), step(keys)
        key, value, output = rows_of(k), rows_of(v), torch.full_like(query, torch.nan)
        _, fit = Fit.of(layer.spec, batch)
        call = fit.call(ATTEND, Call(query, None, output, key, value, None, layer.params))
        plan = triton_attn.plan(layer.spec, batch)
        triton_attn.run(layer.spec, plan, call)
        exact = reference.attention(layer.spec, batch, query, key=key, value=value).output
        torch.testing.assert_close(output.double(), exact, atol=1e-5, rtol=1e-5)
        # and the same call on other memory, which a decode's other layers make
        again, others = torch.full_like(output, torch.nan), [x.clone() for x in (query, key, value)]
        others[1:] = [rows_of(x.clone()) for x in (k, v)]
        triton_attn.repeat(layer.spec, plan, call)(*others, again)
        assert torch.equal(again, output)
    assert len(looked_at) == len(bound) == 1


def test_fewer_rows_than_the_batch_has_keys_are_refused(make: Make) -> None:
    layer = make(block_size=None)
    query = torch.randn(REQUESTS, HEADS, SIZE)

    def call(keys: int, key: Tensor, value: Tensor) -> Call:
        output = torch.empty_like(query)
        return planned(layer, keys).call(ATTEND, Call(query, None, output, key, value, None, layer.params))

    k, v = (rows_of(torch.randn(REQUESTS, KV_HEADS, 8, SIZE)) for _ in range(2))
    call(8, k, v)
    with pytest.raises(BatchError, match="key has 24 rows; the batch has 27 keys"):
        call(9, k, v)
    with pytest.raises(BatchError, match=r"value is \[23, 2, 16\] float32; expected \[24, 2, 16\]"):
        call(8, k, v[:-1])
    call(8, k, v)


def test_a_write_beside_packed_keys_has_as_many_rows_as_the_batch_has_keys(make: Make) -> None:
    # a prompt: its keys are stored, and read as they are given
    layer = make(block_size=16)
    cache = layer.new_kv_cache(8)

    def call(rows: int, keys: int) -> Call:
        batch = BatchMetadata.build(
            [2], [keys], slot_mapping=torch.arange(2), key_starts=[0], key_rows=keys
        )  # fmt: skip
        key, value = torch.randn(2, rows, KV_HEADS, SIZE)
        query = torch.randn(2, HEADS, SIZE)
        _, fit = Fit.of(layer.spec, batch)
        return fit.call(Work(True, True), Call(query, cache, torch.empty_like(query), key, value, None, layer.params))

    call(6, 6)
    with pytest.raises(BatchError, match="key has 6 rows; the batch has 9 keys"):
        call(6, 9)


def test_no_row_says_nothing_about_the_elements_of_others(make: Make) -> None:
    layer = make(block_size=None)
    batch = BatchMetadata.build([0], [0], key_starts=[0], key_rows=0)
    _, fit = Fit.of(layer.spec, batch)
    query = torch.randn(1, HEADS, SIZE)

    def call(rows: int) -> Call:
        # every second element
        key, value = torch.randn(2, rows, KV_HEADS, 2 * SIZE)[..., ::2]
        return fit.call(ATTEND, Call(query, None, torch.empty_like(query), key, value, None, layer.params))

    call(0)
    with pytest.raises(BatchError, match="key has stride 2 in its last dimension"):
        call(3)


Given = dict[str, Tensor]


def gradient(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def tangent(x: Tensor) -> Tensor:
    return forward_ad.make_dual(x, torch.ones_like(x))


def spread(x: Tensor) -> Tensor:
    """The same numbers, every second element of other memory."""
    return torch.stack([x, x], -1)[..., 0]


def deeper(x: Tensor) -> Tensor:
    return x[None]


def on_meta(x: Tensor) -> Tensor:
    return x.to("meta")


CHANGES: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    (name, change)
    for name in ("query", "key", "value", "output", "lse")
    for change in (gradient, tangent, Tensor.double, spread, on_meta, torch._neg_view, deeper, Tensor.to_sparse)
]


# PyTorch loads its rules for derivatives by torch.jit
@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_what_is_refused_at_first_is_refused_in_any_step(make: Make, name: str, change: Any) -> None:
    layer = make(block_size=None, features={"lse"})

    def call(keys: int, change: Callable[[Tensor], Tensor] | None) -> str:
        key, value = (rows_of(torch.randn(REQUESTS, KV_HEADS, keys, SIZE)) for _ in range(2))
        given: Given = {
            "query": torch.randn(REQUESTS, HEADS, SIZE), "output": torch.empty(REQUESTS, HEADS, SIZE),
            "lse": torch.empty(HEADS, REQUESTS), "key": key, "value": value,
        }  # fmt: skip
        if change is not None:
            given[name] = change(given[name])
        try:
            planned(layer, keys).call(ATTEND, Call(**given, kv_cache=None, params=layer.params))
        except BatchError as refusal:
            return str(refusal)
        return ""

    with forward_ad.dual_level():
        refused = call(6, change)
        assert name in refused
        for keys in (4, 5, 6):
            assert not call(keys, None)
            assert not call(keys + 1, None)
            assert call(6, change) == refused


@pytest.mark.parametrize("read", ["query", "key", "value", "output"])
@pytest.mark.parametrize("written", ["output", "lse"])
def test_memory_that_a_step_writes_and_reads_is_refused_in_any_step(make: Make, written: str, read: str) -> None:
    if written == read:
        return
    layer = make(block_size=None, features={"lse"})
    shapes = {"query": (1, HEADS, SIZE), "output": (1, HEADS, SIZE), "lse": (HEADS, 1)}
    memory = {name: torch.zeros(1024) for name in ("query", "output", "lse", "key", "value")}

    def call(keys: int, into: str | None) -> None:
        rows = {"key": (keys, KV_HEADS, SIZE), "value": (keys, KV_HEADS, SIZE)}
        places = {**memory, written: memory[into or written]}
        given = {name: places[name][: math.prod(shape)].view(shape) for name, shape in (shapes | rows).items()}
        batch = BatchMetadata.build([1], [keys], key_starts=[0], key_rows=keys)
        _, fit = Fit.of(layer.spec, batch)
        fit.call(ATTEND, Call(**given, kv_cache=None, params=layer.params))

    for keys in (5, 6, 7):
        call(keys, None)
        with pytest.raises(BatchError, match=f"{written} overlaps {read}|{read} overlaps {written}"):
            call(keys, read)


def test_rows_that_reach_into_the_output_are_refused(make: Make) -> None:
    layer = make(block_size=None)
    memory, query = torch.randn(40 * KV_HEADS * SIZE), torch.randn(1, HEADS, SIZE)
    value = torch.randn(40, KV_HEADS, SIZE)
    # behind the first ten keys
    output = memory[10 * KV_HEADS * SIZE :][: HEADS * SIZE].view(1, HEADS, SIZE)

    def call(keys: int) -> Call:
        batch = BatchMetadata.build([1], [keys], key_starts=[0], key_rows=keys)
        _, fit = Fit.of(layer.spec, batch)
        key = memory.view(40, KV_HEADS, SIZE)[:keys]
        return fit.call(ATTEND, Call(query, None, output, key, value[:keys], None, layer.params))

    call(9)
    call(10)
    # the addresses are those of the calls before
    with pytest.raises(BatchError, match="output overlaps key in memory"):
        call(11)
    call(10)


def test_any_number_of_lengths_is_remembered_as_one(make: Make) -> None:
    layer = make(block_size=None)
    for keys in range(1, 2 * arguments.MOST_LENGTHS):
        planned(layer, keys)
    (remembered,) = validation._LIKE.values()
    (like,) = remembered._values.values()
    assert len(like.accepted) == 1
