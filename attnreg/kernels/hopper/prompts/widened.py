# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""Prompts over a cache of 8-bit floats: keys and values are widened to 16 bits once; the copy engine reads the result.

A key is multiplied with every tile of its request's queries. Writing it once in 16 bits, which is exact, takes less
time than converting it for each tile. Memory is bounded: if a batch's keys take more than MOST_MEMORY, the KV heads are
computed in groups. A graph has MOST_MEMORY for any lengths. At each replay the device decides whether they fit;
TRITON_ATTN's kernel computes those that do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from attnreg.kernels.hopper.prompts.choices import TILE, pack_of
from attnreg.kernels.hopper.prompts.plans import ManyQueries, PromptLaunch, prompts_of
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.planned.arguments import AttentionBatch, AttentionTensors
from attnreg.kernels.triton.planned.launches import Run
from attnreg.kernels.triton.schedule import KeyLengths, Launch, divisor
from attnreg.kernels.triton.tiles import power_of_2

# the formats of a cache that this module widens
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
# the most bytes of widened keys and values at once
MOST_MEMORY = 256 << 20
# with at least this many tiles for a request and KV head, widening is faster than TRITON_ATTN's conversions
FEWEST_TILES = 3
# how many keys a program widens
_KEYS = 64
# rows of memory are rounded up to a multiple of this, so that similar batches share their launches
_ROWS_ALIKE = 4096


