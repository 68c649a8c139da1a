# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""What the warps of the kernel in `kernel` share: constants, memory, and the facts of a tile."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnreg.kernels.hopper.memory import in_groups
from attnreg.kernels.hopper.releases import reinterpret
from attnreg.kernels.triton.splits.beside import Beside

# rows of a warpgroup
ROWS = gl.constexpr(64)
# how many tiles the producer may be ahead of the consumers
AHEAD = gl.constexpr(2)
# how many facts a tile has, those of `PromptTile`, a power of 2
FACTS = gl.constexpr(8)


class Places(NamedTuple):
    """Where keys, or values, are in the rows and columns of their descriptor; tensors.

    A block of the cache begins ``block`` rows after the one before, a head ``head`` rows and ``column`` columns.
    """

    block: gl.tensor
    head: gl.tensor
    column: gl.tensor


class Batch(NamedTuple):
    """The batch's tensors and numbers.

    taken: the numbers of `counters`. They count the programs that blocks of threads took after their first; with
    C.mixed, all prompts and all other requests that were taken. of_prompts: how many blocks of threads take prompts
    first. splits: of keys. slots: how many slots for parts a request has, 0 if parts are by row.
    """

    query_start_loc: gl.tensor
    key_start_loc: gl.tensor
    seq_lens: gl.tensor
    block_table: gl.tensor
    taken: gl.tensor
    num_reqs: gl.tensor
    stride_table: gl.tensor
    min_query_len: gl.tensor
    max_query_len: gl.tensor
    tiles: gl.tensor
    heads_at_once: gl.tensor
    of_prompts: gl.tensor
    splits: gl.tensor
    slots: gl.tensor


class Outputs(NamedTuple):
    """Where the consumers store their results, beside the descriptor; also the sinks and the KV heads' scales.

    partial, partial_lse: the parts of split keys, as in `triton.splits`.
    """

    output: gl.tensor
    lse: gl.tensor
    sinks: gl.tensor
    k_scale: gl.tensor
    v_scale: gl.tensor
    partial: gl.tensor
    partial_lse: gl.tensor
    stride_token: gl.tensor
    stride_head: gl.tensor
    stride_lse: gl.tensor
    stride_sink: gl.tensor
    stride_k_scale: gl.tensor
    stride_v_scale: gl.tensor
    splits: gl.tensor


class PromptTile(NamedTuple):
    """The facts of a tile, which the warp that finds tiles writes; scalars.

    blocks: of keys, 0 if no tile is left. row: the row of its first query in the batch. queries: of the request, from
    the first query on. position: of the first query among the request's ``keys`` keys. begin: of its first block of
    keys. head: its first head. part: where the first query's part of head 0 goes.
    """

    blocks: gl.tensor
    row: gl.tensor
    queries: gl.tensor
    position: gl.tensor
    keys: gl.tensor
    begin: gl.tensor
    head: gl.tensor
    part: gl.tensor


