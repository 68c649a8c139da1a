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

from attnreg.kernels.hopper.latents import SWIZZLED, latent_attention_kernel
from attnreg.kernels.hopper.target import require
from attnreg.kernels.mla.cache import block_and_token
from attnreg.kernels.mla.plans import Launches, latent_launches
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.schedule import Launch
from attnreg.kernels.triton.splits import MergeKey, PlannedMerge, Run, run_of
from attnreg.kernels.triton.target import Target
from attnreg.kernels.triton.tiles import Config
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, SpecError
from attnreg.runtime.lengths import content, queries_of

RANK, ROPE = 512, 64
# the tile of a program: its rows and keys, and that it has a multiprocessor to itself. On an H200 in bfloat16, graphs
# replayed in turn (Triton 3.6, 2026-11-22, µs; in brackets FlashMLA, FlashAttention 3, TRITON_MLA): 64 requests of 8k
# keys, 128 heads 259 (251, 252, 554), with two queries each 489 (484, 472, 1,059); 128 requests 503 (526, 495, 1,086);
# 16 requests 94 (101, 85, 161); one 30 (47, 31, 31), in more splits 34 and 43; 32 of 2k 65 (72, 61, 93); 128 of 32k,
# 16 heads 1,123 (1,189, 1,120, 1,101). In another run 64 requests took 257, and FlashMLA 259. Two warpgroups that take
# turns at scores and weights, each of every second tile, and hand each other the weights, took 261, 503 (128 requests),
# 101, 34 and 1,132.
CONFIG = Config(64, 64, 4, 2, programs_per_sm=1)
# the tensors of a launch in the order of the kernel's pointers: those of the call and of the batch, then its parts
_POINTERS = (
    "query_ptr", "output_ptr", "lse_ptr", "query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "partial_ptr",
    "partial_lse_ptr",
)  # fmt: skip
# the numbers of the batch and of the call, those of its cache, and those of the launch
_NUMBERS = ("num_reqs", "stride_table", "stride_lse")
_CACHE = ("wide_desc", "narrow_desc", "apart")
_LAUNCH = ("min_query_len", "max_query_len", "min_split", "softmax_scale")
_ATTENTION = Kernel(latent_attention_kernel, (*_POINTERS, *_CACHE, *_NUMBERS, *_LAUNCH, "slots"))
# a block of key lengths within which plans are alike
_ALIKE = 256


def validate_spec(spec: AttentionSpec) -> None:
    """Raises `SpecError` for a layer that the kernel does not compute."""
    if not spec.latent:
        raise SpecError("the layer is none of MLA in its latent form, which is all that the kernel computes")
    if (spec.head_size_v, spec.head_size) != (RANK, RANK + ROPE):
        raise SpecError(
            f"head_size is {spec.head_size} and head_size_v {spec.head_size_v}; the kernel computes latents of {RANK} "
            f"with a rotary part of {ROPE}"
        )
    if spec.dtype not in (torch.float16, torch.bfloat16) or spec.cache_dtype != spec.dtype:
        raise SpecError(
            f"dtype is {spec.dtype} and that of the cache {spec.cache_dtype}; the kernel computes float16 and "
            "bfloat16, from a cache of the same"
        )
    if spec.block_size is None or spec.block_size % 16:
        raise SpecError(f"block_size is {spec.block_size}; the kernel reads blocks of a multiple of 16 tokens")


class CacheRows(NamedTuple):
    """A cache as rows of one token each: where it begins, its rows, elements from one to the next, and rows from one
    block to the next."""

    address: int
    rows: int
    step: int
    apart: int


