"""Own: FlashInfer's own kernels over the pages of a cache, or over packed keys and values, by one of its sub-backends.

FlashInfer plans on the host, from the lengths of the keys. With a cache, the host may know only upper bounds, so each
plan reads the lengths from the device once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.kernels.flashinfer import record
from attnreg.kernels.flashinfer.ragged import (
    Ragged,
    arguments,
    pages_of,
    ragged,
    requests_of,
    rows_of,
    store,
    store_empty,
    workspace,
)
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call


class PlannedWrapper(NamedTuple):
    """The requests of a batch, and the wrapper that has planned them; None if there are none."""

    requests: Ragged
    wrapper: Any
    paged: bool
    slot_mapping: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """One sub-backend. backend: its name in messages. kernels: FlashInfer's name of it, which is never "auto"."""

    backend: str
    kernels: str
    paged: Any
    packed: Any

    @classmethod
    def load(cls, backend: str, kernels: str) -> Own:
        """The sub-backend of the installed FlashInfer. Raises `UpstreamError` if its wrappers have changed."""
        paged = record.load_wrapper(record.PAGED_WRAPPER, (record.PAGED_PLAN, record.PAGED_RUN))
        return cls(backend, kernels, paged, record.load_wrapper(record.WRAPPER, (record.PLAN_MHA, record.RUN)))

    def plan(self, spec: AttentionSpec, batch: BatchMetadata) -> PlannedWrapper:
        """The requests of a batch, planned. Raises `BatchError` for causality by request, or if keys lie apart."""
        if batch.paged:
            requests = requests_of(batch, batch.seq_lens.tolist(), self.backend)
        else:
            requests = ragged(batch, self.backend)
        left, _ = spec.sides(requests.causal)
        shared = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim_qk": spec.head_size,
            "causal": requests.causal,
            "sm_scale": spec.softmax_scale,
            "window_left": left,
            "logits_soft_cap": spec.softcap,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.dtype,
            "o_data_type": spec.dtype,
        }
        wrapper, made = None, {"float_workspace_buffer": workspace(batch.seq_lens), "backend": self.kernels}
        if requests.num_reqs and batch.paged:
            wrapper = self.paged(kv_layout=spec.kv_layout, **made)
            wrapper.plan(qo_indptr=requests.host_queries, **_pages(spec, requests, batch), **shared)
        elif requests.num_reqs:
            wrapper = self.packed(kv_layout="NHD", **made)
            starts = {"qo_indptr": requests.host_queries, "kv_indptr": requests.host_keys}
            wrapper.plan(**starts, head_dim_vo=spec.head_size_v, **shared)
        return PlannedWrapper(requests, wrapper, batch.paged, batch.slot_mapping)

    def forward(self, spec: AttentionSpec, plan: PlannedWrapper, call: Call) -> None:
        """Writes the attention of the batch's queries into ``output``, and into ``lse``. Raises `BatchError`.

        Source of the arguments' meanings: flashinfer/prefill.py.
        """
        requests, with_lse = plan.requests, call.lse is not None
        if plan.wrapper is None:
            store_empty(requests, call)
            return
        if plan.paged:
            cache = pages_of(call, self.backend)
            query, out = rows_of(requests, call)
            result = plan.wrapper.run(q=query, paged_kv_cache=cache, out=out, return_lse=with_lse)
        else:
            query, key, value, out = arguments(requests, call)
            result = plan.wrapper.run(q=query, k=key, v=value, out=out, return_lse=with_lse)
        store(requests, call, out, result[1] if with_lse else None)


def _pages(spec: AttentionSpec, requests: Ragged, batch: BatchMetadata) -> dict[str, Any]:
    """The pages of each request, by the block table, as FlashInfer takes them; the prefix sums are in host memory."""
    size, table = spec.block_size, batch.block_table
    assert size is not None
    assert table is not None
    lengths = requests.host_keys.diff()
    counts = [-(-keys // size) for keys in lengths.tolist()]
    places = [(request, page) for request, n in zip(requests.active, counts, strict=True) for page in range(n)]
    # one transfer for both
    request, page = torch.tensor(places, device="cpu").to(table.device, non_blocking=True).unbind(1)
    return {
        "paged_kv_indptr": torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cpu"),
        "paged_kv_indices": table[request, page].int(),
        "paged_kv_last_page_len": (lengths - 1) % size + 1,
        "page_size": size,
    }
