"""A graph as an engine captures it: with a dummy batch, replayed with any lengths within its bounds."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from attnreg.conformance.trial import Trial
from attnreg.runtime.interface import BatchMetadata, KVCache
from attnreg.runtime.layer import Attention
from attnreg.runtime.lengths import prefix_sums

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# NaN in every floating format of so many bytes, but fnuz ones
POISON = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFFFFFF}


def bits(tensor: Tensor) -> Tensor:
    """A tensor's elements as integers."""
    return tensor.view(_WORDS[tensor.itemsize])


class Replayed:
    """A captured forward of a layer, and the tensors that it reads and writes."""

    def __init__(
        self, layer: Attention, random: Random, *, causal: bool, requests: int, rows: int, max_keys: int, blocks: int
    ) -> None:
        """requests, rows, max_keys, blocks: of the largest step."""
        spec, self.layer = layer.spec, layer
        assert spec.block_size is not None
        self.max_query_len = random.choice((1, 4, 16, 24, 64, rows // 4))
        dummy = random.choice(([1] * requests, [0] * requests, [min(self.max_query_len, rows // requests)] * requests))
        starts, columns = prefix_sums(dummy), -(-max_keys // spec.block_size) + 2

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device="cuda")

        self.query = zeros(rows, spec.num_heads, spec.head_size, dtype=spec.query_dtype)
        self.key = zeros(rows, spec.num_kv_heads, spec.head_size, dtype=spec.dtype)
        self.value = zeros(rows, spec.num_kv_heads, spec.head_size_v, dtype=spec.dtype)
        self.output = zeros(rows, spec.num_heads, spec.head_size_v, dtype=spec.output_dtype)
        self.lse = zeros(spec.num_heads, rows, dtype=torch.float32)
        self.cache = layer.new_kv_cache(blocks, "cuda")
        host = torch.tensor(starts, dtype=torch.int32), torch.tensor(dummy, dtype=torch.int32)
        self.batch = BatchMetadata(
            query_start_loc=host[0].cuda(),
            seq_lens=host[1].cuda(),
            max_query_len=self.max_query_len,
            max_seq_len=max_keys,
            query_start_loc_cpu=host[0],
            seq_lens_cpu=host[1],
            block_table=zeros(requests, columns, dtype=torch.int32),
            slot_mapping=zeros(rows, dtype=torch.int64).fill_(-1),
            causal=zeros(requests, dtype=torch.bool) if "causal_by_request" in spec.features else causal,
            mm_prefix=zeros(requests, 2, 2, dtype=torch.int32) if "mm_prefix" in spec.features else None,
            tree_mask=zeros(rows, self.max_query_len, dtype=torch.bool) if "tree_mask" in spec.features else None,
        )
        self.fresh = self.cache
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._forward()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward()

    def _forward(self) -> None:
        lse = self.lse if "lse" in self.layer.spec.features else None
        self.layer.forward(self.query, self.key, self.value, self.cache, self.batch, self.output, lse=lse)

    def plainly(self, batch: BatchMetadata, rows: int) -> Tensor:
        """The output of a plain call of a batch by what the last replay has read and written, of the same strides."""
        output, lse = torch.empty_like(self.output[:rows]), torch.empty_like(self.lse[:, :rows])
        known = {"lse": lse} if "lse" in self.layer.spec.features else {}
        self.layer.attend(self.query[:rows], self.cache, batch, output, **known)
        return output

    def before(self, trial: Trial) -> None:
        """Keeps the cache of a trial as it is before the trial's keys are written."""
        assert trial.cache is not None
        self.fresh = KVCache(*(x.clone() for x in trial.cache))

    def __call__(self, trial: Trial, batch: Any, query: Tensor) -> tuple[Tensor, Tensor]:
        """Output and LSE of a trial's batch by a replay, which writes the trial's keys too."""
        mine, requests, rows = self.batch, batch.num_reqs, len(query)
        assert trial.cache is not None
        mine.query_start_loc.fill_(int(batch.query_start_loc_cpu[-1]))
        mine.query_start_loc[: requests + 1] = batch.query_start_loc
        mine.seq_lens.zero_()
        mine.seq_lens[:requests] = batch.seq_lens
        mine.block_table.fill_(2**30)
        mine.block_table[:requests, : batch.block_table.shape[1]] = batch.block_table
        mine.slot_mapping.fill_(-1)
        mine.slot_mapping[: len(batch.slot_mapping)] = batch.slot_mapping
        if mine.mm_prefix is not None:
            mine.mm_prefix.zero_()
            mine.mm_prefix[:requests] = batch.mm_prefix
        if isinstance(mine.causal, torch.Tensor):
            mine.causal[:requests] = batch.causal
        if mine.tree_mask is not None:
            width = min(mine.tree_mask.shape[1], batch.tree_mask.shape[1])
            mine.tree_mask[: len(batch.tree_mask), :width] = batch.tree_mask[:, :width]
        for there, here in ((self.query, query), (self.key, trial.key), (self.value, trial.value)):
            bits(there).fill_(POISON[there.itemsize])
            bits(there)[: len(here)] = bits(here)
        for there, here in zip(self.cache, self.fresh, strict=True):
            bits(there)[: len(here)] = bits(here)
        bits(self.output).fill_(POISON[self.output.itemsize])
        self.lse.fill_(torch.nan)
        self.graph.replay()
        torch.cuda.synchronize()
        for there, here in zip(self.cache, trial.cache, strict=True):
            assert torch.equal(bits(there)[: len(here)], bits(here)), "a replay wrote other keys or values"
        assert bool((bits(self.output)[rows:] == POISON[self.output.itemsize]).all()), (
            "a replay wrote to rows that it has not"
        )
        return self.output[:rows], self.lse[:, :rows]
