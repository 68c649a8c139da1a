# mypy: disable-error-code="import-untyped"
"""Plans of MLA's decoding: the launches for a batch, made once for all layers of a spec and run once per layer.

A plan has no memory of its own: the parts of split keys are allocated by each run, on the stream of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnreg.kernels.mla.cache import block_and_token, paged_layout, scaled_parts
from attnreg.kernels.mla.decode import _latent_attention_kernel
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.layout import FP8, Strides
from attnreg.kernels.triton.rows import Mask, Tile
from attnreg.kernels.triton.schedule import Launch, schedule
from attnreg.kernels.triton.splits import _merge_splits_kernel
from attnreg.kernels.triton.target import Target, target_of
from attnreg.kernels.triton.tiles import Config, Shape, power_of_2
from attnreg.runtime import latents
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, SpecError
from attnreg.runtime.lengths import content, queries_of

_BATCH = ("query_start_loc_ptr", "num_reqs", "seq_lens_ptr", "block_table_ptr", "stride_table")
_CALL = (
    "query_ptr", "latent_ptr", "rope_ptr", "tile_scale_ptr", "output_ptr", "lse_ptr", "kv_scale_ptr", "stride_lse",
)  # fmt: skip
_LAUNCH = ("min_query_len", "max_query_len", "min_split", "rank", "softmax_scale")
_PARTS = ("partial_ptr", "partial_lse_ptr", "slots")
_ATTENTION = Kernel(_latent_attention_kernel, (*_BATCH, *_CALL, *_LAUNCH, *_PARTS))
_MERGE = Kernel(
    _merge_splits_kernel,
    ("query_start_loc_ptr", "num_reqs", "output_ptr", "lse_ptr", "sinks_ptr", "out_scale_ptr", "stride_lse",
     "min_query_len", "max_query_len", "num_splits", *_PARTS),
)  # fmt: skip
_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# a block of key lengths within which plans are alike
_ALIKE = 256
# the widest latent, and the widest with its rotary part
WIDEST, WIDEST_KEY = 512, 640


def validate_spec(spec: AttentionSpec) -> None:
    """Raises `SpecError` for a layer that the kernel does not compute."""
    if not spec.latent:
        raise SpecError("the layer is none of MLA in its latent form, which is all that the kernel computes")
    if spec.head_size_v > WIDEST or spec.head_size > WIDEST_KEY or spec.head_size_v % 16:
        raise SpecError(
            f"head_size is {spec.head_size} and head_size_v {spec.head_size_v}; the kernel computes latents of "
            f"multiples of 16 up to {WIDEST}, with their rotary part up to {WIDEST_KEY}"
        )


def compute_dtype(spec: AttentionSpec, target: Target) -> torch.dtype:
    """The dtype of the dots: float16 holds every 8-bit float exactly, but not one with the scale of its tile.

    Triton's interpreter has no bfloat16 to compute in.
    """
    if spec.cache_dtype in FP8:
        return torch.float16
    return torch.float32 if target.backend == "interpreter" and spec.dtype == torch.bfloat16 else spec.dtype


class LatentPlan:
    """The launches that compute attention over latents for a batch, for all layers of one spec."""

    def __init__(
        self, spec: AttentionSpec, batch: BatchMetadata, *, config: Config | None = None, splits: int | None = None
    ) -> None:
        """config, splits: override the chosen ones, for measurements. Raises `SpecError` and `BatchError`."""
        validate_spec(spec)
        table, starts = batch.block_table, batch.query_start_loc
        if table is None:
            raise BatchError(["the batch has no block_table: MLA in its latent form reads the cache"])
        self.slot_mapping = batch.slot_mapping
        self.launches = _launches(
            spec, target_of(starts.device), starts.device, batch.causal is True, content(batch.query_start_loc_cpu),
            batch.max_query_len, -(-batch.max_seq_len // _ALIKE) * _ALIKE, config, splits,
        )  # fmt: skip
        stride = table.stride(0) if table.shape[0] > 1 else 0
        self._values = starts, batch.num_reqs, batch.seq_lens, table, stride

    def run(self, call: Call) -> None:
        """Writes the output, and the lse, of every query of the batch."""
        if not self.launches:
            return
        assert call.kv_cache is not None
        query, output, lse = call.query, call.output, call.lse
        code = self.launches[0].code
        cache = call.kv_cache.key
        if code.tiles:
            latent, scales, rope = scaled_parts(cache, code.converts)
        else:
            latent = cache.view(torch.uint8) if code.fp8 and not code.converts else cache
            rope, scales = latent[..., code.rank :], None
        kv_scale = call.params.k_scale
        variant_key = (
            query.stride(), output.stride(), block_and_token(latent, code.tokens_first),
            block_and_token(rope, code.tokens_first),
            None if scales is None else block_and_token(scales, code.tokens_first), kv_scale is None, lse is None,
        )  # fmt: skip
        values = query, latent, rope, scales, output, lse, kv_scale, 0 if lse is None else lse.shape[1]
        for planned in self.launches:
            planned.run(variant_key, self._values, values)


class _Code(NamedTuple):
    """The facts that the decode kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    compute: torch.dtype
    fp8: str
    tiles: int
    converts: bool
    tokens_first: bool
    block_size: int
    num_heads: int
    heads: int
    rank: int
    rope: int
    config: Config
    mask: Mask
    one_tile: bool
    split: bool
    dependent_launch: bool

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}

    @property
    def block_dv(self) -> int:
        return power_of_2(self.rank)

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        query, output, latent, rope, scales, *_ = key
        tile = Tile(
            heads=self.heads,
            block_m=self.config.block_m,
            block_n=self.config.block_n,
            block_k=min(self.config.block_k or self.block_dv, self.block_dv),
            block_d=max(16, power_of_2(self.rope)),
            block_rest=0,
            block_dv=self.block_dv,
        )
        return {
            "Q": Strides(query[0], query[1]),
            "OUT": Strides(output[0], output[1]),
            "LATENT": paged_layout(self.block_size, latent, self.rank, self.fp8),
            "ROPE": paged_layout(self.block_size, rope, self.rope, "" if self.tiles else self.fp8),
            "SCALES": paged_layout(self.block_size, scales or (0, 0), self.tiles, ""),
            "TILE": tile,
            "COMPUTE_DTYPE": _TL_DTYPES[self.compute],
            "NUM_HEADS": self.num_heads,
            "MASK": self.mask,
            "ONE_TILE": self.one_tile,
            "SPLIT": self.split,
            "DEPENDENT_LAUNCH": self.dependent_launch,
        }


