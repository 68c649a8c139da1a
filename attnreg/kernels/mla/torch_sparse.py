"""TORCH_MLA_SPARSE: TORCH_MLA over the tokens that an indexer chose, on any device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnreg.kernels import torch_mla
from attnreg.kernels.dense.cache import write_kv, written
from attnreg.kernels.mla.chosen import by_token
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, SpecError, paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

kv_cache_shape = paged_cache_shape


class TorchSparsePlan(NamedTuple):
    """A batch, and its writes to the cache (`cache.written`)."""

    batch: BatchMetadata
    written: tuple[Tensor, Tensor, Tensor] | None


def plan(spec: AttentionSpec, batch: BatchMetadata) -> TorchSparsePlan:
    """The batch; its calls depend on the tokens that queries choose. Raises `SpecError` and `BatchError`."""
    if not spec.sparse:
        raise SpecError("the layer is not sparse MLA; TORCH_MLA_SPARSE computes nothing else")
    if batch.block_table is None:
        raise BatchError(["the batch has no block_table: MLA in its latent form reads the cache"])
    return TorchSparsePlan(batch, written(spec, batch))


def forward(spec: AttentionSpec, plan: TorchSparsePlan, call: Call) -> None:
    """Writes the attention of each query to the latents that it chose into ``output``, and into ``lse``."""
    if not plan.batch.num_tokens:
        return
    dense, batch, call = by_token(spec, plan.batch, call)
    torch_mla.forward(dense, torch_mla.plan(dense, batch), call)
