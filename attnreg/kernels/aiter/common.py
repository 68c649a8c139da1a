"""Functions that the adapters over AMD's aiter share: the cache they accept, and dense memory for a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnreg.kernels.aiter import record
from attnreg.kernels.dense.cache import KeyPlaces, places
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchError,
    BatchMetadata,
    KVCacheShape,
    UnclaimedError,
    paged_cache_shape,
)

FP8: torch.dtype = record.FP8.load()
# kernels read indices in whole vectors: after the last index there must be memory that names existing rows
SPARE_INDICES = 256


def kv_cache_shape(spec: AttentionSpec, num_blocks: int, backend: str) -> KVCacheShape:
    """The shape of one layer's cache. Raises `UnclaimedError` as `validate_cache` does."""
    validate_cache(spec, backend)
    return paged_cache_shape(spec, num_blocks)


def validate_cache(spec: AttentionSpec, backend: str) -> None:
    """Raises `UnclaimedError` if the cache's 8-bit format is not the one that aiter's kernels read on this GPU."""
    if spec.quantised and spec.cache_dtype != FP8:
        formats = [str(dtype).removeprefix("torch.") for dtype in (spec.cache_dtype, FP8)]
        raise UnclaimedError(
            f"kv_dtype {spec.kv_dtype}: the cache holds {formats[0]}, and on this GPU aiter reads {formats[1]}", backend
        )


def into(output: Tensor, compute: Callable[[Tensor], Any]) -> None:
    """Lets ``compute`` fill ``output``, through dense memory of its own if the output is a view with gaps.

    ``compute`` may return another tensor than it was given; then that tensor is copied to the output. Some paths of
    aiter do not write to ``out``.
    """
    target = output if output.is_contiguous() else output.new_empty(output.shape)
    result = compute(target)
    if not isinstance(result, Tensor) or result.data_ptr() == target.data_ptr():
        result = target
    if result.data_ptr() != output.data_ptr():
        output.copy_(result)


def float32(tensor: Tensor | None) -> Tensor | None:
    """The numbers of each head as contiguous float32, which the kernels read through a pointer."""
    return None if tensor is None else tensor.float().contiguous()


def one_scale(scale: Tensor | None, like: Tensor) -> Tensor:
    """The one scale of all heads, or 1, as [1] float32."""
    return torch.ones(1, dtype=torch.float32, device=like.device) if scale is None else scale[:1]


def int32(values: Tensor, device: torch.device) -> Tensor:
    """Host integers, copied to the device as int32."""
    return values.to(torch.int32).to(device, non_blocking=True)


def starts_of(lengths: Tensor) -> Tensor:
    """The int32 prefix sums of lengths on a device, beginning with 0."""
    return pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def packed_places(
    spec: AttentionSpec, batch: BatchMetadata, request: Tensor, lengths: Tensor, starts: Tensor, most: int
) -> KeyPlaces:
    """The places of the first ``lengths`` keys of some requests, one request after the other.

    request, lengths: on the device; starts: `starts_of` the lengths. most: an upper bound of their sum. Rows past the
    last key have places in blocks that exist.
    """
    row = torch.arange(most, device=starts.device, dtype=torch.int32)
    owner = torch.searchsorted(starts[1:], row, right=True).clamp(max=len(request) - 1)
    position = row - starts[owner]
    exists = position < lengths[owner]
    blocks, offsets = places(spec, batch, request[owner], position.masked_fill(~exists, 0).long())
    return KeyPlaces(None if blocks is None else blocks.masked_fill(~exists, 0), offsets)


def refuse_padding(batch: BatchMetadata, backend: str) -> None:
    """Raises `BatchError` for requests with queries and no keys: aiter's kernels leave their output undefined."""
    keyless = (batch.host_starts.diff() > 0) & (batch.host_lens == 0)
    if keyless.any():
        request = int(keyless.int().argmax())
        raise BatchError([f"request {request} has queries and no keys, which {backend} does not serve; leave it out"])


def with_spare(indices: Tensor) -> Tensor:
    """The same indices as int32, with readable memory after the last one."""
    padded = torch.zeros(indices.shape[0] + SPARE_INDICES, dtype=torch.int32, device=indices.device)
    padded[: indices.shape[0]] = indices
    return padded[: indices.shape[0]]
