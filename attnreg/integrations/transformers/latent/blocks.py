"""Conversion of transformers' rectangles to a batch for MLA: latents in blocks, request by request.

transformers keeps latents and rotary parts apart, in rows that begin with padding. Kernels of the latent form read both
as one row, from a request's first token on. So each layer copies them once a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.integrations.transformers.batches import VarlenBatch
from attnreg.integrations.transformers.latent.lazy import CallLatents
from attnreg.runtime.interface import BatchMetadata
from attnreg.runtime.lengths import prefix_sums

# FlashMLA and FlashInfer read blocks of 64 tokens, and attnreg's own kernels all multiples of 16
BLOCK_SIZE = 64


class Blocks(NamedTuple):
    """The batch of a mask over blocks, for all layers of a step.

    places: the request and position of each key in transformers' rectangles, and its row in the blocks. None: the keys
    are all before ``stop``, in the same order in both. source: with places, each row of the blocks -> its row in the
    rectangles up to ``stop``; any row for one that is no key. all_new: no request has a key of an earlier step. least,
    most: the queries of requests that have some; 0 if none has.
    """

    batch: BatchMetadata
    per_request: int
    stop: int
    places: tuple[Tensor, Tensor, Tensor] | None
    source: Tensor | None
    all_new: bool
    least: int
    most: int

    def filled(self, latents: CallLatents) -> Tensor:
        """A cache [num_blocks, block_size, rank + rope] that holds the latents of all keys."""
        latent, rope = latents.latent, latents.rope
        size, _, keys, rank = latent.shape
        width = rank + rope.shape[3]
        if keys != self.stop:
            latent, rope = latent[:, :, : self.stop], rope[:, :, : self.stop]
        if self.source is not None:
            whole = torch.cat((latent, rope), 3).view(-1, width)
            return whole.index_select(0, self.source).view(-1, BLOCK_SIZE, width)
        # nothing reads rows that are no keys, so they stay uninitialised
        cache = latent.new_empty(size * self.per_request, BLOCK_SIZE, width)
        rows = cache.view(size, 1, self.per_request * BLOCK_SIZE, width)
        # one operation, which writes into the blocks directly
        torch.cat((latent, rope), 3, out=rows.narrow(2, 0, self.stop))
        return cache

    def positions(self, chosen: Tensor) -> Tensor:
        """The positions among a request's tokens, [batch * queries, topk] int32, of chosen [batch, queries, topk] keys.

        -1 for a key that its query does not see: padding, or a later key. transformers' indexers choose such keys if a
        query sees fewer than topk.
        """
        size, queries, topk = chosen.shape
        chosen = chosen.long()
        position = torch.arange(self.stop, device=chosen.device).expand(size, -1)
        if self.places is not None:
            request, key, row = self.places
            position = position.new_full((size, self.stop), -1)
            position[request, key] = row - request * self.per_request * BLOCK_SIZE
        known = (chosen >= 0) & (chosen < self.stop)
        found = position.gather(1, chosen.clamp(0, self.stop - 1).flatten(1)).view_as(chosen)
        # the last keys are the queries' own
        last = position[:, self.stop - queries :, None]
        return found.where(known & (found <= last), -1).int().view(size * queries, topk)


def blocks_of(varlen: VarlenBatch) -> Blocks:
    """The blocks of a batch, made once for the layers that share it."""
    blocks: Blocks | None = varlen.blocks.get(BLOCK_SIZE)
    if blocks is None:
        blocks = varlen.blocks[BLOCK_SIZE] = _blocks(varlen)
    return blocks


def _blocks(varlen: VarlenBatch) -> Blocks:
    lengths, device = varlen.seq_lens, varlen.device
    per_request = max(1, -(-max(lengths, default=0) // BLOCK_SIZE))
    table = torch.arange(len(lengths) * per_request, dtype=torch.int32, device=device).view(len(lengths), per_request)
    places = source = None
    if varlen.tokens is not None:
        request, position = varlen.tokens
        # keys stand request by request
        shift = [i * per_request * BLOCK_SIZE - start for i, start in enumerate(prefix_sums(lengths)[:-1])]
        shifts = torch.tensor(shift, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        row = torch.arange(len(request), device=device) + shifts[request]
        places = request, position, row
        source = row.new_zeros(table.numel() * BLOCK_SIZE)
        source[row] = request * varlen.key_stop + position
    batch = BatchMetadata.build(varlen.query_lens, lengths, device=device, block_table=table, causal=varlen.band.causal)
    queries = [n for n in varlen.query_lens if n] or [0]
    all_new = varlen.query_lens == lengths
    return Blocks(batch, per_request, varlen.key_stop, places, source, all_new, min(queries), max(queries))
