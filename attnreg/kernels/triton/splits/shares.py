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
def _size_of_parts(total, members, longest, SHARES: tl.constexpr):
    """Returns the tiles of a part, of so many requests that have ``total`` together and up to ``longest`` each.

    In parts of s tiles the device takes begin + s where all run at once, and else about
    (total / s + members / 2) * begin / programs + total / programs + s / 2, for the last one begins when others end.
    """
    each = tl.cdiv(total, SHARES.programs)
    at_once = tl.cdiv(total, tl.maximum(SHARES.programs - members, 1))
    in_turn = tl.sqrt(total.to(tl.float32) * (2.0 * SHARES.begin / SHARES.programs)).to(tl.int32)
    in_turn = tl.maximum(in_turn, tl.cdiv(each, 2))
    begins = (total / in_turn + members * 0.5) * (SHARES.begin / SHARES.programs)
    fits = (members < SHARES.programs) & (SHARES.begin + at_once <= begins + total / SHARES.programs + in_turn * 0.5)
    size = tl.maximum(tl.where(fits, at_once, in_turn), SHARES.fewest)
    # programs that are somewhat fewer than run at once keep the memory as busy, and have nothing to merge
    return tl.where(longest * 2 <= each * 3, longest, size)


@triton.jit
def part_of_program(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, i, program, SHARES: tl.constexpr
):  # fmt: skip
    """Returns the `Part` of a program; those of a request follow each other.

    i: all requests at once, [SHARES.lanes]. Beside a loop over them, Triton 3.7 no longer pipelines the one over keys.
    Gluon's kernels, whose numbers have a layout, call it too.
    """
    tiles = _tiles(query_start_loc_ptr, seq_lens_ptr, i, num_reqs, min_query_len, max_query_len, SHARES)
    # two sums in one, in the halves of a number
    both = tl.sum(tiles.to(tl.int64) + ((tiles > 0).to(tl.int64) << 32))
    size = _size_of_parts(both.to(tl.int32), (both >> 32).to(tl.int32), tl.max(tiles), SHARES)
    parts = tl.cdiv(tiles, tl.maximum(size, 1))
    ends = tl.cumsum(parts, 0)
    # those of the last request that begins up to here
    begun = (ends - parts <= program) & (parts > 0)
    request = tl.max(tl.where(begun, i, -1))
    number = program - tl.sum(tl.where(i == request, ends - parts, 0))
    count = tl.sum(tl.where(i == request, parts, 0))
    return Part(tl.where(number < count, request, num_reqs), number, count)