@triton.jit(
    do_not_specialize=["min_query_len", "max_query_len", "stride_table", "rows"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "starts_ptr"],
)
def _widen_kernel(
    key_ptr, value_ptr, wide_key_ptr, wide_value_ptr, query_start_loc_ptr, seq_lens_ptr, block_table_ptr, starts_ptr,
    min_query_len, max_query_len, stride_table, rows, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Widens the keys that the requests of min_query_len to max_query_len queries see, one request after the other.

    Grid: (blocks of a request's keys, num_reqs, num_kv_heads). wide_key_ptr [num_kv_heads, rows, size], values
    likewise. starts_ptr [num_reqs]: the row of the request's key 0; this key itself may not be widened.
    """
    req, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    query_len = tl.load(query_start_loc_ptr + req + 1) - tl.load(query_start_loc_ptr + req)
    if (query_len < min_query_len) | (query_len > max_query_len):
        return
    # counts the rows of the requests before this one
    start = 0
    for i in range(0, req, LANES):
        other = i + tl.arange(0, LANES)
        before = other < req
        queries = tl.load(query_start_loc_ptr + other + 1, mask=before, other=0)
        queries -= tl.load(query_start_loc_ptr + other, mask=before, other=0)
        keys = tl.load(seq_lens_ptr + other, mask=before, other=0)
        if WIDE.left >= 0:
            keys = tl.minimum(keys, queries + WIDE.left)
        counts = before & (queries >= min_query_len) & (queries <= max_query_len)
        start += tl.sum(tl.where(counts, keys, 0), 0)
    kv_len = tl.load(seq_lens_ptr + req)
    first = 0
    if WIDE.left >= 0:
        first = tl.maximum(kv_len - query_len - WIDE.left, 0)
    if (tl.program_id(0) == 0) & (tl.program_id(2) == 0):
        tl.store(starts_ptr + req, start - first)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = first + offs_n
    # lengths above the host's bounds are the caller's fault, but must not make the kernel write outside its memory
    exists = (key < kv_len) & (start + offs_n < rows)
    table_ptr = block_table_ptr + req.to(tl.int64) * stride_table
    block = tl.load(table_ptr + key // WIDE.block_size, mask=exists, other=0).to(tl.int64)
    token = key % WIDE.block_size
    row = (head * rows + start + offs_n)[:, None]
    k_offs = (block * WIDE.k_block + token * WIDE.k_token + head * WIDE.k_head)[:, None] + offs_d[None, :]
    v_offs = (block * WIDE.v_block + token * WIDE.v_token + head * WIDE.v_head)[:, None] + offs_d[None, :]
    of_key = exists[:, None] & (offs_d < WIDE.size)[None, :]
    of_value = exists[:, None] & (offs_d < WIDE.size_v)[None, :]
    keys = tl.load(key_ptr + k_offs, mask=of_key, other=0.0)
    values = tl.load(value_ptr + v_offs, mask=of_value, other=0.0)
    tl.store(wide_key_ptr + row * WIDE.size + offs_d[None, :], keys.to(wide_key_ptr.dtype.element_ty), mask=of_key)
    tl.store(wide_value_ptr + row * WIDE.size_v + offs_d[None, :], values.to(wide_key_ptr.dtype.element_ty),
             mask=of_value)  # fmt: skip


@triton.jit(
    do_not_specialize=["num_reqs", "min_query_len", "max_query_len", "rows"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "wide_starts_ptr", "other_starts_ptr"],
)
def _divide_kernel(
    query_start_loc_ptr, seq_lens_ptr, wide_starts_ptr, other_starts_ptr, num_reqs, min_query_len, max_query_len, rows,
    LEFT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Gives the queries to the launches over widened keys if ``rows`` rows of memory suffice, else to the other ones.

    wide_starts_ptr, other_starts_ptr [num_reqs + 1]: the prefix sums of queries for the two; those of the one that
    computes nothing are zeros.
    """
    needed = tl.full([], 0, tl.int64)
    for i in range(0, num_reqs, LANES):
        req = i + tl.arange(0, LANES)
        exists = req < num_reqs
        queries = tl.load(query_start_loc_ptr + req + 1, mask=exists, other=0)
        queries -= tl.load(query_start_loc_ptr + req, mask=exists, other=0)
        keys = tl.load(seq_lens_ptr + req, mask=exists, other=0)
        if LEFT >= 0:
            keys = tl.minimum(keys, queries + LEFT)
        counts = exists & (queries >= min_query_len) & (queries <= max_query_len)
        needed += tl.sum(tl.where(counts, keys, 0).to(tl.int64), 0)
    fits = needed <= rows
    for i in range(0, num_reqs + 1, LANES):
        place = i + tl.arange(0, LANES)
        exists = place <= num_reqs
        start = tl.load(query_start_loc_ptr + place, mask=exists, other=0)
        tl.store(wide_starts_ptr + place, tl.where(fits, start, 0), mask=exists)
        tl.store(other_starts_ptr + place, tl.where(fits, 0, start), mask=exists)


_WIDEN = Kernel(_widen_kernel)
_DIVIDE = Kernel(_divide_kernel)
# what a program reads at once of a batch's lengths
_LANES = 256


class Wide(NamedTuple):
    """The constants of the kernel: the sizes, and the strides of the cache in elements.

    left: how many keys a row sees before its own, -1: all.
    """

    size: int
    size_v: int
    block_size: int
    left: int
    k_block: int
    k_token: int
    k_head: int
    v_block: int
    v_token: int
    v_head: int


class WidenCode(NamedTuple):
    """The facts that the kernel's code depends on."""

    dtype: torch.dtype
    wide: Wide

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4}

    def constants(self, key: Any) -> Mapping[str, Any]:
        block_d = power_of_2(max(self.wide.size, self.wide.size_v))
        return {"WIDE": self.wide, "BLOCK_N": _KEYS, "BLOCK_D": block_d, "LANES": _LANES}


class DivideCode(NamedTuple):
    """The facts that the code of `_divide_kernel` depends on."""

    left: int

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4}

    def constants(self, key: Any) -> Mapping[str, Any]:
        return {"LEFT": self.left, "LANES": _LANES}


def rows_for(many: ManyQueries, launch: Launch, keys: Sequence[int]) -> int:
    """The rows of memory that widened keys need; keys: of each request of the batch."""
    left, _ = many.spec.sides(many.causal)
    rows = 0
    for query_len, kv_len in zip(many.queries, keys, strict=True):
        if launch.min_query_len <= query_len <= launch.max_query_len:
            rows += kv_len if left < 0 else min(kv_len, query_len + left)
    return _rounded(rows)


