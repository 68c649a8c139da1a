"""The contract (version 1) between an engine and a kernel module: layers, batches, and what each call must compute.

**Numbers.** Queries, keys and values are packed: request i owns the rows from ``query_start_loc[i]`` to before
``query_start_loc[i + 1]``. Its query j stands at position ``seq_lens[i] - query_len + j`` among its keys ``0`` to
``seq_lens[i] - 1``. The score of a query at position p with a key at position k is computed in this order:

1. ``x = softmax_scale * (q . k)``; a query of ``fp8_query`` is e4m3 and stands for ``q * q_scale[kv_head]``
2. with a softcap c: ``x = c * tanh(x / c)``
3. with ALiBi: ``x = x - slope[head] * abs(p - k)``
4. the mask: a key takes part if all of these allow it:

   - ``causal``: k <= p
   - a window of w: p - k < w; for a request that is not causal also k - p < w
   - a window of (left, right): p - k <= left and k - p <= right, -1 for no bound
   - chunks of c: k // c == p // c

   A key also takes part if p and k lie in one of the request's mm_prefix ranges, whatever these say. With
   ``mm_prefix_in_window`` the window still bounds p - k. A ``tree_mask`` then hides keys of this step's queries: a
   query keeps those in its row of the mask, and its own.
   Keys at or past ``seq_lens[i]`` never take part, and their memory may hold anything, NaN included. Keys before
   ``seq_lens[i]`` are finite numbers in blocks that exist, even where no query sees them.
5. softmax over the keys that take part; a sink adds ``exp(sink[head])`` to the denominator and nothing to the output.

Queries of bfloat16 over a cache of 8-bit floats or of codes are multiplied in float16. An element past 65,504 becomes
65,504, and one below 2**-24 becomes 0. The caller chooses scales that keep queries between these bounds.

``lse`` is the natural logarithm of the softmax's denominator, the sink included. With it, outputs over disjoint parts
of the keys can be merged; then just one part includes the sink. A row without a key has the output zero and the lse
-inf, or the sink if there is one. An output of ``fp8_output`` is e4m3: ``output / out_scale``, saturated and rounded to
nearest even.

**Memory.** The caller owns the memory that a call writes to; it may be uninitialised. Rows of query, output and
lse past ``query_start_loc[-1]`` are padding: never read, never written. The cache is written by ``write_kv`` alone.

**The KV cache** is a pair of tensors, so that values may be narrower than keys, and an engine with one fused tensor
passes two views of it: NHD ``[num_blocks, block_size, num_kv_heads, head_size]``, or HND with the middle two swapped.
SPLIT, the layout of AMD's paged kernels, has keys ``[num_blocks, num_kv_heads, head_size // x, block_size, x]``, where
x elements are 16 bytes, and values ``[num_blocks, num_kv_heads, head_size_v, block_size]``. The last dimension is
contiguous; other strides are free. A quantised cache is float8_e4m3fn or float8_e5m2, or the fnuz variant of that
format on architectures that have it. It holds ``x / scale``, computed in float32, saturated at the largest finite
number and rounded to nearest even.

A packed cache (``spec.packed``) holds codes of a few bits with their scales: keys ``[num_blocks, num_kv_heads, bytes]``
uint8 and values likewise, whose blocks `attnreg.runtime.turboquant.cache_bytes` lays out and whose numbers
`attnreg.runtime.turboquant.codec` defines. A slot past the cache is skipped, as a negative one is. A key or value that
is not finite, or too large for its format, is stored as NaN. Then the rows that see it are NaN; other requests' rows
are not.

**Latents.** MLA in its latent form (``spec.latent``; `attnreg.runtime.mla.interface`) is this contract with one KV
head, where the value is the first part of the key. ``kv_cache.value`` is ``kv_cache.key[..., :head_size_v]``, the same
memory, and ``v_scale`` is ``k_scale``. ``write_kv`` gets the two parts of a key: as key the latent
``[rows, 1, head_size_v]``, and as value its rotary part ``[rows, 1, head_size - head_size_v]``.

**No device-to-host synchronisation** in ``plan``, ``write_kv`` or ``forward``: the batch's CPU copies hold all that the
host needs. Where host and device differ, the device is right: ``seq_lens_cpu`` may hold upper bounds.

**Batch invariance.** A layer that is ``batch_invariant`` gives a request the same bits whatever else is in its batch,
and whatever bounds the host has. This holds for tensors of the same strides and the same alignment to 16 bytes. A
compiler may order sums by the width of its loads, and a kernel may need aligned addresses.

**CUDA graphs.** A captured call computes with what the batch's tensors hold at each replay. Lengths may be any within
``max_query_len``, ``max_seq_len``, the number of requests and the rows of query, so a dummy batch of one token a
request will do. The caller keeps the tensors that it passed; a layer keeps the tensors of its plans. Backends that
compute from the host's lengths refuse a capture.

**Scratch memory.** Each call allocates its own on its stream; a capture allocates it from the graph's pool. So no two
streams, layers or graphs share any. TRITON_ATTN needs some if it splits keys:
``rows * num_heads * splits * (head_size_v + 1)`` float32. Rows are those of query, or the requests times their longest
query if that is less. A batch has at most as many splits as fill the device four times (70 MiB on an H200 with heads of
128). With ``batch_invariant`` splits are up to 32 for requests of one query and up to 8 for up to 16 queries, whatever
``max_seq_len`` is. On NVIDIA's GPUs a graph captures another variant of this kernel, which reads the lengths on the
device. It is compiled during the capture, and rounds differently. HOPPER_ATTN keeps 1.5 MiB on each device, and each
launch of prompts has 16 bytes of it for itself; a launch in a graph keeps its 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from attnreg.runtime import latents
from attnreg.runtime.batch import BatchError as BatchError
from attnreg.runtime.batch import BatchMetadata as BatchMetadata
from attnreg.runtime.spec import DTYPES as DTYPES
from attnreg.runtime.spec import AttentionSpec as AttentionSpec
from attnreg.runtime.spec import DeviceError as DeviceError
from attnreg.runtime.spec import Layout as Layout
from attnreg.runtime.spec import SpecError as SpecError
from attnreg.runtime.turboquant.cache_bytes import packed_blocks


class UnclaimedError(ValueError):
    """Raised for an input that changes the result and that the backend does not claim.

    ``backend`` is the one that refused the input; ``alternatives`` are the backends that accept it when named in the
    request.
    """

    def __init__(self, message: str, backend: str, alternatives: Sequence[str] = ()) -> None:
        self.backend = backend
        self.alternatives = tuple(alternatives)
        super().__init__(message)


class KVCache(NamedTuple):
    """One layer's cache, in ``spec.cache_dtype``.

    key [num_blocks, block_size, num_kv_heads, head_size], value likewise with head_size_v; the layout HND swaps the
    middle two. The contract (`attnreg.runtime.interface`) has the other layouts: SPLIT, packed codes, latents.
    """

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

    sinks, alibi_slopes: [num_heads], any floating type and stride; kernels compute with float32. Given if and only if
    the spec has the feature. A sink of -inf counts as no sink. A sink of +inf takes all the weight: the output is zero,
    and the lse is +inf, which merges take for an empty state. Kernels of other packages may return NaN for it.
    k_scale, v_scale: [num_kv_heads] float32, the factors of a quantised cache. One scale for all heads is an expanded
    view (stride 0); None is 1. q_scale: the same for ``fp8_query``. out_scale: [1] float32, the scale of
    ``fp8_output``. A scale is given only with what it scales. tensors, names: the tensors that are given, and their
    names.
    """

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None
    out_scale: Tensor | None = None
    tensors: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        object.__setattr__(self, "tensors", tuple(given.values()))
        object.__setattr__(self, "names", tuple(given))


