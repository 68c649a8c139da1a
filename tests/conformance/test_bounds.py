"""Bounds are near what the dtype can hold."""

from __future__ import annotations

import pytest
import torch

from attnreg.conformance.bounds import ROUNDOFF, bounds
from attnreg.kernels.reference import attention
from attnreg.runtime.interface import AttentionSpec, BatchMetadata


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
