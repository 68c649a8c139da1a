# mypy: disable-error-code="import-untyped"
"""Attention plans: the launches for a batch, made once for all layers of a spec and run once per layer.

A plan has no memory of its own. The parts of split keys are allocated by each run, on the stream of the call: so two
streams, layers or graphs never share them, and those of a captured graph are in the graph's own pool.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.attention import _attention_kernel
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.layout import FP8, Cache, PerHead, Strides, packed_strides
from attnreg.kernels.triton.rows import Mask, Tile
from attnreg.kernels.triton.schedule import SMALLEST_SPLIT, Launch, schedule
from attnreg.kernels.triton.splits import _merge_splits_kernel
from attnreg.kernels.triton.target import Target, target_of
from attnreg.kernels.triton.tiles import Config, Shape, columns_of, power_of_2, value_columns
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call
from attnreg.runtime.lengths import LONGEST, content, queries_of

# the values of a launch, in the order in which they are put together: those of the batch and of the call, then those
# of the launch, then those of its parts
_BATCH = (
    "query_start_loc_ptr", "num_reqs", "key_start_loc_ptr", "seq_lens_ptr", "causal_ptr", "block_table_ptr",
    "ranges_ptr", "tree_ptr", "num_ranges", "stride_table", "stride_ranges", "stride_range", "stride_tree",
)  # fmt: skip
_CALL = (
    "query_ptr", "key_ptr", "value_ptr", "output_ptr", "lse_ptr", "sinks_ptr", "slopes_ptr", "q_scale_ptr",
    "k_scale_ptr", "v_scale_ptr", "out_scale_ptr", "stride_lse", "stride_key_head", "stride_value_head",
)  # fmt: skip
_LAUNCH = (
    "min_query_len", "max_query_len", "min_split", "programs_at_once", "head_size", "softmax_scale", "softcap",
)  # fmt: skip
_PARTS = ("partial_ptr", "partial_lse_ptr", "slots")
_NO_PARTS = (None, None, 0)
_ATTENTION = Kernel(_attention_kernel, (*_BATCH, *_CALL, *_LAUNCH, *_PARTS))
_MERGE = Kernel(
    _merge_splits_kernel,
    ("query_start_loc_ptr", "num_reqs", "output_ptr", "lse_ptr", "sinks_ptr", "out_scale_ptr", "stride_lse",
     "min_query_len", "max_query_len", "num_splits", *_PARTS),
)  # fmt: skip
_TL_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


# no split has fewer keys: lengths up to the same multiple are split alike, but for what a share more or less makes up
_ALIKE = SMALLEST_SPLIT


def compute_dtype(dtype: torch.dtype, cache_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the dots: float16 holds every 8-bit float exactly, bfloat16 would cost another conversion."""
    if cache_dtype in FP8:
        return dtype if dtype == torch.float32 else torch.float16
    return dtype if cache_dtype == dtype else torch.float32


