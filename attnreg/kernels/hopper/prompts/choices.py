"""Choices for a launch of prompts: the constants of its kernel, its splits, and whether it computes few queries too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from attnreg.kernels.hopper.prompts.shared import ROWS, Code
from attnreg.kernels.triton.schedule import Costs, Launch, choose_splits
from attnreg.kernels.triton.splits.beside import Beside, is_worth, seen_keys
from attnreg.runtime.interface import AttentionSpec

# the head sizes of keys and values that the kernel computes; and the most columns that the copy engine can swizzle
SIZES = (64, 80, 96, 128, 192, 256)
COPIED = 64
# sizes of heads whose block of keys has several boxes and is one part of a power of 2: one copy loads all columns of a
# box. On an H200, over pages of 16, heads of 128 take 0 to 3 % less time; over pages of 128 they would take 1 to 2 %
# more. For heads of 256, only the values are one part
GROUPED = {128, 256}
# the default rows of a tile
TILE = 2 * ROWS.value
# the smallest box of keys
SMALLEST_BOX = 16
# how many tiles each multiprocessor has to have: in a narrow window, or before three warpgroups share a tile
SEVERAL = 4
# the registers of a thread that do not hold scores, weights, outputs or queries
OTHERS = 40
# keys are split if there are fewer than FEW_TILES tiles for each multiprocessor
FEW_TILES, COSTS = 2, Costs(begin=256, merge=0, row=0)
# the share of the multiprocessors that take prompts first, of launches that also compute requests of few queries;
# measured on an H200
OF_PROMPTS = 0.3


class Build(NamedTuple):
    """How a block of threads is built.

    registers, loading: of a thread of the computing warpgroups, and of the loading warp. at_start: of each thread when
    the kernel begins; None: the compiler's number. programs: how many blocks a multiprocessor holds.
    """

    registers: int
    loading: int
    at_start: int | None = None
    programs: int = 1


# by the number of computing warpgroups; WIDE: two warpgroups for wide heads, whose outputs take more registers
BUILDS = {1: Build(128, 32, at_start=80, programs=3), 2: Build(232, 40), 3: Build(160, 32)}
WIDE = Build(240, 24)


def pack_of(spec: AttentionSpec) -> int:
    """How many query heads a tile has: the largest power of 2 that divides the query heads of a KV head, at most 64."""
    group = spec.num_heads // spec.num_kv_heads
    return int(min(group & -group, ROWS.value))


def code_of(
    spec: AttentionSpec, causal: bool, block_size: int, given: Collection[str] = (), groups: int = 2,
    split: bool = False,
) -> Code:  # fmt: skip
    """The constants of the kernel for a layer.

    block_size: 0 without a cache. given: which of lse, sinks, k_scale and v_scale its calls have. groups: how many
    warpgroups compute a tile. split: several programs share a tile's keys.
    """
    group = spec.num_heads // spec.num_kv_heads
    left, right = spec.sides(causal)
    size, size_v = spec.head_size, spec.head_size_v
    block_n = 64 if max(size - 64, size_v) > 128 or _is_narrow(spec, causal) else 128
    box = min(block_size & -block_size, block_n) if block_size else block_n
    wide = size > 128
    output_in_query = size_v <= size and wide
    # the output reuses the queries' memory, so its parts have the same columns
    whole = size == size_v or not output_in_query
    part_v = _part(size_v) if whole else COPIED
    # one part, so that registers can hold part of the queries
    part = _part(size) if whole and size <= 128 else COPIED
    build = WIDE if wide and groups == 2 and not split else BUILDS[groups]
    free = build.registers - OTHERS - block_n // 2 - block_n // 4 - size_v // 2
    return Code(
        kv_heads=spec.num_kv_heads,
        group=group,
        pack=pack_of(spec),
        size=size,
        size_v=size_v,
        part=part,
        part_v=part_v,
        block_n=block_n,
        box=box,
        block_size=block_size,
        stages=2 if groups == 2 else 3,
        left=left,
        right=right,
        softcap=bool(spec.softcap),
        sinks="sinks" in given,
        lse="lse" in given,
        q_stages=1 if wide else 2,
        output_in_query=output_in_query,
        groups=groups,
        registers=build.registers,
        loading=build.loading,
        programs=build.programs,
        # parts of split keys need addresses of their own, which take registers
        held=0 if split else max(0, min(free // (part // 4), -(-size // part))),
        lazy=size_v >= 128,
        take_turns=groups > 1,
        mixed=False,
        beside=None,
        split=split,
        k_scaled="k_scale" in given,
        v_scaled="v_scale" in given,
        in_groups=box < block_n and {size, size_v} <= GROUPED and size_v == part_v,
    )


def _part(size: int) -> int:
    """How many columns a part has: all columns if they are a power of 2."""
    return COPIED if size & (size - 1) else size


def groups_of(spec: AttentionSpec, causal: bool, launch: Launch, queries: Sequence[int], num_sms: int) -> int:
    """How many warpgroups compute a tile of a launch of prompts whose keys are not split.

    For small heads and many tiles, three share a tile, so that each load of keys serves more rows. In a narrow window
    each warpgroup has its own tile, and a multiprocessor computes several tiles at once.
    """
    if max(spec.head_size, spec.head_size_v) > COPIED:
        return 2
    if _is_narrow(spec, causal):
        return 1
    if "batch_invariant" in spec.features or spec.sides(causal)[0] >= 0:
        return 2
    return 3 if _tiles(spec, launch, queries) >= SEVERAL * num_sms else 2


def _tiles(spec: AttentionSpec, launch: Launch, queries: Sequence[int]) -> int:
    """How many tiles the requests of a launch have."""
    group, pack = spec.num_heads // spec.num_kv_heads, pack_of(spec)
    members = [n for n in queries if launch.min_query_len <= n <= launch.max_query_len]
    return int(sum(-(-n // (TILE // pack)) for n in members) * spec.num_kv_heads * (group // pack))


def splits_of(
    spec: AttentionSpec, causal: bool, launch: Launch, queries: Sequence[int], max_seq_len: int, num_sms: int
) -> int:  # fmt: skip
    """In how many splits of keys this kernel computes a launch of prompts; 0 if TRITON_ATTN's kernel is faster.

    In a narrow window, starting a tile costs more than computing it, unless each multiprocessor has several tiles.
    """
    if "batch_invariant" in spec.features:
        # a request's result must not depend on the number of tiles in its batch
        return 1
    tiles = _tiles(spec, launch, queries)
    if _is_narrow(spec, causal):
        return int(tiles >= SEVERAL * num_sms)
    if launch.splits == 1 or not 0 < tiles < FEW_TILES * num_sms:
        return 1
    sides = spec.sides(causal)
    keys = min(max_seq_len, sum(sides) + 1 + launch.max_query_len) if min(sides) >= 0 else max_seq_len
    # rows without a program have memory for parts too
    parts = min(sum(queries), launch.max_query_len * len(queries)) * spec.num_heads
    return choose_splits(tiles, ((1, keys),), parts, TILE, num_sms, 1, COSTS)[0]


def beside_of(
    spec: AttentionSpec, causal: bool, launch: Launch, queries: Sequence[int], longest: int, num_sms: int
) -> Beside | None:
    """The constants by which a launch of prompts may also compute the batch's requests of fewer queries; None: never.

    Each of these becomes a tile whose keys are not split. Equally many keys take a multiprocessor about equally long in
    both, until only the longest request is left. longest: the most keys of a request.
    """
    group, pack = spec.num_heads // spec.num_kv_heads, pack_of(spec)
    # a window has few keys, so it gains little; and a batch_invariant result must not depend on the batch
    if pack < group or spec.sides(causal)[0] >= 0 or "batch_invariant" in spec.features:
        return None
    block_q = TILE // pack
    if launch.min_query_len > block_q + 1 or splits_of(spec, causal, launch, queries, longest, num_sms) != 1:
        return None
    return Beside(block_q, spec.num_kv_heads, num_sms, causal)


def mixes(beside: Beside, shortest: int, queries: Sequence[int], keys: Sequence[int]) -> bool:
    """Whether a launch of prompts should compute the batch's requests of fewer queries too.

    shortest: the fewest queries of a prompt.
    """
    pairs = list(zip(queries, keys, strict=True))
    few = [kv_len for query_len, kv_len in pairs if 0 < query_len < shortest]
    many = sum(seen_keys(query_len, kv_len, beside) for query_len, kv_len in pairs if query_len >= shortest)
    return is_worth(sum(few), many, max(few, default=0), beside)


def _is_narrow(spec: AttentionSpec, causal: bool) -> bool:
    """Whether a row sees so few keys that blocks of 64 keys are better than blocks of 128."""
    left, right = spec.sides(causal)
    return bool(left >= 0 and right >= 0 and left + right < 256)
