"""AttentionSpec: the constants of one layer, checked against each other."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from attnreg.language.packed import Packed
from attnreg.runtime.lengths import LONGEST
from attnreg.runtime.turboquant.cache_bytes import ROWS

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
    # bytes, in the layout of `attnreg.runtime.latents`
    "fp8_ds_mla": torch.uint8,
}
_FNUZ = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}


# kernels compute tanh from powers of 2, with an error of up to 2**-23; a score's error is this times its softcap
LARGEST_SOFTCAP = 4096
# bounds of softmax_scale and of softcaps: kernels compute in float32, and a masked score is -1e30
_SMALLEST, _LARGEST_SCALE = 2.0**-60, 2.0**60


class SpecError(ValueError):
    """Raised for a layer that contradicts itself or lacks a number. The message names the field and the remedy."""


class DeviceError(SpecError):
    """Raised by a kernel module, before anything is computed, for a device that its kernels do not run on."""


class _Hashed:
    """Two values of a spec that a step reads many times, beside its fields: its hash, and its window's sides."""

    __slots__ = ("_both", "_hash")
    _hash: int
    _both: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(_Hashed):
    """The constants of one layer. Hashable; layers with equal specs share their plans.

    ``features`` are those of the request. Kernels read the switches ``sinks``, ``alibi``, ``mm_prefix``,
    ``mm_prefix_in_window``, ``lse`` and ``batch_invariant`` from them. ``sliding_window``, ``asymmetric_window`` (left,
    right), ``chunk`` and ``softcap`` are features if and only if their numbers are given. ``block_size`` None: there is
    no paged cache. ``kv_dtype`` is the request's word. ``fnuz``: its 8-bit formats are those of gfx942, without
    infinities and -0. ``latent``: MLA in its latent form (`attnreg.runtime.mla.interface`). ``sparse``: MLA over chosen
    tokens. ``options`` are the registry row's. ``packed`` is the format that ``kv_dtype`` names, if that is a format of
    codes with scales.

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
    asymmetric_window: tuple[int, int] | None = None
    chunk: int | None = None
    softcap: float | None = None
    attn_type: str = "decoder"
    features: frozenset[str] = frozenset()
    kv_layout: Layout = "NHD"
    fnuz: bool = False
    latent: bool = False
    sparse: bool = False
    options: tuple[tuple[str, str | int | float | bool], ...] = ()
    packed: Packed | None = None

    def __post_init__(self) -> None:
        for name, integral in _NUMBERS.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), integral=integral))
        if self.asymmetric_window is not None:
            object.__setattr__(self, "asymmetric_window", _sides("asymmetric_window", self.asymmetric_window))
        problem = next(_spec_problems(self), None)
        if problem is not None:
            raise SpecError(problem)
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, f.name) for f in fields(self))))
        w = self.sliding_window
        both = self.asymmetric_window or ((-1, -1) if w is None else (w - 1, w - 1))
        object.__setattr__(self, "_both", tuple(-1 if side >= LONGEST - 1 else side for side in both))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # a string has another hash in another process
        return _spec_of, ({f.name: getattr(self, f.name) for f in fields(self)},)

    @classmethod
    def from_request(
        cls,
        request: AttentionRequest,
        *,
        softmax_scale: float | None = None,
        sliding_window: int | Sequence[int] | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        kv_layout: Layout = "NHD",
        fnuz: bool = False,
        options: tuple[tuple[str, str | int | float | bool], ...] = (),
        packed: Packed | None = None,
    ) -> Self:
        """The spec of a layer, from its request and the numbers that a request does not hold.

        softmax_scale: default ``head_size ** -0.5``; for MLA in either form, the default of its expanded keys.
        sliding_window: as `window_of` takes it. chunk: in positions. Raises `SpecError` if the request lacks a number
        that a layer needs, or asks for something outside this contract.
        """
        if request.attention not in ("mha", "mla", "mla_sparse"):
            raise SpecError(f"attention is {request.attention}; this contract is for mha, mla and mla_sparse")
        if unserved := request.features & _ELSEWHERE:
            names = ", ".join(sorted(unserved))
            raise SpecError(f"the request asks for {names}, and a layer here is given nothing to compute that with")
        latent = request.attention != "mha" and request.phase != "prefill"
        # prompts of MLA have packed keys, whatever format the cache of their latents has
        expanded = request.attention != "mha" and not latent
        if request.num_heads is None:
            raise SpecError("num_heads is not given; to run a layer its request must say how many heads it has")
        if request.dtype not in DTYPES:
            raise SpecError(f"dtype is {request.dtype}; layers compute in {', '.join(DTYPES)}")
        number, sides = window_of(sliding_window, request)
        return cls(
            num_heads=request.num_heads,
            num_kv_heads=request.num_kv_heads or (1 if latent else request.num_heads),
            head_size=request.head_size,
            head_size_v=_latent_rank(request) if latent else request.head_size_v or request.head_size,
            dtype=DTYPES[request.dtype],
            softmax_scale=_default_scale(request, latent) if softmax_scale is None else softmax_scale,
            kv_dtype="auto" if expanded else request.kv_dtype or "auto",
            block_size=request.block_size,
            sliding_window=number,
            asymmetric_window=sides,
            chunk=chunk,
            softcap=softcap,
            attn_type=request.attn_type,
            features=request.features,
            kv_layout=kv_layout,
            fnuz=fnuz,
            latent=latent,
            sparse=latent and request.attention == "mla_sparse",
            options=options,
            packed=packed,
        )

    def sides(self, causal: bool | Tensor) -> tuple[int, int]:
        """How many keys a query sees before its own and after it, -1 for all. Chunks and ranges do not count.

        A side that is wider than any request is -1, so that two positions fit into 32 bits when added. causal: the
        batch's. If it is a tensor, the sides of a request that is not causal.
        """
        left, right = self._both
        return left, 0 if causal is True else right

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the KV cache's elements; uint8 where they are packed."""
        if self.packed is not None:
            return torch.uint8
        dtype = self.dtype if self.kv_dtype == "auto" else KV_DTYPES[self.kv_dtype]
        return _FNUZ.get(dtype, dtype) if self.fnuz else dtype

    @property
    def query_dtype(self) -> torch.dtype:
        """The dtype of queries."""
        return self._e4m3 if "fp8_query" in self.features else self.dtype

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self._e4m3 if "fp8_output" in self.features else self.dtype

    @property
    def _e4m3(self) -> torch.dtype:
        return torch.float8_e4m3fnuz if self.fnuz else torch.float8_e4m3fn

    @property
    def quantised(self) -> bool:
        """Whether the cache holds 8-bit numbers with a scale."""
        return self.cache_dtype.itemsize == 1


