# mypy: disable-error-code="import-untyped"
"""Attention plans: the launches for a batch, made once for all layers of a spec and run once per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.attention import _attention_kernel
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.layout import FP8, Cache, Strides
from attnreg.kernels.triton.rows import Tile
from attnreg.kernels.triton.schedule import Launch, schedule
from attnreg.kernels.triton.splits import _merge_splits_kernel
from attnreg.kernels.triton.target import Target, target_of
from attnreg.kernels.triton.tiles import Config, Shape, power_of_2
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call

_ATTENTION, _MERGE = Kernel(_attention_kernel), Kernel(_merge_splits_kernel)
_TL_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


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
        self.target = target_of(batch.query_start_loc.device)
        paged, ranges = batch.block_table is not None, batch.mm_prefix if "mm_prefix" in spec.features else None
        cache = Cache(
            spec.kv_layout if paged else "NHD",
            (spec.block_size or 0) if paged else 0,
            spec.head_size,
            spec.head_size_v,
            spec.cache_dtype if paged else spec.dtype,
        )
        shape = Shape(
            rows=0,
            short=False,
            group=spec.num_heads // spec.num_kv_heads,
            block_d=max(16, power_of_2(spec.head_size)),
            block_dv=max(16, power_of_2(spec.head_size_v)),
            itemsize=compute_dtype(spec.dtype, cache.dtype).itemsize,
            cache_itemsize=cache.dtype.itemsize,
            paged=paged,
            split=cache.layout == "SPLIT",
            window=spec.sliding_window or 0,
            extras=ranges is not None or "alibi" in spec.features or bool(spec.softcap),
        )
        starts = batch.query_start_loc_cpu
        launches = schedule(
            self.target,
            shape,
            (starts[1:] - starts[:-1]).tolist(),
            num_kv_heads=spec.num_kv_heads,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            batch_invariant="batch_invariant" in spec.features,
            config=config,
        )
        if splits is not None:
            launches = [one._replace(splits=splits, min_split=16) for one in launches]
        self.launches = [_PlannedLaunch(spec, batch, cache, ranges, shape, one, self.target) for one in launches]

    def run(self, call: Call) -> None:
        """Writes the output, and the lse, of every query of the batch."""
        query, kv_cache, output, key, value, lse, params = call
        if kv_cache is not None:
            key, value = kv_cache
        # the layer has validated that a call has a cache, or keys and values
        assert key is not None
        assert value is not None
        if key.dtype in FP8 and not self.target.converts(key.dtype):
            key, value = key.view(torch.uint8), value.view(torch.uint8)
        sinks, slopes, k_scale, v_scale = params.sinks, params.alibi_slopes, params.k_scale, params.v_scale
        # all that the code depends on beyond the plan; `_Code.constants` reads the strides
        variant_key = (
            query.stride(), output.stride(), key.stride(), value.stride(),
            None if k_scale is None else k_scale.stride(0), None if v_scale is None else v_scale.stride(0),
            (query.data_ptr() | key.data_ptr() | value.data_ptr() | output.data_ptr()) % 16 == 0,
            lse is None, None if sinks is None else sinks.dtype, None if slopes is None else slopes.dtype,
        )  # fmt: skip
        arguments = {
            "query_ptr": query, "key_ptr": key, "value_ptr": value, "output_ptr": output, "lse_ptr": lse,
            "sinks_ptr": sinks, "slopes_ptr": slopes, "k_scale_ptr": k_scale, "v_scale_ptr": v_scale,
            "stride_lse": 0 if lse is None else lse.stride(0),
        }  # fmt: skip
        for planned in self.launches:
            planned.variant.launch(variant_key, planned.grid, planned.arguments | arguments)
            if planned.merge is not None:
                planned.merge.run(variant_key, output, lse, sinks)


class _Code(NamedTuple):
    """The facts that the attention kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    cache: Cache
    own_key_starts: bool
    ranges: bool
    num_kv_heads: int
    group: int
    heads: int
    block_d: int
    block_dv: int
    config: Config
    causal: bool
    window: int
    softcap: bool
    one_tile: bool
    split: bool
    dependent_launch: bool

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        query, output, keys, values, k_scale, v_scale, *_ = key
        tile = Tile(
            heads=self.heads,
            block_m=self.config.block_m,
            block_n=self.config.block_n,
            block_k=min(self.config.block_k or self.block_d, self.block_d),
            block_d=self.block_d,
            block_dv=self.block_dv,
        )
        return {
            "Q": Strides(token=query[0], head=query[1]),
            "OUT": Strides(token=output[0], head=output[1]),
            "K": self.cache.keys(keys, k_scale),
            "V": self.cache.values(values, v_scale),
            "TILE": tile,
            "COMPUTE_DTYPE": _TL_DTYPES[compute_dtype(self.dtype, self.cache.dtype)],
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "CAUSAL": self.causal,
            "WINDOW": self.window,
            "SOFTCAP": self.softcap,
            "ONE_TILE": self.one_tile,
            "SPLIT": self.split,
            "DEPENDENT_LAUNCH": self.dependent_launch,
            "PEEL": self.config.peel,
        }


