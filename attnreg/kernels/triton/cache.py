# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The cache write: new keys and values into the paged cache, quantised on the way if the cache holds 8-bit floats."""

import triton
import triton.language as tl

from attnreg.kernels.triton.fp8 import float32_to_fp8_bits
from attnreg.kernels.triton.layout import columns


@triton.jit
def _to_cache(x, scale, cache_ptr, FP8: tl.constexpr):
    """A tile in the cache's dtype: cast, or divided by its rows' scales and rounded to 8 bits."""
    DTYPE: tl.constexpr = cache_ptr.dtype.element_ty
    LARGEST: tl.constexpr = 448.0 if FP8 == "e4m3fn" else 57344.0
    if DTYPE.primitive_bitwidth > 8:
        y = x.to(DTYPE)
    elif tl.uint8 == DTYPE:
        y = float32_to_fp8_bits(tl.div_rn(x.to(tl.float32), scale), FP8)
    else:
        y = tl.clamp(tl.div_rn(x.to(tl.float32), scale), -LARGEST, LARGEST).to(DTYPE)
    return y


@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping_ptr", "k_scale_ptr", "v_scale_ptr"]
)
def _write_kv_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr, num_tokens,
    STRIDE_KEY_T: tl.constexpr, STRIDE_KEY_H: tl.constexpr, STRIDE_VALUE_T: tl.constexpr, STRIDE_VALUE_H: tl.constexpr,
    STRIDE_KB: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_KH: tl.constexpr,
    STRIDE_VB: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_VH: tl.constexpr,
    STRIDE_KX: tl.constexpr, STRIDE_VX: tl.constexpr, K_VECTOR: tl.constexpr, V_VECTOR: tl.constexpr,
    STRIDE_K_SCALE: tl.constexpr, STRIDE_V_SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Stores BLOCK_ROWS (token, head) rows at their tokens' slots; a negative slot skips its token."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    stored = (slot >= 0)[:, None]
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    k_scale, v_scale = 1.0, 1.0
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr + head * STRIDE_K_SCALE)[:, None]
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + head * STRIDE_V_SCALE)[:, None]

    mask = stored & (offs_d < HEAD_SIZE)
    key = tl.load(key_ptr + (token * STRIDE_KEY_T + head * STRIDE_KEY_H)[:, None] + offs_d, mask=mask, other=0.0)
    key_offs = block * STRIDE_KB + offset * STRIDE_KT + head * STRIDE_KH
    key_offs = key_offs[:, None] + columns(offs_d, K_VECTOR, STRIDE_KX)
    tl.store(key_cache_ptr + key_offs, _to_cache(key, k_scale, key_cache_ptr, FP8), mask=mask)

    mask = stored & (offs_d < HEAD_SIZE_V)
    value = tl.load(
        value_ptr + (token * STRIDE_VALUE_T + head * STRIDE_VALUE_H)[:, None] + offs_d, mask=mask, other=0.0
    )
    value_offs = block * STRIDE_VB + offset * STRIDE_VT + head * STRIDE_VH
    value_offs = value_offs[:, None] + columns(offs_d, V_VECTOR, STRIDE_VX)
    tl.store(value_cache_ptr + value_offs, _to_cache(value, v_scale, value_cache_ptr, FP8), mask=mask)
