"""The tiles of the attention kernel: one table, where the first row that matches a launch applies.

A row has a condition in the registry's grammar (`attnreg.language.conditions`), a configuration, and the GPU on which
the configuration was measured against others. A configuration that was not measured was chosen because it spills no
registers, which the compile tests verify. Nothing is tuned at run time, so the same batch always runs the same way.

docs/tiles.md prints the table.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.language.conditions import NOWHERE, Clause, Condition
from attnreg.language.matchers import Matcher, bounded, equals, integer

if TYPE_CHECKING:
    from attnreg.kernels.triton.target import Target
    from attnreg.language.packed import Side


class Config(NamedTuple):
    """The tile of a program, how it is compiled, and how many programs a multiprocessor holds at once.

    block_m rows against block_n keys. block_k: how many columns of the query registers hold at once; 0: all. peel:
    tiles whose keys all rows see have a loop of their own, without a mask.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    block_k: int = 0
    peel: bool = False


class UpTo(int):
    """The rows of a tile: as many as the launch's, from 16 up to this maximum."""


class Shape(NamedTuple):
    """The facts of a launch on which the choice of a configuration depends.

    rows: `tile_rows` of the longest request of the launch. short: its requests are decoded. block_d: `columns_of` keys.
    block_dv: the columns of values, rounded up to a power of 2. itemsize: of the products' operands. split: the cache's
    layout is SPLIT. extras: scores are more than products (softcap, ALiBi, ranges), which takes registers. ranges: keys
    are visible in ranges. mask: queries form trees, or requests differ in causality. latent: keys are latents, block_d
    wide in their rotary part; values are the rest of them. tile_scales: latents have 8 bits, with a scale for each
    tile. packed: keys and values are decoded from codes of a few bits. codes: the kind of the values' codes, a word of
    `FACTS`. pairs: the requests of the launch times the KV heads, if keys are packed or programs share them out. It is
    0 if a request must not depend on others.
    """

    rows: int
    short: bool
    group: int
    block_d: int
    block_dv: int
    itemsize: int
    cache_itemsize: int
    paged: bool
    split: bool
    window: int
    extras: bool
    ranges: bool = False
    mask: bool = False
    latent: bool = False
    tile_scales: bool = False
    packed: bool = False
    codes: str = ""
    pairs: int = 0

    @property
    def width(self) -> int:
        """The width of keys or of values, whichever is larger, rounded up to a power of 2."""
        return power_of_2(max(self.block_d, self.block_dv))


# the facts that a row's condition may name
FACTS: Mapping[str, str] = {
    "gpu": "nvidia, AMD's cdna (matrix units for computing) or rdna (for graphics), or Triton's interpreter",
    "sm": "NVIDIA's compute capability, 90 for 9.0; 0 elsewhere",
    "warpgroup_mma": "matrix units read their operands from shared memory, for four warps at once",
    "matrix_units": "products are computed by matrix units: 16-bit operands, and on NVIDIA sm 80 or later",
    "queries": "few: the launch decodes, up to 16 queries a request; many: longer prompts",
    "rows": "queries of the longest request times the query heads of a KV head, as a power of 2 from 16 to 128",
    "group": "query heads of a KV head",
    "width": "of a head's keys or values, the wider, as a power of 2",
    "keys": "columns of keys in a product: a power of 2, or the sum of two, such as 192",
    "values": "columns of values, as a power of 2",
    "quantised": "the cache holds 8-bit numbers",
    "extras": "scores are more than products (softcap, ALiBi, ranges), which takes registers",
    "ranges": "the keys of some ranges are visible to all queries there",
    "mask": "queries form trees, or requests differ in causality",
    "paged": "keys are in a paged cache",
    "split": "the cache has the layout SPLIT",
    "window": "of a sliding window, in keys; 0: none",
    "latent": "MLA in its latent form: a key is loaded once, and is the value too",
    "tile_scales": "latents are in 8 bits with a scale for each of their tiles (fp8_ds_mla)",
    "packed": "keys and values are decoded from codes of a few bits (turboquant_*), which takes registers",
    "codes": "of the values of a packed cache: nibbles (uniform, of 4 bits), levels (of 4 bits) or others",
    "pairs": "requests times KV heads, of a packed cache or a graph for any lengths; 0 elsewhere, and batch-invariant",
}


