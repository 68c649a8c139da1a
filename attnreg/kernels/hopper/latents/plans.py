# mypy: disable-error-code="import-untyped"
"""Plans of MLA's decoding on SM 9.0: the launches for a batch, made once for all layers of a spec, run once per layer.

Launches, splits and the merge of their parts are those of `attnreg.kernels.mla.plans`; the kernel is another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnreg.kernels.hopper.latents.kernel import latent_attention_kernel
from attnreg.kernels.hopper.latents.loads import BOXES
from attnreg.kernels.hopper.target import require
from attnreg.kernels.mla.cache import block_and_token, paged_layout
from attnreg.kernels.mla.plans import Launches, PlanOfBatch, latent_launches, latent_shares
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.layout import FP8
from attnreg.kernels.triton.schedule import Keys, Launch, Shares
from attnreg.kernels.triton.splits.merge import MergeKey, PlannedMerge, Run, run_of
from attnreg.kernels.triton.target import Target
from attnreg.kernels.triton.tiles import Config
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, SpecError
from attnreg.runtime.lengths import queries_of

RANK, ROPE = 512, 64
# the tile of a program: its rows and keys, and that it has a multiprocessor to itself; benchmarks/results/mla.json has
# its times. On an H200 one request of 8k keys takes 2 us more with 24 or 48 splits of its keys in place of 32. Two
# warpgroups that take turns at scores and weights, each of every second tile, and hand each other the weights, took
# 261 us where these took 259 (64 requests of 8k, 128 heads).
CONFIG = Config(64, 64, 4, 2, programs_per_sm=1)
# the tensors of a launch in the order of the kernel's pointers: those of the call and of the batch, then its parts
_POINTERS = (
    "query_ptr", "output_ptr", "lse_ptr", "latent_ptr", "tile_scale_ptr", "kv_scale_ptr",
    "query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "partial_ptr", "partial_lse_ptr",
)  # fmt: skip
# the numbers of the batch and of the call, those of its cache, and those of the launch
_NUMBERS = ("num_reqs", "stride_table", "stride_lse")
_CACHE = ("wide_desc", "narrow_desc")
_LAUNCH = ("min_query_len", "max_query_len", "min_split", "softmax_scale")
# 8-bit floats that a warpgroup converts
_CONVERTED = (torch.float8_e4m3fn, torch.float8_e5m2)
_ATTENTION = Kernel(latent_attention_kernel, (*_POINTERS, *_CACHE, *_NUMBERS, *_LAUNCH, "slots"), _CACHE)


def validate_spec(spec: AttentionSpec) -> None:
    """Raises `SpecError` for a layer that the kernel does not compute."""
    if not spec.latent:
        raise SpecError("the layer is none of MLA in its latent form, which is all that the kernel computes")
    if (spec.head_size_v, spec.head_size) != (RANK, RANK + ROPE):
        raise SpecError(
            f"head_size is {spec.head_size} and head_size_v {spec.head_size_v}; the kernel computes latents of {RANK} "
            f"with a rotary part of {ROPE}"
        )
    read = spec.kv_dtype == "fp8_ds_mla" or spec.cache_dtype in (spec.dtype, *_CONVERTED)
    if spec.dtype not in (torch.float16, torch.bfloat16) or not read:
        raise SpecError(
            f"dtype is {spec.dtype} and that of the cache {spec.cache_dtype}; the kernel computes float16 and "
            "bfloat16, from a cache of the same or of 8-bit floats"
        )
    if spec.block_size is None or (spec.block_size != 1 and spec.block_size % 16):
        raise SpecError(f"block_size is {spec.block_size}; the kernel reads blocks of a multiple of 16 tokens")


class CacheStrides(NamedTuple):
    """Where a cache of latents is: its address, blocks, and elements from one block, and one token, to the next."""

    address: int
    blocks: int
    block: int
    token: int


def cache_strides(cache: Tensor, *, tokens_first: bool) -> CacheStrides:
    """The strides of a cache of latents. Raises `BatchError` where the hardware does not copy by them."""
    block, token = block_and_token(cache, tokens_first)
    if cache.shape[0] < 2:
        block = cache.shape[1 if tokens_first else 2] * token
    address, unit = cache.data_ptr(), 16 // cache.itemsize
    if address % 16 or block % unit or token % unit or min(block, token) <= 0:
        problem = (
            f"kv_cache.key has strides {list(cache.stride())} and begins {address % 16} bytes after a multiple of 16"
        )
        rule = "here blocks and tokens begin at multiples of 16 bytes; TRITON_MLA and TRITON_MLA_SPARSE read any"
        raise BatchError([f"{problem}; {rule}"])
    return CacheStrides(address, cache.shape[0], block, token)


class HopperLatentPlan(PlanOfBatch):
    """The launches that compute attention over latents for a batch, for all layers of one spec."""

    launches: Launches[_PlannedLaunch]

    def __init__(
        self, spec: AttentionSpec, batch: BatchMetadata, *, splits: int | None = None, alike: bool = False
    ) -> None:
        """splits: overrides the chosen ones, for measurements. Raises `SpecError` and `BatchError`."""
        validate_spec(spec)
        super().__init__(batch, alike=alike)
        self._tokens_first = spec.kv_layout == "NHD"
        device = batch.query_start_loc.device
        self._launches_of = functools.partial(_launches, spec, require(device), device, *self._facts, splits)
        self.launches = self._launches_of(self.keys)

    def _run(self, call: Call) -> None:
        assert call.kv_cache is not None
        query, output, lse, kv_scale = call.query, call.output, call.lse, call.params.k_scale
        strides, code = cache_strides(call.kv_cache.key, tokens_first=self._tokens_first), self.launches.planned[0].code
        latent, scales, descriptors = None, None, (None, None)
        key = _VariantKey(query.stride(), output.stride(), lse is None)
        if code.by_row:
            latent, scales = by_row(call.kv_cache.key, strides, self._tokens_first)
            key = key._replace(cache=block_and_token(latent, self._tokens_first), no_kv_scale=kv_scale is None)
        else:
            descriptors = _descriptors(code.dtype, code.block_size, code.box, strides)
        # an lse is contiguous, and that of one head may have any stride
        numbers = (*self._numbers, 0 if lse is None else lse.shape[1])
        for run in self.launches.bound(key, query.shape[0], numbers):
            run((query, output, lse, latent, scales, kv_scale), self._tensors, descriptors)


def by_row(cache: Tensor, known: CacheStrides, tokens_first: bool) -> tuple[Tensor, Tensor | None]:
    """A cache that is read row by row, 8-bit numbers as words, and the scales that a latent in fp8_ds_mla has."""
    # those of the only block and of the one head may be anything, which need not be a number of words
    strides = (known.block, known.token, known.token) if tokens_first else (known.block, known.block, known.token)
    cache = cache.as_strided(cache.shape, (*strides, 1))
    if cache.itemsize > 1:
        return cache, None
    scales = None if cache.dtype in FP8 else cache.view(torch.float32)[..., RANK // 4 :]
    return cache.view(torch.int32), scales


class _VariantKey(NamedTuple):
    """The facts about a call's tensors that the kernel's code depends on; cache: strides of one read row by row."""

    query: tuple[int, ...]
    output: tuple[int, ...]
    no_lse: bool
    no_kv_scale: bool = True
    cache: tuple[int, int] = (0, 0)


class _Code(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    block_size: int
    num_heads: int
    heads: int
    causal: bool
    one_tile: bool
    split: bool
    shares: Shares | None
    by_row: bool
    fp8: str

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": CONFIG.num_warps}

    @property
    def box(self) -> int:
        """The rows that the copy engine fetches at once: they lie in one block."""
        return CONFIG.block_n if self.by_row else math.gcd(self.block_size, CONFIG.block_n)

    def constants(self, key: _VariantKey) -> Mapping[str, Any]:
        return {
            "Q_TOKEN": key.query[0],
            "Q_HEAD": key.query[1],
            "OUT_TOKEN": key.output[0],
            "OUT_HEAD": key.output[1],
            "CACHE": paged_layout(self.block_size, key.cache, RANK, self.fp8),
            "BOX": self.box,
            "NUM_HEADS": self.num_heads,
            "HEADS": self.heads,
            "CAUSAL": self.causal,
            "ONE_TILE": self.one_tile,
            "SPLIT": self.split,
            "SHARES": self.shares,
        }


@functools.lru_cache(maxsize=1024)
def _descriptors(dtype: torch.dtype, block_size: int, box: int, cache: CacheStrides) -> tuple[Any, Any]:
    """The kernel's arguments that describe a cache. They hold its address alone and keep no cache alive."""
    base = SimpleNamespace(data_ptr=lambda: cache.address, dtype=dtype)
    shape = [cache.blocks, block_size // 8, (RANK + ROPE) // 64, 8, 64]
    strides = [cache.block, 8 * cache.token, 64, cache.token, 1]
    wide, narrow = (
        TensorDescriptor(base, shape, strides, [1, box // 8, columns // 64, 8, 64], BOXES.value)
        for columns in (RANK // 2, ROPE)
    )
    return wide, narrow


class _PlannedLaunch:
    """One launch of the kernel, without tensors, and the merge if its keys are split."""

    def __init__(self, spec: AttentionSpec, chosen: Launch, requests: int, device: torch.device, code: _Code) -> None:
        self.chosen, self.requests, self.code = chosen, requests, code
        self.merge: PlannedMerge | None = None
        if code.split or code.shares:
            self.merge = PlannedMerge(spec, chosen, RANK, requests, device, True, code.shares)
        self.programs = -(-spec.num_heads // chosen.heads)
        self.values = chosen.min_query_len, chosen.max_query_len, chosen.min_split, spec.softmax_scale
        self.variant = _ATTENTION.variant(device, code)

    def bind(self, key: _VariantKey, rows: int, numbers: tuple[int, ...]) -> Run:
        """What computes the requests of this launch, of calls with so many rows of queries, padding included.

        It is given the `_descriptors` of a call's cache: whoever makes a cache for each call has others each time.
        """
        grid = (self.chosen.tiles(self.requests, rows) * self.programs, self.chosen.splits, 1)
        values = (None, None, *numbers, *self.values, 0)
        named = dict(zip((*_CACHE, *_NUMBERS, *_LAUNCH, "slots"), values, strict=True))
        merge_key = MergeKey(key.output, None, not key.no_lse, False)
        return run_of(self.variant, self.merge, key, grid, rows, named, merge_key, _merged)


def _merged(call: Sequence[Any]) -> tuple[Any, Any, None, None]:
    """The tensors of a call that the merge of split keys needs; latents have no sinks and no 8-bit output."""
    return call[1], call[2], None, None


@functools.lru_cache(maxsize=1024)
def _launches(
    spec: AttentionSpec,
    target: Target,
    device: torch.device,
    causal: bool,
    starts: bytes,
    max_query_len: int,
    splits: int | None,
    keys: Keys,
) -> Launches[_PlannedLaunch]:
    """The launches for every batch of which this is true; starts: the prefix sums of its queries, as int32."""
    assert spec.block_size is not None
    queries = queries_of(starts).each
    launches = latent_launches(spec, target, queries, max_query_len, keys, CONFIG, splits)
    planned = []
    for one in launches:
        code = _Code(
            dtype=spec.dtype,
            block_size=spec.block_size,
            num_heads=spec.num_heads,
            heads=one.heads,
            causal=causal,
            one_tile=one.one_tile,
            split=one.splits > 1,
            shares=latent_shares(spec, one, len(queries)),
            by_row=spec.cache_dtype != spec.dtype or spec.block_size % 16 > 0,
            fp8=FP8.get(torch.float8_e4m3fn if spec.kv_dtype == "fp8_ds_mla" else spec.cache_dtype, ""),
        )
        planned.append(_PlannedLaunch(spec, one, len(queries), device, code))
    return Launches(planned)
