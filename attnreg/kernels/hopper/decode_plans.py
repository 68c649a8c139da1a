# mypy: disable-error-code="import-untyped"
"""The launch of the kernel in `decode`, in place of one of TRITON_ATTN's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from attnreg.kernels.hopper.decode import Decode, decode_kernel
from attnreg.kernels.hopper.programs import PAGE, WARPS
from attnreg.kernels.triton.launch import Kernel, KernelCode
from attnreg.kernels.triton.planned.arguments import (
    MERGED,
    POINTERS,
    AttentionBatch,
    AttentionKey,
    AttentionTensors,
    HeadStrides,
)
from attnreg.kernels.triton.planned.launches import Merging, PlannedLaunch, Run
from attnreg.kernels.triton.schedule import (
    ALIKE,
    ALONE,
    SHORT_QUERIES,
    SMALLEST_SPLIT,
    Costs,
    KeyLengths,
    Launch,
    Shares,
    choose_splits,
    costs_of,
    groups_in_window,
    shares_of,
    sharing_of,
)
from attnreg.kernels.triton.target import target_of
from attnreg.kernels.triton.tiles import power_of_2
from attnreg.runtime.interface import AttentionSpec

# the formats of a cache that the kernel reads
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# by head size and rows: the pages that a warp loads at once, and the programs of a multiprocessor that keys are split
# for. Measured on an H200, but for (64, 16). (64, 8) has registers for five programs, but more splits are slower
SHAPES = {(64, 8): (1, 4), (64, 16): (1, 3), (128, 8): (2, 2), (128, 16): (1, 2)}
# the keys that a multiprocessor computes while a program begins and ends, and while a part is merged; on an H200, by
# benchmarks/splits.py
_BEGINS, _MERGED = 960, 24
# the bytes of a load
_LOADED = 16

_DECODE = Kernel(decode_kernel, POINTERS, HeadStrides._fields)


class Split(NamedTuple):
    """The programs that keys are split for: each walks ``step`` keys at a time; a multiprocessor runs ``per_sm``."""

    step: int
    num_sms: int
    per_sm: int


class DecodeCode(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides and optional tensors."""

    spec: AttentionSpec
    rows: int
    pages: int
    sides: tuple[int, int]
    split: bool
    shares: Shares | None

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": WARPS.value}

    def constants(self, key: AttentionKey) -> Mapping[str, Any]:
        spec = self.spec
        q_token, q_head, _ = key.query
        out_token, out_head, _ = key.output
        k_block, k_token, k_head = _by_token(spec, key.keys)
        v_block, v_token, v_head = _by_token(spec, key.values)
        left, right = self.sides
        return {
            "C": Decode(
                kv_heads=spec.num_kv_heads,
                group=spec.num_heads // spec.num_kv_heads,
                rows=self.rows,
                size=spec.head_size,
                block_size=spec.block_size or 0,
                pages=self.pages,
                code=FORMATS[spec.cache_dtype],
                left=left,
                right=right,
                softcap=bool(spec.softcap),
                split=self.split,
                q_token=q_token,
                q_head=q_head,
                out_token=out_token,
                out_head=out_head,
                k_block=k_block,
                k_token=k_token,
                k_head=k_head,
                v_block=v_block,
                v_token=v_token,
                v_head=v_head,
                k_scale=key.k_scale or 0,
                v_scale=key.v_scale or 0,
                sink=key.sinks.stride if key.sinks else 1,
            ),
            "SHARES": self.shares,
        }


def _by_token(spec: AttentionSpec, strides: Sequence[int]) -> tuple[int, int, int]:
    """The strides of a cache's blocks, tokens and heads."""
    block, token, head, _ = strides
    return (block, token, head) if spec.kv_layout == "NHD" else (block, head, token)


