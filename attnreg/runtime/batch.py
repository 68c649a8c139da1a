"""The batch of a step: its lengths, on the device and in host memory, and where its keys are."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter, countOf, index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnreg.runtime.lengths import LONGEST, Lengths, bytes_of, content, queries_of, starts_of
from attnreg.runtime.tensors import has_memory, named
from attnreg.runtime.tensors import tensor_words as tensor_words

if TYPE_CHECKING:
    from typing import Self

_INT32 = 2**31 - 1


class BatchError(ValueError):
    """Raised for tensors or lengths that do not fit the layer or each other; ``problems`` lists every problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchMetadata:
    """The requests of one step, for all layers of one KV-cache group. `BatchMetadata.build` makes it from lengths.

    query_start_loc:     [num_reqs + 1] int32, prefix sums of the queries per request; a request may have none
    seq_lens:            [num_reqs] int32, keys per request, this step's included. At least the request's queries, or 0
                         for the padding of a graph, whose queries see no key. For encoder_decoder the keys are the
                         encoder's
    block_table:         [num_reqs, max_blocks] int32, physical block ids; entries past a request's last block may hold
                         anything. None: there is no cache, and ``forward`` takes packed keys and values
    slot_mapping:        [num_keys] int64, where ``write_kv`` puts each row of key and value, as block * block_size +
                         offset. A negative slot: the row is not written. Other slots are distinct. None: nothing is
                         written. A decoder that reads a cache has one slot for each of this step's tokens
    max_query_len, max_seq_len: upper bounds of the lengths
    causal:              queries see no later keys. False for all but decoder layers. Where requests differ, [num_reqs]
                         bool on the device
    query_start_loc_cpu, seq_lens_cpu: the same numbers in host memory. With a cache, seq_lens_cpu may hold upper
                         bounds, for lengths that the device computes
    key_start_loc:       [num_reqs + 1] int32, prefix sums of ``seq_lens``: where each request's packed keys begin,
                         without a cache. None: keys and queries are the same tokens
    key_rows:            the rows of key and value, if the requests' keys may lie anywhere among them. key_start_loc is
                         then no prefix sum, and its last element is not read. None: the keys of one request follow
                         those of the request before
    mm_prefix:           [num_reqs, max_ranges, 2] int32, half-open ranges [begin, end) of key positions within which
                         all tokens see each other. end <= begin is an empty range; keys before 0 do not exist
    tree_mask:           [tokens, longest query] bool: whether the query of a row sees the query of a column of the
                         same request. A query always sees itself. Columns past the request's queries are not read

    Its tensors may be changed in place between calls: every call computes with the current content.
    Backends that no CUDA graph can capture, such as TORCH_SDPA, read the device's tensors while they plan. They plan
    again after PyTorch has counted a change. PyTorch counts no changes of tensors made in inference mode, so with such
    tensors they plan for each call. PyTorch counts no changes by other libraries' kernels: build a new batch after
    those. Raises `BatchError`.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    query_start_loc_cpu: Tensor
    seq_lens_cpu: Tensor
    block_table: Tensor | None = None
    slot_mapping: Tensor | None = None
    causal: bool | Tensor = True
    key_start_loc: Tensor | None = None
    key_rows: int | None = None
    mm_prefix: Tensor | None = None
    tree_mask: Tensor | None = None
    # this batch's plans by layer kind; `Attention` fills it, the layers share it
    plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    # the tensors that the batch has; and for each optional or required one, whether it is missing
    given: tuple[Tensor, ...] = field(init=False, repr=False)
    lacks: tuple[bool, ...] = field(init=False, repr=False)
    # two lists: the tensors in host memory, each with its address and its bytes (None if it is not contiguous); and the
    # tensors on a device
    _watched: list[Any] = field(default_factory=list, init=False, repr=False)
    # the bytes of seq_lens_cpu as last read, and the `Lengths` in them and in query_start_loc_cpu
    _read: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        tensors = self.tensors
        given = tuple([x for x in tensors if x is not None])
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "lacks", tuple([x is None for x in tensors]))
        if not _plain(self, given) and (problems := [*_field_problems(self)]):
            raise BatchError(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy plans anew: plans hold kernels and addresses, which another process does not have
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self) if f.init})

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int] | None = None,
        *,
        device: torch.device | str = "cpu",
        block_table: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        causal: bool | Sequence[bool] | Tensor = True,
        mm_prefix: Tensor | None = None,
        tree_mask: Tensor | None = None,
        key_starts: Sequence[int] | None = None,
        key_rows: int | None = None,
    ) -> Self:
        """A batch from its lengths (host integers); ``seq_lens`` None: the keys are the queries' own tokens.

        causal: a sequence has one truth value for each request. key_starts: the row of each request's first key, among
        ``key_rows`` rows of packed keys. Raises `BatchError` for lengths that are not integers of at least 0, or if
        query_lens and seq_lens differ in number.
        """
        problems: list[str] = []
        queries, query_numbers, most_queries = _lengths("query_lens", query_lens, problems)
        keys, key_numbers, most_keys = queries, query_numbers, most_queries
        if seq_lens is not None:
            keys, key_numbers, most_keys = _lengths("seq_lens", seq_lens, problems)
        if not problems and len(keys) != len(queries):
            problems.append(f"query_lens has {len(queries) // 4} requests and seq_lens {len(keys) // 4}")
        if problems:
            raise BatchError(problems)
        if (key_starts is None) != (key_rows is None) or (key_starts is not None and len(key_starts) != len(keys) // 4):
            raise BatchError(["key_starts and key_rows come together, with one start for each request"])
        starts, begins = starts_of(queries), b""
        if block_table is None and (keys != queries or key_starts is not None):
            begins = starts_of(keys) if key_starts is None else _key_starts(key_starts)
        # one tensor, so that one copy takes all numbers to the device
        numbers = bytearray(b"".join((starts, keys, begins)))
        sizes = [len(starts) // 4, len(keys) // 4, *([len(begins) // 4] if begins else ())]
        host, on_device = _parts(numbers, sizes, device)
        read = [keys, named(Lengths, (starts, queries_of(starts), key_numbers, most_keys))]
        # not by the class, whose generated initialisation takes twice as long
        batch: Self = object.__new__(cls)
        values: tuple[Any, ...] = (
            *on_device[:2], most_queries, most_keys, *host[:2], block_table, slot_mapping, _by_request(causal, device),
            on_device[2] if begins else None, key_rows, mm_prefix, tree_mask, {}, (), (), [], read,
        )  # fmt: skip
        for put, value in zip(_PUT, values, strict=True):
            put(batch, value)
        batch.__post_init__()
        return batch

    @property
    def num_reqs(self) -> int:
        """The number of requests."""
        return self.seq_lens_cpu.shape[0]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors of the batch, None for each that it lacks."""
        causal = self.causal
        return (causal if isinstance(causal, Tensor) else None, *_others(self))

    @property
    def num_tokens(self) -> int:
        """The number of query rows, without padding."""
        return int(self.host_starts[-1])

    @property
    def paged(self) -> bool:
        """Whether keys and values are in a paged cache."""
        return self.block_table is not None

    @property
    def on_host(self) -> bool:
        """Whether the batch's device is the CPU, so that the host can read the device's lengths."""
        return self.seq_lens.is_cpu

    @property
    def host_starts(self) -> Tensor:
        """The host's ``query_start_loc``: the tensor itself if it is in host memory, else query_start_loc_cpu."""
        return self.query_start_loc if self.on_host else self.query_start_loc_cpu

    @property
    def host_lens(self) -> Tensor:
        """The host's ``seq_lens``: the tensor itself if it is in host memory, else seq_lens_cpu, maybe upper bounds."""
        return self.seq_lens if self.on_host else self.seq_lens_cpu

    def lengths(self) -> Lengths:
        """The numbers that `query_start_loc_cpu` and `seq_lens_cpu` hold now, both int32."""
        starts, keys, read = content(self.query_start_loc_cpu), content(self.seq_lens_cpu), self._read
        if not read or read[0] != keys or read[1].starts != starts:
            read[:] = keys, Lengths.of(starts, keys)
        return read[1]  # type: ignore[no-any-return]

    def state(self, content: bool = True) -> list[Any]:
        """A value that changes when tensors of the batch are changed in place.

        Host tensors are compared by their bytes, because numpy arrays may share their memory. content: tensors on a
        device count too, for plans that were made from them. Their changes are those that PyTorch counts. It counts
        none of tensors made in inference mode; with one of these, no two states are equal.
        """
        if not self._watched:
            self.watch()
        read, on_device = self._watched
        state: list[Any] = []
        for tensor, address, memory in read:
            # the tensor may have got other memory since
            now = tensor.data_ptr()
            held = memory is not None and now == address
            state.append(memory.raw if held else (now, _elements(tensor)))
        if content:
            state += [(x.data_ptr(), object() if x.is_inference() else x._version) for x in on_device]
        return state

    def watch(self) -> None:
        """Makes `state` compare with the tensors as they are now, after their shapes or strides may have changed."""
        read: list[Any] = []
        on_device: list[Tensor] = []
        for x in self.given:
            if x.is_cpu:
                address = _address(x)
                # a view that is not contiguous may reach over any amount of memory
                read.append((x, address, bytes_of(x.nbytes).from_address(address) if x.is_contiguous() else None))
            else:
                on_device.append(x)
        self._watched[:] = read, on_device


