# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The cache write of MLA: new latents and their rotary parts into the paged cache, in any of its formats."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.cache import PlanWithSlots, write_new_kv
from attnreg.kernels.triton.fp8 import stored_as
from attnreg.kernels.triton.launch import Kernel, KernelVariant
from attnreg.kernels.triton.layout import CacheLayout, Strides
from attnreg.kernels.triton.target import Target, target_of
from attnreg.runtime import latents
from attnreg.runtime.interface import NO_PARAMS, AttentionSpec, BatchError, KVCache, LayerParams

# the least scale: the smallest normal float32
_SMALLEST = tl.constexpr(2.0**-126)


class ScaledParts(NamedTuple):
    """The three parts of a cache of fp8_ds_mla, as views of it in the types of their numbers."""

    numbers: Tensor
    scales: Tensor
    rope: Tensor


def scaled_parts(cache: Tensor, converts: bool) -> ScaledParts:
    """The parts of a cache [..., 656] uint8, without a copy; converts: the device converts float8_e4m3fn.

    Raises `BatchError` if the float32 scales are not at multiples of 4 bytes.
    """
    if any(s % 4 for s in (cache.storage_offset(), *cache.stride()[:-1])):
        problem = f"kv_cache.key has strides {list(cache.stride())} and offset {cache.storage_offset()}"
        raise BatchError([f"{problem}; fp8_ds_mla holds float32 scales, which lie at multiples of 4"])
    numbers = cache.view(torch.float8_e4m3fn) if converts else cache
    first = latents.RANK // 4
    scales = cache.view(torch.float32)[..., first : first + latents.RANK // latents.TILE]
    return ScaledParts(numbers, scales, cache.view(torch.bfloat16)[..., latents.BYTES // 2 - latents.ROPE :])


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _write_scaled_kernel(
    latent_ptr, new_rope_ptr, numbers_ptr, scales_ptr, rope_ptr, slot_mapping_ptr,
    LATENT: tl.constexpr, NEW_ROPE: tl.constexpr, NUMBERS: tl.constexpr, SCALES: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Stores one token at its slot; a negative slot skips the token. Grid: (tokens,).

    LATENT, NEW_ROPE: the `Strides` of the source. NUMBERS, SCALES, ROPE: the `CacheLayout` of the target.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    block, offset = slot // NUMBERS.block_size, slot % NUMBERS.block_size
    TILES: tl.constexpr = SCALES.size
    WIDTH: tl.constexpr = NUMBERS.size // TILES
    tiles, offs_r = tl.arange(0, TILES), tl.arange(0, ROPE.size)
    columns = tiles[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    latent = tl.load(latent_ptr + token * LATENT.token + columns).to(tl.float32)
    # max ignores NaN, so a NaN makes only its own number NaN
    scales = tl.maximum(tl.div_rn(tl.max(tl.abs(latent), 1), 448.0), _SMALLEST)  # [TILES]
    FP8: tl.constexpr = NUMBERS.fp8
    numbers = stored_as(latent, scales[:, None], numbers_ptr, FP8)
    tl.store(numbers_ptr + block * NUMBERS.stride_block + offset * NUMBERS.stride_token + columns, numbers)
    tl.store(scales_ptr + block * SCALES.stride_block + offset * SCALES.stride_token + tiles, scales)
    rope = tl.load(new_rope_ptr + token * NEW_ROPE.token + offs_r)
    tl.store(rope_ptr + block * ROPE.stride_block + offset * ROPE.stride_token + offs_r, rope)


_WRITE = Kernel(_write_scaled_kernel)


class ScaledWriteCode(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides."""

    block_size: int

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 2}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        latent, new_rope, *cached = key
        sizes = (latents.RANK, "e4m3fn"), (latents.RANK // latents.TILE, ""), (latents.ROPE, "")
        return {
            "LATENT": Strides(token=latent, head=0),
            "NEW_ROPE": Strides(token=new_rope, head=0),
            **{
                name: paged_layout(self.block_size, strides, size, fp8)
                for name, strides, (size, fp8) in zip(("NUMBERS", "SCALES", "ROPE"), cached, sizes, strict=True)
            },
        }


def paged_layout(block_size: int, strides: tuple[int, int], size: int, fp8: str) -> CacheLayout:
    """The layout of one part of the latents; strides: of blocks and of tokens."""
    return CacheLayout(
        block_size=block_size, stride_block=strides[0], stride_token=strides[1], stride_head=0, stride_x=0, vector=0,
        size=size, fp8=fp8, stride_scale=0,
    )  # fmt: skip


def block_and_token(cache: Tensor, tokens_first: bool) -> tuple[int, int]:
    """The strides of a cache's blocks and tokens."""
    return cache.stride(0), cache.stride(1 if tokens_first else 2)


@functools.lru_cache(maxsize=256)
def _variant(device: torch.device, target: Target, block_size: int) -> KernelVariant:
    return _WRITE.variant(device, ScaledWriteCode(block_size))


def write_latents(
    spec: AttentionSpec, plan: PlanWithSlots, key: Tensor, value: Tensor, kv_cache: KVCache, *,
    params: LayerParams = NO_PARAMS,
) -> None:  # fmt: skip
    """Stores latents [tokens, 1, kv_lora_rank] and their rotary parts at the slots of a batch."""
    if spec.kv_dtype != "fp8_ds_mla":
        write_new_kv(spec, plan, key, value, kv_cache, params=params)
        return
    slots, target = plan.slot_mapping, target_of(key.device)
    if slots is None or not (tokens := min(key.shape[0], slots.shape[0])):
        return
    assert spec.block_size is not None
    cached = scaled_parts(kv_cache.key, target.converts(torch.float8_e4m3fn))
    variant_key = key.stride(0), value.stride(0), *(block_and_token(x, spec.kv_layout == "NHD") for x in cached)
    _variant(key.device, target, spec.block_size).launch(
        variant_key,
        (tokens, 1, 1),
        latent_ptr=key,
        new_rope_ptr=value,
        numbers_ptr=cached.numbers,
        scales_ptr=cached.scales,
        rope_ptr=cached.rope,
        slot_mapping_ptr=slots,
    )
