"""The merge of partial states by both kernels: the numbers, strides, sizes, and memory that is not read."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
from support.layers.states import DEVICE, merged, states_of

from attnreg.kernels.states.torch_merge import TorchMerge
from attnreg.kernels.states.triton_merge import StatesTile, TritonMerge, config_for

KERNELS = pytest.mark.parametrize("kernel", [TritonMerge, TorchMerge], ids=["triton", "torch"])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PRECISION = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def merge(kernel: type[Any], *arguments: Any, **more: Any) -> None:
    """Merges; tokens with a prefix are the last argument but the scale."""
    *tensors, n, scale = arguments
    kernel(*tensors, scale, **more).run(*tensors, scale, n)


def call(
    kernel: type[Any], states: torch.Tensor, lses: torch.Tensor, n: int, **more: object
) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.full(states.shape[1:], torch.nan, dtype=states.dtype, device=DEVICE)
    lse = torch.full(lses.shape[1:], torch.nan, device=DEVICE)
    merge(kernel, output, lse, states[:-1], lses[:-1], states[-1], lses[-1], n, None, **more)
    return output, lse


def agrees(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=PRECISION[dtype], atol=PRECISION[dtype])


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "tokens", "heads", "size", "with_prefix"),
    [
        (2, 37, 5, 128, 20),
        (2, 1, 1, 1, 1),
        (2, 9, 3, 80, 0),
        (2, 33, 2, 576, 33),
        (1, 5, 4, 64, 0),
        (3, 17, 2, 192, 16),
        (9, 6, 3, 72, 6),
        (2, 3, 1, 2100, 2),
    ],
)
def test_the_mean_weighted_by_the_exponentials(
    kernel: type[Any], dtype: torch.dtype, count: int, tokens: int, heads: int, size: int, with_prefix: int
) -> None:
    states, lses = states_of(count, tokens, heads, size, dtype)
    exact, exact_lse = merged(states, lses, with_prefix)
    # what no token's prefix may come from
    states[:-1, with_prefix:], lses[:-1, :, with_prefix:] = torch.nan, torch.nan
    output, lse = call(kernel, states, lses, with_prefix)
    agrees(output, exact, dtype)
    agrees(lse, exact_lse, torch.float32)
    assert (output[(lse == -torch.inf).T] == 0).all()


@KERNELS
def test_a_state_that_is_alone_is_copied_bit_by_bit(kernel: type[Any]) -> None:
    states = torch.randn(2, 40, 3, 64, device=DEVICE)
    states[:, ::3] = -0.0
    lses = torch.randn(2, 3, 40, device=DEVICE) * 100
    lses[0, 1], lses[1, 2, :5] = -torch.inf, torch.inf
    output, lse = call(kernel, states, lses, 17)
    for token, head, source in ((20, 0, 1), (3, 1, 1), (2, 2, 0), (39, 2, 1)):
        assert torch.equal(output[token, head].view(torch.int32), states[source, token, head].view(torch.int32))
        assert lse[head, token] == lses[source, head, token]
    # the prefix is empty by its place, the suffix by its LSE
    lses[1, 0, 30] = torch.inf
    output, lse = call(kernel, states, lses, 17)
    assert (output[30, 0] == 0).all()
    assert lse[0, 30] == -torch.inf


@KERNELS
@pytest.mark.parametrize(
    ("a", "b"), [(1e30, 1e30), (1e30, -1e30), (3e38, -3e38), (-3e38, 3e38), (88.0, 89.0), (-1e30, -1e30), (0.0, 200.0)]
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_large_logarithms(kernel: type[Any], a: float, b: float) -> None:
    states = torch.tensor([1.0, 3.0], device=DEVICE).view(2, 1, 1, 1).expand(2, 1, 1, 16)
    lses = torch.tensor([a, b], device=DEVICE).view(2, 1, 1)
    output, lse = call(kernel, states, lses, 1)
    exact, exact_lse = merged(states, lses)
    agrees(output, exact, torch.float32)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0)


@KERNELS
def test_nan_of_a_state_with_keys_is_not_hidden(kernel: type[Any]) -> None:
    states, lses = torch.ones(2, 3, 1, 16, device=DEVICE), torch.zeros(2, 1, 3, device=DEVICE)
    states[0, 0, 0, 4], lses[1, 0, 1] = torch.nan, torch.nan
    output, lse = call(kernel, states, lses, 3)
    assert output[0, 0].isnan().nonzero().tolist() == [[4]]
    assert output[1].isnan().all()
    assert lse.isnan().tolist() == [[False, True, False]]
    assert (output[2] == 1).all()


@KERNELS
@pytest.mark.parametrize("with_prefix", [0, 5, 17])
def test_nan_of_an_lse_is_not_hidden(kernel: type[Any], with_prefix: int) -> None:
    # whatever rows are in the tile: of 17, some tiles have rows of both kinds
    states, lses = torch.zeros(2, 17, 2, 16, device=DEVICE), torch.zeros(2, 2, 17, device=DEVICE)
    lses[1, :, ::2] = torch.nan
    output, output_lse = torch.zeros_like(states[0]), torch.zeros_like(lses[0])
    tensors = output, output_lse, states[0], lses[0], states[1], lses[1], None
    kernel(*tensors).run(*tensors, with_prefix)
    assert output[::2].isnan().all()
    assert output_lse[:, ::2].isnan().all()
    assert (output[1::2] == 0).all()


@KERNELS
def test_any_strides(kernel: type[Any]) -> None:
    tokens, heads, size = 21, 6, 80
    states, lses = states_of(3, tokens, heads, size)
    exact, exact_lse = merged(states, lses, 15)
    # heads first, elements apart, one memory for all heads, and an odd first element
    by_head = states.transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.full((3, tokens, heads, size, 3), torch.nan, device=DEVICE)[..., 1]
    apart.copy_(states)
    odd = torch.empty(states.numel() + 1, device=DEVICE)[1:].view_as(states)
    odd.copy_(states)
    lses_apart = lses.transpose(1, 2).contiguous().transpose(1, 2)
    for given in (by_head, apart, odd, states.flip(0).contiguous().flip(0)):
        for given_lses in (lses, lses_apart):
            for out in (torch.empty(heads, tokens, size, device=DEVICE).transpose(0, 1), apart[0].clone()):
                lse = torch.empty(tokens, heads, device=DEVICE).T
                merge(kernel, out, lse, given[:-1], given_lses[:-1], given[-1], given_lses[-1], 15, None)
                agrees(out, exact, torch.float32)
                agrees(lse, exact_lse, torch.float32)
    one = states[:, :, :1].expand(3, tokens, heads, size)
    lses = lses.clamp(-5, 5)
    output, _ = call(kernel, one.nan_to_num(0, 0, 0), lses, tokens)
    agrees(output, merged(one.nan_to_num(0, 0, 0), lses)[0], torch.float32)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("scale", [0.02, 1.0, 7.0])
def test_8_bits_are_saturated_and_rounded(kernel: type[Any], dtype: torch.dtype, scale: float) -> None:
    states, lses = states_of(2, 30, 2, 96)
    # a state that is alone is exact, so the rounding is as well
    lses[0] = -torch.inf
    states[1] *= 100
    states[1, 3, 0], lses[1, 0, 3] = 1.0, 0.0
    states[1, 3, 0, 5] = torch.nan
    exact, _ = merged(states, lses)
    out = torch.empty(30, 2, 96, device=DEVICE).to(dtype)
    factor = torch.tensor([scale], device=DEVICE)
    merge(kernel, out, None, states[:-1], lses[:-1], states[-1], lses[-1], 30, factor)
    largest = torch.finfo(dtype).max
    expected = (exact.float() / factor).clamp(-largest, largest).to(dtype).float()
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert out.float().isnan().sum() == 1


@KERNELS
def test_the_output_may_be_the_memory_of_a_state(kernel: type[Any]) -> None:
    states, lses = states_of(2, 50, 4, 64, torch.bfloat16)
    exact, exact_lse = call(kernel, states, lses, 30)
    for i in range(2):
        given, given_lses = states.clone(), lses.clone()
        merge(kernel, given[i], given_lses[i], given[:-1], given_lses[:-1], given[-1], given_lses[-1], 30, None)
        assert torch.equal(given[i], exact)
        assert torch.equal(given_lses[i], exact_lse)


@KERNELS
@pytest.mark.skipif(DEVICE != "cpu", reason="pages of a GPU's memory cannot be protected")
def test_a_prefix_that_is_not_there_is_not_read(kernel: type[Any]) -> None:
    # the pages after the first cannot be read: a load from them ends the process
    page = mmap.PAGESIZE
    states, lses = states_of(2, 4, 1, page // 4)
    exact, exact_lse = merged(states, lses, 1)
    with mmap.mmap(-1, 4 * page) as memory:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        rows = torch.frombuffer((ctypes.c_char * (4 * page)).from_address(begin), dtype=torch.float32)
        prefix = rows.view(1, 4, 1, page // 4)
        prefix[0, :1] = states[0, :1]
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(begin + page), 3 * page, 0) == 0
        output, lse = torch.full((4, 1, page // 4), torch.nan), torch.full((1, 4), torch.nan)
        # one row a program: the interpreter reads what a mask hides, at the beginning of the tensor
        merge(kernel, output, lse, prefix, lses[:1], states[1], lses[1], 1, None)
        assert libc.mprotect(ctypes.c_void_p(begin + page), 3 * page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        del rows, prefix
    agrees(output, exact, torch.float32)
    agrees(lse, exact_lse, torch.float32)


def test_any_tile_gives_the_numbers() -> None:
    states, lses = states_of(3, 40, 5, 96)
    exact, exact_lse = merged(states, lses, 22)
    for config in (
        StatesTile(8, 2, 128, 4),
        StatesTile(1, 4, 128, 2),
        StatesTile(16, 1, 32, 4),
        StatesTile(2, 8, 64, 8),
    ):
        output, lse = call(TritonMerge, states, lses, 22, config=config)
        agrees(output, exact, torch.float32)
        agrees(lse, exact_lse, torch.float32)


def test_few_tokens_have_the_numbers_of_many() -> None:
    # the tile depends on how many there are, the order of the sum does not
    states, lses = states_of(3, 400, 5, 96, torch.bfloat16)
    many, _ = call(TritonMerge, states, lses, 400)
    few, _ = call(TritonMerge, states[:, :7], lses[:, :, :7], 7)
    torch.testing.assert_close(few, many[:7], rtol=8e-3, atol=1e-6)


def test_the_tile_is_small_where_states_are_few() -> None:
    assert config_for(16384, 128, 128, 132) == StatesTile(16, 1, 128, 4)
    assert config_for(16, 16, 128, 132) == StatesTile(4, 1, 128, 4)
    assert config_for(4096, 128, 576, 132) == StatesTile(4, 1, 512, 4)