class Shared(NamedTuple):
    """The memory that producer and consumers share: tiles, and for each kind its barriers for full and empty.

    k_rest, v_rest: of the last parts, if they are narrower than the others.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_rest: gl.shared_memory_descriptor
    v_rest: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    facts: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    facts_full: gl.shared_memory_descriptor
    facts_empty: gl.shared_memory_descriptor


class Code(NamedTuple):
    """The constants of the kernel.

    group: query heads of a KV head. pack: how many of them a tile has, a power of 2. size, size_v: of a head's keys and
    values. part, part_v: how many columns lie together, a power of 2; the last part may have fewer. block_n: keys of a
    block. box: keys that one copy loads. block_size: of the cache, 0 without one. stages: blocks of keys under way.
    q_stages: tiles whose queries are loaded or under way. output_in_query: the output reuses the queries' memory.
    groups: warpgroups that compute a tile. registers, loading: of a thread of these, and of the loading warp. programs:
    blocks of threads that a multiprocessor holds. held: parts of the queries that stay in registers. lazy: a row's
    maximum ignores small increases. take_turns: the warpgroups issue products in turns. mixed: requests of fewer
    queries are computed too, and a block of threads takes its first tile from the counters as well. beside: given if
    the device decides whether they are. split: several programs share a tile's keys. k_scaled, v_scaled: keys, or
    values, have a scale for each KV head. in_groups: keys or values that are one part (heads of 128 and 256) lie in
    groups of 8 rows, so that one copy loads all columns of a box.
    """

    kv_heads: int
    group: int
    pack: int
    size: int
    size_v: int
    part: int
    part_v: int
    block_n: int
    box: int
    block_size: int
    stages: int
    left: int
    right: int
    softcap: bool
    sinks: bool
    lse: bool
    q_stages: int
    output_in_query: bool
    groups: int
    registers: int
    loading: int
    programs: int
    held: int
    lazy: bool
    take_turns: bool
    mixed: bool
    beside: Beside | None
    split: bool
    k_scaled: bool
    v_scaled: bool
    in_groups: bool


@gluon.constexpr_function
def parts_of(size, part):
    """How many parts a head has."""
    return -(-size // part)


@gluon.constexpr_function
def is_in_groups(in_groups, size, part):
    """Whether keys, or values, lie in groups of 8 rows. They do not if they have several parts: from Triton 3.8 on,
    products cannot read some columns of such groups."""
    return in_groups and size == part


@gluon.jit
def part_of(
    memory, rest, stage, PLACE: gl.constexpr, SIZE: gl.constexpr, PART: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Returns part PLACE of a block of keys, or values, [keys, columns]; rest: the memory of a narrower last part."""
    WHOLE: gl.constexpr = SIZE // PART
    if is_in_groups(C.in_groups, SIZE, PART):
        found = reinterpret(memory.index(stage), memory.dtype, [C.block_n, SIZE], in_groups(C.block_n, SIZE))
    elif PLACE < WHOLE:
        found = memory.index(stage * WHOLE + PLACE)
    else:
        found = rest.index(stage)
    return found


@gluon.constexpr_function
def columns_of(size, part, i):
    """How many columns part i of a head has."""
    return min(part, size - i * part)


@gluon.jit
def tell(shared, slot, tile):
    """Writes the facts of a tile for the other warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = gl.arange(0, FACTS, LAYOUT)
    x = gl.where(i == 0, tile.blocks, 0) + gl.where(i == 1, tile.row, 0) + gl.where(i == 2, tile.queries, 0)
    x += gl.where(i == 3, tile.position, 0) + gl.where(i == 4, tile.keys, 0) + gl.where(i == 5, tile.begin, 0)
    x += gl.where(i == 6, tile.head, 0) + gl.where(i == 7, tile.part, 0)
    shared.facts.index(slot).store(x)


@gluon.jit
def _fact(x, i, N: gl.constexpr):
    return gl.sum(gl.where(i == N, x, 0), 0)


@gluon.jit
def next_tile(shared, taken, WARPS: gl.constexpr):
    """Waits for the facts of the next tile and returns them, to WARPS warps. taken: how many tiles came before."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([FACTS], [32], [WARPS], [0])
    slot = taken % AHEAD
    mbarrier.wait(shared.facts_full.index(slot), (taken // AHEAD) & 1)
    x = shared.facts.index(slot).load(LAYOUT)
    i = gl.arange(0, FACTS, LAYOUT)
    tile = PromptTile(_fact(x, i, 0), _fact(x, i, 1), _fact(x, i, 2), _fact(x, i, 3), _fact(x, i, 4), _fact(x, i, 5),
                _fact(x, i, 6), _fact(x, i, 7))  # fmt: skip
    mbarrier.arrive(shared.facts_empty.index(slot))
    return tile


@gluon.constexpr_function
def _turn_asm(barrier, wait):
    return f"bar.{'sync' if wait else 'arrive'} {barrier}, 256; mov.b32 $0, $1;"


@gluon.jit
def _turn(BARRIER: gl.constexpr, WAIT: gl.constexpr):
    """Waits at a barrier of two warpgroups, or only arrives there. Gluon's own barriers cannot be used for this."""
    t = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    ASM: gl.constexpr = _turn_asm(BARRIER, WAIT)
    gl.inline_asm_elementwise(ASM, "=r,r", [t], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(W: gl.constexpr, C: gl.constexpr):
    """Waits until it is this warpgroup's turn to issue products."""
    if C.take_turns:
        _turn(8 + W, True)


@gluon.jit
def give_turn(W: gl.constexpr, C: gl.constexpr):
    """Lets the next warpgroup issue its products."""
    if C.take_turns:
        _turn(8 + (W + 1) % C.groups, False)
