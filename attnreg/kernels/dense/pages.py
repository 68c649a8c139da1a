"""Packed keys and values copied to pages, for kernels that only read a paged cache."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from attnreg.runtime.interface import BatchMetadata, KVCache


class Pages(NamedTuple):
    """Where packed keys go: their slots [keys] int64, in ``pages`` pages of ``size`` tokens."""

    slots: Tensor
    pages: int
    size: int

    @classmethod
    def of(cls, batch: BatchMetadata, size: int = 16) -> tuple[BatchMetadata, Self | None]:
        """A batch over packed keys as a batch over pages, and the `Pages`; a batch over a cache unchanged, and None."""
        if batch.paged:
            return batch, None
        device, keys = batch.seq_lens.device, batch.host_lens.long()
        blocks = -(-keys // size)
        first = blocks.cumsum(0) - blocks
        # kernels may read a page even if no request has a key
        count = max(1, int(blocks.sum()))
        table = first[:, None] + torch.arange(max(1, -(-batch.max_seq_len // size)), device="cpu")
        table = table.clamp(max=count - 1).to(torch.int32).to(device, non_blocking=True)
        begins = keys.cumsum(0) - keys
        slots = torch.arange(int(keys.sum()), device="cpu") + (first * size - begins).repeat_interleave(keys)
        paged = replace(batch, block_table=table, key_start_loc=None)
        return paged, cls(slots.to(device, non_blocking=True), count, size)

    def filled(self, packed: tuple[Tensor, Tensor]) -> KVCache:
        """Keys and values copied to pages [pages, size, num_kv_heads, head_size]; other slots are zero."""
        return KVCache(*map(self._filled, packed))

    def _filled(self, packed: Tensor) -> Tensor:
        cache = packed.new_zeros(self.pages * self.size, *packed.shape[1:])
        cache.index_copy_(0, self.slots, packed[: self.slots.shape[0]])
        return cache.view(self.pages, self.size, *packed.shape[1:])
