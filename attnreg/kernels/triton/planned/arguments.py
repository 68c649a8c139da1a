# mypy: disable-error-code="import-untyped"
"""The arguments of TRITON_ATTN's attention kernel by name. Some kernels for SM 9.0 take the same."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.kernels.triton.launch import pointers_of
from attnreg.kernels.triton.splits.merge import MergedTensors, MergeKey, OfHeads, Parts


class AttentionTensors(NamedTuple):
    """The tensors of a call: the kernel's first pointers. key, value: packed ones, or the cache."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    out_scale: Tensor | None = None


class AttentionBatch(NamedTuple):
    """The tensors of a batch: the kernel's next pointers."""

    query_start_loc: Tensor
    seq_lens: Tensor
    key_start_loc: Tensor | None
    causal: Tensor | None
    block_table: Tensor | None
    ranges: Tensor | None
    tree: Tensor | None


class BatchNumbers(NamedTuple):
    """The numbers of a batch."""

    num_reqs: int
    num_ranges: int
    stride_table: int
    stride_ranges: int
    stride_range: int
    stride_tree: int


class HeadStrides(NamedTuple):
    """The strides of packed keys and values that change from call to call, as those of a growing cache do."""

    stride_key_head: int
    stride_value_head: int


POINTERS = pointers_of(AttentionTensors, AttentionBatch, Parts)
# `AttentionTensors` -> the fields of `MergedTensors`
MERGED = attrgetter(*MergedTensors._fields)


class AttentionKey(NamedTuple):
    """The facts about a call's tensors that the code depends on beyond the plan: strides, and which are given."""

    query: tuple[int, ...]
    output: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    k_scale: int | None
    v_scale: int | None
    sinks: OfHeads | None
    slopes: OfHeads | None
    q_scale: int | None
    out_scale: bool
    lse: bool
    output_dtype: torch.dtype

    @property
    def merge_key(self) -> MergeKey:
        return MergeKey(self.output, self.sinks, self.lse, self.out_scale)