def _default_scale(request: AttentionRequest, latent: bool) -> float:
    """The softmax scale of a layer that names none. Raises `SpecError` for latents whose expanded keys are unknown.

    A root, not a power: kernels may be compiled for the number, and all processors round roots alike, but not powers.
    """
    if not latent:
        return 1.0 / math.sqrt(request.head_size)
    nope, rope = request.qk_nope_head_dim, request.qk_rope_head_dim
    if nope is None or rope is None:
        raise SpecError(
            "softmax_scale is not given, and of a latent it depends on qk_nope_head_dim and qk_rope_head_dim, which "
            "the request lacks; give it, or both of them"
        )
    return 1.0 / math.sqrt(nope + rope)


def _latent_rank(request: AttentionRequest) -> int:
    """How many elements of a latent are its value. Raises `SpecError` if the request does not say."""
    rope = request.qk_rope_head_dim
    rank = request.head_size_v or request.kv_lora_rank or (None if rope is None else request.head_size - rope)
    if rank is None:
        raise SpecError("head_size_v is not given; of a latent it is the part that is the value (kv_lora_rank)")
    return rank


def _spec_of(values: dict[str, Any]) -> AttentionSpec:
    return AttentionSpec(**values)


# the numbers of a spec, and whether they are integers
_NUMBERS = {
    "num_heads": True, "num_kv_heads": True, "head_size": True, "head_size_v": True, "block_size": True,
    "sliding_window": True, "chunk": True, "softmax_scale": False, "softcap": False,
}  # fmt: skip


