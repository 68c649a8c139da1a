# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The cache write: new keys and values into the paged cache, quantised on the way if the cache holds 8-bit floats."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.fp8 import stored_as
from attnreg.kernels.triton.launch import Kernel, Variant
from attnreg.kernels.triton.layout import FP8, Cache, Strides, columns
from attnreg.kernels.triton.target import Target, target_of
from attnreg.kernels.triton.tiles import power_of_2
from attnreg.runtime.interface import NO_PARAMS, AttentionSpec, KVCache, LayerParams, Layout

# the dimension of a cache of keys that holds the tokens of a block
_BLOCK_SIZE_AT: dict[Layout, int] = {"NHD": 1, "HND": 2, "SPLIT": 3}


@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping_ptr", "k_scale_ptr", "v_scale_ptr"]
)
def _write_kv_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr, num_tokens,
    KEY: tl.constexpr, VALUE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Stores BLOCK_ROWS (token, head) rows at their tokens' slots; a negative slot skips its token.

    KEY, VALUE: the `Strides` of what is stored. K, V: the `CacheLayout` of where.
    """
    FP8: tl.constexpr = K.fp8
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    stored = (slot >= 0)[:, None]
    block, offset = slot // K.block_size, slot % K.block_size
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    k_scale, v_scale = 1.0, 1.0
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr + head * K.stride_scale)[:, None]
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + head * V.stride_scale)[:, None]

    mask = stored & (offs_d < K.size)
    key = tl.load(key_ptr + (token * KEY.token + head * KEY.head)[:, None] + offs_d, mask=mask, other=0.0)
    key_offs = block * K.stride_block + offset * K.stride_token + head * K.stride_head
    key_offs = key_offs[:, None] + columns(offs_d, K)
    tl.store(key_cache_ptr + key_offs, stored_as(key, k_scale, key_cache_ptr, FP8), mask=mask)

    mask = stored & (offs_d < V.size)
    value = tl.load(value_ptr + (token * VALUE.token + head * VALUE.head)[:, None] + offs_d, mask=mask, other=0.0)
    value_offs = block * V.stride_block + offset * V.stride_token + head * V.stride_head
    value_offs = value_offs[:, None] + columns(offs_d, V)
    tl.store(value_cache_ptr + value_offs, stored_as(value, v_scale, value_cache_ptr, FP8), mask=mask)


_WRITE = Kernel(
    _write_kv_kernel,
    ("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr", "slot_mapping_ptr", "k_scale_ptr", "v_scale_ptr",
     "num_tokens"),
)  # fmt: skip


class _Code(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides."""

    dtype: torch.dtype
    num_kv_heads: int
    cache: Cache

    @property
    def block_d(self) -> int:
        return power_of_2(max(self.cache.head_size, self.cache.head_size_v))

    @property
    def block_rows(self) -> int:
        return max(1, 4096 // self.block_d)

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        new_key, new_value, keys, values, k_scale, v_scale = key
        return {
            "KEY": Strides(token=new_key[0], head=new_key[1]),
            "VALUE": Strides(token=new_value[0], head=new_value[1]),
            "K": self.cache.keys(keys, k_scale),
            "V": self.cache.values(values, v_scale),
            "NUM_KV_HEADS": self.num_kv_heads,
            "BLOCK_ROWS": self.block_rows,
            "BLOCK_D": self.block_d,
        }


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: Layout = "NHD",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Stores each row of key and value at its slot (block * block_size + offset); rows with a negative slot nowhere.

    key [tokens, num_kv_heads, head_size], value likewise; the caches as `AttentionPlan.run` reads them, in the same
    dtype or in float8, then divided by the head's scale, rounded to nearest even and saturated.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    num_tokens = min(num_tokens, slot_mapping.shape[0])
    if num_tokens == 0:
        return
    block_size = key_cache.shape[_BLOCK_SIZE_AT[layout]]
    variant, block_rows, as_bits = _variant(
        key.device, target_of(key.device), key.dtype, num_kv_heads, layout, block_size, head_size, value.shape[2],
        key_cache.dtype,
    )  # fmt: skip
    if as_bits:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    variant_key = (
        key.stride(), value.stride(), key_cache.stride(), value_cache.stride(),
        None if k_scale is None else k_scale.stride(0), None if v_scale is None else v_scale.stride(0),
    )  # fmt: skip
    grid = (-(-num_tokens * num_kv_heads // block_rows), 1, 1)
    values = (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_tokens)
    variant.launch(variant_key, grid, values)


@functools.lru_cache(maxsize=256)
def _variant(
    device: torch.device, target: Target, dtype: torch.dtype, num_kv_heads: int, layout: Layout, block_size: int,
    head_size: int, head_size_v: int, cache_dtype: torch.dtype,
) -> tuple[Variant, int, bool]:  # fmt: skip
    """The kernel for such keys and values, the rows of a program, and whether the kernel is given the cache's bits."""
    code = _Code(dtype, num_kv_heads, Cache(layout, block_size, head_size, head_size_v, cache_dtype))
    as_bits = cache_dtype in FP8 and not target.converts(cache_dtype)
    return _WRITE.variant(device, code), code.block_rows, as_bits


class _Plan(Protocol):
    """A plan that knows the slots of a batch's new keys."""

    @property
    def slot_mapping(self) -> Tensor | None: ...


def write_new_kv(
    spec: AttentionSpec, plan: _Plan, key: Tensor, value: Tensor, kv_cache: KVCache, *, params: LayerParams = NO_PARAMS
) -> None:
    """Store a batch's new keys and values in the cache: ``write_kv`` of the kernel modules that use this kernel."""
    if plan.slot_mapping is not None:
        write_kv(
            key,
            value,
            kv_cache.key,
            kv_cache.value,
            plan.slot_mapping,
            layout=spec.kv_layout,
            k_scale=params.k_scale,
            v_scale=params.v_scale,
        )
