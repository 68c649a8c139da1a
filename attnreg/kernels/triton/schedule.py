"""How a batch becomes launches: which requests go together, the tiles, and the splits. Plain integers, no tensors.

The configurations are the short list below, with the GPU and the day that each was measured on; nothing is tuned at run
time, so the same batch always runs the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

# requests of up to so many queries are decoded: their rows fit one tile, and their keys are what takes the time
SHORT_QUERIES = 16
# keys per split where a request's result may not depend on its batch
INVARIANT_SPLIT = 1024
# a split of fewer keys costs more in the merge than it saves
SMALLEST_SPLIT = 256


class Target(NamedTuple):
    """What is compiled for: ``backend`` and ``arch`` as Triton names them, the multiprocessors and their memory."""

    backend: str
    arch: int | str
    num_sms: int
    shared_memory: int

    @property
    def rdna(self) -> bool:
        """Whether this is one of AMD's graphics GPUs: a warp has half the threads, and with them half the registers."""
        return self.backend == "hip" and not str(self.arch).startswith("gfx9")

    @property
    def matrix_units(self) -> bool:
        """Whether Triton has matrix units to compute with; it has left those before Ampere."""
        return self.backend != "cuda" or int(self.arch) >= 80

    @property
    def warpgroup_mma(self) -> bool:
        """Whether the matrix units read their operands from shared memory, for four warps at once."""
        return self.backend == "cuda" and int(self.arch) // 10 in (9, 10)

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel can be set up while the one that it depends on still runs."""
        return self.backend == "cuda" and int(self.arch) >= 90

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether the hardware converts this 8-bit format; AMD's is left to integers, which do it everywhere alike."""
        ocp = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        return ocp and self.backend == "cuda" and int(self.arch) >= 89


# per block of threads, in bytes
SHARED_MEMORY: dict[int | str, int] = {
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    110: 232448,
    120: 101376,
    121: 101376,
    "gfx950": 163840,
}


def target_for(backend: str, arch: int | str, num_sms: int) -> Target:
    """The target with its shared memory; 64 KiB where it is not known."""
    return Target(backend, arch, num_sms, SHARED_MEMORY.get(arch, 65536))


@dataclass(frozen=True, slots=True)
class Config:
    """The tile of a program, how it is compiled, and how many programs a multiprocessor holds at once.

    block_k: the columns of the query that are in registers at once; 0: all of them. peel: tiles of keys that all rows
    see whole have a loop of their own, without a mask.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    block_k: int = 0
    peel: bool = False


class Shape(NamedTuple):
    """What the choice of a configuration depends on.

    rows: of the longest request of the launch, all heads of a KV head. short: its requests are to be decoded.
    itemsize: of the dots. split: the cache's layout is SPLIT. extras: scores are more than products (softcap, ALiBi,
    ranges), which takes registers.
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

    @property
    def width(self) -> int:
        """Of the wider of keys and values."""
        return max(self.block_d, self.block_dv)


def choose_config(target: Target, shape: Shape) -> Config:
    """The configuration for a launch, made to fit the target's registers and shared memory."""
    if shape.itemsize == 4 or not target.matrix_units:
        config = _scalar_config(target, shape)
    elif target.backend == "hip":
        config = _amd_config(target, shape)
    elif shape.short:
        config = _short_config(target, shape)
    else:
        config = _long_config(target, shape)
    # where no key is clamped, the values of a block can be loaded in vectors
    return _fit(target, shape, replace(config, peel=config.peel or shape.split))


def _scalar_config(target: Target, shape: Shape) -> Config:
    """Without matrix units, which compute in 16 bits alone; not measured: what spills no registers."""
    if target.rdna:
        return Config(16, 16, 8, 1, block_k=32 if shape.width > 256 else 64)
    if target.backend == "cuda" and (shape.width > 128 or shape.extras or not target.matrix_units):
        return Config(16, 16, 8, 1, block_k=32) if shape.width > 256 else Config(16, 32, 8, 1, block_k=64)
    return Config(16, 32, 4, 1)


def _short_config(target: Target, shape: Shape) -> Config:
    """Few queries: what counts is to keep many keys on their way."""
    block_m = max(16, min(128, power_of_2(shape.rows)))
    if shape.width > 128 or shape.extras:
        # what spills no registers; of that the fastest for 16 queries of 256 elements on an NVIDIA H200, 2026-11-21
        if block_m == 16:
            many = shape.width > 256 or (shape.extras and shape.cache_itemsize == 1)
            return Config(16, 32, 8 if many else 4, 2, programs_per_sm=4)
        if shape.width > 256:
            return Config(16, 32, 8, 2, programs_per_sm=1, block_k=128)
        if not target.warpgroup_mma:
            return Config(32, 32, 8, 2, programs_per_sm=1)
        return Config(min(block_m, 64), 64, 8, 2, programs_per_sm=1)
    # NVIDIA H200, 2026-11-21
    if block_m == 128:
        return Config(128, 64, 8, 3, programs_per_sm=1)
    if block_m > 16:
        return Config(block_m, 64, 4, 3) if target.warpgroup_mma else Config(block_m, 64, 8, 2)
    if shape.cache_itemsize == 1:
        return Config(16, 128, 4, 3)
    # many small programs: they share the device evenly, and wait for each other the least
    return Config(16, 64, 4, 2, programs_per_sm=4)


