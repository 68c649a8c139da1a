"""Validates a call's arguments before anything is launched; one error states every problem."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from attnreg.runtime.batch import BatchError, BatchMetadata, tensor_words
from attnreg.runtime.interface import AttentionSpec, Call, KVCache, LayerParams, SpecError, paged_cache_shape
from attnreg.runtime.states.memory import overlap_words, reach, share_memory
from attnreg.runtime.tensors import NONE_FREE, Alike, Free, Remembered, derivative_problems, named, tensor_problems
from attnreg.runtime.validation import PlaceBounds, fake_problems, refuse, validate_batch


def validate_device(platform: str) -> None:
    """Raises `SpecError` if PyTorch sees no device of a platform; Triton's interpreter counts as one."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    present = {
        "cuda": torch.version.hip is None and torch.cuda.is_available(),
        "rocm": torch.version.hip is not None and torch.cuda.is_available(),
        "xpu": torch.xpu.is_available(),
    }
    if not present.get(platform, True):
        how = "select without `to_run` to describe a layer of another machine"
        raise SpecError(f"the selection is to run on {platform}, and PyTorch sees no such device here; {how}")


def validate_params(spec: AttentionSpec, params: LayerParams) -> None:
    """Raises `SpecError` if the tensors of a layer do not match its spec."""
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
        if feature is None and not (spec.quantised and spec.packed is None and spec.kv_dtype != "fp8_ds_mla"):
            raise SpecError(f"{name} is given, and kv_dtype {spec.kv_dtype} has no scales")
    if spec.latent and params.v_scale is not params.k_scale:
        raise SpecError("v_scale is not k_scale; of latents, which are keys and values, they are one tensor")


def _params(spec: AttentionSpec, params: LayerParams) -> Iterator[tuple[str, Tensor | None, int, torch.dtype | None]]:
    """The name of each tensor of a layer, the tensor, its size, and its type (None: any floating one)."""
    yield "sinks", params.sinks, spec.num_heads, None
    yield "alibi_slopes", params.alibi_slopes, spec.num_heads, None
    yield "k_scale", params.k_scale, spec.num_kv_heads, torch.float32
    yield "v_scale", params.v_scale, spec.num_kv_heads, torch.float32
    yield "q_scale", params.q_scale, spec.num_kv_heads, torch.float32
    yield "out_scale", params.out_scale, 1, torch.float32


# the feature that a layer's tensor belongs to; k_scale and v_scale belong to a quantised cache
_FEATURES = {"sinks": "sinks", "alibi_slopes": "alibi", "q_scale": "fp8_query", "out_scale": "fp8_output"}


class Work(NamedTuple):
    """The kind of a call: it writes keys and values to the cache, attends, or both."""

    write: bool
    attend: bool


def _names(given: Call) -> tuple[str, ...]:
    """The names of a call's own tensors."""
    own = [name for name in ("query", "output", "lse", "key", "value") if getattr(given, name) is not None]
    return tuple(own) if given.kv_cache is None else (*own, "kv_cache.key", "kv_cache.value")


# the most numbers of queries that are remembered, for batches that are otherwise equal
MOST_LENGTHS = 256
# pages of codes begin at multiples of this many bytes; kernels load larger words only if they know that they can
_WORD = 4
# the sizes that may differ between calls that fitted: the rows of packed keys and values, which grow in each step of a
# decode. Indexed by the number of tensors before the keys
_ROWS: tuple[Free, ...] = tuple({at: 0, at + 1: 0} for at in range(4))


_address = Tensor.data_ptr


