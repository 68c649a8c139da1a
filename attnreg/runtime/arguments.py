"""Validates a call's arguments before anything is launched; one error states every problem.

Validation reads host memory and the tensors' metadata, never device memory. With ``ATTNREG_DEBUG=1`` it also reads
device memory; a batch on the processor is in host memory as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import gt, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.environment import DEBUG_VARIABLE
from attnreg.runtime.batch import LONGEST, BatchError, BatchMetadata, prefix_sums, tensor_words
from attnreg.runtime.interface import AttentionSpec, KVCache, LayerParams, SpecError, paged_cache_shape
from attnreg.runtime.tensors import signature, table_problems, tensor_problems


def validate_params(spec: AttentionSpec, params: LayerParams) -> None:
    """Raises `SpecError` where the tensors of a layer do not match its spec."""
    for name, tensor, size, dtype in _params(spec, params):
        scale, feature = dtype is not None, _FEATURES.get(name)
        if tensor is None:
            if not scale and feature in spec.features:
                raise SpecError(f"the request asks for {feature}; give {name}")
            continue
        if feature is not None and feature not in spec.features:
            raise SpecError(f"{name} is given, and the request does not ask for {feature}")
        problem = next(tensor_problems(name, tensor, (size,), dtype, dense=False), None)
        if problem is not None:
            raise SpecError(problem)
        if feature is None and not spec.quantised:
            raise SpecError(f"{name} is given, and kv_dtype {spec.kv_dtype} has no scales")


def _params(spec: AttentionSpec, params: LayerParams) -> Iterator[tuple[str, Tensor | None, int, torch.dtype | None]]:
    """The name of each tensor of a layer, the tensor, its size, and its type (None: any floating one)."""
    yield "sinks", params.sinks, spec.num_heads, None
    yield "alibi_slopes", params.alibi_slopes, spec.num_heads, None
    yield "k_scale", params.k_scale, spec.num_kv_heads, torch.float32
    yield "v_scale", params.v_scale, spec.num_kv_heads, torch.float32
    yield "q_scale", params.q_scale, spec.num_kv_heads, torch.float32
    yield "out_scale", params.out_scale, 1, torch.float32


# the feature that a tensor of a layer belongs to; other scales belong to a quantised cache
_FEATURES = {"sinks": "sinks", "alibi_slopes": "alibi", "q_scale": "fp8_query", "out_scale": "fp8_output"}


def validate_batch(spec: AttentionSpec, batch: BatchMetadata) -> None:
    """Raises `BatchError` where a batch contradicts itself or does not fit a layer."""
    problems = [*_host_problems(spec, batch)]
    # the other validations compute with the lengths
    if not problems:
        problems = [*_device_tensor_problems(batch), *_storage_problems(spec, batch), *_mask_problems(spec, batch)]
    if not problems and (batch.on_host or debugging()):
        problems = [*_content_problems(spec, batch)]
    _raise(problems)


def _host_problems(spec: AttentionSpec, batch: BatchMetadata) -> Iterator[str]:
    starts, lengths = batch.query_start_loc_cpu, batch.seq_lens_cpu
    for name, tensor in (("query_start_loc_cpu", starts), ("seq_lens_cpu", lengths)):
        if tensor.device.type != "cpu" or tensor.dtype != torch.int32 or tensor.ndim != 1:
            yield f"{name} is {tensor_words(tensor)}; expected a one-dimensional int32 tensor in host memory"
            return
    if len(starts) != len(lengths) + 1:
        yield f"query_start_loc_cpu has {len(starts)} elements for {len(lengths)} requests; expected {len(lengths) + 1}"
        return
    yield from _length_problems(spec, batch, starts.tolist(), lengths.tolist(), "_cpu")


def _length_problems(
    spec: AttentionSpec, batch: BatchMetadata, starts: list[int], lengths: list[int], suffix: str
) -> Iterator[str]:
    """The problems of the numbers themselves; suffix: of the names of their tensors."""
    queries = list(map(sub, starts[1:], starts))
    if starts[0] != 0 or min(queries, default=0) < 0:
        yield f"query_start_loc{suffix} is {_short_list(starts)}; expected prefix sums that begin with 0"
        return
    longest, most = max(lengths, default=0), max(queries, default=0)
    if min(lengths, default=0) < 0 or longest > LONGEST:
        yield f"seq_lens{suffix} is {_short_list(lengths)}; expected lengths of at least 0 and at most {LONGEST}"
    if spec.attn_type != "encoder_decoder":
        # padding of a graph has queries and no keys
        short = any(map(gt, queries, lengths))
        for i in [i for i, (q, k) in enumerate(zip(queries, lengths, strict=True)) if 0 < k < q][:1] if short else ():
            yield (
                f"request {i} has seq_len {lengths[i]} and {queries[i]} queries; seq_lens count this step's tokens too"
            )
    if not batch.paged and batch.key_start_loc is None and lengths != queries:
        yield "key_start_loc is None, which says that keys and queries are the same tokens, and seq_lens says otherwise"
    for name, bound, actual in (
        ("max_query_len", batch.max_query_len, most),
        ("max_seq_len", batch.max_seq_len, longest),
    ):
        if bound < actual:
            yield f"{name} is {bound}; a request has {actual}"


def _device_tensor_problems(batch: BatchMetadata) -> Iterator[str]:
    n, device = batch.num_reqs, batch.seq_lens.device
    for name, shape, dtype in (
        ("query_start_loc", (n + 1,), torch.int32),
        ("seq_lens", (n,), torch.int32),
        ("causal", (n,), torch.bool),
        ("block_table", (n, None), torch.int32),
        ("slot_mapping", (None,), torch.int64),
        ("key_start_loc", (n + 1,), torch.int32),
        ("mm_prefix", (n, None, 2), torch.int32),
        ("tree_mask", (None, None), torch.bool),
    ):
        tensor = getattr(batch, name)
        if isinstance(tensor, Tensor):
            yield from tensor_problems(name, tensor, shape, dtype, device=device, beside="seq_lens")
            yield from table_problems(name, tensor)
    tree, rows, columns = batch.tree_mask, batch.num_tokens, batch.max_query_len
    if tree is not None and tree.ndim == 2 and (tree.shape[0] < rows or tree.shape[1] < columns):
        yield f"tree_mask is {tensor_words(tree)}; the batch has {rows} tokens and up to {columns} queries a request"


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
    if batch.causal is not False and spec.attn_type != "decoder":
        yield f"the batch is causal, and {spec.attn_type} attention is not; build it with causal=False"


def _content_problems(spec: AttentionSpec, batch: BatchMetadata) -> Iterator[str]:
    """Problems of what a device's memory holds: its copies of the lengths, and the slots."""
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    if starts != batch.query_start_loc_cpu.tolist() and debugging():
        on_host = _short_list(batch.query_start_loc_cpu.tolist())
        yield f"query_start_loc is {_short_list(starts)} on the device and {on_host} on the host"
    if any(a > b for a, b in zip(lengths, batch.seq_lens_cpu.tolist(), strict=True)):
        on_host = _short_list(batch.seq_lens_cpu.tolist())
        yield f"seq_lens is {_short_list(lengths)} on the device and {on_host} on the host, which is no upper bound"
    yield from _length_problems(spec, batch, starts, lengths, "")
    if batch.key_start_loc is not None and batch.key_rows is not None:
        ends = zip(batch.key_start_loc.tolist(), lengths, strict=False)
        for i, (begin, length) in enumerate(ends):
            if length and not 0 <= begin <= batch.key_rows - length:
                yield f"key_start_loc[{i}] is {begin} for {length} keys; key_rows is {batch.key_rows}"
                break
    elif batch.key_start_loc is not None and batch.key_start_loc.tolist() != prefix_sums(lengths):
        begins = _short_list(batch.key_start_loc.tolist())
        yield f"key_start_loc is {begins}; expected the prefix sums of seq_lens, {_short_list(prefix_sums(lengths))}"
    if batch.slot_mapping is not None:
        slots = batch.slot_mapping[batch.slot_mapping >= 0].sort().values
        repeated = slots[1:][slots.diff() == 0]
        if len(repeated):
            yield f"slot_mapping writes slot {int(repeated[0])} twice"


