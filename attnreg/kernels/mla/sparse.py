# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""The cache places of the tokens that queries chose, computed by one Triton kernel."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.mla.chosen import Chosen, dense_call, indices_of, tokens_of
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.rows import request_of_row
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call

# how many indices of a query the kernel looks at in one step
_BLOCK = 1024


@triton.jit(
    do_not_specialize=["num_reqs", "topk", "blocks_apart", "stride_indices", "stride_table"],
    do_not_specialize_on_alignment=[
        "indices_ptr", "query_start_loc_ptr", "seq_lens_ptr", "causal_ptr", "block_table_ptr", "starts_ptr",
        "counts_ptr", "places_ptr",
    ],
)  # fmt: skip
def _places_kernel(
    indices_ptr, query_start_loc_ptr, seq_lens_ptr, causal_ptr, block_table_ptr, starts_ptr, counts_ptr, places_ptr,
    num_reqs, topk, blocks_apart, stride_indices, stride_table,
    CAUSAL: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores where each row begins, how many keys it has, and their places, in their order and without gaps.

    Grid: (rows + 1,), a row each. A row of padding gets no keys. blocks_apart: how many tokens apart blocks begin in
    memory. CAUSAL: all requests are causal. causal_ptr: whether each request is, or None.
    """
    row = tl.program_id(0)
    tokens = tl.load(query_start_loc_ptr + num_reqs)
    tl.store(starts_ptr + row, tl.minimum(row, tokens))
    if row >= tokens:
        # kernels read the number of keys of padding too
        tl.store(counts_ptr + row, 0, mask=row < tl.num_programs(0) - 1)
        return
    req = request_of_row(query_start_loc_ptr, num_reqs, row)
    length = tl.load(seq_lens_ptr + req)
    end = length - tl.load(query_start_loc_ptr + req + 1) + row + 1
    if causal_ptr is not None:
        end = tl.where(tl.load(causal_ptr + req) != 0, end, length)
    elif not CAUSAL:
        end = length
    block_table_ptr += req.to(tl.int64) * stride_table
    indices_ptr += row.to(tl.int64) * stride_indices
    places_ptr += row.to(tl.int64) * topk
    count = 0
    for start in range(0, topk, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        position = tl.load(indices_ptr + offs, mask=offs < topk, other=-1)
        seen = (position >= 0) & (position < end)
        block = tl.load(block_table_ptr + position // BLOCK_SIZE, mask=seen, other=0)
        kept = seen.to(tl.int32)
        before = tl.cumsum(kept, 0) - kept
        tl.store(places_ptr + count + before, block * blocks_apart + position % BLOCK_SIZE, mask=seen)
        count += tl.sum(kept)
    tl.store(counts_ptr + row, count)


_PLACES = Kernel(_places_kernel)


class PlacesCode(NamedTuple):
    """The facts that the kernel's code depends on."""

    causal: bool
    block_size: int

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        return {"CAUSAL": self.causal, "BLOCK_SIZE": self.block_size, "BLOCK": _BLOCK}


class DenseLatentPlan(Protocol):
    """A plan of dense MLA, made of a spec and a batch; alike: as in `PlanOverLatents`."""

    def __init__(self, spec: AttentionSpec, batch: BatchMetadata, *, alike: bool) -> None: ...

    def run(self, call: Call) -> None: ...


class SparsePlan:
    """A batch's tensors, and the slots of its new keys; not the batch itself, because that holds its plans."""

    def __init__(self, batch: BatchMetadata) -> None:
        """Raises `BatchError` for a batch without a cache."""
        if batch.block_table is None:
            raise BatchError(["the batch has no block_table: MLA in its latent form reads the cache"])
        self.slot_mapping = batch.slot_mapping
        self.batch = BatchMetadata(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens_cpu=batch.seq_lens_cpu,
            block_table=batch.block_table,
            causal=batch.causal,
        )


def attend(spec: AttentionSpec, plan: SparsePlan, call: Call, dense_plan: type[DenseLatentPlan]) -> None:
    """Writes the attention of each query to the latents that it chose, by a plan of dense MLA over single tokens."""
    if call.query.shape[0]:
        dense, batch, call = by_token(spec, plan.batch, call)
        dense_plan(dense, batch, alike=True).run(call)


def by_token(spec: AttentionSpec, batch: BatchMetadata, call: Call) -> tuple[AttentionSpec, BatchMetadata, Call]:
    """A call over chosen tokens as a call of dense MLA, on a GPU or in Triton's interpreter; padding stays padding."""
    cache, apart = tokens_of(spec, call)
    rows, indices = call.query.shape[0], indices_of(call)
    # uninitialised, because no program reads places of padding
    topk = indices.shape[1]
    memory = indices.new_empty(2 * rows + 1 + rows * topk)
    starts, counts, places = memory.split_with_sizes((rows + 1, rows, rows * topk))
    table = batch.block_table
    assert table is not None
    assert spec.block_size is not None
    causal = batch.causal.view(torch.uint8) if isinstance(batch.causal, Tensor) else None
    variant = _PLACES.variant(indices.device, PlacesCode(batch.causal is True, spec.block_size))
    variant.launch(
        (causal is None,),
        (rows + 1, 1, 1),
        indices_ptr=indices,
        query_start_loc_ptr=batch.query_start_loc,
        seq_lens_ptr=batch.seq_lens,
        causal_ptr=causal,
        block_table_ptr=table,
        starts_ptr=starts,
        counts_ptr=counts,
        places_ptr=places,
        num_reqs=batch.num_reqs,
        topk=topk,
        blocks_apart=apart,
        stride_indices=indices.stride(0) if rows > 1 else 0,
        stride_table=table.stride(0) if table.shape[0] > 1 else 0,
    )
    return dense_call(spec, call, cache, Chosen(starts, counts, places.view(rows, topk)))
