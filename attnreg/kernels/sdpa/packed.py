"""Helpers of the adapters over PyTorch's fused kernels, which read only packed sequences and return dense memory."""

from __future__ import annotations

from torch import Tensor

from attnreg.kernels.flash_attn.sequences import Sequences
from attnreg.runtime.interface import (
    NO_PARAMS,
    AttentionSpec,
    BatchError,
    BatchMetadata,
    Call,
    KVCache,
    LayerParams,
    paged_cache_shape,
)

kv_cache_shape = paged_cache_shape


def sequences(spec: AttentionSpec, batch: BatchMetadata, backend: str) -> Sequences:
    """The sequences of a batch. Raises `BatchError` for a batch over a cache, which these kernels cannot read."""
    if batch.paged:
        raise BatchError([f"the batch has a block_table: {backend} reads packed keys and values alone"])
    return Sequences.of(spec, batch)


def write_kv(
    spec: AttentionSpec, plan: object, key: Tensor, value: Tensor, kv_cache: KVCache, *, params: LayerParams = NO_PARAMS
) -> None:
    """Raises `BatchError`: there is no cache."""
    raise BatchError(["a backend over packed keys and values has no cache to write to"])


def store(plan: Sequences, call: Call, output: Tensor, lse: Tensor | None = None) -> None:
    """Stores a kernel's results for the rows that exist: output [rows, heads, size], lse [heads, rows]."""
    call.output[: plan.num_tokens] = output[: plan.num_tokens]
    if call.lse is not None and lse is not None:
        call.lse[:, : plan.num_tokens] = lse[:, : plan.num_tokens]
