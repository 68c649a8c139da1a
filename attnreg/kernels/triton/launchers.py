# mypy: disable-error-code="import-untyped"
"""What the adapters call: attention and the cache write on plain tensors, planned once per batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.attention import _attention_kernel, _merge_splits_kernel
from attnreg.kernels.triton.cache import _write_kv_kernel
from attnreg.kernels.triton.launch import compiled_for, launch
from attnreg.kernels.triton.schedule import Config, Launch, Shape, Target, power_of_2, schedule, target_for

if TYPE_CHECKING:
    from attnreg.runtime.interface import Layout

FP8 = {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}
_TL_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@functools.cache
def target_of(device: torch.device) -> Target:
    """What kernels for this device are compiled for; on the CPU, Triton's interpreter passes for a small A100."""
    if device.type != "cuda":
        if isinstance(_attention_kernel, triton.JITFunction):
            raise RuntimeError(
                f"Triton cannot compile for {device}; move the tensors to a GPU or set TRITON_INTERPRET=1"
            )
        return target_for("interpreter", 80, 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return target_for("hip", properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return target_for("cuda", properties.major * 10 + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What is fixed for one layer. ``window`` and ``softcap`` 0: none. ``block_size`` 0: no cache, packed keys."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    softmax_scale: float
    block_size: int = 0
    layout: Layout = "NHD"
    window: int = 0
    softcap: float = 0.0
    alibi: bool = False
    batch_invariant: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the dots: float16 holds every 8-bit float exactly, bfloat16 would cost another conversion."""
        if self.cache_dtype in FP8:
            return self.dtype if self.dtype == torch.float32 else torch.float16
        return self.dtype if self.cache_dtype == self.dtype else torch.float32

    def shape(self, *, ranges: bool) -> Shape:
        """What the choice of a configuration looks at."""
        return Shape(
            rows=0,
            short=False,
            group=self.num_heads // self.num_kv_heads,
            block_d=max(16, power_of_2(self.head_size)),
            block_dv=max(16, power_of_2(self.head_size_v)),
            itemsize=self.compute_dtype.itemsize,
            cache_itemsize=self.cache_dtype.itemsize,
            paged=self.block_size > 0,
            split=self.block_size > 0 and self.layout == "SPLIT",
            window=self.window,
            extras=ranges or self.alibi or self.softcap > 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The lengths of a batch. Shapes as in `attnreg.runtime.interface.BatchMetadata`, on the device but query_lens."""

    query_lens: Sequence[int]
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor | None = None
    key_start_loc: Tensor | None = None
    ranges: Tensor | None = None
    causal: bool = True


class AttentionPlan:
    """The launches that compute attention for a batch, for all layers of one kind."""

    def __init__(self, layer: Layer, batch: Batch, *, config: Config | None = None, splits: int | None = None) -> None:
        """config, splits: instead of the chosen ones, to measure them."""
        self.layer, self.batch = layer, batch
        self.target = target_of(batch.query_start_loc.device)
        shape = layer.shape(ranges=batch.ranges is not None)
        launches = schedule(
            self.target,
            shape,
            batch.query_lens,
            num_kv_heads=layer.num_kv_heads,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            batch_invariant=layer.batch_invariant,
            config=config,
        )
        self.launches = [
            _PlannedLaunch(
                layer, batch, shape, one if splits is None else one._replace(splits=splits, min_split=16), self.target
            )
            for one in launches
        ]

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        *,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Writes the output, and the lse, of every query of the batch.

        query [tokens, num_heads, head_size]; key and value: the cache's tensors, or packed [tokens, num_kv_heads, …];
        output [tokens, num_heads, head_size_v]; lse [num_heads, tokens] float32; sinks, alibi_slopes [num_heads];
        k_scale, v_scale [num_kv_heads] float32, any stride.
        """
        if key.dtype in FP8 and not self.target.converts(key.dtype):
            key, value = key.view(torch.uint8), value.view(torch.uint8)
        stride_q, stride_o = query.stride(), output.stride()
        strides = (
            stride_q[0], stride_q[1], stride_o[0], stride_o[1],
            *_cache_strides(self.layer.layout, key, value),
            0 if k_scale is None else k_scale.stride(0),
            0 if v_scale is None else v_scale.stride(0),
        )  # fmt: skip
        aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr() | output.data_ptr()) % 16 == 0
        dtypes = (_dtype(sinks), _dtype(alibi_slopes))
        key_of_call = (strides, aligned, lse is None, k_scale is None, v_scale is None, dtypes)
        for planned in self.launches:
            planned.run(query, key, value, output, lse, sinks, alibi_slopes, k_scale, v_scale, strides, key_of_call)


class _PlannedLaunch:
    """One launch of the attention kernel, and of the merge if its keys are split; all that the batch decides."""

    def __init__(self, layer: Layer, batch: Batch, shape: Shape, chosen: Launch, target: Target) -> None:
        config, device = chosen.config, batch.query_start_loc.device
        self.layer, self.batch, self.chosen = layer, batch, chosen
        num_reqs, num_ranges = len(batch.query_lens), 0 if batch.ranges is None else batch.ranges.shape[1]
        self.slots = chosen.max_query_len
        self.partial = self.partial_lse = None
        if chosen.splits > 1:
            parts = (num_reqs * self.slots, layer.num_heads, chosen.splits)
            self.partial = torch.empty(*parts, layer.head_size_v, dtype=torch.float32, device=device)
            self.partial_lse = torch.empty(parts, dtype=torch.float32, device=device)
        dependent_launch = chosen.splits > 1 and target.dependent_launch
        head_tiles = -(-shape.group // chosen.heads)
        self.grid = (chosen.tiles * layer.num_kv_heads * head_tiles, chosen.splits, 1)
        self.tensors = (
            self.partial, self.partial_lse, batch.query_start_loc, batch.key_start_loc, batch.seq_lens,
            batch.block_table, batch.ranges,
        )  # fmt: skip
        table_stride = 0 if batch.block_table is None else batch.block_table.stride(0)
        self.numbers = (num_reqs, chosen.min_query_len, chosen.max_query_len, self.slots, num_ranges,
                        chosen.min_split, layer.head_size, table_stride)  # fmt: skip
        self.scales = (layer.softmax_scale, layer.softcap)
        block_k = min(config.block_k or shape.block_d, shape.block_d)
        self.constants = (
            layer.num_kv_heads, shape.group, chosen.heads, layer.head_size, layer.head_size_v, layer.block_size,
            batch.causal, layer.window, layer.softcap > 0, FP8.get(layer.cache_dtype, ""),
            chosen.one_tile, chosen.splits > 1, dependent_launch, config.peel, _TL_DTYPES[layer.compute_dtype],
            config.block_m, config.block_n, block_k, shape.block_d, shape.block_dv,
        )  # fmt: skip
        optional = (batch.key_start_loc is None, batch.ranges is None)
        static = (device, layer.dtype, layer.cache_dtype, optional, self.constants, config)
        self.compiled = compiled_for(_attention_kernel, static)
        self.device = device.index or 0
        # in which order parts are summed depends on it, so it may not depend on the batch
        block_s = min(32, 4096 // shape.block_dv)
        if not layer.batch_invariant:
            block_s = min(block_s, power_of_2(chosen.splits))
        self.merge_constants = (layer.head_size_v, dependent_launch, block_s, shape.block_dv)
        self.merge_compiled = compiled_for(_merge_splits_kernel, (static, self.merge_constants))
        self.merge_grid = (num_reqs * self.slots, layer.num_heads, 1)
        self.merge_numbers = (chosen.min_query_len, chosen.max_query_len, self.slots, chosen.splits)
        self.merge_options = {"num_warps": 4, "launch_pdl": True} if dependent_launch else {"num_warps": 4}

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        strides: tuple[int, ...],
        key_of_call: tuple[Any, ...],
    ) -> None:
        config = self.chosen.config
        lse_stride = 0 if lse is None else lse.stride(0)
        launch(
            self.compiled,
            key_of_call,
            _attention_kernel,
            self.device,
            self.grid,
            (
                query, key, value, output, lse, *self.tensors, sinks, slopes, k_scale, v_scale,
                *self.numbers, lse_stride, *self.scales,
            ),
            strides + self.constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )  # fmt: skip
        if self.partial is not None:
            launch(
                self.merge_compiled,
                key_of_call,
                _merge_splits_kernel,
                self.device,
                self.merge_grid,
                (
                    output, lse, self.partial, self.partial_lse, self.batch.query_start_loc, sinks,
                    *self.merge_numbers, lse_stride,
                ),
                strides[2:4] + self.merge_constants,
                **self.merge_options,
            )  # fmt: skip


def _cache_strides(layout: Layout, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Strides of block, token and head, of keys and then of values; of a row's parts, and how much of it is together.

    A row is contiguous but in the layout SPLIT: there x elements of a key are, and a value's are a block apart.
    """
    k, v = key.stride(), value.stride()
    if key.dim() == 3:
        # packed: one block
        return (0, *k[:2], 0, *v[:2], 0, 0, 0, 0)
    if layout == "SPLIT":
        return (k[0], k[3], k[1], v[0], v[3], v[1], k[2], v[2], key.shape[4], 1)
    token, head = (1, 2) if layout == "NHD" else (2, 1)
    return (k[0], k[token], k[head], v[0], v[token], v[head], 0, 0, 0, 0)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: Layout = "NHD",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Stores each row of key and value at its slot (block * block_size + offset); rows with a negative slot nowhere.

    key [tokens, num_kv_heads, head_size], value likewise; the caches as `AttentionPlan.run` reads them, in the same
    dtype or in float8, then divided by the head's scale, rounded to nearest even and saturated.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    num_tokens = min(num_tokens, slot_mapping.shape[0])
    if num_tokens == 0:
        return
    target = target_of(key.device)
    cache_dtype = key_cache.dtype
    if cache_dtype in FP8 and not target.converts(cache_dtype):
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    block_d = power_of_2(max(head_size, value.shape[2]))
    block_rows = max(1, 4096 // block_d)
    block_size = key_cache.shape[{"NHD": 1, "HND": 2, "SPLIT": 3}[layout]]
    constants = (
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), *_cache_strides(layout, key_cache, value_cache),
        0 if k_scale is None else k_scale.stride(0), 0 if v_scale is None else v_scale.stride(0),
        num_kv_heads, head_size, value.shape[2], block_size, FP8.get(cache_dtype, ""), block_rows, block_d,
    )  # fmt: skip
    aligned = (key.data_ptr() | value.data_ptr() | key_cache.data_ptr() | value_cache.data_ptr()) % 16 == 0
    optional = (k_scale is None, v_scale is None)
    launch(
        compiled_for(_write_kv_kernel, (key.device, key.dtype, key_cache.dtype)),
        (aligned, optional, constants),
        _write_kv_kernel,
        key.device.index or 0,
        (-(-num_tokens * num_kv_heads // block_rows), 1, 1),
        (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_tokens),
        constants,
        num_warps=4,
    )