class Accepted:
    """Calls that fitted and whose tensors have the same facts.

    flat: some tensors have heads and elements in one dimension. names: of the call's own tensors, the first ``count``.
    codes, pairs hold positions among these. codes: the tensors of a packed cache. pairs: each tensor that is written,
    with each other one that the same call reads or writes. Beside a position are the bytes that the tensor reaches
    over, None if its rows may differ. apart: the addresses of the last tensors that were found to share no memory.
    """

    __slots__ = ("apart", "codes", "count", "flat", "names", "pairs")

    def __init__(
        self, flat: bool, work: Work, given: Call, tensors: Sequence[Tensor], free: Free, *, codes: bool
    ) -> None:
        caches = () if given.kv_cache is None else ("kv_cache.key", "kv_cache.value")
        self.flat, self.names = flat, _names(given)
        self.codes = tuple(map(self.names.index, caches)) if codes else ()
        self.count, self.apart = len(self.names), tuple[Any, ...]()
        written = {"output", "lse", *(caches if work.write else ())}
        # without an output, a query's memory is not read; a cache's two sides may lie in one another
        read = {name for name in self.names if name != "query" or given.output is not None} - written
        among = [
            (i, name, None if i in free else reach(x))
            for i, (name, x) in enumerate(zip(self.names, tensors, strict=False))
        ]
        self.pairs = tuple(
            (i, size, j, other_size)
            for i, name, size in among
            for j, other, other_size in among
            if size is not None
            and name in written
            and (other in read or (other in written and i < j and {name, other} != {*caches}))
        )

    def problems(self, tensors: Sequence[Tensor], places: tuple[Any, ...]) -> list[str]:
        """The problems of tensors at these addresses: codes that begin within a word, and pairs that share memory."""
        odd = [
            f"{self.names[i]} begins {places[i] % _WORD} bytes past a multiple of {_WORD}; it is read by such words"
            for i in self.codes
            if places[i] % _WORD
        ]
        met = [
            (i, j)
            for i, size, j, other in self.pairs
            if places[j] < places[i] + size and places[i] < places[j] + (reach(tensors[j]) if other is None else other)
        ]
        return odd + [
            overlap_words(self.names[i], self.names[j])
            for i, j in met
            # tensors without memory have no address
            if places[i] and share_memory(tensors[i], tensors[j], may_be_alias=False)
        ]


