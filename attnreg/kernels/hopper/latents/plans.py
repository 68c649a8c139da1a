# mypy: disable-error-code="import-untyped"
"""The plan of MLA's decoding on SM 9.0: the launches of `attnreg.kernels.mla.plans`, with another kernel."""

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
from attnreg.kernels.mla.plans import (
    LatentBatch,
    LatentFacts,
    PlanOverLatents,
    latent_launches,
    latent_shares,
    merged_of,
)
from attnreg.kernels.triton.launch import Kernel, pointers_of
from attnreg.kernels.triton.layout import FP8
from attnreg.kernels.triton.planned.launches import Launches, Merging, PlannedLaunch, Run
from attnreg.kernels.triton.schedule import KeyLengths, Shares
from attnreg.kernels.triton.splits.merge import MergeKey, Parts
from attnreg.kernels.triton.tiles import Config
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, SpecError
from attnreg.runtime.lengths import queries_of
from attnreg.runtime.tensors import named

RANK, ROPE = 512, 64
# The tile of a program, which has a multiprocessor to itself; benchmarks/results/mla.json has its times. On an H200 one
# request of 8k keys takes 2 us more with 24 or 48 splits of its keys in place of 32. Another kernel took 261 us where
# this one took 259 (64 requests of 8k, 128 heads). There two warpgroups took turns at the tiles, each computed scores
# and weights of every second one, and they exchanged the weights.
CONFIG = Config(64, 64, 4, 2, programs_per_sm=1)
# 8-bit floats that a warpgroup converts
_CONVERTED = (torch.float8_e4m3fn, torch.float8_e5m2)


class HopperLatentTensors(NamedTuple):
    """The tensors of a call: the kernel's first pointers. latent, tile_scale: of a cache that is read row by row."""

    query: Tensor
    output: Tensor
    lse: Tensor | None
    latent: Tensor | None
    tile_scale: Tensor | None
    kv_scale: Tensor | None


class CacheDescriptors(NamedTuple):
    """Descriptors of a call's cache for the copy engine, of boxes of 256 columns and of 64; None if it is not used.

    They hold the cache's address, so a caller that allocates a cache for each call has new ones each time.
    """

    wide_desc: Any
    narrow_desc: Any


_NO_DESCRIPTORS = CacheDescriptors(None, None)


_POINTERS = pointers_of(HopperLatentTensors, LatentBatch, Parts)
_ATTENTION = Kernel(latent_attention_kernel, _POINTERS, CacheDescriptors._fields)


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
    """Where a cache of latents lies: its address, its number of blocks, and the strides of blocks and tokens."""

    address: int
    blocks: int
    block: int
    token: int


def cache_strides(cache: Tensor, *, tokens_first: bool) -> CacheStrides:
    """The strides of a cache of latents. Raises `BatchError` if the copy engine cannot copy by them."""
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


class HopperLatentPlan(PlanOverLatents):
    """The launches that compute attention over latents for a batch, for all layers of one spec."""

    def __init__(
        self, spec: AttentionSpec, batch: BatchMetadata, *, splits: int | None = None, alike: bool = False
    ) -> None:
        """splits: overrides the chosen ones, for measurements. Raises `SpecError` and `BatchError`."""
        validate_spec(spec)
        super().__init__(batch, alike=alike)
        self._read = CacheReads.of(spec)
        self._tokens_first = spec.kv_layout == "NHD"
        device = batch.query_start_loc.device
        self._facts = LatentFacts(
            spec, require(device), device, batch.causal is True, self.host, batch.max_query_len, CONFIG, splits
        )
        self.launches = self._launches_of(self.keys)

    def _launches_of(self, keys: KeyLengths) -> Launches:
        return _launches(self._facts, keys)

    def _prepared(self, call: Call) -> tuple[Sequence[Run], HopperLatentTensors | None, CacheDescriptors | None]:
        if not self.launches:
            return (), None, None
        assert call.kv_cache is not None
        query, output, lse, kv_scale = call.query, call.output, call.lse, call.params.k_scale
        strides, read = cache_strides(call.kv_cache.key, tokens_first=self._tokens_first), self._read
        latent, scales, descriptors = None, None, _NO_DESCRIPTORS
        key = HopperLatentKey(query.stride(), output.stride(), lse is None)
        if read.by_row:
            latent, scales = by_row(call.kv_cache.key, strides, self._tokens_first)
            key = key._replace(cache=block_and_token(latent, self._tokens_first), no_kv_scale=kv_scale is None)
        else:
            descriptors = _descriptors(read, strides)
        # the lse is contiguous: its shape gives the stride, because a tensor of one head may have any
        runs = self.launches.bound(key, query.shape[0], self._numbers, 0 if lse is None else lse.shape[1])
        return runs, named(HopperLatentTensors, (query, output, lse, latent, scales, kv_scale)), descriptors