class Places(NamedTuple):
    """The largest and the smallest block id of the keys that a batch reads, with their requests; the largest slot."""

    most: tuple[int, int]
    least: tuple[int, int]
    slot: int

    def problems(self, blocks: int, block_size: int) -> Iterator[str]:
        """The problems of places outside a cache of so many blocks."""
        block, request = self.least if self.least[0] < 0 else self.most
        if not -1 < block < max(blocks, 1):
            yield f"block_table of request {request} names block {block}; the cache has {blocks}"
        if self.slot >= blocks * block_size:
            yield f"slot_mapping names slot {self.slot}; the cache has {blocks * block_size}"


def _places(spec: AttentionSpec, batch: BatchMetadata) -> Places:
    """The places that a batch names. This reads the device."""
    most, least, slot = (0, 0), (0, 0), -1
    if batch.block_table is not None and spec.block_size is not None and batch.block_table.numel():
        table, lengths = batch.block_table.cpu(), batch.seq_lens.cpu()
        # freed blocks before a window are not read, unless a prefix range reaches there
        first = torch.zeros_like(lengths)
        left = spec.sides(batch.causal)[0]
        if left >= 0 and batch.mm_prefix is None:
            first = (lengths - batch.query_start_loc.cpu().diff() - left).clamp(min=0)
        column = torch.arange(table.shape[1], device="cpu")
        used = (column >= (first // spec.block_size)[:, None]) & (column < -(-lengths // spec.block_size)[:, None])
        highest, lowest = table.masked_fill(~used, 0).amax(1), table.masked_fill(~used, 0).amin(1)
        most = int(highest.max()), int(highest.argmax())
        least = int(lowest.min()), int(lowest.argmin())
    if batch.slot_mapping is not None and batch.slot_mapping.numel():
        slot = int(batch.slot_mapping.max())
    return Places(most, least, slot)


class Tensors(NamedTuple):
    """The tensors of a call, heads apart from their elements. write, attend: the parts of a forward that run."""

    write: bool
    attend: bool
    query: Any
    output: Any
    lse: Any
    key: Any
    value: Any
    kv_cache: Any


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The shapes and types that every call with one batch must have.

    num_tokens, num_keys, num_slots: the fewest rows of queries, of packed keys and of keys to write. accepted: what is
    known of calls that fitted, so that only the first of its kind is looked at closely.
    """

    spec: AttentionSpec
    device: torch.device
    paged: bool
    num_tokens: int
    num_keys: int
    num_slots: int | None
    places: Places | None
    accepted: set[Any] = field(default_factory=set)

    @classmethod
    def of(cls, spec: AttentionSpec, batch: BatchMetadata) -> Fit:
        """The requirements of a batch for a layer. Raises `BatchError` as `validate_batch` does."""
        validate_batch(spec, batch)
        slots = None if batch.slot_mapping is None else batch.slot_mapping.shape[0]
        keys = 0 if batch.paged else int(batch.host_lens.sum()) if batch.key_rows is None else batch.key_rows
        places = _places(spec, batch) if batch.on_host or debugging() else None
        return cls(spec, batch.seq_lens.device, batch.paged, batch.num_tokens, keys, slots, places)

    def validate(self, given: Tensors, params: LayerParams) -> None:
        """Raises `BatchError` where the tensors of a call, or of its layer, do not fit."""
        cache = given.kv_cache or (None, None)
        tensors = (*given[2:7], *cache, *[x for _, x, _, _ in _params(self.spec, params)])
        try:
            known = (given.write, given.attend, *[signature(x) for x in tensors])
        except (AttributeError, RuntimeError):
            # no tensor, or one without strides
            known = None
        if known not in self.accepted:
            _raise([*self._problems(given, params)])
            self.accepted.add(known)

    def _problems(self, given: Tensors, params: LayerParams) -> Iterator[str]:
        if given.write and self.num_slots is None:
            yield "slot_mapping is None: there is no place to write key and value to"
        if given.attend:
            # a forward that writes gives both, and attends to one of them
            if not given.write and (self.paged != (given.kv_cache is not None) or self.paged != (given.key is None)):
                yield _STORAGE[self.paged]
            yield from self._query_problems(given)
        packed = given.attend and not self.paged
        if given.key is not None or given.value is not None:
            rows = max(self.num_slots or 0 if given.write else 0, self.num_keys if packed else 0)
            yield from self._key_problems(given, rows)
        if given.kv_cache is not None:
            yield from self._cache_problems(given.kv_cache, written=given.write)
        for name, tensor, size, dtype in _params(self.spec, params):
            if tensor is not None:
                yield from tensor_problems(name, tensor, (size,), dtype, device=self.device, dense=False)

    def _query_problems(self, given: Tensors) -> Iterator[str]:
        spec, query = self.spec, given.query
        rows = query.shape[0] if isinstance(query, Tensor) and query.ndim else None
        for name, size, dtype in (
            ("query", spec.head_size, spec.query_dtype), ("output", spec.head_size_v, spec.output_dtype),
        ):  # fmt: skip
            tensor, shape = getattr(given, name), (rows, spec.num_heads, size)
            yield from tensor_problems(name, tensor, shape, dtype, device=self.device, written=name == "output")
        if rows is not None and rows < self.num_tokens:
            yield f"query has {rows} rows; the batch has {self.num_tokens} tokens"
        if given.lse is not None:
            sizes = spec.num_heads, rows
            yield from tensor_problems("lse", given.lse, sizes, torch.float32, device=self.device, written=True)
            if isinstance(given.lse, Tensor) and not given.lse.is_contiguous():
                yield f"lse has strides {list(given.lse.stride())}; expected contiguous memory"

    def _key_problems(self, given: Tensors, min_rows: int) -> Iterator[str]:
        spec, key = self.spec, given.key
        if key is None or given.value is None:
            yield f"{'key' if key is None else 'value'} is None; expected key and value, or neither"
            return
        rows = key.shape[0] if isinstance(key, Tensor) and key.ndim else None
        for name, size in (("key", spec.head_size), ("value", spec.head_size_v)):
            shape = rows, spec.num_kv_heads, size
            yield from tensor_problems(name, getattr(given, name), shape, spec.dtype, device=self.device)
        if rows is not None and rows < min_rows:
            yield f"key has {rows} rows; the batch has {min_rows} keys"

    def _cache_problems(self, kv_cache: Any, *, written: bool) -> Iterator[str]:
        key = kv_cache[0]
        blocks = key.shape[0] if isinstance(key, Tensor) and key.ndim else 0
        shape = paged_cache_shape(self.spec, blocks)
        problems: list[str] = []
        for name, tensor, sizes in (("key", kv_cache[0], shape.key), ("value", kv_cache[1], shape.value)):
            problems += tensor_problems(
                f"kv_cache.{name}", tensor, sizes, shape.dtype, device=self.device, written=written
            )
        yield from problems
        if not problems and self.places is not None and self.spec.block_size is not None:
            used = self.places if written else self.places._replace(slot=-1)
            yield from used.problems(blocks, self.spec.block_size)


_STORAGE = {
    True: "the batch has a block_table: attention reads kv_cache, and takes no packed keys and values",
    False: "the batch has no block_table: attention takes packed keys and values, and reads no kv_cache",
}


def as_cache(kv_cache: Any) -> KVCache:
    """A pair of tensors as a cache. Raises `BatchError` for anything else."""
    if isinstance(kv_cache, tuple | list) and len(kv_cache) == 2:
        return KVCache(*kv_cache)
    raise BatchError([f"kv_cache is {tensor_words(kv_cache)}; expected KVCache(key, value)"])


def debugging() -> bool:
    """Whether validation may read the device; not while a graph is captured, which allows no such copy."""
    if os.environ.get(DEBUG_VARIABLE) != "1":
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _raise(problems: list[str]) -> None:
    if problems:
        raise BatchError(problems)


def _short_list(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, …]"
