"""The merge of partial states on a GPU: in graphs, without a synchronisation, far in memory, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.layers.states import merged, states_of

from attnreg import ops

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gpu_and_the_processor_agree(dtype: torch.dtype) -> None:
    states, lses = (x.cuda() for x in states_of(4, 300, 5, 192, dtype))
    outputs, totals = [], []
    for device in ("cuda", "cpu"):
        output = torch.empty(300, 5, 192, dtype=dtype, device=device)
        lse = torch.empty(5, 300, device=device)
        ops.merge_states(output, states.to(device), lses.to(device), lse)
        outputs.append(output.float().cpu())
        totals.append(lse.cpu())
    precision = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(*outputs, rtol=precision, atol=precision)
    torch.testing.assert_close(*totals, rtol=2e-6, atol=2e-6)


def test_a_captured_merge_is_replayed_without_a_synchronisation() -> None:
    states, lses = states_of(2, 64, 8, 128, torch.bfloat16)
    output, lse = torch.empty_like(states[0]), torch.empty_like(lses[0])
    given = (output, states[0], lses[0], states[1], lses[1], lse, 40)
    ops.merge_attn_states(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.merge_attn_states(*given)
            ops.merge_states(states[0], states, lses)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    new, new_lses = states_of(2, 64, 8, 128, torch.bfloat16, seed=1)
    states.copy_(new)
    lses.copy_(new_lses)
    states[0, 40:], lses[0, :, 40:] = torch.nan, -torch.inf
    exact, exact_lse = merged(states, lses)
    graph.replay()
    for found in (output, states[0]):
        torch.testing.assert_close(found.double(), exact, rtol=8e-3, atol=8e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("heads_first", [False, True])
def test_states_past_2_to_the_31(heads_first: bool) -> None:
    heads, size = 4, 128
    tokens = (2**31 + 2**22) // (heads * size)
    if torch.cuda.mem_get_info()[0] < 3 * 2 * tokens * heads * size + 2**31:
        pytest.skip("needs 15 GiB of memory on the GPU")
    shape = (heads, tokens, size) if heads_first else (tokens, heads, size)
    few = 700
    states, lses = states_of(2, few, heads, size, torch.bfloat16)
    exact, exact_lse = merged(states, lses, 300)
    big = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    big_lses = [torch.full((heads, tokens), torch.nan, device="cuda") for _ in range(3)]
    output, prefix, suffix = (x.transpose(0, 1) if heads_first else x for x in big)
    for x, y in ((prefix, states[0]), (suffix, states[1])):
        x[-few:] = y
    for x, y in zip(big_lses[1:], lses, strict=True):
        x[:, -few:] = y
    prefix[-few + 300 :] = torch.nan
    ops.merge_attn_states(output, prefix, big_lses[1], suffix, big_lses[2], big_lses[0], tokens - few + 300)
    torch.testing.assert_close(output[-few:].double(), exact, rtol=8e-3, atol=8e-3)
    torch.testing.assert_close(big_lses[0][:, -few:].double(), exact_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_states_of_another_device_than_the_current_one() -> None:
    states, lses = (x.to("cuda:1") for x in states_of(2, 30, 4, 64))
    output, lse = torch.empty_like(states[0]), torch.empty_like(lses[0])
    with torch.cuda.device(0):
        ops.merge_attn_states(output, states[0], lses[0], states[1], lses[1], lse)
        assert torch.cuda.current_device() == 0
    exact, exact_lse = merged(states, lses)
    torch.testing.assert_close(output.double(), exact, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=2e-6)
