"""The phases of an MLA batch: the requests of the latent form, the requests of the expanded form, and their parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.runtime.batch import BatchMetadata


class PhasePart(NamedTuple):
    """The requests of one phase as a batch, and the rows of their tokens in the whole: a slice, or [tokens] int64."""

    batch: BatchMetadata
    rows: slice | Tensor


class Phases(NamedTuple):
    """The part of a batch in the latent form and the part in the expanded form; None for a part without a token."""

    latent: PhasePart | None
    expanded: PhasePart | None


def phases_of(batch: BatchMetadata, decode_queries: int) -> Phases:
    """The phases of a batch: requests of more than ``decode_queries`` queries are expanded. Reads no device memory."""
    starts = batch.host_starts.tolist()
    queries = [last - first for first, last in pairwise(starts)]
    prompts = [i for i, n in enumerate(queries) if n > decode_queries]
    others = [i for i, n in enumerate(queries) if 0 < n <= decode_queries]
    return Phases(_part(batch, starts, others, prompts), _part(batch, starts, prompts, others))


def _part(batch: BatchMetadata, starts: list[int], requests: list[int], others: list[int]) -> PhasePart | None:
    """Some requests of a batch; None for no requests. others: the requests that the part must not have."""
    if not requests:
        return None
    if not others:
        return PhasePart(batch, slice(0, starts[-1]))
    device = batch.seq_lens.device
    host = torch.tensor(requests, dtype=torch.int64, device="cpu")
    chosen = host.to(device, non_blocking=True)
    lengths = batch.query_start_loc.diff()[chosen]
    host_lengths = batch.host_starts.diff()[host]
    causal = batch.causal
    # `replace` gives the part a dictionary of plans of its own
    part = replace(
        batch,
        query_start_loc=_sums(lengths),
        seq_lens=batch.seq_lens[chosen],
        max_query_len=min(batch.max_query_len, int(host_lengths.max())),
        query_start_loc_cpu=_sums(host_lengths),
        seq_lens_cpu=batch.host_lens[host],
        block_table=None if batch.block_table is None else batch.block_table[chosen],
        slot_mapping=None,
        causal=causal[chosen] if isinstance(causal, Tensor) else causal,
    )
    first, last = requests[0], requests[-1]
    if sum(host_lengths.tolist()) == starts[last + 1] - starts[first]:
        # the tokens are consecutive, apart from requests without a token
        return PhasePart(part, slice(starts[first], starts[last + 1]))
    rows = [row for i in requests for row in range(starts[i], starts[i + 1])]
    return PhasePart(part, torch.tensor(rows, dtype=torch.int64, device="cpu").to(device, non_blocking=True))


def _sums(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
