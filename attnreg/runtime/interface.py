"""The contract (version 1) between an engine and a kernel module: layers, batches, and what each call must compute.

**Numbers.** Queries, keys and values are packed: request i owns the rows from ``query_start_loc[i]`` to before
``query_start_loc[i + 1]``. Its query j stands at position ``seq_lens[i] - query_len + j`` among its keys ``0`` to
``seq_lens[i] - 1``. The score of a query at position p with a key at position k is computed in this order:

1. ``x = softmax_scale * (q . k)``
2. with a softcap c: ``x = c * tanh(x / c)``
3. with ALiBi: ``x = x - slope[head] * abs(p - k)``
4. the mask: a key takes part if ``causal`` allows it (k <= p) and a window of w allows it (p - k < w, and in a batch
   that is not causal k - p < w as well); or if p and k lie in one of the request's mm_prefix ranges, whatever causal
   and window say. Keys at or past ``seq_lens[i]`` never take part, and their memory may hold anything, NaN included;
   keys before it are finite numbers in blocks that exist, even where no query sees them.
5. softmax over the keys that take part; a sink adds ``exp(sink[head])`` to the denominator and nothing to the output.

``lse`` is the natural logarithm of that denominator, the sink included. With it, outputs over disjoint parts of the
keys can be merged; then just one part includes the sink. A row without a key has the output zero and the lse -inf (with
a sink: the sink).

**Memory.** The caller owns the memory that a call writes to; it may be uninitialised. Rows of query, output and
lse past ``query_start_loc[-1]`` are padding: never read, never written. The cache is written by ``write_kv`` alone.

**The KV cache** is a pair of tensors, so that values may be narrower than keys, and an engine with one fused tensor
passes two views of it: NHD ``[num_blocks, block_size, num_kv_heads, head_size]``, or HND with the middle two swapped.
SPLIT, the layout of AMD's paged kernels, has keys ``[num_blocks, num_kv_heads, head_size // x, block_size, x]``, where
x elements are 16 bytes, and values ``[num_blocks, num_kv_heads, head_size_v, block_size]``. The last dimension is
contiguous; other strides are free. A quantised cache is float8_e4m3fn or float8_e5m2, or the fnuz variant of that
format on architectures that have it. It holds ``x / scale``, computed in float32, saturated at the largest finite
number and rounded to nearest even.

**No device-to-host synchronisation** in ``plan``, ``write_kv`` or ``forward``: the batch's CPU copies hold all that the
host needs. Where they and the device differ, the device is right: ``seq_lens_cpu`` may be upper bounds.

**CUDA graphs.** A captured call computes with what the batch's tensors hold at each replay, for any lengths within
``max_query_len``, ``max_seq_len``, the number of requests and the rows of query: a dummy batch of one token a request
will do. The caller keeps the tensors that it handed over; a layer keeps those of its plans. Scratch memory is allocated
by each call on its stream, while a graph is captured from the graph's pool, so no two streams, layers or graphs share
any. TRITON_ATTN's is for split keys: ``rows * num_heads * splits * (head_size_v + 1)`` float32, of which a batch has no
more than fill the device four times (70 MiB on an H200 with heads of 128); with ``batch_invariant`` splits are up to 32
for requests of one query and up to 8 for up to 16, whatever ``max_seq_len`` is. Rows are those of query, or the
requests times their longest query if that is less. Backends that compute from the host's lengths refuse a capture.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from attnreg.runtime.batch import LONGEST
from attnreg.runtime.batch import BatchError as BatchError
from attnreg.runtime.batch import BatchMetadata as BatchMetadata

if TYPE_CHECKING:
    from typing import Self

    from attnreg.request import AttentionRequest

Layout = Literal["NHD", "HND", "SPLIT"]

DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
KV_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_FNUZ = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}


class SpecError(ValueError):
    """Raised for a layer that contradicts itself or lacks a number; the message names the field and the cure."""


class UnclaimedError(ValueError):
    """Raised for an input that changes the result and that the backend does not claim.

    ``backend`` refused the input; ``alternatives`` are the backends that accept it when named in the request.
    """

    def __init__(self, message: str, backend: str, alternatives: Sequence[str] = ()) -> None:
        self.backend = backend
        self.alternatives = tuple(alternatives)
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The constants of one layer. Hashable; layers with equal specs share their plans.

    ``features`` are those of the request. Kernels read the switches ``sinks``, ``alibi``, ``mm_prefix``, ``lse``,
    ``non_causal`` and ``batch_invariant`` from them; ``sliding_window`` and ``softcap`` are features if and only if
    their numbers are given. ``block_size`` None: the layer has no paged cache. ``kv_dtype`` is the request's word; with
    ``fnuz`` its 8-bit formats are those of gfx942, without infinities and -0. ``options`` are the row's.

    Raises `SpecError`.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    softmax_scale: float
    kv_dtype: str = "auto"
    block_size: int | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    attn_type: str = "decoder"
    features: frozenset[str] = frozenset()
    kv_layout: Layout = "NHD"
    fnuz: bool = False
    options: tuple[tuple[str, str | int | float | bool], ...] = ()

    def __post_init__(self) -> None:
        for name, integral in _NUMBERS.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), integral=integral))
        problem = next(_spec_problems(self), None)
        if problem is not None:
            raise SpecError(problem)

    @classmethod
    def from_request(
        cls,
        request: AttentionRequest,
        *,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        kv_layout: Layout = "NHD",
        fnuz: bool = False,
        options: tuple[tuple[str, str | int | float | bool], ...] = (),
    ) -> Self:
        """The spec of a layer, from its request and the numbers that a request does not hold.

        softmax_scale: default ``head_size ** -0.5``. sliding_window: keys that a query sees, itself included.
        Raises `SpecError` where the request lacks a number that running needs, or asks for what this contract does not
        cover.
        """
        if request.attention != "mha":
            raise SpecError(f"attention is {request.attention}; this contract is for mha")
        if request.num_heads is None:
            raise SpecError("num_heads is not given; to run a layer its request must say how many heads it has")
        if request.dtype not in DTYPES:
            raise SpecError(f"dtype is {request.dtype}; layers compute in {', '.join(DTYPES)}")
        return cls(
            num_heads=request.num_heads,
            num_kv_heads=request.num_kv_heads or request.num_heads,
            head_size=request.head_size,
            head_size_v=request.head_size_v or request.head_size,
            dtype=DTYPES[request.dtype],
            softmax_scale=request.head_size**-0.5 if softmax_scale is None else softmax_scale,
            kv_dtype=request.kv_dtype or "auto",
            block_size=request.block_size,
            sliding_window=sliding_window,
            softcap=softcap,
            attn_type=request.attn_type,
            features=request.features,
            kv_layout=kv_layout,
            fnuz=fnuz,
            options=options,
        )

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the KV cache's elements."""
        dtype = self.dtype if self.kv_dtype == "auto" else KV_DTYPES[self.kv_dtype]
        return _FNUZ.get(dtype, dtype) if self.fnuz else dtype

    @property
    def quantised(self) -> bool:
        """Whether the cache holds 8-bit numbers with a scale."""
        return self.cache_dtype.itemsize == 1


