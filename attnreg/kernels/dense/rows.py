"""A batch over a paged cache as other packages' kernels take it: if they have to, single queries become requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from attnreg.runtime.interface import BatchError, BatchMetadata, Call


@dataclass(slots=True, eq=False)
class DenseRows:
    """The one call for a batch: ``requests`` requests with ``queries`` queries each.

    If a kernel cannot take the batch's requests, every query becomes a request of its own. The keys of a causal query
    then end before those of its request's later queries. max_key_len: the most keys of a request, as the host knows
    them. empty: whether a row of queries sees no key.
    """

    num_tokens: int
    requests: int
    queries: int
    causal: bool
    seq_lens: Tensor
    block_table: Tensor
    max_key_len: int
    empty: Tensor
    slot_mapping: Tensor | None

    @classmethod
    def of(cls, batch: BatchMetadata, *, several: bool = True) -> Self:
        """The one call of a batch. several: the kernel takes requests of several queries, if all have equally many.

        Raises `BatchError` without a cache.
        """
        if batch.block_table is None:
            raise BatchError(["there is no block_table: the kernel reads the cache"])
        lengths, device = batch.host_starts.diff(), batch.seq_lens.device
        queries = int(lengths[0]) if len(lengths) else 0
        causal, lens, table, requests = batch.causal is True, batch.seq_lens, batch.block_table, batch.num_reqs
        if (lengths != queries).any() or (queries > 1 and not several):
            request = torch.arange(batch.num_reqs, device="cpu").repeat_interleave(lengths)
            # the keys of a causal query end before those of the later queries
            later = (batch.host_starts[1:][request] - 1 - torch.arange(batch.num_tokens, device="cpu")) * causal
            request, later = torch.stack([request, later]).to(device, non_blocking=True)
            lens, table = (lens[request] - later).clamp(min=0).to(torch.int32), table[request]
            requests, queries, causal = batch.num_tokens, 1, False
        return cls(
            num_tokens=batch.num_tokens,
            requests=requests,
            queries=queries,
            causal=causal and queries > 1,
            seq_lens=lens.contiguous(),
            block_table=table,
            max_key_len=batch.max_seq_len,
            empty=(lens == 0).repeat_interleave(queries),
            slot_mapping=batch.slot_mapping,
        )

    def store(self, call: Call, out: Tensor, lse: Tensor | None) -> None:
        """Stores a kernel's results, [tokens, heads, size] and [tokens, heads]; zero and -inf for rows without keys."""
        n, empty, output = self.num_tokens, self.empty[:, None], call.output[: self.num_tokens]
        if out.data_ptr() != output.data_ptr():
            output.copy_(out)
        output.masked_fill_(empty[..., None], 0)
        if call.lse is not None and lse is not None:
            call.lse[:, :n] = lse.masked_fill(empty, -torch.inf).mT
