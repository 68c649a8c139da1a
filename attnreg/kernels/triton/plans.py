# mypy: disable-error-code="import-untyped"
"""The plan of TRITON_ATTN. The plans of packed caches and of kernels for SM 9.0 derive from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.kernels.triton.attention import _attention_kernel
from attnreg.kernels.triton.launch import UNFUSED, Kernel
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
from attnreg.kernels.triton.planned.arguments import (
    MERGED,
    POINTERS,
    AttentionBatch,
    AttentionKey,
    AttentionTensors,
    BatchNumbers,
    HeadStrides,
)
from attnreg.kernels.triton.planned.batches import BatchPlan
from attnreg.kernels.triton.planned.launches import Launches, Merging, PlannedLaunch, Run
from attnreg.kernels.triton.rows import Mask, Tile
from attnreg.kernels.triton.schedule import KeyLengths, Shares, costs_of, rotate_when_loaded, schedule, shares_of
from attnreg.kernels.triton.splits.beside import Beside
from attnreg.kernels.triton.splits.merge import OfHeads
from attnreg.kernels.triton.target import Target, target_of
from attnreg.kernels.triton.tiles import Config, Shape, codes_of, columns_of, power_of_2, value_columns
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call
from attnreg.runtime.lengths import LONGEST, queries_of
from attnreg.runtime.tensors import named

_ATTENTION = Kernel(_attention_kernel, POINTERS, HeadStrides._fields)


class LaunchFacts(NamedTuple):
    """The facts of a batch on which its launches depend, beside the keys.

    paged, own_key_starts, ranges, tree: whether it has these. causal: None if requests differ. host: the prefix sums
    of its queries, as int32. config, splits: override the chosen ones. unrotated: the elements of a query before it is
    rotated. beside: of launches that share keys out.
    """

    spec: AttentionSpec
    target: Target
    device: torch.device
    paged: bool
    own_key_starts: bool
    ranges: bool
    tree: bool
    causal: bool | None
    host: bytes
    max_query_len: int
    config: Config | None
    splits: int | None
    unrotated: int
    beside: Beside | None = None


class AttentionLaunches(Launches):
    """The launches of an attention plan. rotates: over packed codes, whether they rotate queries as they load them."""

    rotates = False


class AttentionPlan(BatchPlan[AttentionLaunches]):
    """The launches that compute attention for a batch, for all layers of one spec."""

    # of a subclass: the further facts that its runs depend on, hashable
    apart: object = None

    def __init__(
        self, spec: AttentionSpec, batch: BatchMetadata, *, config: Config | None = None, splits: int | None = None,
        unrotated: int = 0,
    ) -> None:  # fmt: skip
        """config, splits: override the chosen ones. unrotated: the elements of a query before it is rotated."""
        super().__init__(batch)
        starts, table = batch.query_start_loc, batch.block_table
        ranges = batch.mm_prefix if "mm_prefix" in spec.features else None
        causal, by_request = (batch.causal, None) if isinstance(batch.causal, bool) else (None, batch.causal)
        tree = batch.tree_mask if "tree_mask" in spec.features else None
        self._facts = named(
            LaunchFacts,
            (
                spec, target_of(starts.device), starts.device, table is not None, batch.key_start_loc is not None,
                ranges is not None, tree is not None, causal, self.host, batch.max_query_len, config, splits,
                unrotated, None,
            ),
        )  # fmt: skip
        self.launches = _launches(self._facts, self.keys)
        # whether the launches take queries of `unrotated` elements, and rotate them as they load them
        self.rotates = self.launches.rotates
        num_ranges = stride_ranges = stride_range = 0
        if ranges is not None:
            num_ranges, stride_ranges, stride_range = ranges.shape[1], stride_of(ranges, 0), stride_of(ranges, 1)
        strides = stride_of(table, 0), stride_ranges, stride_range, 0 if tree is None else stride_of(tree, 0)
        self._numbers = named(BatchNumbers, (batch.num_reqs, num_ranges, *strides))
        self._paged = table is not None
        self._tensors = named(
            AttentionBatch, (starts, batch.seq_lens, batch.key_start_loc, by_request, table, ranges, tree)
        )
        self._masked = by_request is not None or tree is not None

    def _launches_of(self, keys: KeyLengths, beside: Beside | None = None) -> AttentionLaunches:
        return _launches(self._facts if beside is None else self._facts._replace(beside=beside), keys)

    def repeat(self, call: Call) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        """`run` for the call with other memory: query, key, value and output differ from its own in address alone."""
        runs, tensors, heads = self._prepared(call)
        others, batch = tensors[tensors._fields.index("lse") :], self._batch()

        def again(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
            tensors = named(AttentionTensors, (query, key, value, output, *others))
            for run in runs:
                run(tensors, batch, heads)

        return again

    def _batch(self) -> AttentionBatch:
        """The tensors of the batch; truth values as bytes, which kernels load."""
        # made for each run, because a tensor's memory may have been replaced
        return AttentionBatch._make(
            [x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x for x in self._tensors]
        )

    def _prepared(self, call: Call) -> tuple[Sequence[Run], AttentionTensors, tuple[Any, ...] | None]:
        query, kv_cache, output, key, value, lse, params, alike, _ = call
        if self._paged and kv_cache is not None:
            key, value = kv_cache
        # the layer has validated that a call has a cache, or keys and values
        assert key is not None
        assert value is not None
        tensors = named(
            AttentionTensors,
            (
                query, key, value, output, lse, params.sinks, params.alibi_slopes, params.q_scale, params.k_scale,
                params.v_scale, params.out_scale,
            ),
        )  # fmt: skip
        if alike is None:
            some = (query, key, value, output, *(() if lse is None else (lse,)), *params.tensors)
            alike = self.launches.kinds.of((lse is None, params.names), some)
        # calls of one kind may differ in the rows and the strides of packed keys and values
        kind = alike if self._paged else (alike, key.shape, key.stride(), value.stride())
        known, runs, heads = self._recent
        if known != kind:
            differing, heads = (None, None) if self._paged else self._differing(key, value)
            runs = self.launches.runs.of(
                (type(self), alike, self._numbers, self.apart, differing), lambda: self._bind(tensors)
            )
            self._recent = kind, runs, heads
        return runs, tensors, heads

    def _differing(self, key: Tensor, value: Tensor) -> tuple[Any, HeadStrides]:
        """The strides of packed keys and values that a run is bound to, and those that it is given at each call."""
        (keys, key_head), (values, value_head) = packed_strides(key.stride()), packed_strides(value.stride())
        return (keys, values), HeadStrides(key_head, value_head)

    def _bind(self, tensors: AttentionTensors) -> list[Run]:
        """One function a launch, for calls whose tensors have the same facts as these."""
        return bound_launches(self.launches, self._numbers, tensors)


class AttentionCode(NamedTuple):
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
        # batches with and without ranges, a tree or causality by request have different code for the same request
        return options | UNFUSED if self.batch_invariant else options

    def constants(self, key: AttentionKey) -> Mapping[str, Any]:
        q_token, q_head, _ = key.query
        out_token, out_head, _ = key.output
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
            "Q": Strides(q_token, q_head, FP8.get(self.query_dtype, ""), key.q_scale or 0, self.unrotated),
            "OUT": Strides(out_token, out_head, FP8.get(self.output_dtype, "")),
            "K": self.cache.keys(key.keys, key.k_scale),
            "V": self.cache.values(key.values, key.v_scale, self.config.num_warps),
            "HEADS": PerHead(sink=key.sinks.stride if key.sinks else 1, slope=key.slopes.stride if key.slopes else 1),
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


def bound_launches(launches: Sequence[PlannedLaunch], batch: BatchNumbers, tensors: AttentionTensors) -> list[Run]:
    """One function a launch, for calls whose tensors have the same facts as these. batch: the batch's numbers."""
    query, key, value, output, lse = tensors.query, tensors.key, tensors.value, tensors.output, tensors.lse
    key_strides, value_strides, heads = key.stride(), value.stride(), HeadStrides(0, 0)
    if len(key_strides) == 3:
        key_strides, key_head = packed_strides(key_strides)
        value_strides, value_head = packed_strides(value_strides)
        heads = HeadStrides(key_head, value_head)
    q_scale, k_scale, v_scale = (
        None if x is None else x.stride(0) for x in (tensors.q_scale, tensors.k_scale, tensors.v_scale)
    )
    variant_key = AttentionKey(
        query=query.stride(),
        output=output.stride(),
        keys=key_strides,
        values=value_strides,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=OfHeads.of(tensors.sinks),
        slopes=OfHeads.of(tensors.slopes),
        q_scale=q_scale,
        out_scale=tensors.out_scale is not None,
        lse=lse is not None,
        output_dtype=output.dtype,
    )
    # the lse is contiguous: its shape gives the stride, because a tensor of one head may have any
    numbers = {**batch._asdict(), "stride_lse": 0 if lse is None else lse.shape[1], **heads._asdict()}
    runs = [planned.bind(variant_key, query.shape[0], numbers) for planned in launches]
    return [on_bytes(run, (query, key, value, output), target_of(query.device)) for run in runs]


