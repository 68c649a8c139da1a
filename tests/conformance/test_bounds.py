"""Bounds are near what the dtype can hold."""

from __future__ import annotations

import pytest
import torch

from attnreg.conformance.bounds import ROUNDOFF, bounds
from attnreg.kernels.reference import attention
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, KVCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bounds_are_near_what_the_dtype_can_hold(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_size=64, head_size_v=64, dtype=dtype, softmax_scale=0.125)
    batch = BatchMetadata.build([4], [32])
    q, k, v = (torch.randn(n, 2, 64).to(dtype) for n in (4, 32, 32))
    exact = attention(spec, batch, q, key=k, value=v)
    allowed, allowed_lse = bounds(spec, batch, exact, float(v.abs().max()))
    # rounding the exact answer is allowed, and no more than a small multiple of it relative to the values
    assert ((exact.output.to(dtype).double() - exact.output).abs() <= allowed).all()
    ordinary = 4 * ROUNDOFF[dtype] + 700 * ROUNDOFF[torch.float32] * float(exact.abs_score.max())
    assert (allowed <= ordinary * (exact.abs_output + exact.output.abs())).all()
    assert float(allowed_lse.max()) < 1e-3


@pytest.mark.parametrize(("dtype", "kv_dtype", "allowed"), [
    (torch.bfloat16, "fp8_e4m3", True), (torch.bfloat16, "bfloat16", False), (torch.float32, "fp8_e4m3", False),
])  # fmt: skip
def test_a_weight_that_float16_does_not_hold_may_be_lost_where_products_are_in_it(
    dtype: torch.dtype, kv_dtype: str, allowed: bool
) -> None:
    stored = torch.float8_e4m3fn if kv_dtype == "fp8_e4m3" else dtype
    spec = AttentionSpec(
        num_heads=1, num_kv_heads=1, head_size=16, head_size_v=16, dtype=dtype, softmax_scale=1.0, kv_dtype=kv_dtype,
        block_size=16, kv_layout="NHD",
    )  # fmt: skip
    keys, values = torch.zeros(1, 16, 1, 16), torch.zeros(1, 16, 1, 16)
    # the second of two keys weighs exp(-20), and is the only one with a value
    keys[0, 0, 0, 0], values[0, 1] = 20, 1
    query = torch.zeros(1, 1, 16, dtype=dtype)
    query[..., 0] = 1
    batch = BatchMetadata.build([1], [2], block_table=torch.zeros(1, 1, dtype=torch.int32))
    exact = attention(spec, batch, query, KVCache(keys.to(stored), values.to(stored)))
    error, _ = bounds(spec, batch, exact, 1.0)
    assert 1e-9 < float(exact.output.abs().max()) < 2.0**-25
    assert bool((exact.output.abs() <= error).all()) is allowed
