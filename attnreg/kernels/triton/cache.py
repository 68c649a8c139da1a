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
from attnreg.kernels.triton.launch import Kernel
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
    cache = Cache(layout, key_cache.shape[_BLOCK_SIZE_AT[layout]], head_size, value.shape[2], key_cache.dtype)
    writer = _writer(key.device, target_of(key.device), _Code(key.dtype, num_kv_heads, cache))
    writer.write(num_tokens, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


class _Writer:
    """The kernel that stores keys and values of one kind on a device."""

    def __init__(self, device: torch.device, target: Target, code: _Code) -> None:
        self.variant, self.num_kv_heads, self.block_rows = (
            _WRITE.variant(device, code),
            code.num_kv_heads,
            code.block_rows,
        )
        # without the hardware's conversions, the kernel is given the bits
        self.as_bits = code.cache.dtype in FP8 and not target.converts(code.cache.dtype)

    def write(
        self, num_tokens: int, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor,
        k_scale: Tensor | None, v_scale: Tensor | None,
    ) -> None:  # fmt: skip
        """Stores the first rows of key and value; the arguments of `write_kv`."""
        if self.as_bits:
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        variant_key = (
            key.stride(), value.stride(), key_cache.stride(), value_cache.stride(),
            None if k_scale is None else k_scale.stride(0), None if v_scale is None else v_scale.stride(0),
        )  # fmt: skip
        grid = (-(-num_tokens * self.num_kv_heads // self.block_rows), 1, 1)
        values = (key, value, key_cache, value_cache, slots, k_scale, v_scale, num_tokens)
        self.variant.launch(variant_key, grid, values)


_writer = functools.lru_cache(maxsize=256)(_Writer)


@functools.lru_cache(maxsize=256)
def _writer_of(spec: AttentionSpec, dtype: torch.dtype, device: torch.device, target: Target) -> _Writer:
    """The writer of new keys and values of a dtype, for the layers of a spec."""
    sizes = (spec.head_size_v, spec.head_size - spec.head_size_v) if spec.latent else (spec.head_size, spec.head_size_v)
    cache = Cache(spec.kv_layout, spec.block_size or 0, *sizes, spec.cache_dtype)
    return _writer(device, target, _Code(dtype, spec.num_kv_heads, cache))


class _Plan(Protocol):
    """A plan that knows the slots of a batch's new keys."""

    @property
    def slot_mapping(self) -> Tensor | None: ...


def write_new_kv(
    spec: AttentionSpec, plan: _Plan, key: Tensor, value: Tensor, kv_cache: KVCache, *, params: LayerParams = NO_PARAMS
) -> None:
    """Store a batch's new keys and values in the cache: ``write_kv`` of the kernel modules that use this kernel."""
    slots, device = plan.slot_mapping, key.device
    if slots is None or not (num_tokens := min(key.shape[0], slots.shape[0])):
        return
    writer = _writer_of(spec, key.dtype, device, target_of(device))
    if spec.latent:
        # the two parts of a latent lie side by side
        kv_cache = KVCache(kv_cache.value, kv_cache.key[..., spec.head_size_v :])
    writer.write(num_tokens, key, value, *kv_cache, slots, params.k_scale, params.v_scale)
