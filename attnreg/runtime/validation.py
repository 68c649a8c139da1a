"""Validates a batch for a layer; one error states every problem.

A batch like one that passed before is not validated whole again: only its lengths are. Validation reads host memory and
the tensors' metadata, never device memory. With ``ATTNREG_DEBUG=1`` it also reads device memory. A batch on the CPU is
in host memory anyway.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from operator import gt, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from attnreg.environment import DEBUG_VARIABLE
from attnreg.runtime.batch import BatchError, BatchMetadata, tensor_words
from attnreg.runtime.interface import AttentionSpec
from attnreg.runtime.lengths import LONGEST, Lengths, content, prefix_sums, queries_of
from attnreg.runtime.tensors import (
    MOST_REMEMBERED,
    Alike,
    Remembered,
    derivative_problems,
    is_traced,
    table_problems,
    tensor_problems,
)


class Like:
    """Batches that have the same facts, and whose tensors fit a layer.

    capacity: how many keys of a request fit the block table. accepted: number of queries -> calls that passed
    validation with such a batch.
    """

    __slots__ = ("accepted", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.accepted: dict[int, Any] = {}


# os.environ takes microseconds to tell that a variable is missing, because it raises twice. So its private dictionary
# is read if it exists, else os.environ itself
_VARIABLES: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_DEBUG, _ONE = (DEBUG_VARIABLE, "1") if _VARIABLES is os.environ else map(os.environ.encodekey, (DEBUG_VARIABLE, "1"))


# the types of an op's other arguments
_NO_TENSORS = frozenset({str, int, float, bool, type(None)})
# all that the validation of a batch depends on, apart from its lengths and its tensors' facts -> what it found
_LIKE: dict[Hashable, Remembered[Like]] = {}


class Validated(NamedTuple):
    """A batch that fits a layer.

    alike: tells whether tensors have the facts of the batch's. tokens: how many queries it has. places: None if they
    cannot be read without waiting for the device.
    """

    alike: Alike
    like: Like
    tokens: int
    places: PlaceBounds | None


def validate_batch(spec: AttentionSpec, batch: BatchMetadata) -> Validated:
    """Raises `BatchError` if a batch contradicts itself or does not fit a layer."""
    if is_traced():
        refuse(["a tracer such as torch.export records this call, and sees no kernel; call attnreg.ops.attention"])
    # a tensor of causality is in ``given``
    causal, given = batch.causal if isinstance(batch.causal, bool) else None, batch.given
    kind = spec, causal, batch.key_rows is None, batch.lacks
    remembered = _LIKE.get(kind)
    known = None if remembered is None else remembered.find(given)
    lengths = None if known is None else batch.lengths()
    problems: list[str] = []
    if known is None or lengths is None or not _lengths_fit(spec, batch, known[1].capacity, lengths):
        problems = [*_host_problems(spec, batch)]
        # the other validations compute with the lengths, so these come first
        if not problems:
            problems = [*_device_tensor_problems(batch), *_storage_problems(spec, batch), *_mask_problems(spec, batch)]
        if not problems:
            problems = [*_tree_problems(batch)]
    read = batch.on_host or debugging()
    if not problems and read:
        problems = [*_content_problems(spec, batch)]
    refuse(problems)
    if known is None:
        if remembered is None:
            if len(_LIKE) >= MOST_REMEMBERED:
                _LIKE.clear()
            remembered = _LIKE.setdefault(kind, Remembered())
        known = remembered.put(given, Like(_capacity(spec, batch)))
    queries = queries_of(content(batch.host_starts)) if read else (lengths or batch.lengths()).queries
    return Validated(*known, queries.total, _places(spec, batch) if read else None)


def _capacity(spec: AttentionSpec, batch: BatchMetadata) -> int:
    """How many keys fit a row of the block table."""
    if batch.block_table is None or spec.block_size is None:
        return LONGEST
    return batch.block_table.shape[1] * spec.block_size


def _lengths_fit(spec: AttentionSpec, batch: BatchMetadata, capacity: int, lengths: Lengths) -> bool:
    """A fast check of the lengths of a batch whose tensors fit. It may return False for right lengths too, so
    `_host_problems` decides then.
    """
    (_, queries, keys, longest), tree = lengths, batch.tree_mask
    if not (
        queries.begin == 0 <= queries.least
        and queries.most <= batch.max_query_len
        and longest <= min(batch.max_seq_len, capacity)
    ):
        return False
    # requests of one query need no check: with no key, the query is padding
    by_request = queries.most > 1 and spec.attn_type != "encoder_decoder"
    return (
        not (by_request and any(map(gt, queries.each, keys)))
        and (batch.paged or batch.key_start_loc is not None or keys == queries.each)
        and (tree is None or (tree.shape[0] >= batch.num_tokens and tree.shape[1] >= batch.max_query_len))
    )


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
    """The problems of the numbers themselves; suffix: the end of their tensors' names."""
    queries = list(map(sub, starts[1:], starts))
    if starts[0] != 0 or min(queries, default=0) < 0:
        yield f"query_start_loc{suffix} is {_short_list(starts)}; expected prefix sums that begin with 0"
        return
    longest, most = max(lengths, default=0), max(queries, default=0)
    if min(lengths, default=0) < 0 or longest > LONGEST:
        yield f"seq_lens{suffix} is {_short_list(lengths)}; expected lengths of at least 0 and at most {LONGEST}"
    if spec.attn_type != "encoder_decoder":
        # a graph's padding has queries and no keys
        short = any(map(gt, queries, lengths))
        for i in [i for i, (q, k) in enumerate(zip(queries, lengths, strict=True)) if 0 < k < q][:1] if short else ():
            yield (
                f"request {i} has seq_len {lengths[i]} and {queries[i]} queries; seq_lens count this step's tokens too"
            )
    if not batch.paged and batch.key_start_loc is None and lengths != queries:
        yield "key_start_loc is None, so keys and queries are the same tokens, but seq_lens differs from the queries"
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