# the numbers of a spec, and whether they are integers
_NUMBERS = {
    "num_heads": True, "num_kv_heads": True, "head_size": True, "head_size_v": True, "block_size": True,
    "sliding_window": True, "softmax_scale": False, "softcap": False,
}  # fmt: skip


def _number(name: str, value: Any, *, integral: bool) -> int | float | None:
    """A number in Python's own type, in which kernels compile it; None for an optional one that is not given."""
    if value is None and name in ("block_size", "sliding_window", "softcap"):
        return None
    if integral and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if not integral and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    cure = ""
    if name == "sliding_window" and isinstance(value, Sequence) and len(value) == 2:
        cure = (
            "; a window of (left, right) = (w - 1, 0) is the number w in a causal batch, and (w - 1, w - 1) in others"
        )
    raise SpecError(f"{name} is {value!r}; expected {'an integer' if integral else 'a number'}{cure}")


def _spec_problems(spec: AttentionSpec) -> Any:
    for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v"):
        if getattr(spec, name) < 1:
            yield f"{name} is {getattr(spec, name)}; expected at least 1"
    if spec.num_heads % max(spec.num_kv_heads, 1):
        yield f"num_heads is {spec.num_heads} and num_kv_heads is {spec.num_kv_heads}; the second must divide the first"
    if spec.kv_dtype != "auto" and spec.kv_dtype not in KV_DTYPES:
        yield f"kv_dtype is {spec.kv_dtype}; caches here hold auto, {', '.join(KV_DTYPES)}"
    if spec.block_size is not None and spec.block_size < 1:
        yield f"block_size is {spec.block_size}; expected at least 1"
    if spec.kv_layout not in get_args(Layout):
        yield f"kv_layout is {spec.kv_layout!r}; expected {', '.join(get_args(Layout))}"
    elif (
        spec.kv_layout == "SPLIT"
        and spec.kv_dtype in ("auto", *KV_DTYPES)
        and spec.head_size % (16 // spec.cache_dtype.itemsize)
    ):
        x = 16 // spec.cache_dtype.itemsize
        yield f"head_size is {spec.head_size}, and the layout SPLIT holds keys by {x}; take a multiple of it"
    if not 0 < spec.softmax_scale < math.inf:
        yield f"softmax_scale is {spec.softmax_scale}; expected more than 0"
    for name in ("sliding_window", "softcap"):
        value = getattr(spec, name)
        if (value is not None) != (name in spec.features):
            yield (
                f"{name} is {value} and the request "
                + (f"does not ask for {name}; add the feature" if value is not None else f"asks for {name}; give it")
            )
        if value is not None and not 0 < value < math.inf:
            yield f"{name} is {value}; expected more than 0 (None for none)"
    if spec.sliding_window is not None and spec.sliding_window > 2 * LONGEST:
        yield f"sliding_window is {spec.sliding_window}; expected up to {2 * LONGEST}"
    if spec.attn_type == "encoder_decoder":
        # queries and keys belong to different texts: there is no distance between them
        for name in sorted(spec.features & {"alibi", "mm_prefix", "sliding_window"}):
            yield f"{name} has no meaning for encoder_decoder attention: query and key positions are not comparable"


class KVCache(NamedTuple):
    """One layer's cache: ``key`` and ``value``, in the spec's layout and ``spec.cache_dtype``."""

    key: Tensor
    value: Tensor


class KVCacheShape(NamedTuple):
    """The shapes of a cache's two tensors, and the type of their elements."""

    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParams:
    """The tensors of one layer. `Attention` passes them to every call; layers with equal specs have their own.

    sinks, alibi_slopes: [num_heads], any floating type and stride (a kernel computes with float32). k_scale, v_scale:
    [num_kv_heads] float32, the factors of a quantised cache; one scale for all heads is an expanded view (stride 0);
    None is 1. sinks and alibi_slopes are given if and only if the spec has the feature; scales only with a quantised
    cache.
    """

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


NO_PARAMS = LayerParams()


def paged_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shapes of a cache in ``spec.kv_layout`` with one element per element of a key or value."""
    if spec.block_size is None:
        raise SpecError("block_size is not given; a paged cache needs the tokens per block")
    dtype, heads = spec.cache_dtype, spec.num_kv_heads
    if spec.kv_layout == "SPLIT":
        x = 16 // dtype.itemsize
        key = (num_blocks, heads, spec.head_size // x, spec.block_size, x)
        return KVCacheShape(key, (num_blocks, heads, spec.head_size_v, spec.block_size), dtype)
    middle = (spec.block_size, heads) if spec.kv_layout == "NHD" else (heads, spec.block_size)
    return KVCacheShape((num_blocks, *middle, spec.head_size), (num_blocks, *middle, spec.head_size_v), dtype)


def by_token(kv_cache: KVCache, layout: Layout) -> KVCache:
    """A cache of any layout as ``[num_blocks, block_size, num_kv_heads, size]``; a view or a copy, for reading only."""
    if layout == "NHD":
        return kv_cache
    if layout == "HND":
        return KVCache(*(x.transpose(1, 2) for x in kv_cache))
    return KVCache(kv_cache.key.permute(0, 3, 1, 2, 4).flatten(3), kv_cache.value.permute(0, 3, 1, 2))


class Call(NamedTuple):
    """The tensors of one call of a kernel module's ``forward``: its inputs, and the memory that it writes to.

    query [tokens, num_heads, head_size] and output [tokens, num_heads, head_size_v] have ``spec.dtype`` and a
    contiguous last dimension; tokens may exceed ``batch.num_tokens`` (padding). key [num_keys, num_kv_heads, head_size]
    and value [num_keys, num_kv_heads, head_size_v] are given if and only if the batch is not paged; kv_cache is then
    None. lse [num_heads, tokens] float32 is contiguous, and is given only where the spec has ``lse``.
    """

    query: Tensor
    kv_cache: KVCache | None
    output: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    lse: Tensor | None = None
    params: LayerParams = NO_PARAMS

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        """Key and value of a call without a cache."""
        # the layer has validated that they are given
        assert self.key is not None
        assert self.value is not None
        return self.key, self.value


class KernelModule(Protocol):
    """The functions that a registry row's ``module`` must have. `Attention` validates every argument before a call.

    A module whose calls read all lengths on the device says so by ``CAPTURABLE = True``; the calls of others are
    refused while a CUDA graph is captured, because its replays would keep the lengths of the host. One that reads
    packed keys where ``key_start_loc`` says, whatever lies between them, says so by ``KEYS_APART = True``; other
    modules get no batch with ``key_rows``.

    ``plan`` is an object of the module's own, made once per batch and spec. ``write_kv`` stores key [rows,
    num_kv_heads, head_size] and value [rows, num_kv_heads, head_size_v] in the batch's slots.
    """

    def kv_cache_shape(self, spec: AttentionSpec, num_blocks: int) -> KVCacheShape: ...

    def plan(self, spec: AttentionSpec, batch: BatchMetadata) -> Any: ...

    def write_kv(
        self,
        spec: AttentionSpec,
        plan: Any,
        key: Tensor,
        value: Tensor,
        kv_cache: KVCache,
        *,
        params: LayerParams = NO_PARAMS,
    ) -> None: ...

    def forward(self, spec: AttentionSpec, plan: Any, call: Call) -> None: ...