def _rounded(rows: int) -> int:
    return -(-max(rows, 1) // _ROWS_ALIKE) * _ROWS_ALIKE


class Widened:
    """The launches for prompts over 8-bit floats, in place of one of TRITON_ATTN's, which runs if memory is too small.

    Launches for a graph serve any lengths within the bounds, so they have memory for the most keys. If that would take
    more than two groups of KV heads, a graph also captures TRITON_ATTN's launch, for lengths that need more memory.
    """

    def __init__(
        self, many: ManyQueries, launch: Launch, rows: int, keys: KeyLengths, tensors: AttentionTensors
    ) -> None:
        """rows: `rows_for`, for the lengths that are known. tensors: with the facts of the calls' tensors."""
        self.many, self.spec, self.launch, self.known = many, many.spec, launch, keys.known
        spec, query, longest = many.spec, tensors.query, keys.longest
        token, self.head = (1, 2) if spec.kv_layout == "NHD" else (2, 1)
        left, _ = spec.sides(many.causal)
        # the most rows for any lengths: for the most requests that fit, with the most keys that each can see
        most = min(many.numbers.num_reqs, query.shape[0] // launch.min_query_len)
        any_rows = _rounded(most * longest)
        if left >= 0:
            any_rows = min(any_rows, _rounded(query.shape[0] + most * left))
            longest = min(longest, launch.max_query_len + left)
        self.rows = rows if self.known else any_rows
        self.blocks, self.a_row = -(-longest // _KEYS), (spec.head_size + spec.head_size_v) * query.itemsize
        strides = (x.stride(dim) for x in (tensors.key, tensors.value) for dim in (0, token, self.head))
        wide = Wide(spec.head_size, spec.head_size_v, spec.block_size or 0, left, *strides)
        self.variant = _WIDEN.variant(query.device, WidenCode(query.dtype, wide))
        self.dividing = _DIVIDE.variant(query.device, DivideCode(left))
        # by KV heads and rows
        self._prompts: dict[tuple[int, int], PromptLaunch | None] = {}

    def run_or(self, portable: Run) -> Run:
        """The function that computes the requests of the launch; portable: TRITON_ATTN's, for too little memory."""
        heads = self.spec.num_kv_heads
        at_once = MOST_MEMORY // (self.rows * self.a_row)
        fitting = MOST_MEMORY // (heads * self.a_row) // _ROWS_ALIKE * _ROWS_ALIKE
        if not self.known and 2 * at_once < heads and fitting:
            return self._divided(fitting, portable)
        if not at_once:
            return portable
        at_once = divisor(heads, at_once)

        def run(call: AttentionTensors, batch: AttentionBatch, varying: tuple[Any, ...] | None = None) -> None:
            for first in range(0, heads, at_once):
                self._run(self._part(call, first, at_once), batch, at_once, self.rows)

        return run

    def _divided(self, rows: int, portable: Run) -> Run:
        """Computes by widened keys what needs up to so many rows, and by ``portable`` what needs more."""

        def run(call: AttentionTensors, batch: AttentionBatch, varying: tuple[Any, ...] | None = None) -> None:
            starts = batch.query_start_loc
            wide, others = torch.empty_like(starts), torch.empty_like(starts)
            self.dividing.launch(
                None,
                (1, 1, 1),
                query_start_loc_ptr=starts,
                seq_lens_ptr=batch.seq_lens,
                wide_starts_ptr=wide,
                other_starts_ptr=others,
                num_reqs=self.many.numbers.num_reqs,
                min_query_len=self.launch.min_query_len,
                max_query_len=self.launch.max_query_len,
                rows=rows,
            )
            self._run(call, batch._replace(query_start_loc=wide), self.spec.num_kv_heads, rows)
            portable(call, batch._replace(query_start_loc=others), varying)

        return run

    def prompts(self, heads: int, rows: int, tensors: AttentionTensors) -> PromptLaunch | None:
        """The kernel over widened keys and values of these heads and rows; None if it cannot run.

        tensors: with the facts of the calls' tensors.
        """
        if (heads, rows) not in self._prompts:
            group = self.spec.num_heads // self.spec.num_kv_heads
            spec = replace(self.spec, num_heads=heads * group, num_kv_heads=heads)
            key, value = (
                torch.empty(heads, rows, size, dtype=tensors.query.dtype, device="meta").transpose(0, 1)
                for size in (spec.head_size, spec.head_size_v)
            )
            launch = self.launch._replace(kv_heads_at_once=divisor(heads, self.launch.kv_heads_at_once))
            wide = tensors._replace(key=key, value=value)
            self._prompts[heads, rows] = prompts_of(self.many._replace(spec=spec), launch, wide)
        return self._prompts[heads, rows]

    def _part(self, call: AttentionTensors, first: int, heads: int) -> AttentionTensors:
        """A call for some of the KV heads."""
        if heads == self.spec.num_kv_heads:
            return call
        group = self.spec.num_heads // self.spec.num_kv_heads
        mine, queries = slice(first, first + heads), slice(first * group, (first + heads) * group)
        key, value = (x.narrow(self.head, first, heads) for x in (call.key, call.value))
        lse, sinks = (None if x is None else x[queries] for x in (call.lse, call.sinks))
        k_scale, v_scale = (None if x is None else x[mine] for x in (call.k_scale, call.v_scale))
        return call._replace(
            query=call.query[:, queries], key=key, value=value, output=call.output[:, queries], lse=lse, sinks=sinks,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    def _run(self, call: AttentionTensors, batch: AttentionBatch, heads: int, rows: int) -> None:
        query, requests = call.query, self.many.numbers.num_reqs
        size, size_v = self.spec.head_size, self.spec.head_size_v
        memory = torch.empty(heads * rows * (size + size_v), dtype=query.dtype, device=query.device)
        wide_key, wide_value = memory[: heads * rows * size], memory[heads * rows * size :]
        starts = torch.empty(requests, dtype=torch.int32, device=query.device)
        self.variant.launch(
            None,
            (self.blocks, requests, heads),
            key_ptr=call.key,
            value_ptr=call.value,
            wide_key_ptr=wide_key,
            wide_value_ptr=wide_value,
            query_start_loc_ptr=batch.query_start_loc,
            seq_lens_ptr=batch.seq_lens,
            block_table_ptr=batch.block_table,
            starts_ptr=starts,
            min_query_len=self.launch.min_query_len,
            max_query_len=self.launch.max_query_len,
            stride_table=self.many.numbers.stride_table,
            rows=rows,
        )
        prompts = self.prompts(heads, rows, call)
        assert prompts is not None
        wide = call._replace(key=wide_key, value=wide_value)
        prompts.run(wide, batch._replace(key_start_loc=starts, block_table=None))


def widened_of(
    many: ManyQueries, launch: Launch, rows: int, keys: KeyLengths, tensors: AttentionTensors
) -> Widened | None:
    """The launches for prompts over 8-bit floats; None if they cannot run or TRITON_ATTN's kernel is faster."""
    spec = many.spec
    if (
        spec.cache_dtype not in FORMATS or spec.kv_layout == "SPLIT" or "batch_invariant" in spec.features
        or tensors.key.stride(3) != 1 or tensors.value.stride(3) != 1
    ):  # fmt: skip
        # for a batch_invariant layer, the choice of a kernel must not depend on the batch
        return None
    group, pack = spec.num_heads // spec.num_kv_heads, pack_of(spec)
    members = [n for n in many.queries if launch.min_query_len <= n <= launch.max_query_len]
    tiles = sum(-(-n // (TILE // pack)) for n in members) * (group // pack)
    if tiles < FEWEST_TILES * len(members):
        return None
    widened = Widened(many, launch, rows, keys, tensors)
    return None if widened.prompts(spec.num_kv_heads, rows, tensors) is None else widened