def cache_rows(cache: Tensor, *, tokens_first: bool) -> CacheRows:
    """The rows of a cache of latents. Raises `BatchError` where its strides are none that the hardware copies by."""
    blocks, block_size = cache.shape[0], cache.shape[1 if tokens_first else 2]
    between, step = block_and_token(cache, tokens_first)
    if blocks < 2:
        between = block_size * step
    address = cache.data_ptr()
    if address % 16 or step % (16 // cache.itemsize) or not step or between % step:
        problem = (
            f"kv_cache.key has strides {list(cache.stride())} and begins {address % 16} bytes after a multiple of 16"
        )
        rule = "here tokens begin at multiples of 16 bytes, and blocks at multiples of a token; TRITON_MLA reads any"
        raise BatchError([f"{problem}; {rule}"])
    apart = between // step
    rows = (blocks - 1) * apart + block_size
    if rows > 2**31:
        raise BatchError([f"kv_cache.key spans {rows} rows of a token; the kernel counts up to {2**31}"])
    return CacheRows(address, rows, step, apart)


class HopperLatentPlan:
    """The launches that compute attention over latents for a batch, for all layers of one spec."""

    def __init__(self, spec: AttentionSpec, batch: BatchMetadata, *, splits: int | None = None) -> None:
        """splits: overrides the chosen ones, for measurements. Raises `SpecError` and `BatchError`."""
        validate_spec(spec)
        table, starts = batch.block_table, batch.query_start_loc
        if table is None:
            raise BatchError(["the batch has no block_table: MLA in its latent form reads the cache"])
        self.slot_mapping = batch.slot_mapping
        self._tokens_first = spec.kv_layout == "NHD"
        self.launches = _launches(
            spec, require(starts.device), starts.device, batch.causal is True, content(batch.query_start_loc_cpu),
            batch.max_query_len, -(-batch.max_seq_len // _ALIKE) * _ALIKE, splits,
        )  # fmt: skip
        self._numbers = batch.num_reqs, table.stride(0) if table.shape[0] > 1 else 0
        self._tensors = starts, batch.seq_lens, table

    def run(self, call: Call) -> None:
        """Writes the output, and the lse, of every query of the batch."""
        if not self.launches.planned:
            return
        assert call.kv_cache is not None
        query, output, lse = call.query, call.output, call.lse
        key = _VariantKey(query.stride(), output.stride(), lse is None)
        cache = cache_rows(call.kv_cache.key, tokens_first=self._tokens_first)
        # an lse is contiguous, and that of one head may have any stride
        numbers = (*self._numbers, 0 if lse is None else lse.shape[1])
        for run in self.launches.bound(key, query.shape[0], numbers, cache):
            run((query, output, lse), self._tensors)


class _VariantKey(NamedTuple):
    """The facts about a call's tensors that the kernel's code depends on."""

    query: tuple[int, ...]
    output: tuple[int, ...]
    no_lse: bool


class _Code(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    block_size: int
    num_heads: int
    heads: int
    causal: bool
    one_tile: bool
    split: bool

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": CONFIG.num_warps}

    @property
    def box(self) -> int:
        """The rows that are fetched at once: they lie in one block."""
        return math.gcd(self.block_size, CONFIG.block_n)

    def constants(self, key: _VariantKey) -> Mapping[str, Any]:
        return {
            "Q_TOKEN": key.query[0],
            "Q_HEAD": key.query[1],
            "OUT_TOKEN": key.output[0],
            "OUT_HEAD": key.output[1],
            "BLOCK_SIZE": self.block_size,
            "BOX": self.box,
            "NUM_HEADS": self.num_heads,
            "HEADS": self.heads,
            "CAUSAL": self.causal,
            "ONE_TILE": self.one_tile,
            "SPLIT": self.split,
        }

    def descriptors(self, cache: CacheRows) -> Mapping[str, Any]:
        """The kernel's arguments that describe a cache. They hold its address alone: a plan keeps no cache alive."""
        base = SimpleNamespace(data_ptr=lambda: cache.address, dtype=self.dtype)
        shape, strides = [cache.rows, RANK + ROPE], [cache.step, 1]
        wide, narrow = (
            TensorDescriptor(base, shape, strides, [self.box, columns], SWIZZLED.value) for columns in (RANK // 2, ROPE)
        )
        return {"wide_desc": wide, "narrow_desc": narrow, "apart": cache.apart}


class _PlannedLaunch:
    """One launch of the kernel, without tensors, and the merge if its keys are split."""

    def __init__(self, spec: AttentionSpec, chosen: Launch, requests: int, device: torch.device, code: _Code) -> None:
        self.chosen, self.requests, self.code = chosen, requests, code
        self.merge = PlannedMerge(spec, chosen, RANK, requests, device, True) if code.split else None
        self.programs = -(-spec.num_heads // chosen.heads)
        self.values = chosen.min_query_len, chosen.max_query_len, chosen.min_split, spec.softmax_scale
        self.variant = _ATTENTION.variant(device, code)

    def bind(self, key: _VariantKey, rows: int, numbers: tuple[int, ...], cache: CacheRows) -> Run:
        """What computes the requests of this launch, of calls with so many rows of queries, padding included."""
        grid = (self.chosen.tiles(self.requests, rows) * self.programs, self.chosen.splits, 1)
        named = dict(zip((*_NUMBERS, *_LAUNCH, "slots"), (*numbers, *self.values, 0), strict=True))
        named |= self.code.descriptors(cache)
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
    max_seq_len: int,
    splits: int | None,
) -> Launches[_PlannedLaunch]:
    """The launches for every batch of which this is true; starts: the prefix sums of its queries, as int32."""
    assert spec.block_size is not None
    queries = queries_of(starts).each
    launches = latent_launches(spec, target, queries, max_query_len, max_seq_len, CONFIG, splits)
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
        )
        planned.append(_PlannedLaunch(spec, one, len(queries), device, code))
    return Launches(planned)