class CacheReads(NamedTuple):
    """How a cache of latents is read: row by row, or in boxes by the copy engine.

    fp8: the format of 8-bit numbers, else "".
    """

    dtype: torch.dtype
    block_size: int
    by_row: bool
    fp8: str

    @classmethod
    def of(cls, spec: AttentionSpec) -> CacheReads:
        """How the cache of a layer is read."""
        assert spec.block_size is not None
        return cls(
            spec.dtype, spec.block_size, spec.cache_dtype != spec.dtype or spec.block_size % 16 > 0,
            FP8.get(torch.float8_e4m3fn if spec.kv_dtype == "fp8_ds_mla" else spec.cache_dtype, ""),
        )  # fmt: skip

    @property
    def box(self) -> int:
        """The rows that the copy engine fetches at once; all lie in one block."""
        return CONFIG.block_n if self.by_row else math.gcd(self.block_size, CONFIG.block_n)


def by_row(cache: Tensor, known: CacheStrides, tokens_first: bool) -> tuple[Tensor, Tensor | None]:
    """The cache as it is read row by row, 8-bit numbers as 32-bit words; and the scales of fp8_ds_mla, else None."""
    # a single block or head may have any stride, also one that is no whole number of words: these replace it
    strides = (known.block, known.token, known.token) if tokens_first else (known.block, known.block, known.token)
    cache = cache.as_strided(cache.shape, (*strides, 1))
    if cache.itemsize > 1:
        return cache, None
    scales = None if cache.dtype in FP8 else cache.view(torch.float32)[..., RANK // 4 :]
    return cache.view(torch.int32), scales


class HopperLatentKey(NamedTuple):
    """The facts about a call's tensors that the kernel's code depends on.

    cache: the strides of blocks and tokens if it is read row by row.
    """

    query: tuple[int, ...]
    output: tuple[int, ...]
    no_lse: bool
    no_kv_scale: bool = True
    cache: tuple[int, int] = (0, 0)

    @property
    def merge_key(self) -> MergeKey:
        return MergeKey(self.output, None, not self.no_lse, False)


class HopperLatentCode(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides and optional tensors."""

    cache: CacheReads
    num_heads: int
    heads: int
    causal: bool
    one_tile: bool
    split: bool
    shares: Shares | None

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": CONFIG.num_warps}

    def constants(self, key: HopperLatentKey) -> Mapping[str, Any]:
        q_token, q_head, _ = key.query
        out_token, out_head, _ = key.output
        return {
            "Q_TOKEN": q_token,
            "Q_HEAD": q_head,
            "OUT_TOKEN": out_token,
            "OUT_HEAD": out_head,
            "CACHE": paged_layout(self.cache.block_size, key.cache, RANK, self.cache.fp8),
            "BOX": self.cache.box,
            "NUM_HEADS": self.num_heads,
            "HEADS": self.heads,
            "CAUSAL": self.causal,
            "ONE_TILE": self.one_tile,
            "SPLIT": self.split,
            "SHARES": self.shares,
        }


@functools.lru_cache(maxsize=1024)
def _descriptors(read: CacheReads, cache: CacheStrides) -> CacheDescriptors:
    """The descriptors of a cache. They hold its address alone and keep no cache alive."""
    base = SimpleNamespace(data_ptr=lambda: cache.address, dtype=read.dtype)
    shape = [cache.blocks, read.block_size // 8, (RANK + ROPE) // 64, 8, 64]
    strides = [cache.block, 8 * cache.token, 64, cache.token, 1]
    return CacheDescriptors(
        *(
            TensorDescriptor(base, shape, strides, [1, read.box // 8, columns // 64, 8, 64], BOXES.value)
            for columns in (RANK // 2, ROPE)
        )
    )


@functools.lru_cache(maxsize=1024)
def _launches(facts: LatentFacts, keys: KeyLengths) -> Launches:
    """The launches for every batch with these facts."""
    spec, requests, planned = facts.spec, len(queries_of(facts.host).each), []
    for one in latent_launches(facts, keys):
        shares = latent_shares(spec, one, requests)
        code = HopperLatentCode(
            cache=CacheReads.of(spec),
            num_heads=spec.num_heads,
            heads=one.heads,
            causal=facts.causal,
            one_tile=one.one_tile,
            split=one.splits > 1,
            shares=shares,
        )
        merging = Merging(merged_of, RANK, True, shares)
        planned.append(PlannedLaunch(spec, one, requests, facts.device, _ATTENTION, code, merging))
    return Launches(planned)