@functools.lru_cache(maxsize=1024)
def _launches(facts: LaunchFacts, keys: KeyLengths) -> AttentionLaunches:
    """The launches for every batch of these facts."""
    spec, target, paged = facts.spec, facts.target, facts.paged
    cache = Cache(
        spec.kv_layout if paged else "NHD", (spec.block_size or 0) if paged else 0, spec.head_size, spec.head_size_v,
        spec.cache_dtype if paged else spec.dtype, spec.packed if paged else None, target.backend == "cuda",
    )  # fmt: skip
    left, right = spec.sides(facts.causal is True)
    # a position and a chunk fit into 32 bits together
    chunk, ranges_in_window = min(spec.chunk or 0, LONGEST), "mm_prefix_in_window" in spec.features
    mask = Mask(left=left, right=right, chunk=chunk, ranges_in_window=ranges_in_window)
    batch_invariant = "batch_invariant" in spec.features
    shape = _shape_of(facts, cache, mask)
    queries = queries_of(facts.host).each
    launches = schedule(
        target, shape, queries, num_kv_heads=spec.num_kv_heads, max_query_len=facts.max_query_len, keys=keys,
        batch_invariant=batch_invariant, config=facts.config,
        shares=facts.splits is None and mask.left < 0 and not mask.chunk,
    )  # fmt: skip
    if facts.splits is not None:
        launches = [one._replace(splits=facts.splits, min_split=16) for one in launches]
    rotate = facts.unrotated > 0 and not batch_invariant
    rotate = rotate and rotate_when_loaded(target, launches, len(queries) * spec.num_kv_heads, shape.block_d)
    planned = []
    for one in launches:
        costs = costs_of(shape.block_d + shape.block_dv, shape.block_dv, one.config.programs_per_sm)
        # programs that share keys out all run at once, so their registers are capped. A SPLIT cache's code and products
        # without matrix units need more registers than the cap
        shares = shares_of(one, len(queries), one.config.block_n, costs.begin)
        capped = one.shared > 0 and not shape.split and target.matrix_units
        code = AttentionCode(
            dtype=spec.dtype,
            query_dtype=spec.query_dtype,
            output_dtype=spec.output_dtype,
            cache=cache,
            own_key_starts=facts.own_key_starts,
            ranges=facts.ranges,
            tree=facts.tree,
            unrotated=facts.unrotated if rotate else 0,
            num_kv_heads=spec.num_kv_heads,
            group=shape.group,
            heads=one.heads,
            block_d=shape.block_d,
            block_dv=shape.block_dv,
            config=one.config,
            mask=mask,
            by_request=facts.causal is None,
            softcap=bool(spec.softcap),
            one_tile=one.one_tile,
            split=one.splits > 1,
            shares=shares and shares._replace(beside=facts.beside),
            most_registers=target.registers(one.config.programs_per_sm * one.config.num_warps) if capped else 0,
            dependent_launch=(one.splits > 1 or one.shared > 0) and target.dependent_launch,
            gpu=target.backend,
            batch_invariant=batch_invariant,
        )
        merging = Merging(MERGED, shape.block_dv, code.dependent_launch, code.shares)
        planned.append(PlannedLaunch(spec, one, len(queries), facts.device, _ATTENTION, code, merging))
    found = AttentionLaunches(planned)
    found.rotates = rotate
    return found