def _number(name: str, value: Any, *, integral: bool) -> int | float | None:
    """A number as Python's int or float, for which kernels are compiled; None for an optional one that is missing."""
    if value is None and name in ("block_size", "sliding_window", "chunk", "softcap"):
        return None
    if integral and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if not integral and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    also = " or (left, right)" if name == "sliding_window" else ""
    raise SpecError(f"{name} is {value!r}; expected {'an integer' if integral else 'a number'}{also}")


def _sides(name: str, value: Any) -> tuple[int, int]:
    """A pair of integers of at least -1. Raises `SpecError` for anything else."""
    sides = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if len(sides) != 2 or not all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in sides):
        raise SpecError(f"{name} is {value!r}; expected (left, right), two integers")
    left, right = map(int, sides)
    if min(left, right) < -1 or max(left, right) > 2 * LONGEST:
        raise SpecError(
            f"{name} is {(left, right)}; expected keys before and after a query, up to {2 * LONGEST}, or -1"
        )
    return left, right


def window_of(window: Any, request: AttentionRequest) -> tuple[Any, tuple[int, int] | None]:
    """The fields ``sliding_window`` and ``asymmetric_window`` of a spec; at most one of them is not None.

    window: how many keys a query sees, itself included, and as many after it in a batch that is not causal. Or (left,
    right): the keys before its own and after it, -1 for all. Raises `SpecError` for sides that are not integers.
    """
    if not isinstance(window, Sequence) or isinstance(window, str):
        return window, None
    left, right = _sides("sliding_window", window)
    features = request.features
    if "asymmetric_window" not in features:
        # in batches that are all causal, a query sees no key after its own
        causal = request.attn_type == "decoder" and not features & {"non_causal", "causal_by_request"}
        if causal or left == right:
            return None if left == -1 else left + 1, None
    return None, (left, right)


# features that registry rows of engines' kernels claim, and that this contract has no input for
_ELSEWHERE = frozenset({"pcp", "rswa", "score_bias", "sparse_blocks"})
# features that compare the positions of queries and keys
_OF_POSITIONS = {"alibi", "asymmetric_window", "causal_by_request", "chunk", "mm_prefix", "sliding_window", "tree_mask"}


# feature -> how a spec without its number is described, and how to mend that
_LACKING = {
    "sliding_window": (
        "sliding_window is not given, or is -1, which is every key,",
        "give the number of keys, or leave the feature out",
    ),
    "asymmetric_window": ("asymmetric_window is None", "give sliding_window=(left, right)"),
}