class _PlannedLaunch:
    """One launch of the decode kernel, without the tensors of a batch, and the merge if its keys are split."""

    def __init__(self, spec: AttentionSpec, chosen: Launch, requests: int, device: torch.device, code: _Code) -> None:
        self.chosen, self.requests, self.code = chosen, requests, code
        self.merge = _PlannedMerge(spec, chosen, requests, device, code) if code.split else None
        self.programs = -(-spec.num_heads // chosen.heads)
        self.values = (
            chosen.min_query_len, chosen.max_query_len, chosen.min_split, spec.head_size_v, spec.softmax_scale,
        )  # fmt: skip
        self.variant = _ATTENTION.variant(device, code)

    def run(self, variant_key: tuple[Any, ...], batch: tuple[Any, ...], call: tuple[Any, ...]) -> None:
        """Computes the requests of this launch; a captured graph may be replayed with any lengths within the bounds."""
        rows = call[0].shape[0]
        grid = (self.chosen.tiles(self.requests, rows) * self.programs, self.chosen.splits, 1)
        if self.merge is None:
            self.variant.launch(variant_key, grid, (*batch, *call, *self.values, None, None, 0))
            return
        parts = self.merge.parts(call[0])
        self.variant.launch(variant_key, grid, (*batch, *call, *self.values, *parts))
        self.merge.run(variant_key, batch, call, parts)


class _MergeCode(NamedTuple):
    """The facts that the merge kernel's code depends on, apart from strides."""

    rank: int
    dependent_launch: bool
    by_row: bool
    block_s: int
    block_dv: int

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4, "launch_pdl": True} if self.dependent_launch else {"num_warps": 4}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        return {
            "OUT": Strides(key[1][0], key[1][1]),
            "SINK_STRIDE": 1,
            "HEAD_SIZE_V": self.rank,
            "DEPENDENT_LAUNCH": self.dependent_launch,
            "BY_ROW": self.by_row,
            "BLOCK_S": self.block_s,
            "BLOCK_DV": self.block_dv,
        }


