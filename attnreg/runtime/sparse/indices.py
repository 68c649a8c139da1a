"""The indices of a call of sparse MLA, which are the tokens that an indexer chose, and their validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnreg.runtime.batch import BatchMetadata
from attnreg.runtime.interface import AttentionSpec, Call
from attnreg.runtime.tensors import table_problems, tensor_problems
from attnreg.runtime.validation import debugging, refuse


def validate_indices(spec: AttentionSpec, batch: BatchMetadata, indices: Any, rows: int) -> None:
    """Raises `BatchError` if the indices of a call with ``rows`` rows of queries do not fit the layer and its batch.

    Rows of padding have indices too: a replay of a captured graph may have queries there. The content of indices is
    read only for a batch in host memory, or with ``ATTNREG_DEBUG=1``.
    """
    if not spec.sparse:
        refuse(["indices are given, but the layer is not sparse MLA"] if indices is not None else [])
        return
    device = batch.seq_lens.device
    problems = [*tensor_problems("indices", indices, (None, None), torch.int32, device=device)]
    if not problems:
        problems = [*table_problems("indices", indices)]
        if indices.shape[0] < rows:
            problems.append(f"indices has {indices.shape[0]} rows; query has {rows}")
    if not problems and (batch.on_host or debugging()):
        problems = [*_content_problems(batch, indices[: batch.num_tokens])]
    refuse(problems)


def with_indices(spec: AttentionSpec, batch: BatchMetadata, call: Call, indices: Any) -> Call:
    """A call with its indices, validated. Raises `BatchError` as `validate_indices` does."""
    validate_indices(spec, batch, indices, call.query.shape[0])
    return call._replace(indices=indices)


def ends_of(batch: BatchMetadata, request: Tensor, row: Tensor) -> Tensor:
    """How many keys of its request each row sees, from the first on; request, row [tokens] int64."""
    length = batch.seq_lens[request].long()
    own = length - batch.query_start_loc[1:][request] + row + 1
    if isinstance(batch.causal, Tensor):
        return torch.where(batch.causal[request], own, length)
    return own if batch.causal else length


def rows_of(batch: BatchMetadata) -> tuple[Tensor, Tensor]:
    """The request of each token of a batch, and its row, [tokens] int64 on the batch's device."""
    device = batch.seq_lens.device
    request = torch.arange(batch.num_reqs, device="cpu").repeat_interleave(batch.host_starts.diff().long())
    return request.to(device, non_blocking=True), torch.arange(batch.num_tokens, device=device)


def _content_problems(batch: BatchMetadata, indices: Tensor) -> Iterator[str]:
    end = ends_of(batch, *rows_of(batch))[:, None]
    wrong = ((indices < -1) | (indices >= end.clamp(min=0))) & (indices != -1)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        yield (
            f"indices[{row}, {column}] is {int(indices[row, column])}; the query of this row sees "
            f"{max(0, int(end[row]))} keys: expected a position before that, or -1 for none"
        )
        return
    ordered = indices.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        row, column = twice.nonzero()[0].tolist()
        yield f"indices[{row}] has the position {int(ordered[row, column])} twice; a query attends to a key once"
