"""Memory that a call writes while it reads it is refused by name before anything is written."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support.layers.walk import HEADS, KV_HEADS, PLATFORMS, SIZE, forward, tensors
from torch import Tensor

import attnreg
from attnreg import BatchError, Registry
from attnreg.runtime.states.memory import share_memory

ROWS = 4
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, Triton compiles, and the CPU's memory is refused"
)


def over(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor shaped as another, in the memory of a third from its start."""
    return memory.flatten()[: like.numel()].view(like.shape)


def overlapping(name: str) -> dict[str, Any]:
    call = tensors({"lse"}, quantised=False, paged=name != "packed")
    if name == "output is query":
        call["output"] = call["query"]
    elif name == "output in value":
        wide = torch.randn(ROWS, HEADS, SIZE)
        call["output"], call["value"] = wide, wide[:, :KV_HEADS]
    elif name == "output in the cache":
        call["output"] = over(call["value_cache"], call["output"])
    elif name == "lse in output":
        call["lse"] = over(call["output"], call["lse"])
    elif name == "lse in query":
        call["lse"] = over(call["query"], call["lse"])
    elif name == "key in the cache":
        call["key"] = call["key_cache"][2, 1 : 1 + ROWS]
    elif name == "query in the cache":
        call["query"] = over(call["key_cache"], call["query"])
    else:
        call["output"] = over(call["key"], call["output"])
    return call


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TRITON_ATTN"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("output is query", "output overlaps query in memory"),
        ("output in value", "output overlaps value in memory"),
        ("output in the cache", "output overlaps kv_cache.value in memory"),
        ("lse in output", "output overlaps lse in memory"),
        ("lse in query", "lse overlaps query in memory"),
        ("key in the cache", "kv_cache.key overlaps key in memory"),
        ("query in the cache", "kv_cache.key overlaps query in memory"),
        ("packed", "output overlaps key in memory"),
    ],
)
def test_memory_that_is_read_and_written_is_refused(backend: str, name: str, words: str, default: Registry) -> None:
    made = forward(backend, default, overlapping(name), quantised=False)
    assert isinstance(made.refusal, BatchError)
    assert words in str(made.refusal)
    assert "give it memory of its own" in str(made.refusal)
    assert not made.written


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TRITON_ATTN"])
def test_parts_of_one_memory_are_fine_and_seen_anew_at_each_call(backend: str, default: Registry) -> None:
    # a projection of queries, keys and values, and the output beside them
    wide = torch.randn(ROWS, 2 * HEADS + 2 * KV_HEADS, SIZE)
    call = tensors({"lse"}, quantised=False, paged=True)
    call["query"], call["key"], call["value"], call["output"] = wide.split([HEADS, KV_HEADS, KV_HEADS, HEADS], 1)
    fused = torch.randn(8, 2, 16, KV_HEADS, SIZE)
    call["key_cache"], call["value_cache"] = fused[:, 0], fused[:, 1]
    made = forward(backend, default, call, quantised=False)
    assert made.output is not None
    assert made.exact is not None
    assert torch.allclose(made.output.double(), made.exact, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_an_address_are_attended_to_as_ever(default: Registry) -> None:
    request = attnreg.AttentionRequest(head_size=SIZE, num_heads=HEADS, num_kv_heads=KV_HEADS, dtype="float32")
    layer = attnreg.Attention.from_selection(attnreg.select(request, PLATFORMS["CPU_ATTN"], default, "CPU_ATTN"))
    key, value, batch = torch.randn(ROWS, KV_HEADS, SIZE), torch.randn(ROWS, KV_HEADS, SIZE), [ROWS]
    queries = torch.randn(2, ROWS, HEADS, SIZE)

    def attend(query: Tensor) -> Tensor:
        return layer(query, key, value, None, attnreg.BatchMetadata.build(batch, batch))

    assert torch.allclose(torch.func.vmap(attend)(queries), torch.stack([*map(attend, queries)]), atol=1e-6)


def bytes_of(tensor: Tensor) -> set[int]:
    """The address of every byte of a tensor."""
    firsts = [tensor.data_ptr()]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        firsts = [first + i * stride * tensor.itemsize for first in firsts for i in range(size)]
    return {first + byte for first in firsts for byte in range(tensor.itemsize)}


@given(st.data())
def test_memory_in_common_is_found_and_nothing_else_where_strides_are_alike(data: st.DataObject) -> None:
    memory = torch.zeros(400)
    ndim = data.draw(st.integers(1, 3))
    step = st.sampled_from([0, 1, 2, 3, 4, 6, 12, 24, 40])
    size = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim)
    strides = data.draw(st.lists(step, min_size=ndim, max_size=ndim))
    others = data.draw(st.one_of(st.just(strides), st.lists(step, min_size=ndim, max_size=ndim)))
    x, y = (memory.as_strided(data.draw(size), of, data.draw(st.integers(0, 50))) for of in (strides, others))
    found = share_memory(x, y, may_be_alias=False)
    expected = bool(bytes_of(x) & bytes_of(y))
    assert found or not expected
    if strides == others:
        assert found == expected