def facts(target: Target, shape: Shape) -> dict[str, Any]:
    """The value of each of `FACTS` for a launch."""
    gpu = {"cuda": "nvidia", "hip": "rdna" if target.rdna else "cdna"}.get(target.backend, target.backend)
    return {
        "gpu": gpu,
        "sm": 0 if target.backend == "hip" else int(target.arch),
        "warpgroup_mma": target.warpgroup_mma,
        "matrix_units": shape.itemsize != 4 and target.matrix_units,
        "queries": "few" if shape.short else "many",
        "rows": shape.rows,
        "group": shape.group,
        "width": shape.width,
        "keys": shape.block_d,
        "values": shape.block_dv,
        "quantised": shape.cache_itemsize < shape.itemsize,
        "extras": shape.extras,
        "ranges": shape.ranges,
        "mask": shape.mask,
        "paged": shape.paged,
        "split": shape.split,
        "window": shape.window,
        "latent": shape.latent,
        "tile_scales": shape.tile_scales,
        "packed": shape.packed,
        "codes": shape.codes,
        "pairs": shape.pairs,
    }


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. measured: the GPU and the day, empty if it was not measured."""

    when: Condition
    config: Config
    measured: str
    because: str


def _row(when: Mapping[str, Any], config: Config, measured: str = "", because: str = "") -> Row:
    """A row from plain data: fact -> value, or operators as in the registry."""
    unknown = when.keys() - FACTS.keys()
    if unknown:
        raise ValueError(f"no launch has the fact {', '.join(sorted(unknown))}; there are {', '.join(FACTS)}")
    clauses = tuple(Clause(fact, _matcher(value), NOWHERE) for fact, value in when.items())
    return Row(Condition(clauses), config, measured, because)


def _matcher(value: Any) -> Matcher:
    if isinstance(value, Mapping):
        return bounded(**value)
    if isinstance(value, bool):
        return equals(value, "yes" if value else "no")
    return integer(value) if isinstance(value, int) else equals(value, value)


H200_21, H200_22, H200_23, H200_24, H200_27, H200_28 = (
    f"NVIDIA H200, 2026-11-{day}" for day in (21, 22, 23, 24, 27, 28)
)
H100_26 = "NVIDIA H100, 2026-11-26"

# conditions for scores with a softcap or slopes, in launches where nothing else takes registers
_SCORED: Mapping[str, Any] = {"sm": 90, "extras": True, "ranges": False, "mask": False, "quantised": False}

TABLE: tuple[Row, ...] = (
    # latents: an accumulator of 512 columns leaves few registers
    _row({"latent": True, "gpu": "rdna"}, Config(16, 16, 8, 1, block_k=64)),
    _row({"latent": True, "gpu": "cdna", "quantised": True}, Config(16, 32, 8, 1, block_k=128)),
    _row({"latent": True, "gpu": "cdna"}, Config(16, 32, 8, 1)),
    _row({"latent": True, "matrix_units": False}, Config(16, 16, 8, 1, block_k=128)),
    _row({"latent": True, "sm": 90, "rows": {"min": 64}, "tile_scales": True, "group": {"below": 64}},
         Config(64, 32, 8, 3, programs_per_sm=1),
         because="rows of several queries take registers: of 64 keys, four were spilled by Triton 3.6"),
    _row({"latent": True, "sm": 90, "rows": {"min": 64}, "tile_scales": True},
         Config(64, 64, 8, 2, programs_per_sm=1), H200_22,
         because="less than half the time of loading a latent twice, in parts and whole"),
    _row({"latent": True, "sm": 90, "rows": {"min": 64}, "quantised": True},
         Config(64, 64, 8, 2, programs_per_sm=1, block_k=64)),
    _row({"latent": True, "sm": 90, "rows": {"min": 64}}, Config(64, 64, 8, 2, programs_per_sm=1)),
    _row({"latent": True, "sm": 90, "rows": 16, "quantised": False}, Config(16, 32, 4, 3), H200_22),
    _row({"latent": True, "warpgroup_mma": True, "rows": 16}, Config(16, 64, 8, 2)),
    _row({"latent": True}, Config(UpTo(32), 32, 8, 2)),
    # packed caches: codes become operands in registers
    _row({"packed": True, "gpu": "rdna"}, Config(16, 16, 8, 2, block_k=64)),
    _row({"packed": True, "gpu": "cdna"}, Config(16, 32, 4, 2)),
    _row({"packed": True, "matrix_units": False}, Config(16, 16, 4, 1, block_k=64)),
    _row({"packed": True, "queries": "few", "rows": 16, "width": {"min": 256}},
         Config(16, 32, 4, 2, programs_per_sm=4)),
    _row({"packed": True, "queries": "few", "rows": 16, "warpgroup_mma": False},
         Config(16, 32, 4, 3, programs_per_sm=4)),
    _row({"packed": True, "queries": "few", "rows": 16, "sm": 90, "width": 128, "extras": False, "codes": "others",
          "pairs": {"min": 64}},
         Config(16, 32, 1, 3, programs_per_sm=8), H100_26,
         because="as below; 3 bits take more registers, so that fewer programs are resident"),
    _row({"packed": True, "queries": "few", "rows": 16, "sm": 90, "width": 128, "extras": False, "pairs": {"min": 64}},
         Config(16, 32, 1, 3, programs_per_sm=12), H200_24,
         because="one warp has all codes of a word: they become operands where they are, and nothing waits for others"),
    _row({"packed": True, "queries": "few", "rows": 16, "sm": 90, "width": 128, "extras": False, "codes": "levels"},
         Config(16, 128, 4, 3, programs_per_sm=3), H200_23,
         because="with twice the keys, a row's largest score and its sum are found half as often"),
    _row({"packed": True, "queries": "few", "rows": 16, "sm": 90, "width": 128, "extras": False},
         Config(16, 128, 4, 2, programs_per_sm=3), H200_23),
    _row({"packed": True, "queries": "few", "rows": 16, "sm": {"min": 100}}, Config(16, 64, 4, 2, programs_per_sm=4),
         because="with three stages Triton 3.7 spills two registers"),
    _row({"packed": True, "queries": "few", "rows": 16}, Config(16, 64, 4, 3, programs_per_sm=4)),
    _row({"packed": True, "width": {"min": 256}}, Config(UpTo(32), 32, 8, 2, programs_per_sm=1)),
    _row({"packed": True, "warpgroup_mma": False, "codes": "others"},
         Config(UpTo(32), 32, 8, 2, programs_per_sm=1), because="of 64 rows, decoding 3 bits spills some registers"),
    _row({"packed": True, "warpgroup_mma": False}, Config(UpTo(64), 32, 8, 2, programs_per_sm=1)),
    _row({"packed": True}, Config(UpTo(64), 64, 8, 2, programs_per_sm=1)),
    # without matrix units
    _row({"matrix_units": False, "gpu": "rdna", "width": {"min": 512}}, Config(16, 16, 8, 1, block_k=32)),
    _row({"matrix_units": False, "gpu": "rdna"}, Config(16, 16, 8, 1, block_k=64)),
    _row({"matrix_units": False, "gpu": "nvidia", "width": {"min": 512}}, Config(16, 16, 8, 1, block_k=32)),
    _row({"matrix_units": False, "gpu": "nvidia", "width": {"min": 256}}, Config(16, 32, 8, 1, block_k=64)),
    _row({"matrix_units": False, "gpu": "nvidia", "extras": True}, Config(16, 32, 8, 1, block_k=64)),
    _row({"matrix_units": False, "gpu": "nvidia", "sm": {"below": 80}}, Config(16, 32, 8, 1, block_k=64)),
    _row({"matrix_units": False}, Config(16, 32, 4, 1)),
    # AMD
    _row({"gpu": "rdna", "width": {"min": 256}}, Config(16, 16, 8, 2, block_k=64),
         because="the matrix units want every row of an operand twice: a wide query would fill the registers"),
    _row({"gpu": "rdna", "split": True}, Config(16, 16, 8, 2, block_k=64)),
    _row({"gpu": "rdna", "mask": True}, Config(16, 16, 8, 2, block_k=64)),
    _row({"gpu": "rdna", "extras": True}, Config(UpTo(32), 32, 8, 2)),
    _row({"gpu": "rdna"}, Config(UpTo(64), 32, 8, 2)),
    _row({"gpu": "cdna", "width": {"min": 256}}, Config(UpTo(32), 32, 4, 2)),
    _row({"gpu": "cdna", "extras": True}, Config(UpTo(32), 32, 4, 2)),
    _row({"gpu": "cdna"}, Config(UpTo(64), 32, 4, 2)),
    # few queries: what matters is to have many loads of keys under way
    _row({"queries": "few", "rows": 16, "width": {"min": 512}}, Config(16, 32, 8, 2, programs_per_sm=4)),
    _row({"queries": "few", "rows": 16, "extras": True, "quantised": True}, Config(16, 32, 8, 2, programs_per_sm=4)),
    _row({"queries": "few", "rows": 16, "width": 256, **_SCORED}, Config(16, 64, 8, 2, programs_per_sm=2), H200_24,
         because="four fifths of the time of 32 keys by 4 warps for 64 requests of Gemma 2, the same for 8 long ones"),
    _row({"queries": "few", "rows": 16, "width": {"min": 256}}, Config(16, 32, 4, 2, programs_per_sm=4)),
    _row({"queries": "few", "rows": 16, "width": {"max": 128}, **_SCORED}, Config(16, 64, 4, 2, programs_per_sm=5),
         H200_27),
    _row({"queries": "few", "rows": {"max": 32}, "width": 256, **_SCORED},
         Config(UpTo(32), 64, 4, 2, programs_per_sm=2), H200_24),
    _row({"queries": "few", "width": 256, **_SCORED}, Config(64, 64, 8, 2, programs_per_sm=1), H200_24),
    _row({"queries": "few", "width": {"max": 128}, **_SCORED}, Config(UpTo(64), 64, 4, 3, programs_per_sm=2), H200_24,
         because="half the time of 8 warps, of which ptxas makes one product wait for the other"),
    _row({"queries": "few", "rows": 16, "extras": True}, Config(16, 32, 4, 2, programs_per_sm=4)),
    _row({"queries": "few", "width": {"min": 512}}, Config(16, 32, 8, 2, programs_per_sm=1, block_k=128)),
    _row({"queries": "few", "width": {"min": 256}, "warpgroup_mma": False}, Config(32, 32, 8, 2, programs_per_sm=1)),
    _row({"queries": "few", "extras": True, "warpgroup_mma": False}, Config(32, 32, 8, 2, programs_per_sm=1)),
    _row({"queries": "few", "width": {"min": 256}}, Config(UpTo(64), 64, 8, 2, programs_per_sm=1), H200_21,
         because="of those that spill no registers the fastest for 16 queries"),
    _row({"queries": "few", "extras": True}, Config(UpTo(64), 64, 8, 2, programs_per_sm=1)),
    _row({"queries": "few", "rows": 128}, Config(128, 64, 8, 3, programs_per_sm=1), H200_21),
    _row({"queries": "few", "rows": {"min": 32}, "warpgroup_mma": True}, Config(UpTo(64), 64, 4, 3), H200_21),
    _row({"queries": "few", "rows": {"min": 32}}, Config(UpTo(64), 64, 8, 2)),
    _row({"queries": "few", "sm": 90, "quantised": True, "width": {"max": 64}},
         Config(16, 128, 4, 3, programs_per_sm=4), H200_28,
         because="two thirds of the time in a graph, where without this bound on registers three run at once"),
    _row({"queries": "few", "quantised": True}, Config(16, 128, 4, 3), H200_21),
    _row({"queries": "few", "sm": 90, "width": {"max": 64}, "pairs": {"min": 128}},
         Config(16, 64, 4, 3, programs_per_sm=5), H200_28,
         because="in graphs 64 of 8k take 272 µs, 292 with six"),
    _row({"queries": "few", "sm": 90, "width": {"max": 64}}, Config(16, 64, 4, 3, programs_per_sm=6), H200_27,
         because="94 % of the time of two stages: narrow keys are loaded before they are waited for"),
    _row({"queries": "few", "sm": 90, "pairs": {"min": 128}}, Config(16, 64, 4, 2, programs_per_sm=4), H200_28,
         because="in graphs 64 of 8k take 495 µs, 512 with five; one of 64k beside 63 of 2k takes 221, 210 with five"),
    _row({"queries": "few", "sm": 90}, Config(16, 64, 4, 2, programs_per_sm=5), H200_27,
         because="as the next; splits that are chosen for five, which its registers allow, take less time"),
    _row({"queries": "few"}, Config(16, 64, 4, 2, programs_per_sm=4), H200_21,
         because="many small programs share the device evenly, and wait for each other the least"),
    # many queries: what matters is to keep the matrix units busy, with tiles as large as the registers allow
    _row({"width": {"min": 512}}, Config(32, 32, 8, 2, programs_per_sm=1)),
    _row({"warpgroup_mma": False, "width": {"min": 256}, "extras": True, "sm": {"below": 100}}, Config(32, 32, 8, 2)),
    _row({"warpgroup_mma": False, "width": {"min": 256}}, Config(64, 32, 8, 2)),
    _row({"warpgroup_mma": False, "extras": True, "quantised": True}, Config(32, 32, 8, 2)),
    _row({"warpgroup_mma": False, "extras": True, "ranges": False, "mask": False}, Config(64, 32, 4, 2),
         because="of 8 warps ptxas spills some registers for a softcap"),
    _row({"warpgroup_mma": False, "extras": True}, Config(64, 32, 8, 2)),
    _row({"warpgroup_mma": False, "quantised": True}, Config(64, 32, 8, 2)),
    _row({"warpgroup_mma": False}, Config(64, 64, 8, 2)),
    # not for SPLIT: Triton 3.8 fails to compile this tile for keys in that layout whose columns are a sum of two powers
    _row({"window": {"min": 1, "max": 256}, "split": False}, Config(64, 32, 4, 3, programs_per_sm=4), H200_21),
    _row({"sm": 90, "keys": 192, "values": 128, "extras": False, "quantised": False, "paged": False},
         Config(128, 64, 8, 3, programs_per_sm=1, peel=True), H200_22,
         because="of twelve tiles the fastest for expanded prompts of MLA, causal or not"),
    _row({"width": 256, **_SCORED}, Config(128, 32, 8, 3, programs_per_sm=1), H200_24,
         because="half the time of 64 × 64; 128 × 64 takes 6 % less, but spills some registers"),
    _row({"width": {"max": 128}, **_SCORED}, Config(64, 64, 4, 3, programs_per_sm=2), H200_24,
         because="half the time of 8 warps, of which ptxas makes one product wait for the other"),
    _row({"width": {"min": 256}, "extras": True}, Config(64, 64, 8, 2, programs_per_sm=1), H200_21),
    _row({"width": {"min": 256}, "quantised": True}, Config(64, 64, 8, 2, programs_per_sm=1), H200_21),
    _row({"width": {"min": 256}}, Config(128, 32, 8, 3, programs_per_sm=1), H200_21,
         because="128 × 64 takes 12 to 18 % less time, but spills some registers"),
    _row({"sm": 90, "extras": False, "quantised": True}, Config(128, 128, 8, 3, programs_per_sm=1), H200_21),
    _row({"sm": 90, "extras": False, "paged": True, "window": 0},
         Config(128, 64, 8, 3, programs_per_sm=1, peel=True), H200_21),
    _row({"sm": 90, "extras": False, "paged": True}, Config(128, 64, 8, 3, programs_per_sm=1), H200_21),
    _row({"sm": 90, "extras": False}, Config(64, 64, 4, 3), H200_21),
    _row({"quantised": True}, Config(64, 32, 8, 3, programs_per_sm=1), because="larger tiles spill"),
    _row({}, Config(64, 64, 8, 3, programs_per_sm=1), because="larger tiles spill"),
)  # fmt: skip


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


def columns_of(head_size: int, head_size_v: int, *, quantised: bool) -> int:
    """How many columns keys have in a product: a power of 2 that holds the head, or the sum of two if that is less.

    A sum has two products. Wide keys with equally wide values get no sum: on sm 90, the products would wait for each
    other. A quantised cache gets none either, because converting keys takes the registers.
    """
    whole = max(16, power_of_2(head_size))
    if quantised or (whole > 128 and power_of_2(head_size_v) >= whole):
        return whole
    first = whole // 2
    rest = max(16, power_of_2(max(head_size - first, 1)))
    return min(whole, first + rest)


def value_columns(target: Target, columns: int, head_size_v: int, itemsize: int) -> int:
    """How many columns a tile of values has: a power of 2, 16 or more. columns: of keys. itemsize: of the products."""
    values = max(16, power_of_2(head_size_v))
    # shared memory is swizzled by up to 128 bytes of a row
    full = 128 // itemsize
    if target.warpgroup_mma and columns >= full:
        # if values are swizzled by less than keys, CUDA 12.8's ptxas loses their address: wrong numbers, or a fault
        values = max(values, full)
    return values


def tile_rows(rows: int) -> int:
    """The rows of a tile for a number of rows: a power of 2 from 16 to 128."""
    return max(16, min(128, power_of_2(rows)))


@functools.lru_cache(maxsize=4096)
def choose_config(target: Target, shape: Shape) -> Config:
    """The configuration for a launch: the table's, made to fit the target's shared memory."""
    config = matching_row(target, shape).config
    if isinstance(config.block_m, UpTo):
        config = config._replace(block_m=min(shape.rows, int(config.block_m)))
    # peel lets SPLIT load the values of a block in vectors, where no key has to be clamped
    return _fit(target, shape, config._replace(peel=config.peel or shape.split))


def matching_row(target: Target, shape: Shape) -> Row:
    """The first row that a launch matches."""
    launch = facts(target, shape)
    return next(row for row in TABLE if row.when.holds(launch))


def _fit(target: Target, shape: Shape, config: Config) -> Config:
    """The configuration with fewer stages, then smaller tiles, until it fits the target's shared memory."""
    itemsize = max(shape.itemsize, shape.cache_itemsize)
    width = shape.block_d + shape.block_dv
    while True:
        # if products read operands from shared memory, a latent stays there for both of its products
        kept = config.num_stages if shape.latent and target.warpgroup_mma else config.num_stages - 1
        buffers = max(1, kept) * config.block_n * width * shape.cache_itemsize
        if shape.cache_itemsize < shape.itemsize:
            # and a converted copy of the keys and of the values
            buffers += config.block_n * width * itemsize
        rows = config.block_m * (width if shape.latent else 2 * shape.width) * itemsize
        if buffers + rows <= target.shared_memory:
            return config
        if config.num_stages > 2:
            config = config._replace(num_stages=config.num_stages - 1)
        elif config.block_n > 32:
            config = config._replace(block_n=config.block_n // 2)
        elif config.block_m > 16:
            config = config._replace(block_m=config.block_m // 2)
        elif config.num_stages > 1:
            config = config._replace(num_stages=1)
        else:
            return config._replace(block_n=16)


def codes_of(values: Side) -> str:
    """The kind of the codes of packed values, a word of `FACTS`."""
    if values.bits != 4:
        return "others"
    return "nibbles" if values.code == "uniform" else "levels"
