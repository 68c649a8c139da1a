"""Validates a call's arguments before anything is launched; one error states every problem.

Validation reads the host's copies of the lengths and the tensors' metadata, never device memory. With
``ATTNREG_DEBUG=1`` it also reads device memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnreg.environment import DEBUG_VARIABLE
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchError,
    BatchMetadata,
    KVCache,
    LayerParams,
    SpecError,
    paged_cache_shape,
)


def validate_params(spec: AttentionSpec, params: LayerParams) -> None:
    """Raises `SpecError` where the tensors of a layer do not match its spec."""
    for name, tensor, size, wanted in (
        ("sinks", params.sinks, spec.num_heads, "sinks" in spec.features),
        ("alibi_slopes", params.alibi_slopes, spec.num_heads, "alibi" in spec.features),
        ("k_scale", params.k_scale, spec.num_kv_heads, None),
        ("v_scale", params.v_scale, spec.num_kv_heads, None),
    ):
        if tensor is None:
            if wanted:
                raise SpecError(f"the request asks for {name.removesuffix('_slopes')}; give {name}")
            continue
        if wanted is False:
            raise SpecError(f"{name} is given, and the request does not ask for {name.removesuffix('_slopes')}")
        if tensor.shape != (size,) or not tensor.is_floating_point():
            raise SpecError(f"{name} is {_tensor_words(tensor)}; expected {size} floating-point numbers")
        if wanted is None and not spec.quantised:
            raise SpecError(f"{name} is given, and kv_dtype {spec.kv_dtype} has no scales")


def validate_batch(spec: AttentionSpec, batch: BatchMetadata) -> None:
    """Raises `BatchError` where a batch contradicts itself or does not fit a layer."""
    problems = [*_host_problems(spec, batch)]
    # the other validations compute with the lengths
    if not problems:
        problems = [*_device_tensor_problems(batch), *_storage_problems(spec, batch), *_mask_problems(spec, batch)]
    if not problems and debugging():
        problems = [*_content_problems(spec, batch)]
    _raise(problems)


def _host_problems(spec: AttentionSpec, batch: BatchMetadata) -> Iterator[str]:
    starts, lengths = batch.query_start_loc_cpu, batch.seq_lens_cpu
    for name, tensor in (("query_start_loc_cpu", starts), ("seq_lens_cpu", lengths)):
        if tensor.device.type != "cpu" or tensor.dtype != torch.int32 or tensor.ndim != 1:
            yield f"{name} is {_tensor_words(tensor)}; expected a one-dimensional int32 tensor in host memory"
            return
    if len(starts) != len(lengths) + 1:
        yield f"query_start_loc_cpu has {len(starts)} elements for {len(lengths)} requests; expected {len(lengths) + 1}"
        return
    queries = starts.diff()
    if starts[0] != 0 or (queries < 0).any():
        yield f"query_start_loc_cpu is {_short_list(starts)}; expected prefix sums that begin with 0"
        return
    if (lengths < 0).any():
        yield f"seq_lens_cpu is {_short_list(lengths)}; expected lengths of at least 0"
    too_short = (lengths < queries).nonzero().flatten()
    if spec.attn_type != "encoder_decoder" and len(too_short):
        i = int(too_short[0])
        yield (
            f"request {i} has seq_len {int(lengths[i])} and {int(queries[i])} queries; "
            "seq_lens count this step's tokens too"
        )
    if not batch.paged and batch.key_start_loc is None and not torch.equal(lengths, queries):
        yield "key_start_loc is None, which says that keys and queries are the same tokens, and seq_lens says otherwise"
    for name, bound, actual in (
        ("max_query_len", batch.max_query_len, queries),
        ("max_seq_len", batch.max_seq_len, lengths),
    ):
        if len(actual) and bound < int(actual.max()):
            yield f"{name} is {bound}; a request has {int(actual.max())}"


def _device_tensor_problems(batch: BatchMetadata) -> Iterator[str]:
    n, device = batch.num_reqs, batch.seq_lens.device
    for name, shape, dtype in (
        ("query_start_loc", (n + 1,), torch.int32),
        ("seq_lens", (n,), torch.int32),
        ("block_table", (n, None), torch.int32),
        ("slot_mapping", (None,), torch.int64),
        ("key_start_loc", (n + 1,), torch.int32),
        ("mm_prefix", (n, None, 2), torch.int32),
    ):
        tensor: Tensor | None = getattr(batch, name)
        if tensor is None:
            continue
        fits = tensor.ndim == len(shape) and all(a in (None, b) for a, b in zip(shape, tensor.shape, strict=True))
        if not fits or tensor.dtype != dtype:
            size = ", ".join("any" if s is None else str(s) for s in shape)
            yield f"{name} is {_tensor_words(tensor)}; expected [{size}] {_dtype_name(dtype)}"
        elif tensor.numel() and tensor.stride(-1) != 1:
            yield f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1 (call .contiguous())"
        if tensor.device != device:
            yield f"{name} is on {tensor.device}, seq_lens on {device}"


def _storage_problems(spec: AttentionSpec, batch: BatchMetadata) -> Iterator[str]:
    table = batch.block_table
    if spec.block_size is None and batch.slot_mapping is not None:
        yield "there is a slot_mapping, and the layer has no block_size; give it in the request"
    if table is None:
        return
    if spec.attn_type in ("encoder", "encoder_only"):
        yield f"there is a block_table, and {spec.attn_type} attention keeps no cache; give packed keys and values"
    if spec.block_size is None:
        yield "there is a block_table, and the layer has no block_size; give it in the request"
    elif batch.num_reqs and table.ndim == 2:
        longest = int(batch.seq_lens_cpu.max())
        capacity = table.shape[1] * spec.block_size
        if capacity < longest:
            yield (
                f"block_table has {table.shape[1]} blocks of {spec.block_size} tokens, which hold {capacity}; "
                f"a request has {longest}"
            )


def _mask_problems(spec: AttentionSpec, batch: BatchMetadata) -> Iterator[str]:
    if batch.causal and spec.attn_type != "decoder":
        yield f"the batch is causal, and {spec.attn_type} attention is not; build it with causal=False"


def _content_problems(spec: AttentionSpec, batch: BatchMetadata) -> Iterator[str]:
    """Problems of what only device memory holds: the device's copies of the lengths, and the slots."""
    for name in ("query_start_loc", "seq_lens"):
        host, device = getattr(batch, f"{name}_cpu"), getattr(batch, name).cpu()
        if not torch.equal(host, device):
            yield f"{name} is {_short_list(device)} on the device and {_short_list(host)} on the host"
    if batch.slot_mapping is not None:
        slots = batch.slot_mapping[batch.slot_mapping >= 0].sort().values
        repeated = slots[1:][slots.diff() == 0]
        if len(repeated):
            yield f"slot_mapping writes slot {int(repeated[0])} twice"