NO_PARAMS = LayerParams()


class LayerTensors(TypedDict, total=False):
    """The arguments of `Attention.from_selection` that are tensors; those of `LayerParams`."""

    sinks: Tensor | None
    alibi_slopes: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    q_scale: Tensor | None
    out_scale: Tensor | None


def paged_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shapes of a cache in ``spec.kv_layout``: one element per element of a key or value, or pages of codes."""
    if spec.block_size is None:
        raise SpecError("block_size is not given; a paged cache needs the tokens per block")
    dtype, heads = spec.cache_dtype, spec.num_kv_heads
    if spec.packed is not None:
        keys, values = packed_blocks(spec.packed, spec.head_size, spec.head_size_v, spec.block_size)
        return KVCacheShape((num_blocks, heads, keys.bytes), (num_blocks, heads, values.bytes), dtype)
    if spec.kv_layout == "SPLIT":
        x = 16 // dtype.itemsize
        key = (num_blocks, heads, spec.head_size // x, spec.block_size, x)
        return KVCacheShape(key, (num_blocks, heads, spec.head_size_v, spec.block_size), dtype)
    middle = (spec.block_size, heads) if spec.kv_layout == "NHD" else (heads, spec.block_size)
    width = latents.BYTES if spec.kv_dtype == "fp8_ds_mla" else spec.head_size
    return KVCacheShape((num_blocks, *middle, width), (num_blocks, *middle, spec.head_size_v), dtype)


def by_token(kv_cache: KVCache, layout: Layout) -> KVCache:
    """A cache of any layout as ``[num_blocks, block_size, num_kv_heads, size]``; a view or a copy, for reading only."""
    if layout == "NHD":
        return kv_cache
    if layout == "HND":
        return KVCache(*(x.transpose(1, 2) for x in kv_cache))
    return KVCache(kv_cache.key.permute(0, 3, 1, 2, 4).flatten(3), kv_cache.value.permute(0, 3, 1, 2))


class Call(NamedTuple):
    """The tensors of one call of a kernel module's ``forward``: its inputs, and the memory that it writes to.

    query [tokens, num_heads, head_size] has ``spec.query_dtype``, output [tokens, num_heads, head_size_v]
    ``spec.output_dtype``. Their last dimension is contiguous; tokens may exceed ``batch.num_tokens`` (padding). If and
    only if the batch is not paged, key [num_keys, num_kv_heads, head_size] and value [num_keys, num_kv_heads,
    head_size_v] are given, and kv_cache is None. The lse [num_heads, tokens] float32 is contiguous, and is given only
    if the spec has ``lse``. The indices [tokens, topk] int32 are given if and only if the spec is ``sparse``.

    alike: for ``run`` alone. Calls have the same object if their tensors have the same shapes, strides, types and
    devices, so a module may keep what it derives from these. Packed keys and values of a call that writes none are an
    exception: their rows and strides may differ, because they grow from step to step.
    """

    query: Tensor
    kv_cache: KVCache | None
    output: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    lse: Tensor | None = None
    params: LayerParams = NO_PARAMS
    alike: object = None
    indices: Tensor | None = None

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        """Key and value of a call without a cache."""
        # the layer has validated that they are given
        assert self.key is not None
        assert self.value is not None
        return self.key, self.value


# runs a call on another query, key, value and output
Repeated = Callable[[Tensor, Tensor, Tensor, Tensor], None]


class KernelModule(Protocol):
    """The functions that a registry row's ``module`` must have. `Attention` validates every argument before a call.

    Three constants of a module are optional. ``CAPTURABLE = True``: its calls read all lengths on the device. Calls of
    other modules are refused while a CUDA graph is captured, because replays would keep the host's lengths.
    ``KEYS_APART = True``: it reads packed keys at ``key_start_loc``, whatever lies between them. Other modules get no
    batch with ``key_rows``. ``REPEATABLE = False``: its library may round the same tensors differently in each call on
    a GPU. Such a module claims no ``batch_invariant`` there.

    ``plan`` returns an object of the module's own, made once per batch and spec. ``write_kv`` stores key [rows,
    num_kv_heads, head_size] and value [rows, num_kv_heads, head_size_v] in the batch's slots; for latents, their two
    parts.

    Two more functions are optional. ``run(spec, plan, call)`` does the work of both at less cost: it stores key and
    value if the call has these and a kv_cache, and attends if it has an output. ``repeat(spec, plan, call)`` returns a
    function that runs a call without a cache again, on another query, key, value and output. The function reads only
    the addresses of these tensors, because all else is as in that call.
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