class AttentionPlan:
    """The launches that compute attention for a batch, for all layers of one spec.

    A plan holds the batch's tensors and not the batch, which holds its plans.
    """

    def __init__(
        self, spec: AttentionSpec, batch: BatchMetadata, *, config: Config | None = None, splits: int | None = None
    ) -> None:
        """config, splits: override the chosen ones, for measurements."""
        starts, table = batch.query_start_loc, batch.block_table
        ranges = batch.mm_prefix if "mm_prefix" in spec.features else None
        causal, by_request = (batch.causal, None) if isinstance(batch.causal, bool) else (None, _bytes(batch.causal))
        tree = _bytes(batch.tree_mask) if "tree_mask" in spec.features else None
        self.launches = _launches(
            spec, target_of(starts.device), starts.device, table is not None, batch.key_start_loc is not None,
            ranges is not None, tree is not None, causal, content(batch.query_start_loc_cpu), batch.max_query_len,
            -(-batch.max_seq_len // _ALIKE) * _ALIKE, config, splits,
        )  # fmt: skip
        self._values = (
            starts, batch.num_reqs, batch.key_start_loc, batch.seq_lens, by_request, table,
            ranges, tree, 0 if ranges is None else ranges.shape[1], _stride(table, 0), _stride(ranges, 0),
            _stride(ranges, 1), _stride(tree, 0),
        )  # fmt: skip

    def run(self, call: Call) -> None:
        """Writes the output, and the lse, of every query of the batch. The output may be of any type, float32 too."""
        query, kv_cache, output, key, value, lse, params = call
        if kv_cache is not None:
            key, value = kv_cache
        # the layer has validated that a call has a cache, or keys and values
        assert key is not None
        assert value is not None
        if key.dtype in FP8 and not target_of(key.device).converts(key.dtype):
            key, value = key.view(torch.uint8), value.view(torch.uint8)
        if query.dtype in FP8 or output.dtype in FP8:
            query, output = _convertible(query), _convertible(output)
        sinks, slopes, k_scale, v_scale = params.sinks, params.alibi_slopes, params.k_scale, params.v_scale
        q_scale, out_scale = params.q_scale, params.out_scale
        key_strides, value_strides = key.stride(), value.stride()
        key_head = value_head = 0
        if kv_cache is None:
            key_strides, key_head = packed_strides(key_strides)
            value_strides, value_head = packed_strides(value_strides)
        # all that the code depends on beyond the plan; `_Code.constants` reads the strides
        variant_key = (
            query.stride(), output.stride(), key_strides, value_strides,
            None if k_scale is None else k_scale.stride(0), None if v_scale is None else v_scale.stride(0),
            None if sinks is None else (sinks.stride(0), sinks.dtype),
            None if slopes is None else (slopes.stride(0), slopes.dtype),
            None if q_scale is None else q_scale.stride(0), out_scale is None, lse is None, output.dtype,
        )  # fmt: skip
        # contiguous; a tensor of one head may have any stride
        stride_lse = 0 if lse is None else lse.shape[1]
        values = (
            query, key, value, output, lse, sinks, slopes, q_scale, k_scale, v_scale, out_scale, stride_lse,
            key_head, value_head,
        )  # fmt: skip
        for planned in self.launches:
            planned.run(variant_key, query.shape[0], self._values, values)


class _Code(NamedTuple):
    """The facts that the attention kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    query_dtype: torch.dtype
    output_dtype: torch.dtype
    cache: Cache
    own_key_starts: bool
    ranges: bool
    tree: bool
    num_kv_heads: int
    group: int
    heads: int
    block_d: int
    block_dv: int
    config: Config
    mask: Mask
    by_request: bool
    softcap: bool
    one_tile: bool
    split: bool
    dependent_launch: bool

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        query, output, keys, values, k_scale, v_scale, sinks, slopes, q_scale, *_ = key
        first = power_of_2(self.block_d + 1) // 2
        tile = Tile(
            heads=self.heads,
            block_m=self.config.block_m,
            block_n=self.config.block_n,
            block_k=min(self.config.block_k or self.block_d, self.block_d),
            block_d=first,
            block_rest=self.block_d - first,
            block_dv=self.block_dv,
        )
        return {
            "Q": Strides(query[0], query[1], FP8.get(self.query_dtype, ""), q_scale or 0),
            "OUT": Strides(output[0], output[1], FP8.get(self.output_dtype, "")),
            "K": self.cache.keys(keys, k_scale),
            "V": self.cache.values(values, v_scale),
            "HEADS": PerHead(sink=sinks[0] if sinks else 1, slope=slopes[0] if slopes else 1),
            "TILE": tile,
            "COMPUTE_DTYPE": _TL_DTYPES[compute_dtype(self.dtype, self.cache.dtype)],
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "MASK": self.mask,
            "SOFTCAP": self.softcap,
            "ONE_TILE": self.one_tile,
            "SPLIT": self.split,
            "DEPENDENT_LAUNCH": self.dependent_launch,
            "PEEL": self.config.peel,
        }


class _PlannedLaunch:
    """One launch of the attention kernel, without the tensors of a batch, and the merge if its keys are split."""

    def __init__(
        self, spec: AttentionSpec, chosen: Launch, shape: Shape, requests: int, device: torch.device, code: _Code
    ) -> None:
        self.chosen, self.requests = chosen, requests
        self.merge = _PlannedMerge(spec, chosen, shape.block_dv, requests, device, code) if code.split else None
        self.programs = spec.num_kv_heads * -(-shape.group // chosen.heads)
        self.values = (
            chosen.min_query_len, chosen.max_query_len, chosen.min_split,
            chosen.kv_heads_at_once * (self.programs // spec.num_kv_heads), spec.head_size, spec.softmax_scale,
            spec.softcap or 0.0,
        )  # fmt: skip
        self.variant = _ATTENTION.variant(device, code)

    def run(self, variant_key: tuple[Any, ...], rows: int, batch: tuple[Any, ...], call: tuple[Any, ...]) -> None:
        """Computes the requests of this launch; rows: of queries, padding included.

        A captured graph may be replayed with any lengths, so the grid is for as many tiles as so many rows can fill.
        """
        grid = (self.chosen.tiles(self.requests, rows) * self.programs, self.chosen.splits, 1)
        if self.merge is None:
            self.variant.launch(variant_key, grid, batch + call + self.values + _NO_PARTS)
            return
        parts = self.merge.parts(rows, call[0])
        self.variant.launch(variant_key, grid, batch + call + self.values + parts)
        self.merge.run(variant_key, rows, batch, call, parts)


@functools.lru_cache(maxsize=1024)
def _launches(
    spec: AttentionSpec,
    target: Target,
    device: torch.device,
    paged: bool,
    own_key_starts: bool,
    ranges: bool,
    tree: bool,
    causal: bool | None,
    starts: bytes,
    max_query_len: int,
    max_seq_len: int,
    config: Config | None,
    splits: int | None,
) -> tuple[_PlannedLaunch, ...]:
    """The launches for every batch of which this is true. causal: None where requests differ.

    starts: the prefix sums of its queries, as int32.
    """
    cache = Cache(
        spec.kv_layout if paged else "NHD",
        (spec.block_size or 0) if paged else 0,
        spec.head_size,
        spec.head_size_v,
        spec.cache_dtype if paged else spec.dtype,
    )
    left, right = spec.sides(causal is True)
    # a position and each of these fit into 32 bits together
    mask = Mask(
        left=min(left, LONGEST), right=min(right, LONGEST), chunk=min(spec.chunk or 0, LONGEST),
        ranges_in_window="mm_prefix_in_window" in spec.features,
    )  # fmt: skip
    itemsize = compute_dtype(spec.dtype, cache.dtype).itemsize
    block_d = columns_of(spec.head_size, spec.head_size_v, quantised=cache.dtype in FP8)
    shape = Shape(
        rows=0,
        short=False,
        group=spec.num_heads // spec.num_kv_heads,
        block_d=block_d,
        block_dv=value_columns(target, block_d, spec.head_size_v, itemsize),
        itemsize=itemsize,
        cache_itemsize=cache.dtype.itemsize,
        paged=paged,
        split=cache.layout == "SPLIT",
        window=mask.chunk or (max(mask.left, mask.right) + 1 if min(mask.left, mask.right) >= 0 else 0),
        extras=ranges or tree or causal is None or "alibi" in spec.features or bool(spec.softcap),
        mask=tree or causal is None,
    )
    queries = queries_of(starts).each
    launches = schedule(
        target,
        shape,
        queries,
        num_kv_heads=spec.num_kv_heads,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        batch_invariant="batch_invariant" in spec.features,
        config=config,
    )
    if splits is not None:
        launches = [one._replace(splits=splits, min_split=16) for one in launches]
    planned = []
    for one in launches:
        code = _Code(
            dtype=spec.dtype,
            query_dtype=spec.query_dtype,
            output_dtype=spec.output_dtype,
            cache=cache,
            own_key_starts=own_key_starts,
            ranges=ranges,
            tree=tree,
            num_kv_heads=spec.num_kv_heads,
            group=shape.group,
            heads=one.heads,
            block_d=shape.block_d,
            block_dv=shape.block_dv,
            config=one.config,
            mask=mask,
            by_request=causal is None,
            softcap=bool(spec.softcap),
            one_tile=one.one_tile,
            split=one.splits > 1,
            dependent_launch=one.splits > 1 and target.dependent_launch,
        )
        planned.append(_PlannedLaunch(spec, one, shape, len(queries), device, code))
    return tuple(planned)


def _bytes(tensor: Tensor | None) -> Tensor | None:
    """Truth values as bytes, which kernels load."""
    return None if tensor is None else tensor.view(torch.uint8)


def _convertible(tensor: Tensor) -> Tensor:
    """A tensor as a kernel takes it: bytes where the device does not convert its 8-bit floats."""
    converts = tensor.dtype not in FP8 or target_of(tensor.device).converts(tensor.dtype)
    return tensor if converts else tensor.view(torch.uint8)


def _stride(tensor: Tensor | None, dim: int) -> int:
    """A stride of a tensor, 0 where no element is that far from the first."""
    return 0 if tensor is None or tensor.shape[dim] < 2 else tensor.stride(dim)


class _MergeCode(NamedTuple):
    """The facts that the merge kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    head_size_v: int
    dependent_launch: bool
    by_row: bool
    block_s: int
    block_dv: int

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4, "launch_pdl": True} if self.dependent_launch else {"num_warps": 4}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        output, sinks = key[1], key[6]
        return {
            "OUT": Strides(output[0], output[1], FP8.get(self.dtype, "")),
            "SINK_STRIDE": sinks[0] if sinks else 1,
            "HEAD_SIZE_V": self.head_size_v,
            "DEPENDENT_LAUNCH": self.dependent_launch,
            "BY_ROW": self.by_row,
            "BLOCK_S": self.block_s,
            "BLOCK_DV": self.block_dv,
        }


