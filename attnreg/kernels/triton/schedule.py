"""The schedule of a batch: its launches, with their requests, tiles and splits. Numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from attnreg.kernels.triton.target import Target
from attnreg.kernels.triton.tiles import Config, Shape, choose_config, tile_rows
from attnreg.runtime.lengths import Lengths

# the most queries of a request that is decoded: its rows fit one tile, and loading keys takes most of the time
SHORT_QUERIES = 16
# for batch_invariant layers: the keys of a split, and the most splits by whether requests have one query
INVARIANT_SPLIT = 1024
INVARIANT_SPLITS = {True: 32, False: 8}
_TALL = 128  # rows or keys of the largest tile
PARTS = 512  # that a launch has memory for, for each multiprocessor
_GROUPS = 4  # of requests beside the longest, each with its mean length


class Constant(NamedTuple):
    """A number that was measured against others, or chosen. measured: the GPU and the day, empty if it was not."""

    value: Any
    measured: str
    because: str


H200_22, H200_24, H200_27, H200_28, H200_30 = (f"NVIDIA H200, 2026-11-{day}" for day in (22, 24, 27, 28, 30))
CONSTANTS = {
    "cached": Constant(24 << 20, H200_22, "bytes of keys and values that run side by side: half of the device's cache"),
    "smallest split": Constant(
        64, H200_30, "one request of 1k keys takes 9.9 µs for 14.0 with 256; no batch takes more"
    ),
    "alike": Constant(256, H200_30, "lengths are rounded up to a multiple; and the smallest split within a window"),
    # with these `choose_splits` comes closest to the fastest in benchmarks/results/splits.json
    "begins": Constant(200 << 10, H200_27, "columns of keys and values in the time of a program's begin and end"),
    "merged": Constant(4 << 10, H200_27, "columns of keys and values in the time in which a part is merged"),
    "column": Constant(0.12, H200_27, "of these, in the time of a column of a merged row, however many parts it has"),
    "alone": Constant(
        1.25, H200_27, "how much faster a program is that has a multiprocessor and its memory for itself"
    ),
    "alone, narrow": Constant((128, 1.4), H200_30, "the same for keys and values of so many 16-bit columns together"),
    "fullest": Constant(
        0.75, H200_27, "where requests differ: how much of its excess the fullest multiprocessor costs"
    ),
    "last": Constant(0.5, H200_27, "where requests differ: how long the last part runs on, in its time"),
    "empty": Constant(0.1, H200_27, "what a program takes that finds no keys, of what others take to begin and end"),
    "as fast": Constant(1.02, H200_27, "fewer parts are preferred if they take at most this many times the least time"),
    "few requests": Constant((32, 128), H200_28, "what a program looks at at once; warps sum 32 without barriers"),
    "most requests": Constant(1024, H200_28, "the most requests whose lengths a program reads"),
    "several": Constant(4, H200_28, "longest over mean keys from which programs share out what the host knows"),
    # 16 and 32 requests take 2 to 5 % less time, 64 and 256 take 1 to 4 % more, and so do 16 rows
    "several, tall": Constant((64, 32, 1.5), H200_30, "the same for more rows than the first, of at most 32 requests"),
    "rotated rows": Constant(16, H200_24, "rows of the tallest tile that rotates its queries"),
    # of more a launch before it takes less time of a longer decode
    "rotated pairs": Constant(64, H200_24, "requests times KV heads of the largest batch whose tiles rotate them"),
}
_CACHED, SMALLEST_SPLIT, ALIKE = (int(CONSTANTS[name].value) for name in ("cached", "smallest split", "alike"))
_BEGINS, _MERGED, _COLUMN = (CONSTANTS[name].value for name in ("begins", "merged", "column"))
ALONE: float = CONSTANTS["alone"].value
_NARROW, _ALONE_NARROW = CONSTANTS["alone, narrow"].value
_FULLEST, _LAST, _EMPTY = (float(CONSTANTS[name].value) for name in ("fullest", "last", "empty"))
_AS_FAST: float = CONSTANTS["as fast"].value
_FEW_REQUESTS, _MOST_REQUESTS = CONSTANTS["few requests"].value, CONSTANTS["most requests"].value
_SEVERAL: int = CONSTANTS["several"].value
_TALL_ROWS, _FEW_TALL, _SEVERAL_TALL = CONSTANTS["several, tall"].value
_ROTATED_ROWS, _ROTATED_PAIRS = CONSTANTS["rotated rows"].value, CONSTANTS["rotated pairs"].value

# pairs of a number of requests and the keys of each, the longest first; one if requests are alike or lengths not known
Groups = tuple[tuple[int, int], ...]


class KeyLengths(NamedTuple):
    """How many keys the requests of a batch have, as far as its launches depend on that.

    longest: the most keys of a request. few: those with few queries. known: False for upper bounds of the lengths.
    """

    longest: int
    few: Groups
    known: bool = True

    @classmethod
    def alike(cls, longest: int) -> KeyLengths:
        """Lengths of requests that all have, or may have, the longest one's keys."""
        return cls(longest, ((1, longest),))

    @classmethod
    def any_of(cls, longest: int) -> KeyLengths:
        """Lengths of the requests of a captured graph: it is replayed with any lengths up to the longest."""
        return cls.alike(-(-longest // ALIKE) * ALIKE)._replace(known=False)

    def one_sided(self, rows: int) -> bool:
        """Whether, among requests with few queries, the longest has several times the mean keys. rows: of a request."""
        requests = sum(n for n, _ in self.few)
        several = _SEVERAL_TALL if rows > _TALL_ROWS and requests <= _FEW_TALL else _SEVERAL
        return self.few[0][1] * requests > several * sum(n * keys for n, keys in self.few)

    @classmethod
    def of(cls, bound: int, lengths: Lengths) -> KeyLengths:
        """Lengths of requests that have up to ``bound`` keys.

        If none has ``bound`` keys, rounded up to ALIKE, all count as if they had: so it is before a graph's capture.
        """
        whole, (_, (queries, _, _, least, most), keys, longest) = -(-bound // ALIKE) * ALIKE, lengths
        if longest <= whole - ALIKE:
            return cls.alike(whole)
        alike = 0 < least <= most <= SHORT_QUERIES and 8 * sum(keys) >= 7 * longest * len(keys)
        if not alike:  # most steps of a decode need no loop
            some = zip(queries, keys, strict=True)  # requests without queries pad a batch
            few = sorted((max(n, ALIKE) for each, n in some if 0 < each <= SHORT_QUERIES), reverse=True)
            longest = few[0] if few else whole
            alike = 8 * sum(few) >= 7 * longest * len(few)
        most = min(whole, -(-longest // ALIKE) * ALIKE)
        if alike:
            return cls(whole, ((1, most),))
        others, count = few[1:], min(_GROUPS, len(few) - 1)
        parts = (others[i * len(others) // count : (i + 1) * len(others) // count] for i in range(count))
        means = ((len(part), min(most, _rounded(-(-sum(part) // len(part))))) for part in parts)
        return cls(whole, ((1, most), *means))


def _rounded(keys: int) -> int:
    """The number rounded up to three binary digits after the first: successive steps of a batch are split alike."""
    step = 1 << max(keys.bit_length() - 4, 0)
    return -(-keys // step) * step


class Costs(NamedTuple):
    """The time of a split beside its keys, in keys that its program would compute meanwhile.

    begin: the begin and end of a program. merge: the merge of a part. row: the merge of a row, for any number of parts.
    alone: how much faster a program is that has a multiprocessor for itself.
    """

    begin: float
    merge: float
    row: float
    alone: float = ALONE


class Shares(NamedTuple):
    """The constants of programs that share keys out.

    programs: how many run at once. spare: see `_spare`. begin: the time of a program's begin and end, in tiles of
    block_n keys. fewest: the smallest part, in such tiles. lanes: a power of 2, at least the requests. alone: the speed
    of a program alone on a multiprocessor, beside a share of a full one. merge: a part's merge, in tiles; 0: uncounted.
    beside: a `Beside`, if a launch of prompts may compute these requests in the programs' place.
    """

    programs: int
    spare: int
    begin: float
    fewest: int
    block_n: int
    lanes: int
    alone: float = ALONE
    merge: float = 0.0
    beside: tuple[int, ...] | None = None


class Launch(NamedTuple):
    """One launch: requests of min_query_len to max_query_len queries, their tiles and splits.

    one_tile: a request's rows fit one tile. kv_heads_at_once: the KV heads whose tiles run side by side. shared: the
    programs of a KV head that run at once and share its keys out; 0: every request has ``splits`` splits.
    """

    config: Config
    min_query_len: int
    max_query_len: int
    heads: int
    one_tile: bool
    splits: int
    min_split: int
    kv_heads_at_once: int
    shared: int = 0

    def sharing(self, requests: int) -> int:
        """The programs of a KV head that share out the keys of this number of requests; 0 if each has its own."""
        return _sharing(self.shared, requests) if self.shared else 0

    def tiles(self, requests: int, rows: int) -> int:
        """The most tiles of a KV head for requests of ``rows`` queries; for shared keys, each program's for one."""
        queries = self.config.block_m // self.heads
        if self.shared:
            return self.sharing(requests) * (1 if self.one_tile else -(-self.max_query_len // queries))
        return requests if self.one_tile else rows // queries + requests


def schedule(
    target: Target,
    shape: Shape,
    query_lens: Sequence[int],
    *,
    num_kv_heads: int,
    max_query_len: int,
    keys: KeyLengths,
    batch_invariant: bool = False,
    config: Config | None = None,
    shares: bool = False,
) -> list[Launch]:
    """The launches for a batch. They serve any lengths within the bounds: a captured graph is replayed with others.

    shape: this function sets rows and short. config: overrides the chosen one, for measurements. shares: whether
    queries see all keys before their own; then programs can share out the keys of requests with few queries.
    batch_invariant: a request's tiles and splits depend on its own lengths alone.
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
        # batch_invariant: the tallest tile of the class, which does not depend on the batch
        rows = (longest if short else _TALL) if batch_invariant else limit
        members = [n for n in query_lens if shortest <= n <= longest] or [limit]
        counted = shape.packed or (shares and short and not keys.known)
        pairs = len(members) * num_kv_heads if counted and not batch_invariant else 0
        facts = shape._replace(rows=tile_rows(rows * shape.group), short=short, pairs=pairs)
        chosen = config or choose_config(target, facts)
        heads = min(shape.group, chosen.block_m)
        block_q = chosen.block_m // heads
        groups = groups_in_window(
            keys.few if short else ((1, keys.longest),), shape.window and shape.window + min(limit, block_q)
        )
        columns = shape.block_d + shape.block_dv
        costs = costs_of(columns, shape.block_dv, chosen.programs_per_sm)
        if batch_invariant:
            splits, min_split = _invariant_splits(shape, longest, keys.longest) if short else (1, 1)
        else:
            programs = sum(-(-n // block_q) for n in members) * num_kv_heads * -(-shape.group // heads)
            # parts of rows without a program have memory too
            parts = min(sum(query_lens), limit * len(query_lens)) * shape.group * num_kv_heads
            splits, min_split = choose_splits(
                programs, groups, parts, chosen.block_n, target.num_sms, chosen.programs_per_sm, costs,
                smallest=ALIKE if shape.window else SMALLEST_SPLIT,
            )  # fmt: skip
        near = min(keys.longest, shape.window + limit) if shape.window else keys.longest
        at_once = divisor(num_kv_heads, _CACHED // max(near * columns * shape.cache_itemsize, 1))
        # batch_invariant: a request takes the same code if longer ones of its class are in the batch
        one_tile = (short and longest <= block_q) if batch_invariant else limit <= block_q
        shared = 0
        # programs read lengths that the host knows only for a long request among many over latents: equal memory for
        # each is too little for its parts. On AMD a kernel's first launch during a graph's capture was not tried
        sought = not keys.known or (shape.latent and limit == 1 and keys.one_sided(shape.group))
        plain = (one_tile or shape.latent) and not (
            batch_invariant or shape.ranges or shape.mask or target.backend == "hip"
        )
        if shares and short and plain and sought:
            programs = num_kv_heads * -(-shape.group // heads) * (1 if one_tile else -(-limit // block_q))
            shared = sharing_of(
                target.num_sms, chosen.programs_per_sm, programs, len(query_lens), limit * shape.group * num_kv_heads,
                fewest=1 if shape.latent else 2,
            )  # fmt: skip
            splits = 1 if shared else splits
        launches.append(Launch(chosen, shortest, limit, heads, one_tile, splits, min_split, at_once, shared))
    return launches


def groups_in_window(groups: Groups, seen: int) -> Groups:
    """The groups as their queries see them: at most this many keys each, as within a window; 0: all keys."""
    return ((1, seen),) if 0 < seen < groups[0][1] else groups


def divisor(n: int, most: int) -> int:
    """The largest divisor of n up to ``most``, at least 1."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def _invariant_splits(shape: Shape, longest: int, max_seq_len: int) -> tuple[int, int]:
    """The number of splits, and the fewest keys of each, that cut a request alike in every batch.

    Two or more, so that a request goes through the merge in every batch, and INVARIANT_SPLITS at most.
    """
    # ranges, one of the extras, reach past a window; a tile begins up to a tile of keys before the window
    windowed = shape.window and not shape.extras
    keys = min(max_seq_len, 2 * shape.window + longest + _TALL) if windowed else max_seq_len
    return max(2, min(INVARIANT_SPLITS[longest == 1], -(-keys // INVARIANT_SPLIT))), INVARIANT_SPLIT


def costs_of(columns: int, columns_v: int, per_sm: int) -> Costs:
    """The costs of a split. columns: of a key and its value. columns_v: of a value. per_sm: as in `choose_splits`."""
    begin, merge, row = (cost / (per_sm * columns) for cost in (_BEGINS, _MERGED, _COLUMN * columns_v))
    return Costs(begin, merge, row, _ALONE_NARROW if columns <= _NARROW else ALONE)


def _spare(at_once: int, requests: int) -> int:
    """All keys divided by this number are the smallest part, so there are at most as many parts, plus one a request.

    For few requests the sum is at most ``at_once``: a further program would begin when another ends.
    """
    return at_once - at_once // 3 if requests <= at_once // 3 else at_once + at_once // 2


def _sharing(at_once: int, requests: int) -> int:
    """The programs of a KV head, enough for the parts of this number of requests with any keys."""
    return max(at_once, _spare(at_once, requests) + requests)


def sharing_of(num_sms: int, per_sm: int, programs: int, requests: int, rows: int, *, fewest: int = 2) -> int:
    """`Launch.shared`; 0 for too few requests, too many for a program to read, or too little memory for their parts.

    programs: of a part, for all heads and tiles. rows: of a request, times heads.
    """
    at_once = max(1, num_sms * per_sm // programs)
    fits = fewest <= requests <= _MOST_REQUESTS and _sharing(at_once, requests) * rows <= PARTS * num_sms
    return at_once if fits else 0


def shares_of(launch: Launch, requests: int, block_n: int, begin: float, merge: float = 0.0) -> Shares | None:
    """The constants of a launch whose programs share keys out; None for other launches.

    block_n: keys that a program walks at a time. begin, merge: as in `Costs`; merges of 0 are not counted.
    """
    if not launch.shared:
        return None
    lanes = next((few for few in _FEW_REQUESTS if requests <= few), 1 << (requests - 1).bit_length())
    fewest, spare = max(1, SMALLEST_SPLIT // block_n), _spare(launch.shared, requests)
    return Shares(
        launch.shared, spare, round(begin / block_n, 2), fewest, block_n, lanes, merge=round(merge / block_n, 3)
    )


def share_of(keys: int, splits: int, block_n: int, smallest: int = SMALLEST_SPLIT) -> int:
    """The keys of a split, which walks block_n keys at a time."""
    return max(smallest, block_n, -(-keys // (splits * block_n)) * block_n)


def choose_splits(
    programs: int, groups: Groups, rows: int, block_n: int, num_sms: int, per_sm: int, costs: Costs, *,
    smallest: int = SMALLEST_SPLIT,
) -> tuple[int, int]:  # fmt: skip
    """The number of splits that takes the least time, or nearly, and the fewest keys of a split.

    programs: without splits. groups: of the programs' requests. rows: of queries that have parts, times heads. per_sm:
    the programs that a multiprocessor holds at once. smallest: the fewest keys of a split. Within a window they are
    ALIKE. benchmarks/notes/key_splits.md says how often it finds the best.
    """
    capacity, (_, keys) = num_sms * per_sm, groups[0]
    each = programs / sum(count for count, _ in groups)
    total = each * sum(count * length for count, length in groups)

    def time_alike(splits: int, share: int) -> float:
        waves, rest = divmod(programs * splits, capacity)
        last = costs.begin + share / min(per_sm / -(-rest // num_sms), costs.alone) if rest else 0
        return waves * (share + costs.begin) + last

    def time_uneven(splits: int, share: int) -> float:
        parts = each * sum(count * -(-length // share) for count, length in groups)
        empty = (programs * splits - parts) / capacity * costs.begin * _EMPTY
        if parts > capacity:
            return empty + parts / capacity * costs.begin + total / capacity + _LAST * share
        fullest = share * -(-parts // num_sms) / per_sm
        evenly = total / capacity
        return empty + costs.begin + max(share / costs.alone, evenly + _FULLEST * max(0, fullest - evenly))

    alike, smallest = len(groups) == 1, max(smallest, block_n)
    # more than four waves keep the device busy
    busy = int(4 * capacity * keys / max(total, 1))
    most = max(1, min(-(-keys // smallest), busy, PARTS * num_sms // max(rows, 1)))
    time, times = time_alike if alike else time_uneven, {}
    for splits in (n for n in range(1, most + 1) if n == most or n % (1 << max(n.bit_length() - 6, 0)) == 0):
        merged = splits * costs.merge + rows * costs.row if splits > 1 else 0
        times[splits] = merged + time(splits, share_of(keys, splits, block_n, smallest))
    enough = _AS_FAST * min(times.values())
    splits = next(splits for splits, taken in times.items() if taken <= enough)
    share = share_of(keys, splits, block_n, smallest)
    # where requests differ, the short ones are not cut into as many parts as the long ones
    return max(1, -(-keys // share)), smallest if alike else share


def rotate_when_loaded(target: Target, launches: Sequence[Launch], pairs: int, block_d: int) -> bool:
    """Whether the tiles of every launch rotate their queries in less time than a launch before them takes.

    Measured on an H200. pairs: the requests times the KV heads. block_d: `columns_of` keys.
    """
    # taller tiles have more queries; neither they nor single warps have registers left
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
