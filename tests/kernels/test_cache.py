"""The cache write: every 8-bit float, rounding, saturation, and slots that are skipped."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attnreg.kernels.triton.cache import write_kv
from attnreg.kernels.triton.fp8 import fp8_to_float16
from attnreg.kernels.triton.layout import FP8 as NAMES
from attnreg.runtime.interface import KVCache, Layout, by_token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@triton.jit
def _widen_kernel(x_ptr, y_ptr, FORMAT: tl.constexpr):  # noqa: N803
    offs = tl.arange(0, 256)
    tl.store(y_ptr + offs, fp8_to_float16(tl.load(x_ptr + offs), FORMAT))


@pytest.mark.parametrize("dtype", FP8)
def test_every_finite_code_is_read_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    found = torch.empty(256, dtype=torch.float16, device=DEVICE)
    _widen_kernel[(1,)](codes, found, NAMES[dtype])
    exact = codes.view(dtype).to(torch.float16)
    finite = exact.isfinite()
    assert torch.equal(found[finite], exact[finite])


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("layout", ["NHD", "HND", "SPLIT"])
def test_rounded_to_nearest_even_and_saturated(dtype: torch.dtype, layout: Layout) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    # every value, the middle between each two, both sides of the middle, and what is out of range
    middle = (codes[1:] + codes[:-1]) / 2
    near = torch.tensor([1 - 1e-4, 1 + 1e-4])[:, None] * middle
    wide = torch.tensor([1e-12, -1e-12, 1e9, -1e9, torch.inf, -torch.inf])
    x = torch.cat([codes, middle, *near, wide])
    x = torch.cat([x, x.new_zeros(-len(x) % 64)]).view(-1, 2, 32).to(DEVICE)
    tokens = len(x)
    scales = torch.tensor([1.0, 0.37], device=DEVICE)
    largest = torch.finfo(dtype).max
    blocks = tokens // 16 + 1
    shape = {"NHD": (blocks, 16, 2, 32), "HND": (blocks, 2, 16, 32), "SPLIT": (blocks, 2, 32, 16)}[layout]
    key_cache, value_cache = torch.zeros(2, *shape, device=DEVICE).to(dtype)
    if layout == "SPLIT":
        key_cache = key_cache.view(blocks, 2, 2, 16, 16)
    slots = torch.randperm(tokens, device=DEVICE)
    write_kv(x, x, key_cache, value_cache, slots, layout=layout, k_scale=scales, v_scale=scales[:1].expand(2))
    caches = by_token(KVCache(key_cache.float(), value_cache.float()), layout)
    for cache, divisor in zip(caches, (scales, scales[:1].expand(2)), strict=True):
        stored = cache.flatten(0, 1)[slots]
        exact = (x / divisor[:, None]).clamp(-largest, largest).to(dtype).float()
        assert torch.equal(stored, exact)


@pytest.mark.parametrize("dtype", FP8)
def test_a_nan_is_stored_as_nan(dtype: torch.dtype) -> None:
    x = torch.ones(16, 1, 32, device=DEVICE)
    x[3, 0, 7], x[5, 0, 9] = torch.nan, -torch.nan
    key_cache, value_cache = torch.zeros(2, 1, 16, 1, 32, device=DEVICE).to(dtype)
    write_kv(x, x, key_cache, value_cache, torch.arange(16, device=DEVICE))
    for cache in (key_cache, value_cache):
        assert torch.equal(cache[0].float().isnan(), x.isnan())


def test_rows_without_a_slot_are_skipped() -> None:
    x = torch.randn(5, 3, 40, device=DEVICE)
    cache = torch.full((2, 2, 16, 3, 40), 7.0, device=DEVICE)
    write_kv(x, x[..., :24], cache[0], cache[1][..., :24], torch.tensor([17, -1, 3, -1], device=DEVICE))
    flat = cache.flatten(1, 2)
    assert torch.equal(flat[0, [17, 3]], x[[0, 2]])
    assert torch.equal(flat[1, [17, 3], :, :24], x[[0, 2], :, :24])
    kept = torch.ones(32, dtype=torch.bool)
    kept[[17, 3]] = False
    assert (flat[:, kept] == 7.0).all()
    assert (flat[1, ..., 24:] == 7.0).all()