@dataclass(slots=True, eq=False)
class Fit:
    """The shapes and types that every call with one batch must have.

    num_tokens, num_keys, num_slots: the fewest rows of queries, of packed keys and of keys to write. accepted: calls
    that fitted, by the kind of call and the tensors given. Only the first call of a kind is validated in full. Batches
    with as many queries share it.
    """

    spec: AttentionSpec
    device: torch.device
    paged: bool
    num_tokens: int
    num_keys: int
    num_slots: int | None
    places: PlaceBounds | None
    accepted: dict[Any, Remembered[Accepted]]

    @classmethod
    def of(cls, spec: AttentionSpec, batch: BatchMetadata) -> tuple[Alike, Fit]:
        """A comparison with the batch's tensors as they are now, and the `Fit` of calls with this batch.

        Raises `BatchError` as `validate_batch` does.
        """
        alike, like, tokens, places = validate_batch(spec, batch)
        keys = 0 if batch.paged else int(batch.host_lens.sum()) if batch.key_rows is None else batch.key_rows
        # which calls fit depends on the number of queries alone, if the places are unknown: each call compares the
        # number of keys itself
        accepted: Any = {}
        if places is None:
            known = like.accepted.get(tokens)
            if known is None:
                if len(like.accepted) >= MOST_LENGTHS:
                    like.accepted.clear()
                known = like.accepted.setdefault(tokens, accepted)
            accepted = known
        slots = None if batch.slot_mapping is None else batch.slot_mapping.shape[0]
        return alike, cls(spec, batch.seq_lens.device, batch.paged, tokens, keys, slots, places, accepted)

    def call(self, work: Work, given: Call) -> Call:
        """The call with its tensors by heads, and with the `Accepted` of calls like it. work: the kind of call.

        Raises `BatchError` if its tensors, or the layer's, do not fit.
        """
        write, attend = work
        key: Any
        value: Any
        query, kv_cache, output, key, value, lse, params, _, _ = given
        if kv_cache is not None and type(kv_cache) is not KVCache:
            given = given._replace(kv_cache=(kv_cache := as_cache(kv_cache)))
        # keys and values that begin at one address share their memory, as those of latents do
        one = kv_cache is not None and (write or self.spec.latent) and _same_place(*kv_cache)
        kind = (
            write, attend, query is None, output is None, lse is None, key is None, value is None, kv_cache is None,
            one, params.names,
        )  # fmt: skip
        tensors = [x for x in (query, output, lse, key, value) if x is not None]
        tensors += () if kv_cache is None else kv_cache
        tensors += params.tensors
        accepted = self.accepted.get(kind)
        known = None if accepted is None else accepted.find(tensors)
        packed = attend and key is not None and not self.paged
        # remembered calls may have any number of keys
        if known is None or (packed and not self.num_keys <= key.shape[0] == value.shape[0]):
            by_head = _by_head(self.spec, given)
            refuse(fake_problems((*_names(given), *params.names), tensors) or [*self._problems(work, by_head)])
            before = sum(x is not None for x in (query, output, lse))
            free = _ROWS[before] if packed and not write else NONE_FREE
            if accepted is None:
                accepted = self.accepted.setdefault(kind, Remembered(free))
            flat = any(x is not None and x.ndim == 2 for x in (query, output, key, value))
            codes = kv_cache is not None and self.spec.packed is not None
            fitting = Accepted(flat, work, given, tensors, free, codes=codes)
            # keys without rows fit with any stride of their elements, so these tell nothing about later calls
            if not free or key.shape[0]:
                accepted.put(tensors, fitting)
        else:
            fitting = known[1]
        derived = torch.is_grad_enabled() and any([x.requires_grad for x in tensors])  # noqa: C419
        if derived or forward_ad._current_level >= 0:
            refuse(derivative_problems(tensors, lambda: (*fitting.names, *params.names)))
        try:
            places: tuple[Any, ...] = tuple(map(_address, tensors[: fitting.count]))
        except RuntimeError:  # tensors of a transform such as vmap have no address
            places = fitting.apart
        else:
            if packed:
                places = (*places, key.shape, key.stride(), value.stride())
        if places != fitting.apart:
            refuse(fitting.problems(tensors, places))
            fitting.apart = places
        if fitting.flat:
            return _by_head(self.spec, given)._replace(alike=fitting)
        return named(Call, (query, kv_cache, output, key, value, lse, params, fitting, None))

    def _problems(self, work: Work, given: Call) -> Iterator[str]:
        if work.write and self.num_slots is None:
            yield "slot_mapping is None: there is no place to write key and value to"
        if work.write and work.attend and self.paged and self.spec.attn_type == "decoder":
            yield from slots_problems(self.num_slots, self.num_tokens)
        if work.write and given.key is None and given.value is None:
            yield "key and value are None; expected the keys and values to write"
        if self.spec.latent and not self.paged:
            yield "the batch has no block_table: MLA in its latent form reads the cache"
        if work.attend:
            # a forward that writes gives cache and keys, and attends to one of them
            if not work.write and (self.paged != (given.kv_cache is not None) or self.paged != (given.key is None)):
                yield _STORAGE[self.paged]
            yield from self._query_problems(given)
        packed = work.attend and not self.paged
        if given.key is not None or given.value is not None:
            rows = max(self.num_slots or 0 if work.write else 0, self.num_keys if packed else 0)
            yield from self._key_problems(given, rows)
        if given.kv_cache is not None:
            yield from self._cache_problems(given.kv_cache, written=work.write)
        for name, tensor, size, dtype in _params(self.spec, given.params):
            if tensor is not None:
                yield from tensor_problems(name, tensor, (size,), dtype, device=self.device, dense=False)

    def _query_problems(self, given: Call) -> Iterator[str]:
        spec, query = self.spec, given.query
        rows = query.shape[0] if isinstance(query, Tensor) and query.ndim else None
        for name, size, dtype in (
            ("query", spec.head_size, spec.query_dtype), ("output", spec.head_size_v, spec.output_dtype),
        ):  # fmt: skip
            tensor, shape = getattr(given, name), (rows, spec.num_heads, size)
            # `write_kv` passes the query of the call that follows, but no output
            if name == "output" and tensor is None:
                continue
            yield from tensor_problems(name, tensor, shape, dtype, device=self.device, written=name == "output")
        if rows is not None and rows < self.num_tokens:
            yield f"query has {rows} rows; the batch has {self.num_tokens} tokens"
        if given.lse is not None:
            sizes = spec.num_heads, rows
            yield from tensor_problems("lse", given.lse, sizes, torch.float32, device=self.device, written=True)
            if isinstance(given.lse, Tensor) and not given.lse.is_contiguous():
                yield f"lse has strides {list(given.lse.stride())}; expected contiguous memory"

    def _key_problems(self, given: Call, min_rows: int) -> Iterator[str]:
        spec, key = self.spec, given.key
        if key is None or given.value is None:
            yield f"{'key' if key is None else 'value'} is None; expected key and value, or neither"
            return
        rows = key.shape[0] if isinstance(key, Tensor) and key.ndim else None
        # key and value of a write to latents are a latent's two parts
        parts = (
            (spec.head_size_v, spec.head_size - spec.head_size_v) if spec.latent else (spec.head_size, spec.head_size_v)
        )
        for name, size in zip(("key", "value"), parts, strict=True):
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
        if problems and self.spec.packed is not None:
            problems.append(_preset_words(self.spec, kv_cache))
        elif self.spec.packed is not None:
            problems += [
                f"kv_cache.{name} has strides {list(x.stride())}; pages, read by words, begin at multiples of {_WORD}"
                for name, x in zip(("key", "value"), kv_cache, strict=True)
                if any(stride % _WORD for stride in x.stride()[:2])
            ]
        one = not problems and key.data_ptr() == kv_cache[1].data_ptr()
        if self.spec.latent and not problems and not (one and key.stride() == kv_cache[1].stride()):
            problems.append("kv_cache.value has memory of its own; of latents it is kv_cache.key[..., :head_size_v]")
        elif written and one and not self.spec.latent and key.numel():
            problems.append("kv_cache.value is the memory of kv_cache.key; both are written, so give each its own")
        yield from problems
        if not problems and self.places is not None and self.spec.block_size is not None:
            used = self.places if written else self.places._replace(slot=-1)
            yield from used.problems(blocks, self.spec.block_size)


