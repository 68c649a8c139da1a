# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The rows that a program of the attention kernel computes, and the keys that they see.

A tile's rows are BLOCK_Q consecutive queries of one request, each with the ``heads`` query heads of a group that share
a KV head. Causality, windows, chunks and bidirectional ranges all reduce to one half-open interval of visible keys per
row, which always holds the row's own position.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from attnreg.kernels.triton.inside.uniform import uniform


class Tile(NamedTuple):
    """The sizes of what one program computes at once; constants of a kernel.

    block_m rows, of ``heads`` query heads each. block_n keys. block_k columns of queries and keys in one product.
    block_d and block_rest: the first columns of keys, and the columns after them; powers of 2, block_rest may be 0.
    block_dv: all columns of values, rounded up to a power of 2.
    """

    heads: int
    block_m: int
    block_n: int
    block_k: int
    block_d: int
    block_rest: int
    block_dv: int


class Mask(NamedTuple):
    """The keys that a query sees by their positions; constants of a kernel.

    left, right: how many keys before its own and after it; -1: all. chunk: how many positions a chunk has; a query sees
    no key of other chunks; 0: no chunks. ranges_in_window: a range lifts the other bounds, but not ``left``.
    """

    left: int
    right: int
    chunk: int = 0
    ranges_in_window: bool = False


class Rows(NamedTuple):
    """The rows of a tile, each field [BLOCK_M]: whether the row exists, its query token and head, and its keys.

    token counts from the request's first query, position and the keys [begin, end) from its first key.
    """

    exists: tl.tensor
    token: tl.tensor
    head: tl.tensor
    position: tl.tensor
    begin: tl.tensor
    end: tl.tensor


class Span(NamedTuple):
    """The keys [start, stop) that some row of a tile sees, and [whole_start, whole_stop), which all rows see."""

    start: tl.tensor
    stop: tl.tensor
    whole_start: tl.tensor
    whole_stop: tl.tensor