def _tree_problems(batch: BatchMetadata) -> Iterator[str]:
    """The problems of a tree_mask's size, for a batch whose lengths can be read."""
    tree, columns = batch.tree_mask, batch.max_query_len
    if tree is not None and (tree.shape[0] < batch.num_tokens or tree.shape[1] < columns):
        yield (
            f"tree_mask is {tensor_words(tree)}; the batch has {batch.num_tokens} tokens and up to {columns} queries "
            "a request"
        )


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
        if not table.shape[1]:
            # kernels read the first column for padding too, whose requests have no key
            yield "block_table has no column; give it one, of any number for requests without keys"
        elif capacity < longest:
            yield (
                f"block_table has {table.shape[1]} blocks of {spec.block_size} tokens, which hold {capacity}; "
                f"a request has {longest}"
            )


def _mask_problems(spec: AttentionSpec, batch: BatchMetadata) -> Iterator[str]:
    if batch.causal is not False and spec.attn_type != "decoder":
        yield f"the batch is causal, and {spec.attn_type} attention is not; build it with causal=False"


def _content_problems(spec: AttentionSpec, batch: BatchMetadata) -> Iterator[str]:
    """The problems of the content of device memory: the device's copies of the lengths, and the slots."""
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


class PlaceBounds(NamedTuple):
    """The largest and the smallest block id of the keys that a batch reads, each with its request; the largest slot.

    Without keys or slots, the largest are -1 and the smallest is 0.
    """

    most: tuple[int, int]
    least: tuple[int, int]
    slot: int

    def problems(self, blocks: int, block_size: int) -> Iterator[str]:
        """The problems of places outside a cache of ``blocks`` blocks."""
        block, request = self.least if self.least[0] < 0 else self.most
        if self.least[0] < 0 or block >= blocks:
            yield f"block_table of request {request} names block {block}; the cache has {blocks}"
        if self.slot >= blocks * block_size:
            yield f"slot_mapping names slot {self.slot}; the cache has {blocks * block_size}"


def _places(spec: AttentionSpec, batch: BatchMetadata) -> PlaceBounds:
    """The places that a batch names. Reads the device."""
    most, least, slot = (-1, 0), (0, 0), -1
    if batch.block_table is not None and spec.block_size is not None and batch.block_table.numel():
        table, lengths = batch.block_table.cpu(), batch.seq_lens.cpu()
        # blocks before a window may have been freed; they are not read, unless a prefix range reaches them
        first = torch.zeros_like(lengths)
        left = spec.sides(batch.causal)[0]
        if left >= 0 and batch.mm_prefix is None:
            first = (lengths - batch.query_start_loc.cpu().diff() - left).clamp(min=0)
        column = torch.arange(table.shape[1], device="cpu")
        used = (column >= (first // spec.block_size)[:, None]) & (column < -(-lengths // spec.block_size)[:, None])
        highest, lowest = table.masked_fill(~used, -1).amax(1), table.masked_fill(~used, 0).amin(1)
        most = int(highest.max()), int(highest.argmax())
        least = int(lowest.min()), int(lowest.argmin())
    if batch.slot_mapping is not None and batch.slot_mapping.numel():
        slot = int(batch.slot_mapping.max())
    return PlaceBounds(most, least, slot)


def debugging() -> bool:
    """Whether validation may read the device. It may not while a graph is captured, which allows no such copy."""
    if _VARIABLES.get(_DEBUG) != _ONE:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def refuse_derivatives(library: Any, name: str, function: Callable[..., None]) -> None:
    """Makes an op refuse gradients and tangents that it would lose, also while a compiler traces it.

    function: what the op does with tensors that have data. If nothing else has to see the call, `function` is called
    directly: a second pass through PyTorch's dispatcher takes as long as the op itself.
    """

    def refusing(*args: Any, **kwargs: Any) -> None:
        given = (*args, *kwargs.values()) if kwargs else args
        # no tensor is of a subclass, without data, or of derivatives; a list, because a generator takes longer
        plain = not any([  # noqa: C419
            (x.requires_grad or x.is_meta) if type(x) is Tensor else type(x) not in _NO_TENSORS for x in given
        ])  # fmt: skip
        if not plain or forward_ad._current_level >= 0:
            tensors = [x for x in given if isinstance(x, Tensor)]
            refuse(derivative_problems(tensors, lambda: _tensor_names(name, args, kwargs)))
        if plain and not (is_in_torch_dispatch_mode() or torch._C._functorch.peek_interpreter_stack()):
            function(*args, **kwargs)
            return
        with torch._C._AutoDispatchBelowAutograd():
            getattr(torch.ops.attnreg, name)(*args, **kwargs)

    library.impl(name, refusing, "Autograd")


def _tensor_names(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of a call's arguments that are tensors."""
    names = [argument.name for argument in getattr(torch.ops.attnreg, name).default._schema.arguments][: len(args)]
    return [name for name, x in (*zip(names, args, strict=True), *kwargs.items()) if isinstance(x, Tensor)]


def fake_problems(names: Iterable[str], tensors: Iterable[object]) -> list[str]:
    """The problem of the first FakeTensor, which stands for a tensor while PyTorch traces and has no address."""
    fakes = (name for name, x in zip(names, tensors, strict=False) if isinstance(x, FakeTensor))
    why = "is a FakeTensor, which has no memory: a program that is traced calls attnreg.ops.attention"
    return [f"{name} {why}" for name in islice(fakes, 1)]


def refuse(problems: list[str]) -> None:
    if problems:
        raise BatchError(problems)


def _short_list(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, …]"
