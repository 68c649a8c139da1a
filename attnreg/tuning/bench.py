"""Bench: verifies one layer of one backend against float64 with the tensors of a workload, then times it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnreg.conformance.proof import attend, compare
from attnreg.conformance.trial import PADDING, Case, Draw, Trial, fill, make_layer
from attnreg.runtime.interface import BatchMetadata
from attnreg.runtime.sparse.indices import ends_of, rows_of
from attnreg.tuning.stopwatch import Stopwatch

if TYPE_CHECKING:
    from attnreg.analysis.timings.samples import Cell
    from attnreg.selection.trace import Selection

# the number of a request's queries that are compared with float64
_ROWS = 8
# the length of a turn on a processor, in seconds
_TURN = 0.02
# the default number of tokens that an indexer keeps for each query, and the queries whose tokens are drawn at once
TOPK = 2048
_DRAWN = 1024


class DeviceDraw(Draw):
    """Random numbers that are drawn on the device: a processor would take minutes for large workloads."""

    def __init__(self, seed: str, device: torch.device, topk: int | None = None) -> None:
        super().__init__(seed, device)
        self.topk = topk or TOPK
        self.there = torch.Generator(device).manual_seed(self.generator.initial_seed())

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        # drawn directly in its dtype if possible, which needs half the memory
        drawn = dtype if dtype.itemsize > 1 else torch.float16
        return torch.randn(*shape, generator=self.there, device=self.device, dtype=drawn).to(dtype)

    def chosen(self, batch: BatchMetadata, block: int) -> Tensor:
        """As many keys for each query as an indexer keeps, or all that the query sees, in any order."""
        ends = ends_of(batch, *rows_of(batch))
        rows = torch.full((len(ends) + PADDING, self.topk), -1, dtype=torch.int32, device=self.device)
        for first in range(0, len(ends), _DRAWN):
            some = slice(first, min(first + _DRAWN, len(ends)))
            shape = some.stop - first, batch.max_seq_len
            keys = torch.rand(*shape, generator=self.there, device=self.device, dtype=torch.float32)
            unseen = torch.arange(batch.max_seq_len, device=self.device) >= ends[some, None]
            kept = keys.masked_fill(unseen, -1.0).topk(min(self.topk, batch.max_seq_len), -1)
            rows[some, : kept.indices.shape[1]] = kept.indices.int().masked_fill(kept.values < 0, -1)
        return rows


class Bench:
    """The tensors of a cell and the layer of a backend. It passes on the backend's exceptions."""

    @torch.inference_mode()
    def __init__(self, cell: Cell, selection: Selection, device: torch.device) -> None:
        case = Case(request=cell.request, lengths="mixed", storage="NHD" if cell.request.block_size else "packed")
        draw = DeviceDraw(case.seed, device, cell.request.index_topk)
        self.layer = make_layer(case, selection, device, draw=draw, numbers=dict(cell.numbers))
        lengths = [(cell.queries, cell.queries + cell.context)] * cell.requests
        causal = cell.request.attn_type == "decoder" and "non_causal" not in cell.request.features
        self.trial = fill(self.layer, lengths, draw, storage=case.storage, causal=causal)
        if self.trial.cache is not None:
            self.layer.write_kv(self.trial.key, self.trial.value, self.trial.cache, self.trial.batch)
        spec = self.layer.spec
        self.output = torch.empty(
            self.trial.query.shape[0], spec.num_heads, spec.head_size_v, dtype=spec.output_dtype, device=device
        )
        self.device = device
        self._stopwatch = Stopwatch(device) if device.type == "cuda" else None

    def call(self) -> None:
        """One call like an engine's for one layer; the plan of the batch is shared."""
        trial = self.trial
        key, value = (trial.key, trial.value) if trial.cache is None else (None, None)
        self.layer.attend(
            trial.query, trial.cache, trial.batch, self.output, key=key, value=value, indices=trial.indices
        )

    @torch.inference_mode()
    def wrong(self) -> str:
        """The problem of the output in some rows; "" if rounding explains all errors."""
        trial = self.trial
        lse_asked = "lse" in self.layer.spec.features
        output, lse = attend(trial, trial.batch, trial.query)
        lse = lse if lse_asked else torch.full_like(lse, torch.nan)
        requests = len(trial.tokens)
        for request in sorted({0, requests // 2, requests - 1}):
            for part, rows in _parts(trial, request):
                outcome = compare(part, output[rows], lse[:, rows])
                if outcome.problem:
                    return outcome.problem
        return ""

    @torch.inference_mode()
    def turn(self, least: int = 6) -> list[float]:
        """The times of some calls in microseconds, each with a cold L2 cache on a GPU."""
        if self._stopwatch is None:
            times: list[float] = []
            begun = time.perf_counter()
            while len(times) < 3 or time.perf_counter() - begun < _TURN:
                start = time.perf_counter_ns()
                self.call()
                self._wait()
                times.append((time.perf_counter_ns() - start) / 1e3)
            return times
        return [self._stopwatch.us(self.call) for _ in range(least)]

    def _wait(self) -> None:
        if self.device.type == "xpu":
            torch.xpu.synchronize()


def _parts(trial: Trial, request: int) -> list[tuple[Trial, slice]]:
    """The last queries of a request, and the first ones if it is causal: each as a batch of its own, with its rows."""
    batch = trial.batch
    start, stop = (int(batch.query_start_loc_cpu[request + i]) for i in range(2))
    keys, queries = int(batch.seq_lens_cpu[request]), stop - start
    causal = batch.causal if isinstance(batch.causal, bool) else False
    count = min(queries, _ROWS)
    cuts = [(stop - count, stop, keys)]
    # the first queries see only the first keys
    cuts += [(start, start + count, keys - queries + count)] if causal and queries > count else []
    if trial.layer.spec.features & {"mm_prefix", "tree_mask", "chunk"}:
        cuts = cuts[:1]
    first_key = int(batch.seq_lens_cpu[:request].sum())
    out = []
    for begin, end, seen in cuts:
        table = None if batch.block_table is None else batch.block_table[request : request + 1]
        alone = BatchMetadata.build(
            [end - begin],
            [seen],
            device=trial.query.device,
            block_table=table,
            causal=batch.causal if isinstance(batch.causal, bool) else batch.causal[request : request + 1],
            mm_prefix=None if batch.mm_prefix is None else batch.mm_prefix[request : request + 1],
        )
        rows = slice(begin, end)
        key, value = trial.key, trial.value
        if batch.block_table is None:
            key, value = (x[first_key : first_key + seen] for x in (key, value))
        indices = None if trial.indices is None else trial.indices[rows]
        out.append((replace(trial, batch=alone, query=trial.query[rows], key=key, value=value, indices=indices), rows))
    return out