def _preset_words(spec: AttentionSpec, kv_cache: Any) -> str:
    """The problem of a cache whose bytes for a token and head are not those of the layer's format."""
    packed, block_size = spec.packed, spec.block_size
    assert packed is not None
    assert block_size is not None
    sizes = [x.shape[-1] / block_size if isinstance(x, Tensor) and x.ndim else 0.0 for x in kv_cache]
    rows = packed.keys.row_bytes(spec.head_size), packed.values.row_bytes(spec.head_size_v)
    times = sizes[0] / rows[0]
    if 0 < times == sizes[1] / rows[1] != 1:
        return f"the cache has blocks of {block_size * times:g} tokens of {packed.name}; the layer's have {block_size}"
    return (
        f"the cache has {sizes[0]:g} + {sizes[1]:g} bytes for each token and KV head in blocks of {block_size}; "
        f"{packed.name} takes {rows[0]} + {rows[1]} "
        "for this head size: allocate it with new_kv_cache of a layer of this kv_dtype"
    )


def _same_place(key: Any, value: Any) -> bool | str:
    """Whether keys and values begin at one address; "unknown" for objects without one."""
    try:
        return type(key) is not FakeTensor and type(value) is not FakeTensor and key.data_ptr() == value.data_ptr()
    except (AttributeError, RuntimeError):
        return "unknown"


_STORAGE = {
    True: "the batch has a block_table: attention reads kv_cache, and takes no packed keys and values",
    False: "the batch has no block_table: attention takes packed keys and values, and reads no kv_cache",
}


def _by_head(spec: AttentionSpec, given: Call) -> Call:
    """A call with tensors [rows, heads * size] as [rows, heads, size]; others unchanged, for validation to report."""

    def apart(x: Any, heads: int) -> Any:
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] % heads:
            return x
        return x.view(x.shape[0], heads, x.shape[1] // heads)

    return given._replace(
        query=apart(given.query, spec.num_heads), output=apart(given.output, spec.num_heads),
        key=apart(given.key, spec.num_kv_heads), value=apart(given.value, spec.num_kv_heads),
    )  # fmt: skip


def slots_problems(slots: int | None, tokens: int) -> Iterator[str]:
    """The problem if a decoder has fewer slots than new tokens: it would read keys that nobody stored."""
    if slots is not None and slots < tokens:
        yield f"slot_mapping has {slots} slots; the batch has {tokens} tokens (-1 is no slot)"


def as_cache(kv_cache: Any) -> KVCache:
    """A pair of tensors as a cache. Raises `BatchError` for anything else."""
    if isinstance(kv_cache, tuple | list) and len(kv_cache) == 2:
        return KVCache(*kv_cache)
    raise BatchError([f"kv_cache is {tensor_words(kv_cache)}; expected KVCache(key, value)"])


def per_head(name: str, scale: Tensor | None, num_kv_heads: int) -> Tensor | None:
    """A scale as [num_kv_heads] float32: a view, so that later changes of the scale take effect."""
    if scale is None:
        return None
    expected = f"expected one float32 element, or [{num_kv_heads}] float32"
    if not isinstance(scale, Tensor) or scale.layout is not torch.strided or scale.dtype != torch.float32:
        raise SpecError(f"{name} is {tensor_words(scale)}; {expected}")
    if scale.numel() == 1:
        return scale.view(1).expand(num_kv_heads)
    if scale.shape != (num_kv_heads,):
        more = "; scales that differ by request are not served" if scale.ndim == 2 else ""
        raise SpecError(f"{name} is {tensor_words(scale)}; {expected}{more}")
    return scale
