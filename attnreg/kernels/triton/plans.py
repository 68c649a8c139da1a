# mypy: disable-error-code="import-untyped"
"""Attention plans: the launches for a batch, made once for all layers of a spec and run once per layer.

A plan has no memory of its own. The parts of split keys are allocated by each run, on the stream of the call: so two
streams, layers or graphs never share them, and those of a captured graph are in the graph's own pool.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from attnreg.kernels.triton.attention import _attention_kernel
from attnreg.kernels.triton.launch import UNFUSED, Kept, Kernel, Variant
from attnreg.kernels.triton.layout import (
    FP8,
    TL_DTYPES,
    Cache,
    PerHead,
    Strides,
    compute_dtype,
    on_bytes,
    packed_strides,
    stride_of,
    value_dtype,
)
from attnreg.kernels.triton.rows import Mask, Tile
from attnreg.kernels.triton.schedule import Keys, Launch, Shares, costs_of, rotate_when_loaded, schedule, shares_of
from attnreg.kernels.triton.splits.merge import MergeKey, PlannedMerge, Run, run_of
from attnreg.kernels.triton.target import Target, target_of
from attnreg.kernels.triton.tiles import Config, Shape, codes_of, columns_of, power_of_2, value_columns
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call
from attnreg.runtime.lengths import LONGEST, content, queries_of
from attnreg.runtime.tensors import Kinds, is_captured

# the tensors of a launch in the order of the kernel's pointers: those of the call and of the batch, then its parts
_CALL = (
    "query_ptr", "key_ptr", "value_ptr", "output_ptr", "lse_ptr", "sinks_ptr", "slopes_ptr", "q_scale_ptr",
    "k_scale_ptr", "v_scale_ptr", "out_scale_ptr",
)  # fmt: skip
_BATCH = (
    "query_start_loc_ptr", "seq_lens_ptr", "key_start_loc_ptr", "causal_ptr", "block_table_ptr", "ranges_ptr",
    "tree_ptr",
)  # fmt: skip
# those of the call that the merge of split keys needs: output, lse, sinks and out_scale
MERGED = itemgetter(3, 4, 5, 10)
_PARTS = ("partial_ptr", "partial_lse_ptr")
# the numbers of the batch, of the call and of the launch; the launch of a batch has `slots` too
_BATCH_NUMBERS = ("num_reqs", "num_ranges", "stride_table", "stride_ranges", "stride_range", "stride_tree")
_CALL_NUMBERS = ("stride_lse", "stride_key_head", "stride_value_head")
_LAUNCH = (
    "min_query_len", "max_query_len", "min_split", "programs_at_once", "head_size", "softmax_scale", "softcap",
)  # fmt: skip
NAMES = (*_CALL, *_BATCH, *_PARTS, *_BATCH_NUMBERS, *_CALL_NUMBERS, *_LAUNCH, "slots")
# packed keys and values of calls alike differ in these: a cache that grows has others in each step
HEADS = ("stride_key_head", "stride_value_head")
_ATTENTION = Kernel(_attention_kernel, NAMES, HEADS)


class AttentionPlan:
    """The launches that compute attention for a batch, for all layers of one spec.

    A plan holds the batch's tensors and not the batch, which holds its plans.
    """

    def __init__(
        self, spec: AttentionSpec, batch: BatchMetadata, *, config: Config | None = None, splits: int | None = None,
        unrotated: int = 0,
    ) -> None:  # fmt: skip
        """config, splits: override the chosen ones. unrotated: of queries' elements before they are `rotates`-ed."""
        starts, table = batch.query_start_loc, batch.block_table
        ranges = batch.mm_prefix if "mm_prefix" in spec.features else None
        causal, by_request = (batch.causal, None) if isinstance(batch.causal, bool) else (None, batch.causal)
        tree = batch.tree_mask if "tree_mask" in spec.features else None
        host = content(batch.query_start_loc_cpu)
        self.keys = Keys.of(batch.max_seq_len, host, content(batch.seq_lens_cpu))
        self._facts = (
            spec, target_of(starts.device), starts.device, table is not None, batch.key_start_loc is not None,
            ranges is not None, tree is not None, causal, host, batch.max_query_len, config, splits, unrotated,
        )  # fmt: skip
        self.launches = _launches(*self._facts, self.keys)
        self._for_graphs: Self | None = None
        # whether the launches take queries of `unrotated` elements, and rotate them when they are loaded
        self.rotates = self.launches.rotate
        self._numbers = (
            batch.num_reqs, 0 if ranges is None else ranges.shape[1], stride_of(table, 0), stride_of(ranges, 0),
            stride_of(ranges, 1), stride_of(tree, 0),
        )  # fmt: skip
        self._paged = table is not None
        # what the runs of a kind of plan depend on beside what makes batches alike
        self.apart: object = None
        # layers follow each other with calls alike
        self._recent: tuple[object, list[Run], tuple[int, int] | None] = (None, [], None)
        self._tensors = starts, batch.seq_lens, batch.key_start_loc, by_request, table, ranges, tree
        self._masked = by_request is not None or tree is not None

    def run(self, call: Call) -> None:
        """Writes the output, and the lse, of every query of the batch."""
        plan = self.for_graphs() if is_captured(call.query) else self
        runs, tensors, heads = plan._prepared(call)
        batch = self._batch()
        for run in runs:
            run(tensors, batch, heads)

    def for_graphs(self) -> Self:
        """The plan that a graph captures: its launches are for any lengths, which differ from replay to replay."""
        if self._for_graphs is None:
            self._for_graphs = plan = copy.copy(self)
            plan.keys = Keys.any_of(self.keys.longest)
            plan.launches = _launches(*self._facts, plan.keys)
            plan._recent = (None, [], None)
        return self._for_graphs

    def repeat(self, call: Call) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        """`run` for a query, key, value and output of which only the addresses differ from the call's."""
        runs, (_, _, _, _, *others), heads = self._prepared(call)
        batch = self._batch()

        def again(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
            tensors = (query, key, value, output, *others)
            for run in runs:
                run(tensors, batch, heads)

        return again

    def _batch(self) -> tuple[Tensor | None, ...]:
        """The tensors of the batch in the order of `_BATCH`; truth values as bytes, which kernels load."""
        if not self._masked:
            return self._tensors
        # made anew, because other memory may have been put in the place of a tensor's
        return tuple([x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x for x in self._tensors])

    def _prepared(self, call: Call) -> tuple[list[Run], tuple[Any, ...], tuple[int, int] | None]:
        """What runs a call's launches, its tensors in the order of `_CALL`, and its `HEADS`."""
        query, kv_cache, output, key, value, lse, params, alike, _ = call
        if self._paged and kv_cache is not None:
            key, value = kv_cache
        # the layer has validated that a call has a cache, or keys and values
        assert key is not None
        assert value is not None
        # the pointers of `_CALL`
        tensors = (
            query, key, value, output, lse, params.sinks, params.alibi_slopes, params.q_scale, params.k_scale,
            params.v_scale, params.out_scale,
        )  # fmt: skip
        if alike is None:
            some = (query, key, value, output, *(() if lse is None else (lse,)), *params.tensors)
            alike = self.launches.kinds.of((lse is None, params.names), some)
        # calls alike may differ in the rows and the strides of packed keys and values
        kind = alike if self._paged else (alike, key.shape, key.stride(), value.stride())
        known, runs, heads = self._recent
        if known != kind:
            differing, heads = (None, None) if self._paged else self._differing(key, value)
            runs = self.launches.runs.of(
                (type(self), alike, self._numbers, self.apart, differing), lambda: self._bind(tensors)
            )
            self._recent = kind, runs, heads
        return runs, tensors, heads

    def _differing(self, key: Tensor, value: Tensor) -> tuple[Any, tuple[int, int]]:
        """What the runs of calls alike depend on of packed keys and values, and the numbers that these are given."""
        (keys, key_head), (values, value_head) = packed_strides(key.stride()), packed_strides(value.stride())
        return (keys, values), (key_head, value_head)

    def _bind(self, tensors: tuple[Any, ...]) -> list[Run]:
        """What runs each launch for calls whose tensors have the facts of these."""
        return bound_launches(self.launches, self._numbers, *tensors)


class _Code(NamedTuple):
    """The facts that the attention kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    query_dtype: torch.dtype
    output_dtype: torch.dtype
    cache: Cache
    own_key_starts: bool
    ranges: bool
    tree: bool
    unrotated: int
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
    shares: Shares | None
    most_registers: int
    dependent_launch: bool
    gpu: str
    batch_invariant: bool

    @property
    def options(self) -> Mapping[str, int]:
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        if self.most_registers:
            options["maxnreg"] = self.most_registers
        # a request is computed by other code where none of the batch has ranges, a tree or a causality of its own
        return options | UNFUSED if self.batch_invariant else options

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
            "Q": Strides(query[0], query[1], FP8.get(self.query_dtype, ""), q_scale or 0, self.unrotated),
            "OUT": Strides(output[0], output[1], FP8.get(self.output_dtype, "")),
            "K": self.cache.keys(keys, k_scale),
            "V": self.cache.values(values, v_scale, self.config.num_warps),
            "HEADS": PerHead(sink=sinks[0] if sinks else 1, slope=slopes[0] if slopes else 1),
            "TILE": tile,
            "COMPUTE_DTYPE": TL_DTYPES[compute_dtype(self.dtype, self.cache.dtype)],
            "VALUE_DTYPE": TL_DTYPES[value_dtype(self.dtype, self.cache)],
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "MASK": self.mask,
            "SOFTCAP": self.softcap,
            "ONE_TILE": self.one_tile,
            "SPLIT": self.split,
            "SHARES": self.shares,
            "DEPENDENT_LAUNCH": self.dependent_launch,
            "PEEL": self.config.peel,
            "GPU": self.gpu,
        }


class PlannedLaunch:
    """One launch of the attention kernel, without tensors, and the merge if its keys are split."""

    def __init__(
        self, spec: AttentionSpec, chosen: Launch, requests: int, variant: Variant, merge: PlannedMerge | None
    ) -> None:
        """variant: of a kernel that takes `NAMES`."""
        self.chosen, self.requests, self.variant, self.merge = chosen, requests, variant, merge
        self.programs = spec.num_kv_heads * -(-spec.num_heads // (spec.num_kv_heads * chosen.heads))
        self.values = (
            chosen.min_query_len, chosen.max_query_len, chosen.min_split,
            chosen.kv_heads_at_once * (self.programs // spec.num_kv_heads), spec.head_size, spec.softmax_scale,
            spec.softcap or 0.0,
        )  # fmt: skip

    def bind(self, variant_key: tuple[Any, ...], rows: int, numbers: Mapping[str, Any]) -> Run:
        """What computes the requests of this launch, of calls with so many rows of queries, padding included.

        A captured graph may be replayed with any lengths, so the grid is for as many tiles as so many rows can fill.
        """
        grid = (self.chosen.tiles(self.requests, rows) * self.programs, self.chosen.splits, 1)
        numbers = {**numbers, **dict(zip(_LAUNCH, self.values, strict=True)), "slots": 0}
        output, sinks, no_out_scale, no_lse = (variant_key[i] for i in (1, 6, 9, 10))
        merge_key = MergeKey(output, sinks, not no_lse, not no_out_scale)
        return run_of(self.variant, self.merge, variant_key, grid, rows, numbers, merge_key, MERGED)


class _Launches(tuple[PlannedLaunch, ...]):
    """The launches that batches alike share. kinds: tells the kinds of calls apart, for `runs`.

    rotate: they rotate queries when they load them. runs: kind of plan, kind of call, numbers of the batch, what packed
    keys and values differ in -> the functions that launch.
    """

    kinds: Kinds
    rotate: bool
    runs: Kept[list[Run]]


def bound_launches(
    launches: Sequence[PlannedLaunch], batch: Sequence[int], query: Tensor, key: Tensor, value: Tensor, output: Tensor,
    lse: Tensor | None, sinks: Tensor | None, slopes: Tensor | None, q_scale: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, out_scale: Tensor | None,
) -> list[Run]:  # fmt: skip
    """What runs the launches for calls whose tensors have the facts of these. batch: the `_BATCH_NUMBERS`."""
    key_strides, value_strides = key.stride(), value.stride()
    key_head = value_head = 0
    if len(key_strides) == 3:
        key_strides, key_head = packed_strides(key_strides)
        value_strides, value_head = packed_strides(value_strides)
    # what the code depends on beyond the plan; `_Code.constants` reads the strides
    variant_key = (
        query.stride(), output.stride(), key_strides, value_strides,
        None if k_scale is None else k_scale.stride(0), None if v_scale is None else v_scale.stride(0),
        None if sinks is None else (sinks.stride(0), sinks.dtype),
        None if slopes is None else (slopes.stride(0), slopes.dtype),
        None if q_scale is None else q_scale.stride(0), out_scale is None, lse is None, output.dtype,
    )  # fmt: skip
    # contiguous; a tensor of one head may have any stride
    numbers = {"stride_lse": 0 if lse is None else lse.shape[1], "stride_key_head": key_head}
    numbers |= {"stride_value_head": value_head, **dict(zip(_BATCH_NUMBERS, batch, strict=True))}
    runs = [planned.bind(variant_key, query.shape[0], numbers) for planned in launches]
    return [on_bytes(run, (query, key, value, output), target_of(query.device)) for run in runs]


@functools.lru_cache(maxsize=1024)
def _launches(
    spec: AttentionSpec, target: Target, device: torch.device, paged: bool, own_key_starts: bool, ranges: bool,
    tree: bool, causal: bool | None, starts: bytes, max_query_len: int, config: Config | None, splits: int | None,
    unrotated: int, keys: Keys,
) -> _Launches:  # fmt: skip
    """The launches for every batch of which this is true. causal: None where requests differ.

    starts: the prefix sums of its queries, as int32.
    """
    cache = Cache(
        spec.kv_layout if paged else "NHD", (spec.block_size or 0) if paged else 0, spec.head_size, spec.head_size_v,
        spec.cache_dtype if paged else spec.dtype, spec.packed if paged else None, target.backend == "cuda",
    )  # fmt: skip
    left, right = spec.sides(causal is True)
    # a position and a chunk fit into 32 bits together
    chunk, ranges_in_window = min(spec.chunk or 0, LONGEST), "mm_prefix_in_window" in spec.features
    mask = Mask(left=left, right=right, chunk=chunk, ranges_in_window=ranges_in_window)
    batch_invariant = "batch_invariant" in spec.features
    # tiles that are chosen for a batch without ranges, a tree or causality by request would give other bits
    brought = (ranges, "mm_prefix"), (tree, "tree_mask"), (causal is None, "causal_by_request")
    has_ranges, has_tree, mixed = (it or (batch_invariant and name in spec.features) for it, name in brought)
    sides = spec.sides(causal is True and not mixed)
    itemsize = compute_dtype(spec.dtype, cache.dtype).itemsize
    block_d = columns_of(spec.head_size, spec.head_size_v, quantised=cache.dtype in FP8 or cache.packed is not None)
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
        window=mask.chunk or (max(sides) + 1 if min(sides) >= 0 else 0),
        extras=has_ranges or has_tree or mixed or "alibi" in spec.features or bool(spec.softcap),
        ranges=has_ranges,
        mask=has_tree or mixed,
        packed=cache.packed is not None,
        codes="" if cache.packed is None else codes_of(cache.packed.values),
    )
    queries = queries_of(starts).each
    launches = schedule(
        target, shape, queries, num_kv_heads=spec.num_kv_heads, max_query_len=max_query_len, keys=keys,
        batch_invariant=batch_invariant, config=config, shares=splits is None and mask.left < 0 and not mask.chunk,
    )  # fmt: skip
    if splits is not None:
        launches = [one._replace(splits=splits, min_split=16) for one in launches]
    rotate = unrotated > 0 and not batch_invariant
    rotate = rotate and rotate_when_loaded(target, launches, len(queries) * spec.num_kv_heads, shape.block_d)
    planned = []
    for one in launches:
        costs = costs_of(shape.block_d + shape.block_dv, shape.block_dv, one.config.programs_per_sm)
        # as many run at once as share keys out; AMD's layout has no registers for that on NVIDIA's GPUs, nor
        # have products without matrix units
        capped = one.shared > 0 and not shape.split and target.matrix_units
        code = _Code(
            dtype=spec.dtype,
            query_dtype=spec.query_dtype,
            output_dtype=spec.output_dtype,
            cache=cache,
            own_key_starts=own_key_starts,
            ranges=ranges,
            tree=tree,
            unrotated=unrotated if rotate else 0,
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
            shares=shares_of(one, len(queries), one.config.block_n, costs.begin),
            most_registers=target.registers(one.config.programs_per_sm * one.config.num_warps) if capped else 0,
            dependent_launch=(one.splits > 1 or one.shared > 0) and target.dependent_launch,
            gpu=target.backend,
            batch_invariant=batch_invariant,
        )
        merge = None
        if code.split or code.shares:
            merge = PlannedMerge(spec, one, shape.block_dv, len(queries), device, code.dependent_launch, code.shares)
        planned.append(PlannedLaunch(spec, one, len(queries), _ATTENTION.variant(device, code), merge))
    found = _Launches(planned)
    found.kinds, found.runs, found.rotate = Kinds(), Kept(), rotate
    return found