def _rebuild(kind: type[BatchMetadata], given: dict[str, Any]) -> BatchMetadata:
    return kind(**given)


# what sets each field of a batch, in order
_PUT = [getattr(BatchMetadata, one.name).__set__ for one in fields(BatchMetadata)]
# the tensors of a batch, and whether each is optional
_TENSORS = {
    "causal": True, "query_start_loc": False, "seq_lens": False, "query_start_loc_cpu": False, "seq_lens_cpu": False,
    "block_table": True, "slot_mapping": True, "key_start_loc": True, "mm_prefix": True, "tree_mask": True,
}  # fmt: skip
_others = attrgetter(*[name for name in _TENSORS if name != "causal"])
_STRIDED = torch.strided
# under another name, because `BatchMetadata.state` has an argument `content`
_elements = content


def _address(tensor: Tensor) -> int:
    """The address of a tensor in host memory. Raises `BatchError` for a tensor without memory, such as a tracer's."""
    if has_memory(tensor):
        return tensor.data_ptr()
    kind = type(tensor).__name__
    problem = (
        f"a tensor of the batch ({kind} {tensor_words(tensor)}) has no memory to read its numbers from; build the "
    )
    problem += "batch outside what torch.export, vmap or another tracer sees, which attnreg.ops.attention may be in"
    raise BatchError([problem])