class _PlannedLaunch:
    """One launch of the attention kernel: its fixed arguments, and the merge if its keys are split."""

    def __init__(
        self,
        spec: AttentionSpec,
        batch: BatchMetadata,
        cache: Cache,
        ranges: Tensor | None,
        shape: Shape,
        chosen: Launch,
        target: Target,
    ) -> None:
        split, table, device = chosen.splits > 1, batch.block_table, batch.query_start_loc.device
        dependent_launch = split and target.dependent_launch
        self.chosen = chosen
        self.merge = _PlannedMerge(spec, batch, shape.block_dv, chosen, dependent_launch) if split else None
        self.grid = (chosen.tiles * spec.num_kv_heads * -(-shape.group // chosen.heads), chosen.splits, 1)
        self.arguments = _ATTENTION.arguments(
            partial_ptr=None if self.merge is None else self.merge.partial,
            partial_lse_ptr=None if self.merge is None else self.merge.partial_lse,
            query_start_loc_ptr=batch.query_start_loc,
            key_start_loc_ptr=batch.key_start_loc,
            seq_lens_ptr=batch.seq_lens,
            block_table_ptr=table,
            ranges_ptr=ranges,
            num_reqs=batch.num_reqs,
            min_query_len=chosen.min_query_len,
            max_query_len=chosen.max_query_len,
            slots=chosen.max_query_len,
            num_ranges=0 if ranges is None else ranges.shape[1],
            min_split=chosen.min_split,
            head_size=spec.head_size,
            stride_table=0 if table is None else table.stride(0),
            softmax_scale=spec.softmax_scale,
            softcap=spec.softcap or 0.0,
        )
        code = _Code(
            dtype=spec.dtype,
            cache=cache,
            own_key_starts=batch.key_start_loc is not None,
            ranges=ranges is not None,
            num_kv_heads=spec.num_kv_heads,
            group=shape.group,
            heads=chosen.heads,
            block_d=shape.block_d,
            block_dv=shape.block_dv,
            config=chosen.config,
            causal=batch.causal,
            window=shape.window,
            softcap=bool(spec.softcap),
            one_tile=chosen.one_tile,
            split=split,
            dependent_launch=dependent_launch,
        )
        self.variant = _ATTENTION.variant(device, code)


class _MergeCode(NamedTuple):
    """The facts that the merge kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    head_size_v: int
    dependent_launch: bool
    block_s: int
    block_dv: int

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4, "launch_pdl": True} if self.dependent_launch else {"num_warps": 4}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        output = key[1]
        return {
            "OUT": Strides(token=output[0], head=output[1]),
            "HEAD_SIZE_V": self.head_size_v,
            "DEPENDENT_LAUNCH": self.dependent_launch,
            "BLOCK_S": self.block_s,
            "BLOCK_DV": self.block_dv,
        }


class _PlannedMerge:
    """The launch that merges the parts of split keys, and the memory of those parts."""

    def __init__(
        self, spec: AttentionSpec, batch: BatchMetadata, block_dv: int, chosen: Launch, dependent_launch: bool
    ) -> None:
        slots, device = chosen.max_query_len, batch.query_start_loc.device
        parts = (batch.num_reqs * slots, spec.num_heads, chosen.splits)
        self.partial = torch.empty(*parts, spec.head_size_v, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(parts, dtype=torch.float32, device=device)
        self.grid = (parts[0], parts[1], 1)
        self.arguments = _MERGE.arguments(
            partial_ptr=self.partial,
            partial_lse_ptr=self.partial_lse,
            query_start_loc_ptr=batch.query_start_loc,
            min_query_len=chosen.min_query_len,
            max_query_len=chosen.max_query_len,
            slots=slots,
            num_splits=chosen.splits,
        )
        # block_s sets the order in which parts are summed; batch_invariant: it may not depend on the batch
        block_s = min(32, 4096 // block_dv)
        if "batch_invariant" not in spec.features:
            block_s = min(block_s, power_of_2(chosen.splits))
        code = _MergeCode(spec.dtype, spec.head_size_v, dependent_launch, block_s, block_dv)
        self.variant = _MERGE.variant(device, code)

    def run(self, variant_key: tuple[Any, ...], output: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        arguments = {
            "output_ptr": output, "lse_ptr": lse, "sinks_ptr": sinks, "stride_lse": 0 if lse is None else lse.stride(0),
        }  # fmt: skip
        self.variant.launch(variant_key, self.grid, self.arguments | arguments)