class FewQueries(NamedTuple):
    """A batch whose launches of few queries may go to a kernel for SM 9.0.

    causal: whether all requests are, else none is. queries: of each request. splits: overrides the chosen ones, for
    measurements.
    """

    spec: AttentionSpec
    causal: bool
    queries: Sequence[int]
    keys: KeyLengths
    device: torch.device
    splits: int | None = None

    def cut(self, chosen: Launch, tile: Split, costs: Costs) -> Launch:
        """The launch with its keys split for programs of one tile, or shared out."""
        spec, queries, splits = self.spec, self.queries, self.splits
        chosen = chosen._replace(heads=spec.num_heads // spec.num_kv_heads, one_tile=True, shared=0)
        if "batch_invariant" not in spec.features:
            if not self.keys.known and splits is None and spec.sides(self.causal)[0] < 0:
                rows = chosen.max_query_len * spec.num_heads
                shared = sharing_of(tile.num_sms, tile.per_sm, spec.num_kv_heads, len(queries), rows)
                if shared:
                    return chosen._replace(splits=1, shared=shared)
            members = [n for n in queries if chosen.min_query_len <= n <= chosen.max_query_len] or [1]
            sides, longest = spec.sides(self.causal), chosen.max_query_len
            groups = groups_in_window(self.keys.few, sum(sides) + 1 + longest if min(sides) >= 0 else 0)
            # parts of rows without a program have memory too
            parts = min(sum(queries), longest * len(queries)) * spec.num_heads
            best, min_split = choose_splits(
                len(members) * spec.num_kv_heads, groups, parts, *tile, costs,
                smallest=SMALLEST_SPLIT if min(sides) < 0 else ALIKE,
            )  # fmt: skip
            chosen = chosen._replace(splits=best, min_split=min_split)
        if splits is not None:
            chosen = chosen._replace(splits=splits, min_split=PAGE.value)
        return chosen

    def shares(self, chosen: Launch, tile: Split, costs: Costs) -> Shares | None:
        """The constants of a launch whose programs share keys out; None for other launches."""
        return shares_of(chosen, len(self.queries), tile.step, costs.begin)

    def launch(self, chosen: Launch, kernel: Kernel, code: KernelCode, shares: Shares | None) -> PlannedLaunch:
        """The launch of a kernel whose programs have one tile each, with the merge of split or shared keys."""
        merging = Merging(MERGED, power_of_2(self.spec.head_size_v), True, shares)
        return PlannedLaunch(self.spec, chosen, len(self.queries), self.device, kernel, code, merging)


def planned(few: FewQueries, chosen: Launch, tensors: AttentionTensors) -> PlannedLaunch | None:
    """The launch in place of ``chosen``, a launch of few queries; None if the kernel cannot compute it."""
    spec, rows = few.spec, rows_of(few.spec, chosen)
    if (
        (spec.head_size, rows) not in SHAPES or spec.head_size_v != spec.head_size
        or spec.cache_dtype not in FORMATS or spec.kv_layout == "SPLIT"
        or not spec.block_size or spec.block_size % PAGE.value
        or not all(walked(x.shape, x.stride()) for x in (tensors.key, tensors.value))
        or not same_kernel_alone(spec, tensors)
    ):  # fmt: skip
        return None
    pages, per_sm = SHAPES[spec.head_size, rows]
    tile = Split(WARPS.value * PAGE.value * pages, target_of(few.device).num_sms, per_sm)
    costs = costs_of_split(spec, per_sm)
    chosen = few.cut(chosen, tile, costs)
    shares = few.shares(chosen, tile, costs)
    code = DecodeCode(spec, rows, pages, spec.sides(few.causal), chosen.splits > 1, shares)
    return few.launch(chosen, _DECODE, code, shares)


def costs_of_split(spec: AttentionSpec, per_sm: int) -> Costs:
    """The costs of a split for this kernel."""
    known = costs_of(spec.head_size + spec.head_size_v, spec.head_size_v, per_sm)
    return known._replace(begin=_BEGINS / per_sm, merge=_MERGED / per_sm, alone=ALONE)


def rows_of(spec: AttentionSpec, chosen: Launch) -> int:
    """The rows of a tile that holds all rows of any request of a launch."""
    # batch_invariant: for the most queries of the class, so that the tile does not depend on the batch
    several = "batch_invariant" in spec.features and chosen.max_query_len > 1
    longest = SHORT_QUERIES if several else chosen.max_query_len
    return max(8, power_of_2(longest * (spec.num_heads // spec.num_kv_heads)))


def walked(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the rows of a cache can be loaded by 16 bytes, wherever the cache begins."""
    apart = (stride for size, stride in zip(shape[:-1], strides, strict=False) if size > 1)
    return strides[-1] == 1 and all(stride % _LOADED == 0 for stride in apart)


def same_kernel_alone(spec: AttentionSpec, tensors: AttentionTensors) -> bool:
    """Whether `either` runs the same kernel for a request alone as in its batch, where the layer is batch_invariant.

    It does if each row of queries and outputs begins as many bytes after a multiple of 16 as the first row.
    """
    rows = tensors.query, tensors.output
    return "batch_invariant" not in spec.features or all(x.stride(0) * x.itemsize % _LOADED == 0 for x in rows)


def either(own: Run, portable: Run) -> Run:
    """Runs ``own``, a kernel for SM 9.0, if the call's tensors begin at multiples of 16 bytes; else ``portable``."""

    def run(call: AttentionTensors, batch: AttentionBatch, varying: tuple[Any, ...] | None = None) -> None:
        address = call.query.data_ptr() | call.key.data_ptr() | call.value.data_ptr() | call.output.data_ptr()
        (portable if address % _LOADED else own)(call, batch, varying)

    return run
