"""The format fp8_ds_mla of a cached latent, in PyTorch: 656 bytes a token.

The bytes of a token are 512 e4m3fn numbers, the latent; 4 float32 scales, one for each 128 of them; and 64 bfloat16
numbers, the rotary part, unscaled. A number of the latent is ``e4m3 * scale``. A scale is ``max(abs(x)) / 448`` of its
128 numbers, and at least the smallest normal float32, so that the scale of zeros is not 0.

Source: the comment above concat_and_cache_ds_mla_kernel in vLLM's csrc/cache_kernels.cu.
"""

from __future__ import annotations

import torch
from torch import Tensor

RANK, ROPE, TILE = 512, 64, 128
BYTES = RANK + 4 * (RANK // TILE) + 2 * ROPE
_SCALES, _ROPE = slice(RANK, RANK + 4 * (RANK // TILE)), slice(BYTES - 2 * ROPE, BYTES)
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def packed(latent: Tensor, rope: Tensor) -> Tensor:
    """The bytes [..., 656] of latents [..., 512] and their rotary parts [..., 64]."""
    tiles = latent.float().reshape(*latent.shape[:-1], RANK // TILE, TILE)
    scales = (tiles.abs().amax(-1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (tiles / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).flatten(-2)
    parts = (numbers, scales, rope.to(torch.bfloat16).contiguous())
    return torch.cat([x.view(torch.uint8) for x in parts], -1)


def unpacked(bytes_: Tensor) -> Tensor:
    """The latents with their rotary parts, [..., 576] float32, of bytes [..., 656]."""
    # a copy, because a view as larger numbers needs an aligned address
    numbers, scales, rope = (
        bytes_[..., part].clone(memory_format=torch.contiguous_format) for part in (slice(RANK), _SCALES, _ROPE)
    )
    tiles = numbers.view(torch.float8_e4m3fn).float().view(*numbers.shape[:-1], RANK // TILE, TILE)
    scales, rope = scales.view(torch.float32), rope.view(torch.bfloat16).float()
    return torch.cat([(tiles * scales[..., None]).flatten(-2), rope], -1)
