# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Attention over split keys: the kernel that merges the `parts`, and its launch after the attention kernel."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.fp8 import stored_as
from attnreg.kernels.triton.launch import UNFUSED, Bound, Kernel, Scratch, pointers_of
from attnreg.kernels.triton.layout import FP8, Strides
from attnreg.kernels.triton.rows import request_of_row
from attnreg.kernels.triton.schedule import Launch, Shares
from attnreg.kernels.triton.softmax import LN_2, LOG2_E, LOWEST, weight_of
from attnreg.kernels.triton.splits.shares import parts_of_requests
from attnreg.kernels.triton.tiles import power_of_2
from attnreg.runtime.interface import AttentionSpec


@triton.jit(
    do_not_specialize=["num_reqs", "min_query_len", "max_query_len", "slots", "num_splits", "stride_lse"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "partial_ptr",
        "partial_lse_ptr",
        "query_start_loc_ptr",
        "sinks_ptr",
        "out_scale_ptr",
    ],
)
def _merge_splits_kernel(
    output_ptr, lse_ptr, sinks_ptr, out_scale_ptr, query_start_loc_ptr, partial_ptr, partial_lse_ptr,
    num_reqs, min_query_len, max_query_len, slots, num_splits, stride_lse,
    OUT: tl.constexpr, SINK_STRIDE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Merges the parts that `_attention_kernel` made, in order; each request has num_splits parts.

    Grid: (num_reqs * slots, num_heads), or (rows, num_heads) if parts lie BY_ROW. OUT: the output's `Strides`.
    BLOCK_S: the parts that are read at once.
    """
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if BY_ROW:
        req = request_of_row(query_start_loc_ptr, num_reqs, slot)
        first_token = tl.load(query_start_loc_ptr + req).to(tl.int64)
        token = slot - first_token
    else:
        req, token = slot // slots, slot % slots
        first_token = tl.load(query_start_loc_ptr + req).to(tl.int64)
    query_len = tl.load(query_start_loc_ptr + req + 1) - first_token
    is_row = (token < query_len) & (query_len >= min_query_len) & (query_len <= max_query_len)
    if BY_ROW:  # noqa: SIM102 (the compiler decides the first, the device the second)
        # padding, and the rows of other launches
        if not is_row:
            # The next kernel waits for this one alone, so this one must not end before the kernel that makes the
            # parts. In a graph all rows may belong to other launches: then the program (0, 0) waits, which is enough
            if DEPENDENT_LAUNCH:  # noqa: SIM102 (as above)
                if (slot == 0) & (head == 0):
                    tl.extra.cuda.gdc_wait()
            return
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * SINK_STRIDE).to(tl.float32) * LOG2_E
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    _merge_row(
        output_ptr, lse_ptr, sink, out_scale_ptr, partial_ptr, partial_lse_ptr,
        (slot * tl.num_programs(1) + head) * num_splits, num_splits, first_token + token, head, is_row, stride_lse, OUT,
        HEAD_SIZE_V, BLOCK_S, BLOCK_DV,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_reqs", "min_query_len", "max_query_len", "num_splits", "stride_lse"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "partial_ptr",
        "partial_lse_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "sinks_ptr",
        "out_scale_ptr",
    ],
)
def _merge_shares_kernel(
    output_ptr, lse_ptr, sinks_ptr, out_scale_ptr, query_start_loc_ptr, seq_lens_ptr, partial_ptr, partial_lse_ptr,
    num_reqs, min_query_len, max_query_len, num_splits, stride_lse,
    OUT: tl.constexpr, SINK_STRIDE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr, NUM_HEADS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Merges the parts of the requests that programs cut as they shared keys out; all requests have num_splits parts.

    Grid: (programs,). The programs take turns at the rows of requests that are cut: other requests have no parts.
    """
    i = tl.arange(0, SHARES.lanes)
    parts, ends = parts_of_requests(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, i, SHARES
    )
    is_cut = parts > 1
    nth = tl.cumsum(is_cut.to(tl.int32), 0) - 1
    rows = tl.sum(is_cut.to(tl.int32)) * max_query_len * NUM_HEADS
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        head, token = tl.cast(row % NUM_HEADS, tl.int64), tl.cast(row // NUM_HEADS % max_query_len, tl.int64)
        mine = is_cut & (nth == row // NUM_HEADS // max_query_len)
        req = tl.sum(tl.where(mine, i, 0))
        first_token = tl.load(query_start_loc_ptr + req)
        is_row = token < tl.load(query_start_loc_ptr + req + 1) - first_token
        first_part = (token * NUM_HEADS + head) * num_splits + tl.sum(tl.where(mine, ends - parts, 0))
        count = tl.where(is_row, tl.sum(tl.where(mine, parts, 0)), 0)
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head * SINK_STRIDE).to(tl.float32) * LOG2_E
        # all but the parts is found while the kernel that makes them runs; later waits return at once
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
        _merge_row(
            output_ptr, lse_ptr, sink, out_scale_ptr, partial_ptr, partial_lse_ptr, first_part, count,
            first_token + token, head, is_row, stride_lse, OUT, HEAD_SIZE_V, BLOCK_S, BLOCK_DV,
        )  # fmt: skip
    # a program without rows waits too: the next kernel waits for this one alone
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _merge_row(
    output_ptr, lse_ptr, sink, out_scale_ptr, partial_ptr, partial_lse_ptr, first_part, count, token, head, is_row,
    stride_lse, OUT: tl.constexpr, HEAD_SIZE_V: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Merges ``count`` parts of a row, from ``first_part`` on, and stores the row's output and its lse."""
    offs_s = tl.arange(0, BLOCK_S)
    offs_dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    row_max = tl.full([], LOWEST, dtype=tl.float32)
    row_sum = tl.full([], 0.0, dtype=tl.float32)
    for s in range(0, count, BLOCK_S):
        parts = first_part + s + offs_s
        is_part = s + offs_s < count
        # Values are loaded without waiting for the sums, so unwritten parts are read too. Loads are of 4 bytes. If
        # Triton knew that parts are aligned, warps would share a row of 128 columns and wait for each other, and ptxas
        # would keep fewer loads under way: 8 requests of 2k over turboquant_4bit_nc took 25.3 us on an H200, here 20.4
        log_sums = tl.load(partial_lse_ptr + parts, mask=is_part, other=float("-inf"))  # [BLOCK_S]
        values = tl.load(partial_ptr + parts[:, None] * HEAD_SIZE_V + offs_dv[None, :],
                         mask=is_part[:, None] & (offs_dv < HEAD_SIZE_V)[None, :], other=0.0)  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(log_sums, 0))
        weights = tl.exp2(log_sums - new_max)
        alpha = tl.exp2(row_max - new_max)
        # where, not a product: an unwritten part may hold NaN
        acc = acc * alpha + tl.sum(tl.where((weights > 0)[:, None], values * weights[:, None], 0.0), 0)
        row_sum = row_sum * alpha + tl.sum(weights, 0)
        row_max = new_max
    if sink is not None:
        new_max = tl.maximum(row_max, sink)
        alpha = tl.exp2(row_max - new_max)
        acc *= alpha
        row_sum = row_sum * alpha + weight_of(sink, new_max)
        row_max = new_max
    has_keys = row_sum != 0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    FP8: tl.constexpr = OUT.fp8
    out_scale = 1.0 if out_scale_ptr is None else tl.load(out_scale_ptr)
    tl.store(output_ptr + token * OUT.token + head * OUT.head + offs_dv,
             stored_as(acc / row_sum, out_scale, output_ptr, FP8), mask=is_row & (offs_dv < HEAD_SIZE_V))  # fmt: skip
    if lse_ptr is not None:
        lse = tl.where(has_keys, (row_max + tl.log2(row_sum)) * LN_2, float("-inf"))
        tl.store(lse_ptr + head * stride_lse + token, lse, mask=is_row)


class MergedTensors(NamedTuple):
    """The tensors of a call that the merge of its parts needs; None for those that the call does not have."""

    output: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    out_scale: Tensor | None


class Parts(NamedTuple):
    """The parts of split keys: their outputs, and the logarithms of the sums of their weights."""

    partial: Tensor | None
    partial_lse: Tensor | None


# the pointers before those of the parts; `_merge_shares_kernel` takes seq_lens between them
_OF_CALL = (*pointers_of(MergedTensors), "query_start_loc_ptr")
_MERGE = Kernel(_merge_splits_kernel, (*_OF_CALL, *pointers_of(Parts)))
_MERGE_SHARES = Kernel(_merge_shares_kernel, (*_OF_CALL, "seq_lens_ptr", *pointers_of(Parts)))
# the programs that take turns at rows to merge. With twice as many, 64 uncut requests of 1k keys take 0.7 us more on an
# H200. With half as many, 16 requests of 16 queries and 500 to 16k keys took 194 us and not 185
_PROGRAMS = 1024


class OfHeads(NamedTuple):
    """The facts about a tensor of one number a head."""

    stride: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor | None) -> Self | None:
        """The facts about a tensor; None for None."""
        return None if tensor is None else cls(tensor.stride(0), tensor.dtype)


class MergeKey(NamedTuple):
    """The facts about a call's tensors that the merge kernel's code depends on.

    output: its strides. lse, out_scale: whether the call has them.
    """

    output: tuple[int, ...]
    sinks: OfHeads | None
    lse: bool
    out_scale: bool


class _MergeCode(NamedTuple):
    """The facts that the merge kernel's code depends on, apart from strides and optional tensors.

    by_row: the kernel's BY_ROW. num_heads, shares: constants of the kernel for shared keys; 0 and None for the other.
    """

    dtype: torch.dtype
    head_size_v: int
    dependent_launch: bool
    by_row: bool
    num_heads: int
    shares: Shares | None
    block_s: int
    block_dv: int

    @property
    def options(self) -> Mapping[str, int]:
        # for programs that take turns and read little at once: with two warps, more programs run at once. 16 requests
        # over latents of 128 heads took 37.7 us on an H200, and 39.6 with four
        few = self.shares is not None and self.block_s * self.block_dv <= 4096
        options = {"num_warps": 2 if few else 4, **UNFUSED}
        return {**options, "launch_pdl": True} if self.dependent_launch else options

    def constants(self, key: MergeKey) -> Mapping[str, Any]:
        apart: Mapping[str, Any] = {"BY_ROW": self.by_row}
        if self.shares is not None:
            apart = {"NUM_HEADS": self.num_heads, "SHARES": self.shares}
        token, head, _ = key.output
        return {
            "OUT": Strides(token, head, FP8.get(self.dtype, "")),
            "SINK_STRIDE": key.sinks.stride if key.sinks else 1,
            "HEAD_SIZE_V": self.head_size_v,
            "DEPENDENT_LAUNCH": self.dependent_launch,
            "BLOCK_S": self.block_s,
            "BLOCK_DV": self.block_dv,
            **apart,
        }


class BoundMerge(NamedTuple):
    """The merge of the parts of calls with equal facts.

    slots: the rows for a request's parts, 0 if parts lie by row. elements: how many numbers the parts' outputs have.
    sums: how many sums of weights there are.
    """

    bound: Bound
    slots: int
    elements: int
    sums: int


class PlannedMerge:
    """The launch that merges the parts of split keys.

    Parts lie by request, with ``slots`` rows for each; or by row, if that takes fewer rows.
    """

    def __init__(
        self, spec: AttentionSpec, chosen: Launch, block_dv: int, requests: int, device: torch.device, dependent: bool,
        shares: Shares | None = None,
    ) -> None:  # fmt: skip
        """shares: given if the launch's programs share keys out."""
        self.num_heads, self.splits, self.head_size_v = spec.num_heads, chosen.splits, spec.head_size_v
        self.shares, self.sharing = shares, chosen.sharing(requests)
        self.slots = chosen.max_query_len
        self.by_request = requests * self.slots
        # block_s sets the order in which parts are summed. For a batch_invariant layer it must not depend on the batch.
        # Programs that read fewer parts at once are faster where they take turns at requests of few parts: more of them
        # run at once
        many = shares is None or chosen.shared >= 16 * requests
        block_s = min(32, (8192 if many else 4096) // block_dv)
        if "batch_invariant" not in spec.features:
            # at most the parts that a request has; for shared keys, about twice the mean of a request. On an H200, 32
            # queries of 8 requests in two parts took 93.5 us with 8 read at once, and 89.6 in an earlier run
            parts = 1 + 2 * chosen.shared // max(requests, 1) if chosen.shared else chosen.splits
            block_s = min(block_s, power_of_2(parts))
        self.programs = min(self.by_request * self.num_heads, _PROGRAMS)
        kernel = _MERGE if shares is None else _MERGE_SHARES
        self.variants = [
            kernel.variant(
                device,
                _MergeCode(
                    spec.output_dtype, spec.head_size_v, dependent, by_row, 0 if shares is None else spec.num_heads,
                    shares, block_s, block_dv,
                ),
            )
            for by_row in ((False, True) if shares is None else (False,))
        ]  # fmt: skip

    def bind(self, key: MergeKey, rows: int, numbers: Mapping[str, Any]) -> BoundMerge:
        """The merge for calls with ``rows`` rows of queries. numbers: of the attention kernel's launch."""
        if self.shares is not None:
            sums = self.slots * self.num_heads * self.sharing
            (variant,) = self.variants
            bound = variant.bind(key, (self.programs, 1, 1), {**numbers, "num_splits": self.sharing})
            return BoundMerge(bound, 0, sums * self.head_size_v, sums)
        by_row = rows < self.by_request
        slots = 0 if by_row else self.slots
        grid = (min(rows, self.by_request), self.num_heads, 1)
        bound = self.variants[by_row].bind(key, grid, {**numbers, "slots": slots, "num_splits": self.splits})
        sums = (rows if by_row else self.by_request) * self.num_heads * self.splits
        return BoundMerge(bound, slots, sums * self.head_size_v, sums)

    @staticmethod
    def parts(query: Tensor, elements: int, sums: int) -> Scratch:
        """Memory on the query's device for the outputs of parts and the sums of their weights."""
        # one allocation takes half the time of two
        return Scratch(torch.empty(elements + sums, dtype=torch.float32, device=query.device), elements)
