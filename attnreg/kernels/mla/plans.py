# mypy: disable-error-code="import-untyped"
"""Plans of MLA's decoding: the launches for a batch, made once for all layers of a spec and run once per layer.

A plan has no memory of its own: the parts of split keys are allocated by each run, on the stream of the call.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
import triton.language as tl

from attnreg.kernels.mla.cache import block_and_token, paged_layout, scaled_parts
from attnreg.kernels.mla.decode import _latent_attention_kernel
from attnreg.kernels.triton.inside.releases import MOVES_ADDRESSES
from attnreg.kernels.triton.launch import Kept, Kernel
from attnreg.kernels.triton.layout import FP8, Strides
from attnreg.kernels.triton.rows import Mask, Tile
from attnreg.kernels.triton.schedule import Keys, Launch, Shares, costs_of, schedule, shares_of
from attnreg.kernels.triton.splits.merge import MergeKey, PlannedMerge, Run, run_of
from attnreg.kernels.triton.target import Target, target_of
from attnreg.kernels.triton.tiles import Config, Shape, power_of_2
from attnreg.runtime import latents
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, SpecError
from attnreg.runtime.lengths import content, queries_of
from attnreg.runtime.tensors import is_captured

# the tensors of a launch in the order of the kernel's pointers: those of the call and of the batch, then its parts
_CALL = ("query_ptr", "latent_ptr", "rope_ptr", "output_ptr", "tile_scale_ptr", "lse_ptr", "kv_scale_ptr")
_BATCH = ("query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr")
_PARTS = ("partial_ptr", "partial_lse_ptr")
# the numbers of the batch and of the call, and those of the launch
_NUMBERS = ("num_reqs", "stride_table", "stride_lse")
_LAUNCH = ("min_query_len", "max_query_len", "min_split", "rank", "softmax_scale")
_ATTENTION = Kernel(_latent_attention_kernel, (*_CALL, *_BATCH, *_PARTS, *_NUMBERS, *_LAUNCH, "slots"))
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


class PlanOfBatch(ABC):
    """What a plan over latents keeps of a batch, and which launches it runs.

    Of the batch launches depend on the ``_facts``: whether it is causal, its queries, and their bound; and on the
    ``keys``. alike: requests have about as many keys as the bound says, as those of chosen tokens have.
    """

    # of keys
    _launches_of: Callable[[Keys], Any]
    launches: Any

    def __init__(self, batch: BatchMetadata, *, alike: bool) -> None:
        """Raises `BatchError` for a batch without a cache."""
        table, starts = batch.block_table, batch.query_start_loc
        if table is None:
            raise BatchError(["the batch has no block_table: MLA in its latent form reads the cache"])
        self.slot_mapping = batch.slot_mapping
        host = content(batch.query_start_loc_cpu)
        self.keys = Keys.of(batch.max_seq_len, host, content(batch.seq_lens_cpu))
        self._alike = alike
        self._for_graphs: Self | None = None
        self._facts = batch.causal is True, host, batch.max_query_len
        self._numbers = batch.num_reqs, table.stride(0) if table.shape[0] > 1 else 0
        self._tensors = starts, batch.seq_lens, table

    def run(self, call: Call) -> None:
        """Writes the output, and the lse, of every query of the batch."""
        plan = self.for_graphs() if not self._alike and is_captured(call.query) else self
        if plan.launches.planned:
            plan._run(call)

    def for_graphs(self) -> Self:
        """The plan that a graph captures: its launches are for any lengths, which differ from replay to replay."""
        if self._for_graphs is None:
            self._for_graphs = plan = copy.copy(self)
            plan.launches = self._launches_of(Keys.any_of(self.keys.longest))
        return self._for_graphs

    @abstractmethod
    def _run(self, call: Call) -> None:
        """Runs the launches, of which there are some."""


class LatentPlan(PlanOfBatch):
    """The launches that compute attention over latents for a batch, for all layers of one spec."""

    launches: Launches[_PlannedLaunch]

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
        self._launches_of = functools.partial(_launches, spec, target_of(device), device, *self._facts, config, splits)
        self.launches = self._launches_of(self.keys)

    def _run(self, call: Call) -> None:
        assert call.kv_cache is not None
        query, output, lse, kv_scale = call.query, call.output, call.lse, call.params.k_scale
        code, cache = self.launches.planned[0].code, call.kv_cache.key
        if code.tiles:
            latent, scales, rope = scaled_parts(cache, code.converts)
        else:
            latent = cache.view(torch.uint8) if code.fp8 and not code.converts else cache
            rope, scales = latent[..., code.rank :], None
        tokens_first = code.tokens_first
        key = _VariantKey(
            query.stride(), output.stride(), block_and_token(latent, tokens_first), block_and_token(rope, tokens_first),
            None if scales is None else block_and_token(scales, tokens_first), kv_scale is None, lse is None,
        )  # fmt: skip
        # an lse is contiguous, and that of one head may have any stride
        numbers = (*self._numbers, 0 if lse is None else lse.shape[1])
        tensors = query, latent, rope, output, scales, lse, kv_scale
        for run in self.launches.bound(key, query.shape[0], numbers):
            run(tensors, self._tensors)


class _VariantKey(NamedTuple):
    """The facts about a call's tensors that the decode kernel's code depends on: strides, and which are not given."""

    query: tuple[int, ...]
    output: tuple[int, ...]
    latent: tuple[int, int]
    rope: tuple[int, int]
    scales: tuple[int, int] | None
    no_kv_scale: bool
    no_lse: bool


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
    shares: Shares | None
    dependent_launch: bool
    gpu: str
    in_place: bool

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}

    @property
    def block_dv(self) -> int:
        return power_of_2(self.rank)

    def constants(self, key: _VariantKey) -> Mapping[str, Any]:
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
            "Q": Strides(key.query[0], key.query[1]),
            "OUT": Strides(key.output[0], key.output[1]),
            "LATENT": paged_layout(self.block_size, key.latent, self.rank, self.fp8),
            "ROPE": paged_layout(self.block_size, key.rope, self.rope, "" if self.tiles else self.fp8),
            "SCALES": paged_layout(self.block_size, key.scales or (0, 0), self.tiles, ""),
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


class _PlannedLaunch:
    """One launch of the decode kernel, without tensors, and the merge if its keys are split."""

    def __init__(self, spec: AttentionSpec, chosen: Launch, requests: int, device: torch.device, code: _Code) -> None:
        self.chosen, self.requests, self.code = chosen, requests, code
        self.merge: PlannedMerge | None = None
        if code.split or code.shares:
            self.merge = PlannedMerge(spec, chosen, code.block_dv, requests, device, code.dependent_launch, code.shares)
        self.programs = -(-spec.num_heads // chosen.heads)
        self.values = (
            chosen.min_query_len, chosen.max_query_len, chosen.min_split, spec.head_size_v, spec.softmax_scale,
        )  # fmt: skip
        self.variant = _ATTENTION.variant(device, code)

    def bind(self, key: _VariantKey, rows: int, numbers: tuple[int, ...]) -> Run:
        """What computes the requests of this launch, of calls with so many rows of queries, padding included.

        numbers: the `_NUMBERS` of a batch and a call. A captured graph may be replayed with any lengths within the
        bounds.
        """
        grid = (self.chosen.tiles(self.requests, rows) * self.programs, self.chosen.splits, 1)
        named = dict(zip((*_NUMBERS, *_LAUNCH, "slots"), (*numbers, *self.values, 0), strict=True))
        merge_key = MergeKey(key.output, None, not key.no_lse, False)
        return run_of(self.variant, self.merge, key, grid, rows, named, merge_key, _merged)


def _merged(call: Sequence[Any]) -> tuple[Any, Any, None, None]:
    """The tensors of a call that the merge of split keys needs; latents have no sinks and no 8-bit output."""
    return call[3], call[5], None, None


class PlannedLaunch(Protocol):
    """One launch of a plan; `bind` makes what runs it, of the facts of a call."""

    def bind(self, *known: Any) -> Run: ...


LaunchT = TypeVar("LaunchT", bound=PlannedLaunch)


class Launches(Generic[LaunchT]):
    """The launches for batches alike, and what runs them for calls alike."""

    def __init__(self, planned: Sequence[LaunchT]) -> None:
        self.planned = planned
        self._runs = Kept[list[Run]]()

    def bound(self, *known: Any) -> list[Run]:
        """What runs each launch; known: the arguments of its ``bind``."""
        return self._runs.of(known, lambda: [one.bind(*known) for one in self.planned])


def _columns(spec: AttentionSpec) -> tuple[int, int]:
    """The columns of a tile of rotary parts, and of one of latents."""
    return max(16, power_of_2(spec.head_size - spec.head_size_v)), power_of_2(spec.head_size_v)


def latent_shares(spec: AttentionSpec, chosen: Launch, requests: int) -> Shares | None:
    """The constants of a launch whose programs share keys out, None of others."""
    block_d, block_dv = _columns(spec)
    begin = costs_of(block_d + block_dv, block_dv, chosen.config.programs_per_sm).begin
    return shares_of(chosen, requests, chosen.config.block_n, begin)


def latent_launches(
    spec: AttentionSpec,
    target: Target,
    queries: Sequence[int],
    max_query_len: int,
    keys: Keys,
    config: Config | None,
    splits: int | None,
) -> list[Launch]:
    """The launches over latents for requests of these numbers of queries, with their tiles and splits.

    config: the tile; None: chosen by the table of tiles. splits: overrides the chosen ones, for measurements.
    """
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
        target, shape, queries, num_kv_heads=1, max_query_len=max_query_len, keys=keys,
        batch_invariant="batch_invariant" in spec.features, config=config, shares=splits is None,
    )  # fmt: skip
    return launches if splits is None else [one._replace(splits=splits, min_split=16) for one in launches]


@functools.lru_cache(maxsize=1024)
def _launches(
    spec: AttentionSpec,
    target: Target,
    device: torch.device,
    causal: bool,
    starts: bytes,
    max_query_len: int,
    config: Config | None,
    splits: int | None,
    keys: Keys,
) -> Launches[_PlannedLaunch]:
    """The launches for every batch of which this is true; starts: the prefix sums of its queries, as int32."""
    scaled = spec.kv_dtype == "fp8_ds_mla"
    assert spec.block_size is not None
    queries = queries_of(starts).each
    launches = latent_launches(spec, target, queries, max_query_len, keys, config, splits)
    stored = torch.float8_e4m3fn if scaled else spec.cache_dtype
    planned = []
    for one in launches:
        code = _Code(
            dtype=spec.dtype,
            compute=compute_dtype(spec),
            fp8=FP8.get(stored, ""),
            tiles=latents.RANK // latents.TILE if scaled else 0,
            converts=stored in FP8 and target.converts(stored),
            tokens_first=spec.kv_layout == "NHD",
            block_size=spec.block_size,
            num_heads=spec.num_heads,
            heads=one.heads,
            rank=spec.head_size_v,
            rope=spec.head_size - spec.head_size_v,
            config=one.config,
            mask=Mask(left=-1, right=0 if causal else -1),
            one_tile=one.one_tile,
            split=one.splits > 1,
            shares=latent_shares(spec, one, len(queries)),
            dependent_launch=(one.splits > 1 or one.shared > 0) and target.dependent_launch,
            gpu=target.backend,
            # addresses of the queries' products before the loop would make registers spill
            in_place=MOVES_ADDRESSES and target.arch == 90 and one.config.block_m >= 64,
        )
        planned.append(_PlannedLaunch(spec, one, len(queries), device, code))
    return Launches(planned)