def _plain(batch: BatchMetadata, given: tuple[Any, ...]) -> bool:
    """A fast check of a batch whose ``causal`` is one bool: True if it has no problem, False if it may have one."""
    for x in given:
        if not isinstance(x, Tensor) or x.layout is not _STRIDED:
            return False
    longest, most, rows = batch.max_seq_len, batch.max_query_len, batch.key_rows
    placed = batch.key_start_loc is not None and batch.block_table is None
    return (
        type(longest) is int is type(most)
        and 0 <= most <= longest <= LONGEST
        and type(batch.causal) is bool
        and (rows is None or (type(rows) is int and 0 <= rows <= _INT32 and placed))
        and not (batch.query_start_loc is None or batch.seq_lens is None)
        and not (batch.query_start_loc_cpu is None or batch.seq_lens_cpu is None)
    )


def _field_problems(batch: BatchMetadata) -> Iterator[str]:
    for name in ("max_query_len", "max_seq_len"):
        value = getattr(batch, name)
        if type(value) is not int or not 0 <= value <= LONGEST:
            yield f"{name} is {value!r}; expected an integer from 0 to {LONGEST}"
    if batch.key_rows is not None and (type(batch.key_rows) is not int or not 0 <= batch.key_rows <= _INT32):
        yield f"key_rows is {batch.key_rows!r}; expected an integer from 0 to {_INT32}, or None"
    if batch.key_rows is not None and (batch.key_start_loc is None or batch.block_table is not None):
        yield "key_rows is given, which is for packed keys that key_start_loc places"
    if type(batch.causal) is not bool and not isinstance(batch.causal, Tensor):
        yield f"causal is {tensor_words(batch.causal)}; expected True, False, or a tensor [num_reqs] bool"
    for (name, optional), value in zip(_TENSORS.items(), batch.tensors, strict=True):
        if not ((optional and value is None) or (isinstance(value, Tensor) and value.layout is _STRIDED)):
            cure = "a tensor with strides" + (" or None" if optional else "")
            yield f"{name} is {tensor_words(value)}; expected {cure}"