class _PlannedMerge:
    """The launch that merges the parts of split keys.

    Parts lie by request, with ``slots`` rows for each, or by row where there are fewer rows than that.
    """

    def __init__(
        self, spec: AttentionSpec, chosen: Launch, block_dv: int, requests: int, device: torch.device, code: _Code
    ) -> None:
        self.num_heads, self.splits, self.head_size_v = spec.num_heads, chosen.splits, spec.head_size_v
        self.slots = chosen.max_query_len
        self.by_request = requests * self.slots
        self.values = (chosen.min_query_len, chosen.max_query_len, chosen.splits)
        # block_s sets the order in which parts are summed; batch_invariant: it may not depend on the batch
        block_s = min(32, 4096 // block_dv)
        if "batch_invariant" not in spec.features:
            block_s = min(block_s, power_of_2(chosen.splits))
        codes = (
            _MergeCode(code.output_dtype, spec.head_size_v, code.dependent_launch, by_row, block_s, block_dv)
            for by_row in (False, True)
        )
        self.variants = [_MERGE.variant(device, one) for one in codes]

    def parts(self, rows: int, query: Tensor) -> tuple[Tensor, Tensor, int]:
        """Memory beside the query for the parts of so many rows, and where each row's are: values of both kernels."""
        by_row = rows < self.by_request
        sums = (rows if by_row else self.by_request) * self.num_heads * self.splits
        # one allocation is half the time of two
        memory = query.new_empty(sums * (self.head_size_v + 1), dtype=torch.float32)
        outputs, sums_of_weights = memory.split_with_sizes((sums * self.head_size_v, sums))
        return outputs, sums_of_weights, 0 if by_row else self.slots

    def run(
        self,
        variant_key: tuple[Any, ...],
        rows: int,
        batch: tuple[Any, ...],
        call: tuple[Any, ...],
        parts: tuple[Tensor, Tensor, int],
    ) -> None:
        """Merges parts into the output."""
        starts, requests, *_ = batch
        _, _, _, output, lse, sinks, _, _, _, _, out_scale, stride_lse, *_ = call
        grid = (min(rows, self.by_request), self.num_heads, 1)
        values = (starts, requests, output, lse, sinks, out_scale, stride_lse, *self.values, *parts)
        self.variants[rows < self.by_request].launch(variant_key, grid, values)
