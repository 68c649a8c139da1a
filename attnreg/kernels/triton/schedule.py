"""The schedule of a batch: its launches, with their requests, tiles and splits. Integers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnreg.kernels.triton.target import Target
from attnreg.kernels.triton.tiles import Config, Shape, choose_config, tile_rows

# requests of up to so many queries are decoded: their rows fit one tile, and loading keys takes most of the time
SHORT_QUERIES = 16
# keys per split where a request's result may not depend on its batch
INVARIANT_SPLIT = 1024
# a split of fewer keys costs more in the merge than it saves
SMALLEST_SPLIT = 256


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
    """The launches for a batch. shape: rows and short are set here. config: overrides the chosen one, for measurements.

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
        # the upper bound where it applies: a captured graph may be replayed with requests longer than these
        limit = max_query_len if max_query_len <= longest else max(members)
        rows = (longest if batch_invariant and short else limit) * shape.group
        chosen = config or choose_config(target, shape._replace(rows=tile_rows(rows), short=short))
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
    """The number of splits of ``keys`` with which the device's waves of programs take the least time."""

    def time(splits: int) -> int:
        share = max(min_split, -(-keys // (splits * block_n)) * block_n)
        return -(-programs * splits // capacity) * share

    # more than four waves keep the device busy, and each further split costs a part to merge
    most = max(1, min(-(-keys // min_split), 4 * capacity // programs))
    least = min(time(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if time(splits) <= 1.05 * least)