def _long_config(target: Target, shape: Shape) -> Config:
    """Many queries: what counts is to keep the matrix units busy, with tiles as large as the registers allow."""
    if shape.width > 256:
        return Config(32, 32, 8, 2, programs_per_sm=1)
    if not target.warpgroup_mma:
        # not measured: what spills no registers
        wide = shape.width > 128
        few = wide or shape.extras or shape.cache_itemsize < shape.itemsize
        small = shape.extras and (int(target.arch) < 100 if wide else shape.cache_itemsize < shape.itemsize)
        return Config(32 if small else 64, 32 if few else 64, 8, 2)
    # NVIDIA H200, 2026-11-21
    if 0 < shape.window <= 256:
        return Config(64, 32, 4, 3, programs_per_sm=4)
    if shape.width > 128:
        # 128 x 64 takes 12 to 18 % less time, and spills some registers
        small = shape.extras or shape.cache_itemsize < shape.itemsize
        return Config(64, 64, 8, 2, programs_per_sm=1) if small else Config(128, 32, 8, 3, programs_per_sm=1)
    if shape.extras or int(target.arch) != 90:
        # larger tiles spill, of the neighbours of that GPU too
        return Config(64, 64 if shape.cache_itemsize == shape.itemsize else 32, 8, 3, programs_per_sm=1)
    if shape.cache_itemsize < shape.itemsize:
        return Config(128, 128, 8, 3, programs_per_sm=1)
    if shape.paged:
        return Config(128, 64, 8, 3, programs_per_sm=1, peel=shape.window == 0)
    return Config(64, 64, 4, 3)


def _amd_config(target: Target, shape: Shape) -> Config:
    """For AMD's GPUs; not measured: what spills no registers."""
    block_m = max(16, min(64, power_of_2(shape.rows)))
    wide = shape.width > 128
    if target.rdna and (wide or shape.split):
        # its matrix units want every row of an operand twice: all of a wide query would fill the registers
        return Config(16, 16, 8, 2, block_k=64)
    if target.rdna:
        return Config(min(block_m, 32) if shape.extras else block_m, 32, 8, 2)
    return Config(min(block_m, 32) if wide or shape.extras else block_m, 32, 4, 2)


def _fit(target: Target, shape: Shape, config: Config) -> Config:
    """The configuration with fewer stages, then smaller tiles, until it fits the target's shared memory."""
    itemsize = max(shape.itemsize, shape.cache_itemsize)
    width = shape.block_d + shape.block_dv
    while True:
        buffers = max(1, config.num_stages - 1) * config.block_n * width * shape.cache_itemsize
        if shape.cache_itemsize < shape.itemsize:
            # a converted copy of the keys and of the values
            buffers += config.block_n * width * itemsize
        rows = 2 * config.block_m * shape.width * itemsize
        if buffers + rows <= target.shared_memory:
            return config
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 32:
            config = replace(config, block_n=config.block_n // 2)
        elif config.block_m > 16:
            config = replace(config, block_m=config.block_m // 2)
        elif config.num_stages > 1:
            config = replace(config, num_stages=1)
        else:
            return replace(config, block_n=16)


class Launch(NamedTuple):
    """One launch: requests of min_query_len to max_query_len queries, in ``tiles`` tiles a KV head, and splits."""

    config: Config
    min_query_len: int
    max_query_len: int
    heads: int
    one_tile: bool
    tiles: int
    splits: int
    min_split: int


def schedule(
    target: Target,
    shape: Shape,
    query_lens: Sequence[int],
    *,
    num_kv_heads: int,
    max_query_len: int,
    max_seq_len: int,
    batch_invariant: bool = False,
    config: Config | None = None,
) -> list[Launch]:
    """The launches for a batch; they fill in the shape's rows and short. config: to measure it, not the chosen one.

    A request's tiles and splits depend on its own lengths alone if ``batch_invariant``.
    """
    classes = [(1, SHORT_QUERIES), (SHORT_QUERIES + 1, max_query_len)]
    if batch_invariant:
        classes = [(1, 1), (2, SHORT_QUERIES), classes[1]]
    launches = []
    for shortest, longest in classes:
        members = [n for n in query_lens if shortest <= n <= longest]
        if not members:
            continue
        short = longest <= SHORT_QUERIES
        # the bound, not the longest, where it matters: a captured graph may be replayed with longer requests
        limit = max_query_len if max_query_len <= longest else max(members)
        rows = (longest if batch_invariant and short else limit) * shape.group
        chosen = config or choose_config(target, shape._replace(rows=rows, short=short))
        heads = min(shape.group, chosen.block_m)
        block_q = chosen.block_m // heads
        one_tile = limit <= block_q
        tiles = len(query_lens) if one_tile else sum(query_lens) // block_q + len(query_lens)
        keys = min(max_seq_len, shape.window + limit) if shape.window else max_seq_len
        if batch_invariant:
            # at least two, so that a request goes through the merge in every batch or in none
            splits, min_split = (max(2, -(-keys // INVARIANT_SPLIT)), INVARIANT_SPLIT) if short else (1, 1)
        else:
            programs = sum(-(-n // block_q) for n in members) * num_kv_heads * -(-shape.group // heads)
            min_split = max(SMALLEST_SPLIT, chosen.block_n)
            capacity = target.num_sms * chosen.programs_per_sm
            splits = choose_splits(programs, keys, min_split, chosen.block_n, capacity)
        launches.append(Launch(chosen, shortest, limit, heads, one_tile, tiles, splits, min_split))
    return launches


def choose_splits(programs: int, keys: int, min_split: int, block_n: int, capacity: int) -> int:
    """Into how many splits to cut ``keys``, so that the device's waves of programs take the least time in all."""

    def time(splits: int) -> int:
        share = max(min_split, -(-keys // (splits * block_n)) * block_n)
        return -(-programs * splits // capacity) * share

    # more than four waves are full enough; and each split is one more part to merge
    most = max(1, min(-(-keys // min_split), 4 * capacity // programs))
    least = min(time(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if time(splits) <= 1.05 * least)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()
