# mypy: disable-error-code="import-untyped"
"""The plan of MLA's decoding by TRITON_MLA, and what that by HOPPER_MLA shares with it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnreg.kernels.mla.cache import block_and_token, paged_layout, scaled_parts
from attnreg.kernels.mla.decode import _latent_attention_kernel
from attnreg.kernels.triton.inside.releases import MOVES_ADDRESSES
from attnreg.kernels.triton.launch import Kernel, pointers_of
from attnreg.kernels.triton.layout import FP8, Strides, stride_of
from attnreg.kernels.triton.planned.batches import BatchPlan
from attnreg.kernels.triton.planned.launches import Launches, Merging, PlannedLaunch, Run
from attnreg.kernels.triton.rows import Mask, Tile
from attnreg.kernels.triton.schedule import KeyLengths, Launch, Shares, costs_of, schedule, shares_of
from attnreg.kernels.triton.splits.merge import MergeKey, Parts
from attnreg.kernels.triton.target import Target, target_of
from attnreg.kernels.triton.tiles import Config, Shape, power_of_2
from attnreg.runtime import latents
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, SpecError
from attnreg.runtime.lengths import queries_of
from attnreg.runtime.tensors import named


class LatentTensors(NamedTuple):
    """The tensors of a call: the kernel's first pointers. tile_scale: of a latent in fp8_ds_mla."""

    query: Tensor
    latent: Tensor
    rope: Tensor
    output: Tensor
    tile_scale: Tensor | None
    lse: Tensor | None
    kv_scale: Tensor | None


class LatentBatch(NamedTuple):
    """The tensors of a batch over latents."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


class LatentNumbers(NamedTuple):
    """The numbers of a batch over latents."""

    num_reqs: int
    stride_table: int


_ATTENTION = Kernel(_latent_attention_kernel, pointers_of(LatentTensors, LatentBatch, Parts))
_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
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


def compute_dtype(spec: AttentionSpec) -> torch.dtype:
    """The dtype of the dots: float16 holds every 8-bit float exactly, but not one with the scale of its tile."""
    return torch.float16 if spec.cache_dtype in FP8 else spec.dtype


def merged_of(call: Any) -> tuple[Any, ...]:
    """The `MergedTensors` of a call over latents, which has no sinks and no 8-bit output."""
    return call.output, call.lse, None, None


class PlanOverLatents(BatchPlan[Launches]):
    """What plans over latents keep of a batch."""

    def __init__(self, batch: BatchMetadata, *, alike: bool) -> None:
        """alike: requests have about as many keys as the bound says, as those of chosen tokens have.

        Raises `BatchError` for a batch without a cache.
        """
        table = batch.block_table
        if table is None:
            raise BatchError(["the batch has no block_table: MLA in its latent form reads the cache"])
        super().__init__(batch)
        self.slot_mapping, self._replayed = batch.slot_mapping, not alike
        self._numbers = LatentNumbers(batch.num_reqs, stride_of(table, 0))
        self._tensors = LatentBatch(batch.query_start_loc, batch.seq_lens, table)


class LatentPlan(PlanOverLatents):
    """The launches that compute attention over latents for a batch, for all layers of one spec."""

    def __init__(
        self,
        spec: AttentionSpec,
        batch: BatchMetadata,
        *,
        config: Config | None = None,
        splits: int | None = None,
        alike: bool = False,
    ) -> None:
        """config, splits: override the chosen ones, for measurements. Raises `SpecError` and `BatchError`."""
        validate_spec(spec)
        super().__init__(batch, alike=alike)
        device = batch.query_start_loc.device
        target = target_of(device)
        self._format = LatentFormat.of(spec, target)
        self._facts = LatentFacts(
            spec, target, device, batch.causal is True, self.host, batch.max_query_len, config, splits
        )
        self.launches = self._launches_of(self.keys)

    def _launches_of(self, keys: KeyLengths) -> Launches:
        return _launches(self._facts, keys)

    def _prepared(self, call: Call) -> tuple[Sequence[Run], LatentTensors | None, None]:
        if not self.launches:
            return (), None, None
        assert call.kv_cache is not None
        query, output, lse, kv_scale = call.query, call.output, call.lse, call.params.k_scale
        form, cache = self._format, call.kv_cache.key
        if form.tiles:
            latent, scales, rope = scaled_parts(cache, form.converts)
        else:
            latent = cache.view(torch.uint8) if form.fp8 and not form.converts else cache
            rope, scales = latent[..., form.rank :], None
        tokens_first = form.tokens_first
        key = LatentKey(
            query.stride(), output.stride(), block_and_token(latent, tokens_first), block_and_token(rope, tokens_first),
            None if scales is None else block_and_token(scales, tokens_first), kv_scale is None, lse is None,
        )  # fmt: skip
        # an lse is contiguous, and that of one head may have any stride
        runs = self.launches.bound(key, query.shape[0], self._numbers, 0 if lse is None else lse.shape[1])
        return runs, named(LatentTensors, (query, latent, rope, output, scales, lse, kv_scale)), None


class LatentFormat(NamedTuple):
    """How a cache of latents is read.

    fp8: the format of 8-bit numbers, else "". tiles: of a latent that have a scale each, 0 without. converts: whether
    the device converts the numbers. tokens_first: the cache is NHD.
    """

    fp8: str
    tiles: int
    converts: bool
    tokens_first: bool
    rank: int

    @classmethod
    def of(cls, spec: AttentionSpec, target: Target) -> LatentFormat:
        """That of a layer's cache on a device."""
        scaled = spec.kv_dtype == "fp8_ds_mla"
        stored = torch.float8_e4m3fn if scaled else spec.cache_dtype
        return cls(
            fp8=FP8.get(stored, ""),
            tiles=latents.RANK // latents.TILE if scaled else 0,
            converts=stored in FP8 and target.converts(stored),
            tokens_first=spec.kv_layout == "NHD",
            rank=spec.head_size_v,
        )