def _shape_of(facts: LaunchFacts, cache: Cache, mask: Mask) -> Shape:
    """The shape of a layer and a batch with these facts, for the table of tiles."""
    spec, target, batch_invariant = facts.spec, facts.target, "batch_invariant" in facts.spec.features
    # batch_invariant: every batch takes the tiles of one with ranges, a tree or causality by request, if the layer may
    # have these; other tiles would give other bits
    brought = (facts.ranges, "mm_prefix"), (facts.tree, "tree_mask"), (facts.causal is None, "causal_by_request")
    has_ranges, has_tree, mixed = (it or (batch_invariant and name in spec.features) for it, name in brought)
    sides = spec.sides(facts.causal is True and not mixed)
    itemsize = compute_dtype(spec.dtype, cache.dtype).itemsize
    block_d = columns_of(spec.head_size, spec.head_size_v, quantised=cache.dtype in FP8 or cache.packed is not None)
    return Shape(
        rows=0,
        short=False,
        group=spec.num_heads // spec.num_kv_heads,
        block_d=block_d,
        block_dv=value_columns(target, block_d, spec.head_size_v, itemsize),
        itemsize=itemsize,
        cache_itemsize=cache.dtype.itemsize,
        paged=facts.paged,
        split=cache.layout == "SPLIT",
        window=mask.chunk or (max(sides) + 1 if min(sides) >= 0 else 0),
        extras=has_ranges or has_tree or mixed or "alibi" in spec.features or bool(spec.softcap),
        ranges=has_ranges,
        mask=has_tree or mixed,
        packed=cache.packed is not None,
        codes="" if cache.packed is None else codes_of(cache.packed.values),
    )
