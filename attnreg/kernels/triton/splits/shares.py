# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""Keys that programs share out on the device: each finds which part of which request it walks.

A launch that is captured in a graph knows nothing of the lengths that it is replayed with. Cut into as many parts each,
the longest of many requests takes several times as long as the others together. So all parts have about one size here,
which every program computes from the lengths: a long request has many, and where none is much longer than the others,
none is cut. The constants are `schedule.Shares`.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Part(NamedTuple):
    """Of which request a program walks which part of how many; the request is num_reqs where it walks none."""

    request: tl.tensor
    number: tl.tensor
    count: tl.tensor


@triton.jit
def _tiles(query_start_loc_ptr, seq_lens_ptr, i, num_reqs, min_query_len, max_query_len, SHARES: tl.constexpr):
    """Returns the tiles of keys of requests i, at least one; 0 where they are of another launch, or there are none."""
    exists = i < num_reqs
    first = tl.load(query_start_loc_ptr + i, mask=exists, other=0)
    after = tl.load(query_start_loc_ptr + i + 1, mask=exists, other=0)
    kv_len = tl.load(seq_lens_ptr + i, mask=exists, other=0)
    mine = (after - first >= min_query_len) & (after - first <= max_query_len)
    return tl.where(mine, tl.maximum(tl.cdiv(kv_len, SHARES.block_n), 1), 0)


@triton.jit
def _size_of_parts(total, members, longest, at_once, SHARES: tl.constexpr):
    """Returns the most tiles of a part, of so many requests that have ``total`` together and up to ``longest`` each.

    at_once: the size in which all parts run at once; the device takes begin + size then. Else it takes about
    parts * begin / programs + total / programs + size / 2, for the last one begins when others end.
    """
    each = total.to(tl.float32) / SHARES.programs
    begins = SHARES.begin / SHARES.programs
    # no smaller, for there are so many programs
    in_turn = tl.maximum(tl.sqrt(each * (2.0 * SHARES.begin)).to(tl.int32), tl.cdiv(total, SHARES.spare))
    time_in_turn = (total / in_turn + members * 0.5) * begins + each + in_turn * 0.5
    fits = members <= SHARES.programs
    time_at_once = tl.where(fits, SHARES.begin + at_once, float("inf"))
    # a program that shares its multiprocessor with fewer is faster
    time_whole = tl.where(
        fits, SHARES.begin + tl.maximum(longest / SHARES.alone, each), members * begins + each + longest * 0.5
    )
    # one that is hardly larger is not cut in two, and where it takes hardly longer none is: a merge takes time too
    in_turn += in_turn // 8
    size = tl.maximum(tl.where(time_at_once <= time_in_turn, at_once, in_turn), SHARES.fewest)
    return tl.where(time_whole <= 1.05 * tl.minimum(time_at_once, time_in_turn), longest, size)


@triton.jit
def parts_of_requests(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, i, SHARES: tl.constexpr
):  # fmt: skip
    """Returns how many parts requests i have, 0 where they are of another launch, and how many they and those before
    them have. Those of a request follow each other.

    i: all requests at once, [SHARES.lanes]. Beside a loop over them, Triton 3.7 no longer pipelines the one over keys.
    Gluon's kernels, whose numbers have a layout, call it too.
    """
    tiles = _tiles(query_start_loc_ptr, seq_lens_ptr, i, num_reqs, min_query_len, max_query_len, SHARES)
    # (sums of 32 bits, which an instruction of its own computes in a warp)
    total, members = tl.sum(tiles), tl.sum((tiles > 0).to(tl.int32))
    # of these sizes the first in which there are no more parts than run at once: what an equal part has; what it has
    # where requests have half a part more than they fill, as in the mean, and three quarters; and where they have a
    # whole one
    equal = tl.maximum(tl.cdiv(total, SHARES.programs), SHARES.fewest)
    likely = tl.maximum(tl.cdiv(total, tl.maximum(SHARES.programs - members // 2, 1)), SHARES.fewest)
    safely = tl.maximum(tl.cdiv(total, tl.maximum(SHARES.programs - members * 3 // 4, 1)), SHARES.fewest)
    surely = tl.cdiv(total, tl.maximum(SHARES.programs - members, 1))
    # two in one: there are no more parts than programs and requests
    fewer = tl.sum(tl.cdiv(tiles, equal) + (tl.cdiv(tiles, likely) << 16))
    at_once = tl.where(tl.sum(tl.cdiv(tiles, safely)) <= SHARES.programs, safely, surely)
    at_once = tl.where((fewer >> 16) <= SHARES.programs, likely, at_once)
    at_once = tl.where((fewer & 0xFFFF) <= SHARES.programs, equal, at_once)
    size = _size_of_parts(total, members, tl.max(tiles), at_once, SHARES)
    parts = tl.cdiv(tiles, tl.maximum(size, 1))
    return parts, tl.cumsum(parts, 0)


@triton.jit
def part_of_program(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, i, program, SHARES: tl.constexpr
):  # fmt: skip
    """Returns the `Part` of a program; the others are as in `parts_of_requests`."""
    parts, ends = parts_of_requests(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, i, SHARES
    )
    mine = (ends - parts <= program) & (program < ends)
    request = tl.max(tl.where(mine, i, -1))
    number = tl.sum(tl.where(mine, program - ends + parts, 0))
    count = tl.sum(tl.where(mine, parts, 0))
    return Part(tl.where(count > 0, request, num_reqs), number, count)
