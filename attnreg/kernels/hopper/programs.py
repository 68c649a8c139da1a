# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""The keys that a program of `decode` or `packed.decode` walks, their request, and where it stores its part."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnreg.kernels.triton.splits import shares

WARPS = gl.constexpr(4)
# a page here: this many consecutive keys, which lie in one cache block and are loaded by one warp at once
PAGE = gl.constexpr(16)


class Program(NamedTuple):
    """What a program computes: the steps [first, last) of keys, from a page of a request on, as one of ``parts`` parts.

    query_len: 0 if the program computes nothing. slot: where the parts of the first query begin. apart: how many parts
    there is room for in each row and head. number: which of these is the program's.
    """

    req: gl.tensor
    kv_head: gl.tensor
    first_token: gl.tensor
    query_len: gl.tensor
    kv_len: gl.tensor
    page: gl.tensor
    first: gl.tensor
    last: gl.tensor
    parts: gl.tensor
    slot: gl.tensor
    apart: gl.tensor
    number: gl.tensor


@gluon.constexpr_function
def _lanes(requests):
    """The layout of a vector of requests. Each warp has up to 256 of them all, so that no warp waits for another."""
    return gl.BlockedLayout([requests // 32 if requests <= 256 else requests // (32 * WARPS.value)], [32], [WARPS], [0])


@gluon.jit
def part_of_program(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, program, SHARES: gl.constexpr
):  # fmt: skip
    """Returns the `Part` of a program of four warps, for programs that share keys out."""
    i = gl.arange(0, SHARES.lanes, _lanes(SHARES.lanes))
    return shares.part_of_program(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, i, program, SHARES
    )


@gluon.jit
def program_of(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, slots, min_split,
    STEP: gl.constexpr, C: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Returns the `Program` of this block of threads, with steps of STEP keys."""
    req = gl.program_id(0) // C.kv_heads
    kv_head = gl.program_id(0) % C.kv_heads
    part = gl.program_id(1)
    parts = gl.num_programs(1)
    number = part
    apart = parts
    exists = req < num_reqs
    if SHARES is not None:
        number = req
        apart = gl.num_programs(0) // C.kv_heads
        req, part, parts = part_of_program(
            query_start_loc_ptr, seq_lens_ptr, num_reqs, min_query_len, max_query_len, number, SHARES
        )
        exists = req < num_reqs
        req = gl.minimum(req, num_reqs - 1)
    first_token = gl.load(query_start_loc_ptr + req)
    query_len = gl.load(query_start_loc_ptr + req + 1) - first_token
    kv_len = gl.load(seq_lens_ptr + req)
    query_len = gl.where(exists & (query_len >= min_query_len) & (query_len <= max_query_len), query_len, 0)
    page = gl.maximum(kv_len - query_len - C.left, 0) // PAGE if C.left >= 0 else 0
    steps = (kv_len - page * PAGE + STEP - 1) // STEP
    share = (steps + parts - 1) // parts
    slot = gl.to_tensor(0).to(gl.int64)
    if SHARES is None:
        slot = gl.where(slots > 0, req.to(gl.int64) * slots, first_token.to(gl.int64))
        share = gl.maximum(share, (min_split + STEP - 1) // STEP)
    first = part * share
    return Program(
        req, kv_head, first_token, query_len, kv_len, gl.to_tensor(page), first, gl.minimum(first + share, steps),
        parts, slot, apart, number,
    )  # fmt: skip
