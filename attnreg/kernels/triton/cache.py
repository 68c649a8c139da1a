# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The cache write: new keys and values into the paged cache, quantised on the way if the cache holds 8-bit floats."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.fp8 import stored_as
from attnreg.kernels.triton.launch import Kept, Kernel, pointers_of
from attnreg.kernels.triton.layout import Cache, Strides, columns, on_bytes
from attnreg.kernels.triton.target import target_of
from attnreg.kernels.triton.tiles import power_of_2
from attnreg.runtime.interface import NO_PARAMS, AttentionSpec, KVCache, LayerParams, Layout
from attnreg.runtime.tensors import Kinds

# which dimension of a cache of keys holds the tokens of a block
_BLOCK_SIZE_AT: dict[Layout, int] = {"NHD": 1, "HND": 2, "SPLIT": 3}


# of keys, and of values, that a program of four warps stores: 8 a thread. On an H200 (2026-11-30) 64 tokens over fp8
# take 5.2 µs, and 6.9 with four times as many; 8,192 tokens take the same time with both
_ELEMENTS = 1024


@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping_ptr", "k_scale_ptr", "v_scale_ptr"]
)
def _write_kv_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr, num_tokens,
    KEY: tl.constexpr, VALUE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Stores BLOCK_ROWS (token, head) rows at their tokens' slots; a negative slot skips its token.

    KEY, VALUE: the `Strides` of the source. K, V: the `CacheLayout` of the target.
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

    # both loads come before the first store: the compiler would move no load past a store
    is_key, is_value = stored & (offs_d < K.size), stored & (offs_d < V.size)
    key = tl.load(key_ptr + (token * KEY.token + head * KEY.head)[:, None] + offs_d, mask=is_key, other=0.0)
    value = tl.load(value_ptr + (token * VALUE.token + head * VALUE.head)[:, None] + offs_d, mask=is_value, other=0.0)
    key_offs = block * K.stride_block + offset * K.stride_token + head * K.stride_head
    value_offs = block * V.stride_block + offset * V.stride_token + head * V.stride_head
    tl.store(key_cache_ptr + key_offs[:, None] + columns(offs_d, K), stored_as(key, k_scale, key_cache_ptr, FP8),
             mask=is_key)  # fmt: skip
    tl.store(value_cache_ptr + value_offs[:, None] + columns(offs_d, V),
             stored_as(value, v_scale, value_cache_ptr, FP8), mask=is_value)  # fmt: skip


class WriteTensors(NamedTuple):
    """The tensors of a write: the kernel's pointers."""

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


_WRITE = Kernel(_write_kv_kernel, pointers_of(WriteTensors))


class WriteKey(NamedTuple):
    """The strides that the code depends on; of a scale None where there is none."""

    key: tuple[int, ...]
    value: tuple[int, ...]
    key_cache: tuple[int, ...]
    value_cache: tuple[int, ...]
    k_scale: int | None
    v_scale: int | None


class WriteCode(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides."""

    dtype: torch.dtype
    num_kv_heads: int
    cache: Cache

    @property
    def block_d(self) -> int:
        return power_of_2(max(self.cache.head_size, self.cache.head_size_v))

    @property
    def block_rows(self) -> int:
        return max(1, _ELEMENTS // self.block_d)

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4}

    def constants(self, key: WriteKey) -> Mapping[str, Any]:
        key_token, key_head, _ = key.key
        value_token, value_head, _ = key.value
        return {
            "KEY": Strides(token=key_token, head=key_head),
            "VALUE": Strides(token=value_token, head=value_head),
            "K": self.cache.keys(key.key_cache, key.k_scale),
            "V": self.cache.values(key.value_cache, key.v_scale),
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
    """Stores each row of key and value at its slot (block * block_size + offset); skips rows with a negative slot.

    key [tokens, num_kv_heads, head_size], value likewise; the caches as `AttentionPlan.run` reads them. They have the
    same dtype, or float8: then rows are divided by the head's scale, rounded to nearest even and saturated.
    """
    _, num_kv_heads, head_size = key.shape
    cache = Cache(layout, key_cache.shape[_BLOCK_SIZE_AT[layout]], head_size, value.shape[2], key_cache.dtype)
    tensors = WriteTensors(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    _write(WriteCode(key.dtype, num_kv_heads, cache), tensors)


# what runs the writes of alike calls, which are of one spec; and the kinds of calls that nobody compared
Write = Callable[[WriteTensors], None]
_writes = Kept[Write]()
_kinds = Kinds()


def _write(code: WriteCode | AttentionSpec, tensors: WriteTensors, alike: object = None) -> None:
    """Stores the first rows of key and value. code: or the spec of the layer."""
    if alike is None:
        some = [x for x in tensors if x is not None]
        alike = code, _kinds.of((tensors.k_scale is None, tensors.v_scale is None), some)
    bound_write(code, alike, tensors)(tensors)


def bound_write(code: WriteCode | AttentionSpec, alike: Hashable, tensors: WriteTensors) -> Write:
    """The function that stores tensors like these; kept under ``alike``."""
    return _writes.of(alike, lambda: _bind(code, tensors))


def _bind(code: WriteCode | AttentionSpec, tensors: WriteTensors) -> Write:
    """The launch of a write, of tensors with the facts of these."""
    key, value, key_cache, value_cache, slots, *scales = tensors
    num_tokens = min(key.shape[0], slots.shape[0])
    if num_tokens == 0:
        return lambda tensors: None
    if isinstance(code, AttentionSpec):
        layout = Cache(code.kv_layout, code.block_size or 0, key.shape[2], value.shape[2], code.cache_dtype)
        code = WriteCode(key.dtype, code.num_kv_heads, layout)
    k_scale, v_scale = (None if x is None else x.stride(0) for x in scales)
    variant_key = WriteKey(key.stride(), value.stride(), key_cache.stride(), value_cache.stride(), k_scale, v_scale)
    grid = (-(-num_tokens * code.num_kv_heads // code.block_rows), 1, 1)
    bound = _WRITE.variant(key.device, code).bind(variant_key, grid, {"num_tokens": num_tokens})
    return on_bytes(bound.launch, (key, value, key_cache, value_cache), target_of(key.device))


class PlanWithSlots(Protocol):
    """A plan that knows the slots of a batch's new keys."""

    @property
    def slot_mapping(self) -> Tensor | None: ...


def write_new_kv(
    spec: AttentionSpec, plan: PlanWithSlots, key: Tensor, value: Tensor, kv_cache: KVCache, *,
    params: LayerParams = NO_PARAMS, alike: object = None,
) -> None:  # fmt: skip
    """Stores a batch's new keys and values in the cache: ``write_kv`` of the kernel modules that use this kernel."""
    if spec.latent:
        # the two parts of a latent lie side by side
        kv_cache = KVCache(kv_cache.value, kv_cache.key[..., spec.head_size_v :])
    if plan.slot_mapping is not None:
        tensors = WriteTensors(key, value, *kv_cache, plan.slot_mapping, params.k_scale, params.v_scale)
        _write(spec, tensors, alike)