@triton.jit
def _find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q: tl.constexpr):
    """Returns the request of a tile, where request i owns the tiles from query_start_loc[i] // BLOCK_Q + i on."""
    LANES: tl.constexpr = 128
    req = -1
    for start in range(0, num_reqs, LANES):
        i = start + tl.arange(0, LANES)
        first_token = tl.load(query_start_loc_ptr + i, mask=i < num_reqs, other=0)  # [LANES]
        starts_before = (i < num_reqs) & (first_token // BLOCK_Q + i <= tile)
        req += tl.sum(starts_before.to(tl.int32))
    return req


@triton.jit
def request_of_row(query_start_loc_ptr, num_reqs, row):
    """Returns the request that owns a row of queries; for a row of padding, a request whose rows end before it."""
    LANES: tl.constexpr = 128
    req = -1
    for start in range(0, num_reqs, LANES):
        i = start + tl.arange(0, LANES)
        first_token = tl.load(query_start_loc_ptr + i, mask=i < num_reqs, other=0)  # [LANES]
        req += tl.sum(((i < num_reqs) & (first_token <= row)).to(tl.int32))
    return req


@triton.jit
def place_of_program(programs_at_once, PROGRAMS: tl.constexpr, ONE_TILE: tl.constexpr):
    """Returns this program's tile of the batch, and its number among the tile's PROGRAMS, each for other heads.

    programs_at_once programs of each tile run before the other programs of any tile. So the device's cache still holds
    the keys of their heads when the next tile needs them. ONE_TILE: no request has a second tile.
    """
    program = tl.program_id(0)
    if ONE_TILE:
        tile, head_tile = program // PROGRAMS, program % PROGRAMS
    else:
        tiles = tl.num_programs(0) // PROGRAMS
        in_group = program % (tiles * programs_at_once)
        head_tile = program // (tiles * programs_at_once) * programs_at_once + in_group % programs_at_once
        # a causal request's last tiles have the most keys, so they begin first
        tile = tiles - 1 - in_group // programs_at_once
    return tile, head_tile


@triton.jit
def find_tile(
    query_start_loc_ptr, num_reqs, tile, BLOCK_Q: tl.constexpr, ONE_TILE: tl.constexpr, GPU: tl.constexpr
):  # fmt: skip
    """Returns a tile's request, its first token and its query length, and the tile's number in the request.

    ONE_TILE: every request has one tile, in order. GPU: as in `uniform`.
    """
    if ONE_TILE:
        req = tile
        tile = 0
    else:
        req = uniform(_find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q), GPU)
    # int64 before any multiply: token * stride passes 2**31 in long prefills
    first_token = tl.load(query_start_loc_ptr + req).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + req + 1) - first_token).to(tl.int32)
    if not ONE_TILE:
        tile -= (first_token // BLOCK_Q).to(tl.int32) + req
    return req, first_token, query_len, tile


@triton.jit
def _visible_keys(position, kv_len, causal, MASK: tl.constexpr):
    """Returns the first key that a query at a position sees, and the end of its keys; both grow with the position.

    causal: whether the request is causal; None: all requests are as MASK says.
    """
    begin = position * 0
    end = position * 0 + kv_len
    if MASK.right >= 0:
        end = tl.minimum(end, position + (MASK.right + 1))
    if causal is not None:
        end = tl.where(causal, tl.minimum(end, position + 1), end)
    if MASK.left >= 0:
        begin = tl.maximum(begin, position - MASK.left)
    if MASK.chunk > 0:
        first = position // MASK.chunk * MASK.chunk
        begin = tl.maximum(begin, first)
        end = tl.minimum(end, first + MASK.chunk)
    return begin, end


@triton.jit
def rows_of_tile(
    tile, kv_head, head_tile, query_len, kv_len, causal,
    TILE: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Returns the rows of a tile and the span of their keys; head_tile: which heads of the group they have."""
    BLOCK_Q: tl.constexpr = TILE.block_m // TILE.heads
    offs_m = tl.arange(0, TILE.block_m)
    token = tile * BLOCK_Q + offs_m // TILE.heads
    head_in_group = head_tile * TILE.heads + offs_m % TILE.heads
    head = kv_head * GROUP + head_in_group
    exists = (offs_m < BLOCK_Q * TILE.heads) & (token < query_len) & (head_in_group < GROUP)
    position = kv_len - query_len + token
    begin, end = _visible_keys(position, kv_len, causal, MASK)
    first_position = kv_len - query_len + tile * BLOCK_Q
    last_position = kv_len - query_len + tl.minimum(tile * BLOCK_Q + BLOCK_Q, query_len) - 1
    start, whole_stop = _visible_keys(first_position, kv_len, causal, MASK)
    whole_start, stop = _visible_keys(last_position, kv_len, causal, MASK)
    return Rows(exists, token, head, position, begin, end), Span(start, stop, whole_start, whole_stop)


@triton.jit
def with_ranges(
    rows, span, req, ranges_ptr, num_ranges, stride_req, stride_range, kv_len, MASK: tl.constexpr, GPU: tl.constexpr
):  # fmt: skip
    """Returns the rows and their span with ranges: all tokens of a range [begin, end) of a request see each other.

    ranges_ptr: [num_reqs, num_ranges, 2] int32, with the strides of its first two dimensions. GPU: as in `uniform`.
    """
    row_begin, row_end = rows.begin, rows.end
    ranges_ptr += req.to(tl.int64) * stride_req
    for _ in range(num_ranges):
        begin, end = tl.maximum(tl.load(ranges_ptr), 0), tl.minimum(tl.load(ranges_ptr + 1), kv_len)
        ranges_ptr += stride_range
        inside = (rows.position >= begin) & (rows.position < end)
        if MASK.ranges_in_window and MASK.left >= 0:
            begin = tl.maximum(begin, rows.position - MASK.left)
        row_begin = tl.where(inside, tl.minimum(row_begin, begin), row_begin)
        row_end = tl.where(inside, tl.maximum(row_end, end), row_end)
    start = tl.minimum(span.start, uniform(tl.min(row_begin), GPU))
    stop = tl.maximum(span.stop, uniform(tl.max(row_end), GPU))
    rows = Rows(rows.exists, rows.token, rows.head, rows.position, row_begin, row_end)
    return rows, Span(start, stop, span.whole_start, span.whole_stop)


class Tree(NamedTuple):
    """The tree of a request's queries: pointers [BLOCK_M] to each row's mask, and how many keys are before them."""

    pointers: tl.tensor
    context: tl.tensor


@triton.jit
def tree_of_rows(tree_ptr, stride_tree, first_token, rows, span, context):
    """Returns the tree of the rows, and their span; tree_ptr: [tokens, queries of a request] uint8."""
    pointers = tree_ptr + (first_token + rows.token) * stride_tree
    # rows see different ones of the queries' own keys
    whole_stop = tl.minimum(span.whole_stop, context)
    return Tree(pointers, context), Span(span.start, span.stop, span.whole_start, whole_stop)


@triton.jit
def in_tree(tree, rows, offs_n, visible):
    """Returns whether the rows' tree shows the keys at offs_n; keys before the queries, and a row's own, it shows."""
    column = (offs_n - tree.context)[None, :]
    is_other = visible & rows.exists[:, None] & (column >= 0) & (column != rows.token[:, None])
    return tl.load(tree.pointers[:, None] + column, mask=is_other, other=1) != 0


@triton.jit
def program_span(span, min_split, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Returns the span that this program walks: all of it, or with SPLIT its share, in whole tiles of keys.

    min_split: the least keys of a share.
    """
    # aligned tiles need fewer look-ups in the block table; the best lie in one block. No tile begins in a block that no
    # row sees, because an engine may have freed it: DIVISOR is the largest power of 2 that divides BLOCK_SIZE
    DIVISOR: tl.constexpr = BLOCK_SIZE & -BLOCK_SIZE
    ALIGNMENT: tl.constexpr = (
        1 if BLOCK_SIZE == 0 else (BLOCK_N if BLOCK_SIZE % BLOCK_N == 0 else (DIVISOR if DIVISOR < 16 else 16))
    )
    start, stop = span.start // ALIGNMENT * ALIGNMENT, span.stop
    if SPLIT:
        share = tl.cdiv(tl.maximum(tl.cdiv(stop - start, tl.num_programs(1)), min_split), BLOCK_N) * BLOCK_N
        start += tl.program_id(1) * share
        stop = tl.minimum(start + share, stop)
    return Span(start, stop, span.whole_start, span.whole_stop)


@triton.jit
def span_of_part(span, kv_len, part, parts, BLOCK_N: tl.constexpr):
    """Returns the span of one of ``parts`` parts of a request's keys, in whole tiles; rows see all of these keys."""
    share = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), parts) * BLOCK_N
    return Span(part * share, tl.minimum((part + 1) * share, span.stop), span.whole_start, span.whole_stop)


@triton.jit
def whole_tiles(span, PEEL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns where the tiles whose keys all rows see begin and end; an empty range without PEEL."""
    first, last = span.start, span.start
    if PEEL:
        first += tl.cdiv(tl.maximum(span.whole_start - span.start, 0), BLOCK_N) * BLOCK_N
        last += tl.maximum(tl.minimum(span.whole_stop, span.stop) - span.start, 0) // BLOCK_N * BLOCK_N
    return first, last


@triton.jit
def phase_of_span(span, first_whole, last_whole, PHASE: tl.constexpr):
    """Returns the keys [first, last) of a phase.

    1: the tiles whose keys all rows see; 0: the tiles before these, if a mask hides first keys; 2: the tiles after.
    """
    if PHASE == 0:
        first, last = span.start, tl.minimum(first_whole, span.stop)
    elif PHASE == 1:
        first, last = first_whole, last_whole
    else:
        first, last = tl.maximum(first_whole, last_whole), span.stop
    return first, last