def _spec_problems(spec: AttentionSpec) -> Any:
    for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v"):
        if getattr(spec, name) < 1:
            yield f"{name} is {getattr(spec, name)}; expected at least 1"
    if spec.num_heads % max(spec.num_kv_heads, 1):
        yield f"num_heads is {spec.num_heads} and num_kv_heads is {spec.num_kv_heads}; the second must divide the first"
    yield from _format_problems(spec)
    if spec.block_size is not None and spec.block_size < 1:
        yield f"block_size is {spec.block_size}; expected at least 1"
    if spec.kv_layout not in get_args(Layout):
        yield f"kv_layout is {spec.kv_layout!r}; expected {', '.join(get_args(Layout))}"
    elif (
        spec.kv_layout == "SPLIT"
        and spec.kv_dtype in ("auto", *KV_DTYPES)
        and spec.packed is None
        and spec.head_size % (16 // spec.cache_dtype.itemsize)
    ):
        x = 16 // spec.cache_dtype.itemsize
        yield f"head_size is {spec.head_size}, and the layout SPLIT holds keys by {x}; take a multiple of it"
    if not 0 < spec.softmax_scale < math.inf:
        yield f"softmax_scale is {spec.softmax_scale}; expected more than 0"
    elif not _SMALLEST <= spec.softmax_scale <= _LARGEST_SCALE:
        yield f"softmax_scale is {spec.softmax_scale}; expected 2**-60 to 2**60, within which float32 holds scores"
    windows = spec.features & {"sliding_window", "asymmetric_window"}
    if len(windows) > 1:
        yield "a layer has a sliding_window or an asymmetric_window, not both; ask for one of the features"
    for name in ("sliding_window", "asymmetric_window", "chunk", "softcap"):
        value = getattr(spec, name)
        if (value is not None) != (name in spec.features):
            lacking, give = _LACKING.get(name, (f"{name} is None", "give it"))
            asked = f"{lacking} and the request asks for {name}; {give}"
            given = f"{name} is {value} and the request does not ask for {name}; add the feature"
            yield asked if value is None else given
        if value is not None and name != "asymmetric_window" and not 0 < value < math.inf:
            yield f"{name} is {value}; expected more than 0 (None for none)"
        elif name == "softcap" and value is not None and value > LARGEST_SOFTCAP:
            yield f"softcap is {value}; expected up to {LARGEST_SOFTCAP}, past which scores are rounded (None for none)"
        elif name == "softcap" and value is not None and value < _SMALLEST:
            yield f"softcap is {value}; expected 2**-60 or more, for float32 holds no score by it (None for none)"
    yield from _mask_problems(spec, windows)
    yield from _latent_problems(spec)


def _format_problems(spec: AttentionSpec) -> Any:
    packed, known = spec.packed, ("auto", *KV_DTYPES)
    if packed is None:
        if spec.kv_dtype not in known:
            yield (
                f"kv_dtype is {spec.kv_dtype}; caches here hold {', '.join(known)}, or a packed format, which is given "
                "as packed"
            )
        return
    if spec.kv_dtype != packed.name:
        yield f"kv_dtype is {spec.kv_dtype} and packed is {packed.name}; they name one format"
    if spec.latent:
        yield f"kv_dtype is {packed.name}, which holds keys and values; the layer is MLA in its latent form"
    if spec.kv_layout != "NHD":
        yield f"kv_layout is {spec.kv_layout}; {packed.name} has a layout of its own, which goes with NHD"
    if spec.block_size is not None and spec.block_size % ROWS:
        yield f"block_size is {spec.block_size}; {packed.name} holds blocks of a multiple of {ROWS} tokens"


def _mask_problems(spec: AttentionSpec, windows: frozenset[str]) -> Any:
    if "mm_prefix_in_window" in spec.features and not (windows and "mm_prefix" in spec.features):
        yield "mm_prefix_in_window bounds the ranges of mm_prefix by a window; ask for both, or for neither"
    if spec.sliding_window is not None and spec.sliding_window > 2 * LONGEST:
        yield f"sliding_window is {spec.sliding_window}; expected up to {2 * LONGEST}"
    if spec.attn_type == "encoder_decoder":
        # the positions of queries and keys count in different sequences: there is no distance between them
        for name in sorted(spec.features & _OF_POSITIONS):
            yield f"{name} has no meaning for encoder_decoder attention: query and key positions are not comparable"


def _latent_problems(spec: AttentionSpec) -> Any:
    if not spec.latent:
        if spec.sparse:
            yield "the layer is sparse and not latent; tokens are chosen for MLA in its latent form alone"
        if spec.kv_dtype == "fp8_ds_mla":
            yield "kv_dtype is fp8_ds_mla, which holds latents; the layer is none of MLA in its latent form"
        return
    if spec.num_kv_heads != 1 or spec.head_size_v > spec.head_size or spec.attn_type != "decoder":
        yield (
            f"num_kv_heads is {spec.num_kv_heads}, head_size {spec.head_size}, head_size_v {spec.head_size_v}, "
            f"attn_type {spec.attn_type}; MLA in its latent form is a decoder with one KV head, whose value is the "
            "beginning of its key"
        )
    if spec.kv_layout == "SPLIT":
        yield "kv_layout is SPLIT; latents lie in NHD or HND, which are one layout for one head"
    shape = spec.head_size, spec.head_size_v, spec.dtype
    if spec.kv_dtype == "fp8_ds_mla" and shape != (576, 512, torch.bfloat16):
        yield (
            f"kv_dtype is fp8_ds_mla, head_size {spec.head_size}, head_size_v {spec.head_size_v}, dtype {spec.dtype}; "
            "the format holds a latent of 512 and a rotary part of 64 in bfloat16"
        )
