# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Programs share keys out on the device: each computes its request, and its part of that request's keys.

A captured launch does not know the lengths of its replays. If all requests were cut into equally many parts, the
longest of many could take several times as long as the others together. So here all parts have about one size, which
every program computes from the lengths. A long request has many parts. If no request is much longer than the others,
none is cut. The constants are `schedule.Shares`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from attnreg.kernels.triton.splits.beside import is_worth_here, work_of


class Part(NamedTuple):
    """The part of a program: its request, its number in the request, and how many parts that has.

    request: num_reqs if the program has no part.
    """

    request: tl.tensor
    number: tl.tensor
    count: tl.tensor


@triton.jit
def _tiles(query_start_loc_ptr, seq_lens_ptr, i, num_reqs, min_query_len, max_query_len, SHARES: tl.constexpr):
    """Returns how many tiles of keys requests i have, at least one; 0 for other launches' and missing requests."""
    exists = i < num_reqs
    first = tl.load(query_start_loc_ptr + i, mask=exists, other=0)
    after = tl.load(query_start_loc_ptr + i + 1, mask=exists, other=0)
    kv_len = tl.load(seq_lens_ptr + i, mask=exists, other=0)
    mine = (after - first >= min_query_len) & (after - first <= max_query_len)
    return tl.where(mine, tl.maximum(tl.cdiv(kv_len, SHARES.block_n), 1), 0)


@triton.jit
def _size_of_parts(total, members, longest, at_once, SHARES: tl.constexpr):
    """Returns the most tiles of a part. The ``members`` requests have ``total`` tiles together, ``longest`` at most.

    at_once: the size with which all parts run at once; the device then takes the time begin + size. With smaller parts,
    which run in turn, it takes about parts * begin / programs + total / programs + size / 2: the last part begins when
    others end.
    """
    each = total.to(tl.float32) / SHARES.programs
    begins = SHARES.begin / SHARES.programs
    # not smaller: with smaller parts there would be more parts than programs
    in_turn = tl.maximum(tl.sqrt(each * (2.0 * SHARES.begin)).to(tl.int32), tl.cdiv(total, SHARES.spare))
    time_in_turn = (total / in_turn + members * 0.5) * begins + each + in_turn * 0.5
    fits = members <= SHARES.programs
    time_at_once = tl.where(fits, SHARES.begin + at_once, float("inf"))
    # a program is faster if fewer others share its multiprocessor
    time_whole = tl.where(
        fits, SHARES.begin + tl.maximum(longest / SHARES.alone, each), members * begins + each + longest * 0.5
    )
    # a part that is hardly too large is not cut in two. If uncut requests take hardly longer, none is cut: merges cost
    in_turn += in_turn // 8
    size = tl.maximum(tl.where(time_at_once <= time_in_turn, at_once, in_turn), SHARES.fewest)
    if SHARES.merge > 0:
        # n parts of the longest request take the time longest / n + n * merge: the least at n = sqrt(longest / merge)
        size = tl.maximum(size, tl.ceil(tl.sqrt(longest.to(tl.float32) * SHARES.merge)).to(tl.int32))
    return tl.where(time_whole <= 1.05 * tl.minimum(time_at_once, time_in_turn), longest, size)


@triton.jit
def parts_of_requests(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, i, SHARES: tl.constexpr
):  # fmt: skip
    """Returns how many parts requests i have, 0 where other launches compute them; and the sum up to each, inclusive.

    A request's parts have consecutive numbers. i: all requests at once, [SHARES.lanes]. With a loop over requests,
    Triton 3.7 no longer pipelines the loop over keys. Gluon's kernels, whose vectors have a layout, call this too.
    """
    tiles = _tiles(query_start_loc_ptr, seq_lens_ptr, i, num_reqs, min_query_len, max_query_len, SHARES)
    # sums of 32-bit numbers, for which a warp has an instruction
    total, members = tl.sum(tiles), tl.sum((tiles > 0).to(tl.int32))
    # at_once is the first of four sizes with which there are no more parts than programs. A request may need one part
    # more than it fills. The sizes assume 0 (equal), 1/2 (likely, the mean), 3/4 (safely) or 1 (surely) for each
    equal = tl.maximum(tl.cdiv(total, SHARES.programs), SHARES.fewest)
    likely = tl.maximum(tl.cdiv(total, tl.maximum(SHARES.programs - members // 2, 1)), SHARES.fewest)
    safely = tl.maximum(tl.cdiv(total, tl.maximum(SHARES.programs - members * 3 // 4, 1)), SHARES.fewest)
    surely = tl.cdiv(total, tl.maximum(SHARES.programs - members, 1))
    # two sums in one number, 16 bits each: there are at most as many parts as programs and requests together
    fewer = tl.sum(tl.cdiv(tiles, equal) + (tl.cdiv(tiles, likely) << 16))
    at_once = tl.where(tl.sum(tl.cdiv(tiles, safely)) <= SHARES.programs, safely, surely)
    at_once = tl.where((fewer >> 16) <= SHARES.programs, likely, at_once)
    at_once = tl.where((fewer & 0xFFFF) <= SHARES.programs, equal, at_once)
    size = _size_of_parts(total, members, tl.max(tiles), at_once, SHARES)
    parts = tl.cdiv(tiles, tl.maximum(size, 1))
    if SHARES.beside is not None:
        # Triton 3.6 passes no tuple in a tuple to a function
        BESIDE: tl.constexpr = SHARES.beside
        few, many, longest = work_of(query_start_loc_ptr, seq_lens_ptr, i, num_reqs, max_query_len, BESIDE)
        parts = tl.where(is_worth_here(few, many, longest, BESIDE), 0, parts)
    return parts, tl.cumsum(parts, 0)


@triton.jit
def part_of_program(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, i, program, SHARES: tl.constexpr
):  # fmt: skip
    """Returns the `Part` of a program; the other arguments are those of `parts_of_requests`."""
    parts, ends = parts_of_requests(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, i, SHARES
    )
    mine = (ends - parts <= program) & (program < ends)
    request = tl.max(tl.where(mine, i, -1))
    number = tl.sum(tl.where(mine, program - ends + parts, 0))
    count = tl.sum(tl.where(mine, parts, 0))
    return Part(tl.where(count > 0, request, num_reqs), number, count)