def validate_places(spec: AttentionSpec, batch: BatchMetadata, kv_cache: KVCache) -> None:
    """Raises `BatchError` for block ids and slots outside a cache. This reads the device, so it runs on demand only."""
    assert spec.block_size is not None
    blocks = kv_cache.key.shape[0]
    problems = []
    if batch.block_table is not None:
        used = -(-batch.seq_lens_cpu // spec.block_size)
        for i, ids in enumerate(batch.block_table.cpu()):
            bad = [b for b in ids[: int(used[i])].tolist() if not 0 <= b < blocks]
            if bad:
                problems.append(f"block_table of request {i} names block {bad[0]}; the cache has {blocks}")
    if batch.slot_mapping is not None and batch.slot_mapping.numel():
        largest = int(batch.slot_mapping.max())
        if largest >= blocks * spec.block_size:
            problems.append(f"slot_mapping names slot {largest}; the cache has {blocks * spec.block_size}")
    _raise(problems)


@dataclass(frozen=True, slots=True)
class Fit:
    """The shapes and types that every call with one batch must have: computed once, to validate a call in microseconds.

    num_tokens, num_keys, num_slots: the fewest rows of queries, of packed keys and of keys to write.
    cache_tails: the shapes of a cache's two tensors past their blocks.
    """

    spec: AttentionSpec
    device: torch.device
    num_tokens: int
    num_keys: int
    num_slots: int
    cache_tails: tuple[tuple[int, ...], ...]
    cache_dtype: torch.dtype
    debug: bool

    @classmethod
    def of(cls, spec: AttentionSpec, batch: BatchMetadata) -> Fit:
        """The requirements of a batch for a layer. Raises `BatchError` as `validate_batch` does."""
        validate_batch(spec, batch)
        slots = 0 if batch.slot_mapping is None else batch.slot_mapping.shape[0]
        keys = 0 if batch.paged else int(batch.seq_lens_cpu.sum())
        tails = () if spec.block_size is None else tuple(s[1:] for s in paged_cache_shape(spec, 0)[:2])
        device = batch.seq_lens.device
        return cls(spec, device, batch.num_tokens, keys, slots, tails, spec.cache_dtype, debugging())

    def validate_queries(self, query: Tensor, output: Tensor, lse: Tensor | None) -> None:
        """Raises `BatchError` where queries, output or LSE do not fit."""
        spec, rows = self.spec, query.shape[0]
        if (
            self._fits(query, rows, spec.num_heads, spec.head_size)
            and self._fits(output, rows, spec.num_heads, spec.head_size_v)
            and rows >= self.num_tokens
            and lse is None
        ):
            return
        problems = [
            *self._problems("query", query, (rows, spec.num_heads, spec.head_size), spec.dtype),
            *self._problems("output", output, (rows, spec.num_heads, spec.head_size_v), spec.dtype),
        ]
        if rows < self.num_tokens:
            problems.append(f"query has {rows} rows; the batch has {self.num_tokens} tokens")
        if lse is not None:
            problems += self._problems("lse", lse, (spec.num_heads, rows), torch.float32)
            if not lse.is_contiguous():
                problems.append("lse is not contiguous")
        _raise(problems)

    def validate_keys(self, key: Tensor, value: Tensor | None, min_rows: int) -> None:
        """Raises `BatchError` where key and value do not fit, or have fewer than ``min_rows`` rows."""
        spec, rows = self.spec, key.shape[0]
        if value is None:
            raise BatchError(["key and value come together or not at all"])
        if (
            self._fits(key, rows, spec.num_kv_heads, spec.head_size)
            and self._fits(value, rows, spec.num_kv_heads, spec.head_size_v)
            and rows >= min_rows
        ):
            return
        problems = [
            *self._problems("key", key, (rows, spec.num_kv_heads, spec.head_size), spec.dtype),
            *self._problems("value", value, (rows, spec.num_kv_heads, spec.head_size_v), spec.dtype),
        ]
        if rows < min_rows:
            problems.append(f"key has {rows} rows; the batch has {min_rows} keys")
        _raise(problems)

    def validate_params(self, params: LayerParams) -> None:
        """Raises `BatchError` for a tensor of the layer that is not on the batch's device."""
        for tensor in (params.sinks, params.alibi_slopes, params.k_scale, params.v_scale):
            if tensor is not None and tensor.device != self.device:
                raise BatchError([f"a tensor of the layer is on {tensor.device}, the batch on {self.device}"])

    def validate_cache(self, kv_cache: KVCache) -> None:
        """Raises `BatchError` where a cache does not have the shapes and dtype of the spec."""
        key, value = kv_cache
        dtype = self.cache_dtype
        if (
            key.dtype is dtype
            and value.dtype is dtype
            and key.shape[1:] == self.cache_tails[0]
            and value.shape[1:] == self.cache_tails[1]
            and key.stride(-1) == value.stride(-1) == 1
            and key.shape[0] == value.shape[0]
            and key.device == value.device == self.device
        ):
            return
        shape = paged_cache_shape(self.spec, kv_cache[0].shape[0])
        _raise(
            [
                *self._problems("kv_cache.key", kv_cache[0], shape.key, shape.dtype),
                *self._problems("kv_cache.value", kv_cache[1], shape.value, shape.dtype),
            ]
        )

    def _fits(self, tensor: Tensor, *shape: int) -> bool:
        return (
            tensor.shape == shape
            and tensor.dtype is self.spec.dtype
            and tensor.stride(2) == 1
            and tensor.device == self.device
        )

    def _problems(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
        if tensor.shape != shape or tensor.dtype != dtype:
            yield f"{name} is {_tensor_words(tensor)}; expected {list(shape)} {_dtype_name(dtype)}"
        elif tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
            yield f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1 (call .contiguous())"
        if tensor.device != self.device:
            yield f"{name} is on {tensor.device}, the batch on {self.device}"


def debugging() -> bool:
    """Whether validation may read the device."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def _raise(problems: list[str]) -> None:
    if problems:
        raise BatchError(problems)


def _tensor_words(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {_dtype_name(tensor.dtype)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short_list(numbers: Tensor) -> str:
    values = numbers.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, …]"