def _by_request(causal: Any, device: torch.device | str) -> Any:
    """A sequence of bools as a tensor on a device; anything else unchanged."""
    if type(causal) is not bool and isinstance(causal, Sequence) and set(map(type, causal)) <= {bool}:
        return torch.tensor(causal, dtype=torch.bool, device="cpu").to(device, non_blocking=True)
    return causal


def _parts(numbers: bytearray, sizes: list[int], device: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The int32 numbers as tensors of these sizes, one after the other: in host memory, and on a device."""
    if torch.is_inference_mode_enabled():
        # PyTorch counts no changes of tensors made in this mode
        with torch.inference_mode(False):
            return _parts(numbers, sizes, device)
    host = torch.frombuffer(numbers, dtype=torch.int32)
    # unsafe_split makes no views, which takes less time; nothing reads the whole tensor any more
    on_device = host.to(device, non_blocking=True).unsafe_split_with_sizes(sizes)
    return host.unsafe_split_with_sizes(sizes), on_device


def _key_starts(key_starts: Sequence[int]) -> bytes:
    """The first rows of keys as int32, with a last element that is not read."""
    try:
        return array("i", [*key_starts, 0]).tobytes()
    except (TypeError, OverflowError) as e:
        raise BatchError([f"key_starts is {tensor_words(key_starts)}; expected integers up to {_INT32}"]) from e


def _lengths(name: str, lengths: Any, problems: list[str]) -> tuple[bytes, list[int], int]:
    """The memory of lengths as 32-bit integers, the lengths, and the largest. Adds what is wrong to ``problems``."""
    try:
        values = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        plain = countOf(map(type, values), int) == len(values)
    except TypeError:
        problems.append(f"{name} is {tensor_words(lengths)}; expected a sequence of integers")
        return b"", [], 0
    if plain:
        try:
            # unsigned numbers take half the time, and array refuses those below 0
            memory, most = array("I", values).tobytes(), max(values) if values else 0
        except OverflowError:
            most = LONGEST + 1
        if most <= LONGEST and most * len(values) <= _INT32:
            return memory, values, most
    else:
        values = [_integer(value) for value in values]
    wrong = [(i, value) for i, value in enumerate(values) if type(value) is not int or not 0 <= value <= LONGEST]
    problems += [f"{name}[{i}] is {value!r}; expected an integer from 0 to {LONGEST}" for i, value in wrong]
    if wrong:
        return b"", [], 0
    most = max(values, default=0)
    if most * len(values) > _INT32 < sum(values):
        problems.append(f"{name} are {sum(values)} tokens together; prefix sums hold up to {_INT32}")
    return array("I", values).tobytes(), values, most


def _integer(value: Any) -> Any:
    """An integer of any type as Python's int; anything else unchanged. A bool stays a bool: it is not a length."""
    if isinstance(value, bool):
        return value
    try:
        return index(value)
    except TypeError:
        return value