class _PlannedMerge:
    """The launch that merges the parts of split keys.

    Parts lie by request, with ``slots`` rows for each, or by row where there are fewer rows than that.
    """

    def __init__(self, spec: AttentionSpec, chosen: Launch, requests: int, device: torch.device, code: _Code) -> None:
        self.num_heads, self.splits, self.rank = spec.num_heads, chosen.splits, spec.head_size_v
        self.slots, self.by_request = chosen.max_query_len, requests * chosen.max_query_len
        self.values = (chosen.min_query_len, chosen.max_query_len, chosen.splits)
        # the order in which parts are summed: with batch_invariant it may not depend on the batch
        block_s = min(32, 4096 // code.block_dv)
        if "batch_invariant" not in spec.features:
            block_s = min(block_s, power_of_2(chosen.splits))
        self.variants = [
            _MERGE.variant(device, _MergeCode(self.rank, code.dependent_launch, by_row, block_s, code.block_dv))
            for by_row in (False, True)
        ]

    def parts(self, query: Tensor) -> tuple[Tensor, Tensor, int]:
        """Memory beside the query for the parts of its rows, and where each row's are: values of both kernels."""
        rows = query.shape[0]
        by_row = rows < self.by_request
        sums = (rows if by_row else self.by_request) * self.num_heads * self.splits
        # one allocation is half the time of two
        memory = query.new_empty(sums * (self.rank + 1), dtype=torch.float32)
        outputs, sums_of_weights = memory.split_with_sizes((sums * self.rank, sums))
        return outputs, sums_of_weights, 0 if by_row else self.slots

    def run(
        self,
        variant_key: tuple[Any, ...],
        batch: tuple[Any, ...],
        call: tuple[Any, ...],
        parts: tuple[Tensor, Tensor, int],
    ) -> None:
        """Merges parts into the output."""
        starts, requests, *_ = batch
        query, _, _, _, output, lse, _, stride_lse = call
        rows = query.shape[0]
        grid = (min(rows, self.by_request), self.num_heads, 1)
        values = (starts, requests, output, lse, None, None, stride_lse, *self.values, *parts)
        self.variants[rows < self.by_request].launch(variant_key, grid, values)


@functools.lru_cache(maxsize=1024)
def _launches(
    spec: AttentionSpec,
    target: Target,
    device: torch.device,
    causal: bool,
    starts: bytes,
    max_query_len: int,
    max_seq_len: int,
    config: Config | None,
    splits: int | None,
) -> tuple[_PlannedLaunch, ...]:
    """The launches for every batch of which this is true; starts: the prefix sums of its queries, as int32."""
    scaled = spec.kv_dtype == "fp8_ds_mla"
    compute, rank, rope = compute_dtype(spec, target), spec.head_size_v, spec.head_size - spec.head_size_v
    assert spec.block_size is not None
    shape = Shape(
        rows=0,
        short=False,
        group=spec.num_heads,
        block_d=max(16, power_of_2(rope)),
        block_dv=power_of_2(rank),
        itemsize=compute.itemsize,
        cache_itemsize=spec.cache_dtype.itemsize,
        paged=True,
        split=False,
        window=0,
        extras=False,
        latent=True,
        tile_scales=scaled,
    )
    queries = queries_of(starts).each
    launches = schedule(
        target, shape, queries, num_kv_heads=1, max_query_len=max_query_len, max_seq_len=max_seq_len,
        batch_invariant="batch_invariant" in spec.features, config=config,
    )  # fmt: skip
    if splits is not None:
        launches = [one._replace(splits=splits, min_split=16) for one in launches]
    stored = torch.float8_e4m3fn if scaled else spec.cache_dtype
    planned = []
    for one in launches:
        code = _Code(
            dtype=spec.dtype,
            compute=compute,
            fp8=FP8.get(stored, ""),
            tiles=latents.RANK // latents.TILE if scaled else 0,
            converts=stored in FP8 and target.converts(stored),
            tokens_first=spec.kv_layout == "NHD",
            block_size=spec.block_size,
            num_heads=spec.num_heads,
            heads=one.heads,
            rank=rank,
            rope=rope,
            config=one.config,
            mask=Mask(left=-1, right=0 if causal else -1),
            one_tile=one.one_tile,
            split=one.splits > 1,
            dependent_launch=one.splits > 1 and target.dependent_launch,
        )
        planned.append(_PlannedLaunch(spec, one, len(queries), device, code))
    return tuple(planned)
