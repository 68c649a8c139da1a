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
from torch import Tensor

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
    do_not_specialize=["num_reqs", "min_query_len", "max_query_len", "rows"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "ends_ptr", "starts_ptr", "wide_loc_ptr", "other_loc_ptr"
    ],
)  # fmt: skip
def _place_kernel(
    query_start_loc_ptr, seq_lens_ptr, ends_ptr, starts_ptr, wide_loc_ptr, other_loc_ptr, num_reqs, min_query_len,
    max_query_len, rows, LEFT: tl.constexpr, BLOCK_N: tl.constexpr, DIVIDES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Places the keys that requests of min_query_len to max_query_len queries see, one request after the other.

    Grid: one program. ends_ptr [num_reqs]: the row after the request's keys, a multiple of BLOCK_N. It is 0 if ``rows``
    rows are too few. starts_ptr [num_reqs]: the row of the request's key 0. This key itself may not be widened.

    wide_loc_ptr, other_loc_ptr [num_reqs + 1], if DIVIDES: the prefix sums of queries for the launches over widened
    keys, and for the other ones. The one has zeros, so no queries: the former if the rows are too few.
    """
    total = tl.full([], 0, tl.int64)
    for i in range(0, num_reqs, LANES):
        req = i + tl.arange(0, LANES)
        _, own = _keys_of(query_start_loc_ptr, seq_lens_ptr, req, num_reqs, min_query_len, max_query_len, LEFT, BLOCK_N)
        total += tl.sum(own, 0)
    fits = total <= rows
    before = tl.full([], 0, tl.int64)
    for i in range(0, num_reqs, LANES):
        req = i + tl.arange(0, LANES)
        first, own = _keys_of(
            query_start_loc_ptr, seq_lens_ptr, req, num_reqs, min_query_len, max_query_len, LEFT, BLOCK_N
        )
        end = before + tl.cumsum(own, 0)
        tl.store(ends_ptr + req, tl.where(fits, end, 0).to(tl.int32), mask=req < num_reqs)
        tl.store(starts_ptr + req, tl.where(fits, end - own - first, 0).to(tl.int32), mask=req < num_reqs)
        before += tl.sum(own, 0)
    if DIVIDES:
        for i in range(0, num_reqs + 1, LANES):
            place = i + tl.arange(0, LANES)
            loc = tl.load(query_start_loc_ptr + place, mask=place <= num_reqs, other=0)
            tl.store(wide_loc_ptr + place, tl.where(fits, loc, 0), mask=place <= num_reqs)
            tl.store(other_loc_ptr + place, tl.where(fits, 0, loc), mask=place <= num_reqs)


@triton.jit
def _keys_of(
    query_start_loc_ptr, seq_lens_ptr, req, num_reqs, min_query_len, max_query_len, LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns the first key that requests see, and the rows that their keys take: 0 for requests of other lengths."""
    exists = req < num_reqs
    queries = tl.load(query_start_loc_ptr + req + 1, mask=exists, other=0)
    queries -= tl.load(query_start_loc_ptr + req, mask=exists, other=0)
    kv_len = tl.load(seq_lens_ptr + req, mask=exists, other=0)
    first = tl.zeros_like(kv_len)
    if LEFT >= 0:
        first = tl.maximum(kv_len - queries - LEFT, 0)
    counts = exists & (queries >= min_query_len) & (queries <= max_query_len)
    own = tl.where(counts, tl.cdiv(kv_len - first, BLOCK_N) * BLOCK_N, 0)
    return first, own.to(tl.int64)


@triton.jit(
    do_not_specialize=["num_reqs", "stride_table", "rows"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "block_table_ptr", "ends_ptr", "starts_ptr"],
)
def _widen_kernel(
    key_ptr, value_ptr, wide_key_ptr, wide_value_ptr, seq_lens_ptr, block_table_ptr, ends_ptr, starts_ptr, num_reqs,
    stride_table, rows, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Widens keys and values to the places that `_place_kernel` has given them.

    Grid: (rows / BLOCK_N, num_kv_heads). wide_key_ptr [num_kv_heads, rows, size], values likewise. A program has
    BLOCK_N rows, which are of one request.
    """
    head = tl.program_id(1).to(tl.int64)
    offs_d, offs_n = tl.arange(0, BLOCK_D), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(0) * BLOCK_N
    if begin >= tl.load(ends_ptr + num_reqs - 1):
        return
    req = tl.full([], 0, tl.int32)
    for i in range(0, num_reqs, LANES):
        other = i + tl.arange(0, LANES)
        ends = tl.load(ends_ptr + other, mask=other < num_reqs, other=rows)
        req += tl.sum((ends <= begin).to(tl.int32), 0)
    key = offs_n - tl.load(starts_ptr + req)
    exists = key < tl.load(seq_lens_ptr + req)
    table_ptr = block_table_ptr + req.to(tl.int64) * stride_table
    block = tl.load(table_ptr + key // WIDE.block_size, mask=exists, other=0).to(tl.int64)
    token = key % WIDE.block_size
    row = (head * rows + offs_n)[:, None]
    k_offs = (block * WIDE.k_block + token * WIDE.k_token + head * WIDE.k_head)[:, None] + offs_d[None, :]
    v_offs = (block * WIDE.v_block + token * WIDE.v_token + head * WIDE.v_head)[:, None] + offs_d[None, :]
    of_key = exists[:, None] & (offs_d < WIDE.size)[None, :]
    of_value = exists[:, None] & (offs_d < WIDE.size_v)[None, :]
    keys = tl.load(key_ptr + k_offs, mask=of_key, other=0.0)
    values = tl.load(value_ptr + v_offs, mask=of_value, other=0.0)
    tl.store(wide_key_ptr + row * WIDE.size + offs_d[None, :], keys.to(wide_key_ptr.dtype.element_ty), mask=of_key)
    tl.store(wide_value_ptr + row * WIDE.size_v + offs_d[None, :], values.to(wide_key_ptr.dtype.element_ty),
             mask=of_value)  # fmt: skip


_PLACE, _WIDEN = Kernel(_place_kernel), Kernel(_widen_kernel)
# what a program reads at once of a batch's lengths
_LANES = 256


class Wide(NamedTuple):
    """The constants of the kernel: the sizes, and the strides of the cache in elements."""

    size: int
    size_v: int
    block_size: int
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


class PlaceCode(NamedTuple):
    """The facts that the code of `_place_kernel` depends on. left: how many keys a row sees before its own, -1: all."""

    left: int
    divides: bool

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4}

    def constants(self, key: Any) -> Mapping[str, Any]:
        return {"LEFT": self.left, "BLOCK_N": _KEYS, "DIVIDES": self.divides, "LANES": _LANES}


def rows_for(many: ManyQueries, launch: Launch, keys: Sequence[int]) -> int:
    """The rows of memory that widened keys need; keys: of each request of the batch."""
    left, _ = many.spec.sides(many.causal)
    rows = 0
    for query_len, kv_len in zip(many.queries, keys, strict=True):
        if launch.min_query_len <= query_len <= launch.max_query_len:
            rows += _rounded(kv_len if left < 0 else min(kv_len, query_len + left), _KEYS)
    return _rounded(max(rows, 1), _ROWS_ALIKE)


def _rounded(rows: int, whole: int) -> int:
    """The number of rows, rounded up to a multiple of ``whole``."""
    return -(-rows // whole) * whole


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
        any_rows = most * _rounded(longest, _KEYS)
        if left >= 0:
            any_rows = min(any_rows, query.shape[0] + most * (left + _KEYS))
        self.rows = rows if self.known else _rounded(any_rows, _ROWS_ALIKE)
        self.a_row = (spec.head_size + spec.head_size_v) * query.itemsize
        strides = (x.stride(dim) for x in (tensors.key, tensors.value) for dim in (0, token, self.head))
        wide = Wide(spec.head_size, spec.head_size_v, spec.block_size or 0, *strides)
        self.variant = _WIDEN.variant(query.device, WidenCode(query.dtype, wide))
        self.placing = [_PLACE.variant(query.device, PlaceCode(left, divides)) for divides in (False, True)]
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
            placed = self._placed(batch, self.rows)
            for first in range(0, heads, at_once):
                self._run(self._part(call, first, at_once), batch, placed, at_once, self.rows)

        return run

    def _divided(self, rows: int, portable: Run) -> Run:
        """Computes by widened keys if the rows suffice, and by ``portable`` if they do not."""

        def run(call: AttentionTensors, batch: AttentionBatch, varying: tuple[Any, ...] | None = None) -> None:
            wide, others = (torch.empty_like(batch.query_start_loc) for _ in range(2))
            placed = self._placed(batch, rows, wide, others)
            heads = self.spec.num_kv_heads
            self._run(call, batch._replace(query_start_loc=wide), placed, heads, rows)
            portable(call, batch._replace(query_start_loc=others), varying)

        return run

    def _placed(self, batch: AttentionBatch, rows: int, *locs: Tensor) -> tuple[Tensor, Tensor]:
        """The ends and the starts of requests among the rows; locs: to divide the queries into, if given."""
        starts, requests = batch.query_start_loc, self.many.numbers.num_reqs
        placed = torch.empty_like(starts), torch.empty_like(starts)
        wide, others = locs or placed
        self.placing[bool(locs)].launch(
            None,
            (1, 1, 1),
            query_start_loc_ptr=starts,
            seq_lens_ptr=batch.seq_lens,
            ends_ptr=placed[0],
            starts_ptr=placed[1],
            wide_loc_ptr=wide,
            other_loc_ptr=others,
            num_reqs=requests,
            min_query_len=self.launch.min_query_len,
            max_query_len=self.launch.max_query_len,
            rows=rows,
        )
        return placed

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

    def _run(
        self, call: AttentionTensors, batch: AttentionBatch, placed: tuple[Tensor, Tensor], heads: int, rows: int
    ) -> None:
        query, (ends, starts) = call.query, placed
        size, size_v = self.spec.head_size, self.spec.head_size_v
        memory = torch.empty(heads * rows * (size + size_v), dtype=query.dtype, device=query.device)
        wide_key, wide_value = memory[: heads * rows * size], memory[heads * rows * size :]
        self.variant.launch(
            None,
            (rows // _KEYS, heads, 1),
            key_ptr=call.key,
            value_ptr=call.value,
            wide_key_ptr=wide_key,
            wide_value_ptr=wide_value,
            seq_lens_ptr=batch.seq_lens,
            block_table_ptr=batch.block_table,
            ends_ptr=ends,
            starts_ptr=starts,
            num_reqs=self.many.numbers.num_reqs,
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