class LatentKey(NamedTuple):
    """The facts about a call's tensors that the decode kernel's code depends on: strides, and which are not given."""

    query: tuple[int, ...]
    output: tuple[int, ...]
    latent: tuple[int, int]
    rope: tuple[int, int]
    scales: tuple[int, int] | None
    no_kv_scale: bool
    no_lse: bool

    @property
    def merge_key(self) -> MergeKey:
        return MergeKey(self.output, None, not self.no_lse, False)


class LatentCode(NamedTuple):
    """The facts that the decode kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    compute: torch.dtype
    form: LatentFormat
    block_size: int
    num_heads: int
    heads: int
    rope: int
    config: Config
    mask: Mask
    one_tile: bool
    split: bool
    shares: Shares | None
    dependent_launch: bool
    gpu: str
    in_place: bool

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}

    @property
    def block_dv(self) -> int:
        return power_of_2(self.form.rank)

    def constants(self, key: LatentKey) -> Mapping[str, Any]:
        form = self.form
        q_token, q_head, _ = key.query
        out_token, out_head, _ = key.output
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
            "Q": Strides(q_token, q_head),
            "OUT": Strides(out_token, out_head),
            "LATENT": paged_layout(self.block_size, key.latent, form.rank, form.fp8),
            "ROPE": paged_layout(self.block_size, key.rope, self.rope, "" if form.tiles else form.fp8),
            "SCALES": paged_layout(self.block_size, key.scales or (0, 0), form.tiles, ""),
            "TILE": tile,
            "COMPUTE_DTYPE": _TL_DTYPES[self.compute],
            "NUM_HEADS": self.num_heads,
            "MASK": self.mask,
            "ONE_TILE": self.one_tile,
            "SPLIT": self.split,
            "SHARES": self.shares,
            "DEPENDENT_LAUNCH": self.dependent_launch,
            "GPU": self.gpu,
            # of queries that are kept whole, and accumulators that leave few registers
            "IN_PLACE": self.in_place and tile.block_k == tile.block_dv == WIDEST,
        }


def _columns(spec: AttentionSpec) -> tuple[int, int]:
    """The columns of a tile of rotary parts, and of one of latents."""
    return max(16, power_of_2(spec.head_size - spec.head_size_v)), power_of_2(spec.head_size_v)


def latent_shares(spec: AttentionSpec, chosen: Launch, requests: int) -> Shares | None:
    """The constants of a launch whose programs share keys out, None of others."""
    block_d, block_dv = _columns(spec)
    costs = costs_of(block_d + block_dv, block_dv, chosen.config.programs_per_sm)
    # a part is as wide as a latent: of one request of 8k keys, twice the parts took 26.2 µs on an H200, and 22.3 known
    return shares_of(chosen, requests, chosen.config.block_n, costs.begin, costs.merge)


def latent_launches(facts: LatentFacts, keys: KeyLengths) -> list[Launch]:
    """The launches over latents for batches of these facts, with their tiles and splits."""
    spec, splits = facts.spec, facts.splits
    block_d, block_dv = _columns(spec)
    shape = Shape(
        rows=0,
        short=False,
        group=spec.num_heads,
        block_d=block_d,
        block_dv=block_dv,
        itemsize=compute_dtype(spec).itemsize,
        cache_itemsize=spec.cache_dtype.itemsize,
        paged=True,
        split=False,
        window=0,
        extras=False,
        latent=True,
        tile_scales=spec.kv_dtype == "fp8_ds_mla",
    )
    launches = schedule(
        facts.target, shape, queries_of(facts.host).each, num_kv_heads=1, max_query_len=facts.max_query_len, keys=keys,
        batch_invariant="batch_invariant" in spec.features, config=facts.config, shares=splits is None,
    )  # fmt: skip
    return launches if splits is None else [one._replace(splits=splits, min_split=16) for one in launches]


class LatentFacts(NamedTuple):
    """The facts of a batch on which its launches depend, beside the keys.

    host: the prefix sums of its queries, as int32. config, splits: override the chosen ones.
    """

    spec: AttentionSpec
    target: Target
    device: torch.device
    causal: bool
    host: bytes
    max_query_len: int
    config: Config | None
    splits: int | None


@functools.lru_cache(maxsize=1024)
def _launches(facts: LatentFacts, keys: KeyLengths) -> Launches:
    """The launches for every batch of these facts."""
    spec, target = facts.spec, facts.target
    assert spec.block_size is not None
    launches = latent_launches(facts, keys)
    requests, planned = len(queries_of(facts.host).each), []
    for one in launches:
        code = LatentCode(
            dtype=spec.dtype,
            compute=compute_dtype(spec),
            form=LatentFormat.of(spec, target),
            block_size=spec.block_size,
            num_heads=spec.num_heads,
            heads=one.heads,
            rope=spec.head_size - spec.head_size_v,
            config=one.config,
            mask=Mask(left=-1, right=0 if facts.causal else -1),
            one_tile=one.one_tile,
            split=one.splits > 1,
            shares=latent_shares(spec, one, requests),
            dependent_launch=(one.splits > 1 or one.shared > 0) and target.dependent_launch,
            gpu=target.backend,
            # addresses of the queries' products before the loop would make registers spill
            in_place=MOVES_ADDRESSES and target.arch == 90 and one.config.block_m >= 64,
        )
        merging = Merging(merged_of, code.block_dv, code.dependent_launch, code.shares)
        planned.append(PlannedLaunch(spec, one, requests, facts.device, _ATTENTION, code, merging))
    return Launches(planned)
