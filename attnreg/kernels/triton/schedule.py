"""The schedule of a batch: its launches, with their requests, tiles and splits. Integers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnreg.kernels.triton.target import Target
from attnreg.kernels.triton.tiles import Config, Shape, choose_config, tile_rows

# requests of up to so many queries are decoded: their rows fit one tile, and loading keys takes most of the time
SHORT_QUERIES = 16
# keys per split where a request's result may not depend on its batch, up to so many splits of one query and of several;
# a longer request has longer splits
INVARIANT_SPLIT = 1024
INVARIANT_SPLITS = {True: 32, False: 8}
# rows or keys of the largest tile
_TALL = 128
# the keys and values that run side by side fill this much of a device's cache, in bytes: half of an H200's
_CACHED = 24 << 20
# a split of fewer keys costs more in the merge than it saves
SMALLEST_SPLIT = 256
# the rows of the tallest tile that rotates its queries
_ROTATED_ROWS = 16
# the requests times KV heads of the largest batch whose tiles do: a launch before it takes less of a longer decode
_ROTATED_PAIRS = 64


class Launch(NamedTuple):
    """One launch: requests of min_query_len to max_query_len queries, their tiles and splits.

    one_tile: a request's rows fit one tile. kv_heads_at_once: the KV heads whose tiles run side by side.
    """

    config: Config
    min_query_len: int
    max_query_len: int
    heads: int
    one_tile: bool
    splits: int
    min_split: int
    kv_heads_at_once: int

    def tiles(self, requests: int, rows: int) -> int:
        """The tiles a KV head that hold any requests with so many rows of queries together."""
        return requests if self.one_tile else rows // (self.config.block_m // self.heads) + requests


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
    """The launches for a batch. shape: rows and short are set here. config: overrides the chosen one, for measurements.

    Together they serve any lengths within the bounds, because a captured graph is replayed with others than these. A
    request's tiles and splits depend on its own lengths alone if ``batch_invariant``.
    """
    if not query_lens:
        return []
    if batch_invariant:
        classes = [(1, 1), (2, SHORT_QUERIES), (SHORT_QUERIES + 1, max_query_len)]
    else:
        short_ones = [n for n in query_lens if n <= SHORT_QUERIES]
        longest_short = max_query_len if max_query_len <= SHORT_QUERIES else max(short_ones, default=0)
        classes = [(1, longest_short), (longest_short + 1, max_query_len)]
    launches = []
    for shortest, longest in classes:
        limit = min(longest, max_query_len)
        if limit < shortest:
            continue
        short = longest <= SHORT_QUERIES
        # the tallest tile of the class, where it may not depend on the batch
        rows = (longest if short else _TALL) if batch_invariant else limit
        members = [n for n in query_lens if shortest <= n <= longest] or [limit]
        pairs = len(members) * num_kv_heads if shape.packed and not batch_invariant else 0
        facts = shape._replace(rows=tile_rows(rows * shape.group), short=short, pairs=pairs)
        chosen = config or choose_config(target, facts)
        heads = min(shape.group, chosen.block_m)
        block_q = chosen.block_m // heads
        keys = min(max_seq_len, shape.window + limit) if shape.window else max_seq_len
        if batch_invariant:
            splits, min_split = _invariant_splits(shape, longest, max_seq_len) if short else (1, 1)
        else:
            programs = sum(-(-n // block_q) for n in members) * num_kv_heads * -(-shape.group // heads)
            min_split = max(SMALLEST_SPLIT, chosen.block_n)
            capacity = target.num_sms * chosen.programs_per_sm
            splits = choose_splits(programs, keys, min_split, chosen.block_n, capacity)
            # parts of rows without a program have memory too
            parts = min(sum(query_lens), limit * len(query_lens)) * shape.group * num_kv_heads
            splits = max(1, min(splits, 4 * capacity * chosen.block_m // max(parts, 1)))
        at_once = divisor(
            num_kv_heads, _CACHED // max(keys * (shape.block_d + shape.block_dv) * shape.cache_itemsize, 1)
        )
        # nor may what a request is computed by: longer ones of its class may be in the batch
        one_tile = (short and longest <= block_q) if batch_invariant else limit <= block_q
        launches.append(Launch(chosen, shortest, limit, heads, one_tile, splits, min_split, at_once))
    return launches


def divisor(n: int, most: int) -> int:
    """The largest divisor of n up to ``most``, at least 1."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def _invariant_splits(shape: Shape, longest: int, max_seq_len: int) -> tuple[int, int]:
    """The number of splits, and the fewest keys of each, that cut a request alike in every batch.

    Either all requests of the batch fit into splits of INVARIANT_SPLIT keys, or there are as many splits as ever. At
    least two, so that a request goes through the merge in every batch or in none.
    """
    # ranges, which are among the extras, reach past a window; a tile begins up to a tile of keys before it
    windowed = shape.window and not shape.extras
    keys = min(max_seq_len, 2 * shape.window + longest + _TALL) if windowed else max_seq_len
    return max(2, min(INVARIANT_SPLITS[longest == 1], -(-keys // INVARIANT_SPLIT))), INVARIANT_SPLIT


def choose_splits(programs: int, keys: int, min_split: int, block_n: int, capacity: int, begin: int = 0) -> int:
    """The number of splits of ``keys`` with which the device's waves of programs take the least time.

    begin: the keys that a program would compute in the time in which it begins and ends.
    """

    def time(splits: int) -> int:
        share = max(min_split, -(-keys // (splits * block_n)) * block_n)
        return -(-programs * splits // capacity) * (share + begin)

    # more than four waves keep the device busy, and each further split costs a part to merge
    most = max(1, min(-(-keys // min_split), 4 * capacity // programs))
    least = min(time(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if time(splits) <= 1.05 * least)


def rotate_when_loaded(target: Target, launches: Sequence[Launch], pairs: int, block_d: int) -> bool:
    """Whether the tiles of every launch rotate their queries in less time than a launch before them takes.

    Measured on an H200. pairs: the requests times the KV heads. block_d: `columns_of` keys.
    """
    # taller tiles are of longer queries; neither they nor single warps have registers left
    return (
        target.backend != "hip"
        and pairs <= _ROTATED_PAIRS
        and all(
            one.one_tile
            and one.config.block_m <= _ROTATED_ROWS
            and one.config.num_warps > 1
            and (one.config.block_k or block_d) >= block_d
            for one in launches
        )
    )
