# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index, assignment"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The warp of the kernel in `kernel` that finds the tiles, and makes the copy engine load what they need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnreg.kernels.hopper.memory import uniform
from attnreg.kernels.hopper.prompts.shared import AHEAD, ROWS, PromptTile, is_in_groups, part_of, parts_of, tell
from attnreg.kernels.hopper.releases import copy_box
from attnreg.kernels.triton.splits.beside import is_worth_here, work_of


@gluon.jit
def _find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q: gl.constexpr):
    """Returns the request of a tile, where request i owns the tiles from query_start_loc[i] // BLOCK_Q + i on."""
    LANES: gl.constexpr = 128
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    req = -1
    for start in range(0, num_reqs, LANES):
        i = start + gl.arange(0, LANES, LAYOUT)
        first_token = gl.load(query_start_loc_ptr + i, mask=i < num_reqs, other=0)
        starts_before = (i < num_reqs) & (first_token // BLOCK_Q + i <= tile)
        req += gl.sum(starts_before.to(gl.int32), 0)
    return req


@gluon.jit
def _few_are_computed(batch, C: gl.constexpr):
    """Returns whether requests of few queries are computed beside prompts, and not by a launch of their own."""
    LANES: gl.constexpr = 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # Triton 3.6 passes no tuple in a tuple to a function
    BESIDE: gl.constexpr = C.beside
    few = gl.to_tensor(0).to(gl.int64)
    many = gl.to_tensor(0).to(gl.int64)
    longest = gl.to_tensor(0)
    for start in range(0, batch.num_reqs, LANES):
        i = start + gl.arange(0, LANES, LAYOUT)
        some = work_of(batch.query_start_loc, batch.seq_lens, i, batch.num_reqs, batch.min_query_len - 1, BESIDE)
        few += some[0]
        many += some[1]
        longest = gl.maximum(longest, some[2])
    return is_worth_here(few, many, longest, BESIDE)


@gluon.jit
def _take_number(taken_ptr, LAST: gl.constexpr):
    """Adds one to a counter, and returns what it was. LAST: only after all earlier work of this warp."""
    SEM: gl.constexpr = "acq_rel" if LAST else "relaxed"
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    before = gl.atomic_add(taken_ptr + lane * 0, lane * 0 + 1, mask=lane == 0, sem=SEM)
    return gl.sum(gl.where(lane == 0, before, 0), 0)


@gluon.jit
def _leave_zeros(taken_ptr):
    """Sets the counters to 0 again, in the last block of threads to end: no block takes a number any more."""
    if _take_number(taken_ptr + 2, True) == gl.num_programs(0) - 1:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        for x in gl.static_range(3):
            gl.store(taken_ptr + x + lane * 0, 0, mask=lane == 0)


@gluon.jit
def _pages(table_ptr, key, last_page, C: gl.constexpr):
    """Returns the cache block of each box of the keys from ``key`` on; after the last block, that block again."""
    pages = ()
    for x in gl.static_range(C.block_n // C.box):
        pages = pages + (gl.load(table_ptr + gl.minimum((key + x * C.box) // C.block_size, last_page)),)  # noqa: RUF005
    return pages


@gluon.jit
def _load_block(
    desc, rest_desc, memory, rest, stage, full, empty, phase, key, pages, first_row, kv_head, places,
    SIZE: gl.constexpr, PART: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Issues the load of the keys, or values, of a block, once its memory is free."""
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, C.block_n * SIZE * 2)
    row = first_row + kv_head * places.head
    for x in gl.static_range(C.block_n // C.box):
        if C.block_size > 0:
            at = row + pages[x] * places.block + (key + x * C.box) % C.block_size
        else:
            at = row + key + x * C.box
        if is_in_groups(C.in_groups, SIZE, PART):
            buffer = memory.index(stage).slice(x * (C.box // 8), C.box // 8, 0)
            copy_box(desc, [at // 8, kv_head * places.column // 64, 0, 0], full, buffer)
        else:
            for i in gl.static_range(parts_of(SIZE, PART)):
                buffer = part_of(memory, rest, stage, i, SIZE, PART, C).slice(x * C.box, C.box, 0)
                column = kv_head * places.column + i * PART
                if i < SIZE // PART:
                    copy_box(desc, [at, column], full, buffer)
                else:
                    copy_box(rest_desc, [at, column], full, buffer)


@gluon.jit
def _load_tile(
    q_desc, k_desc, v_desc, k_rest_desc, v_rest_desc, shared, batch, k_places, v_places, req, first_token, query_len,
    first, head_tile, split, told, loaded, C: gl.constexpr,
):  # fmt: skip
    """Writes the facts of the tile from a request's query ``first`` on, and issues the loads of its queries and keys.

    split: which split of its keys. told, loaded: how many tiles and blocks of keys came before. Returns how many blocks
    there are after it.
    """
    BLOCK_Q: gl.constexpr = C.groups * ROWS // C.pack
    HEAD_TILES: gl.constexpr = C.group // C.pack
    PARTS: gl.constexpr = parts_of(C.size, C.part)
    kv_len = gl.load(batch.seq_lens + req)
    kv_head = head_tile // HEAD_TILES
    head = kv_head * C.group + head_tile % HEAD_TILES * C.pack
    position = kv_len - query_len + first
    begin = 0
    if C.left >= 0:
        begin = gl.maximum(position - C.left, 0)
        if C.block_size > 0:
            begin = begin // C.box * C.box
    end = kv_len
    if C.right >= 0:
        end = gl.minimum(kv_len, position + gl.minimum(BLOCK_Q, query_len - first) + C.right)
    # a row without keys gets one block, which is hidden
    blocks = gl.maximum((end - begin + C.block_n - 1) // C.block_n, 1)
    part = 0
    if C.split:
        share = (blocks + batch.splits - 1) // batch.splits
        begin += split * share * C.block_n
        # a share without keys gets one block, which is hidden
        blocks = gl.maximum(gl.minimum(share, blocks - split * share), 1)
        row = gl.where(batch.slots > 0, req * batch.slots, first_token) + first
        part = row * (C.kv_heads * C.group) * batch.splits + split
    slot = told % AHEAD
    mbarrier.wait(shared.facts_empty.index(slot), ((told // AHEAD) & 1) ^ 1)
    tell(shared, slot, PromptTile(blocks, first_token + first, query_len - first, position, kv_len, begin, head, part))
    mbarrier.arrive(shared.facts_full.index(slot))
    GROUPS: gl.constexpr = C.groups
    for w in gl.static_range(GROUPS):
        at = told % C.q_stages * C.groups + w
        mbarrier.wait(shared.q_empty.index(at), ((told // C.q_stages) & 1) ^ 1)
        mbarrier.expect(shared.q_full.index(at), ROWS * C.part * PARTS * 2)
        for x in gl.static_range(PARTS):
            copy_box(
                q_desc, [first_token + first + w * (ROWS // C.pack), head, x * C.part],
                shared.q_full.index(at), shared.q.index(at * PARTS + x),
            )  # fmt: skip
    return _load_blocks(k_desc, v_desc, k_rest_desc, v_rest_desc, shared, batch, k_places, v_places, req, kv_head,
                        kv_len, begin, blocks, loaded, C)  # fmt: skip


@gluon.jit
def _load_blocks(
    k_desc, v_desc, k_rest_desc, v_rest_desc, shared, batch, k_places, v_places, req, kv_head, kv_len, begin, blocks,
    loaded, C: gl.constexpr,
):  # fmt: skip
    """Issues the loads of a tile's blocks of keys and values, from the last block on; returns the blocks so far."""
    first_row = 0
    table_ptr = batch.block_table
    last_page = 0
    pages = ()
    if C.block_size > 0:
        table_ptr += req.to(gl.int64) * batch.stride_table
        last_page = gl.maximum(kv_len - 1, 0) // C.block_size
        pages = _pages(table_ptr, begin + (blocks - 1) * C.block_n, last_page, C)
    else:
        first_row = gl.load(batch.key_start_loc + req)
    for i in range(blocks):
        key = begin + (blocks - 1 - i) * C.block_n
        stage = loaded % C.stages
        phase = (loaded // C.stages) & 1
        _load_block(k_desc, k_rest_desc, shared.k, shared.k_rest, stage, shared.k_full.index(stage),
                    shared.k_empty.index(stage), phase, key, pages, first_row, kv_head, k_places, C.size, C.part,
                    C)  # fmt: skip
        _load_block(v_desc, v_rest_desc, shared.v, shared.v_rest, stage, shared.v_full.index(stage),
                    shared.v_empty.index(stage), phase, key, pages, first_row, kv_head, v_places, C.size_v,
                    C.part_v, C)  # fmt: skip
        if C.block_size > 0:
            # loads the next block's page ids before its memory is free
            pages = _pages(table_ptr, gl.maximum(key - C.block_n, 0), last_page, C)
        loaded += 1
    return loaded


@gluon.jit
def produce(q_desc, k_desc, v_desc, k_rest_desc, v_rest_desc, shared, batch, k_places, v_places, C: gl.constexpr):
    """Finds tiles, writes their facts for the other warps, and issues their loads.

    With C.mixed there are two lists of programs: the tiles of prompts, and the requests of fewer queries, each of one
    tile. The first blocks of threads take prompts, the others requests; when a list is empty, they go on with the other
    list. So loading the keys of few queries overlaps with computing prompts. With C.beside the latter may be empty.
    """
    BLOCK_Q: gl.constexpr = C.groups * ROWS // C.pack
    PROGRAMS: gl.constexpr = C.kv_heads * (C.group // C.pack)
    told = 0
    loaded = 0
    # few: whether this block takes from the list of requests of few queries; lists: how many lists are left for it
    few = 0
    lists = 1
    requests = batch.num_reqs
    program = gl.program_id(0)
    count = batch.tiles * PROGRAMS
    if C.split:
        count *= batch.splits
    if C.mixed:
        few = (gl.program_id(0) >= batch.of_prompts).to(gl.int32)
        lists = 2
        if C.beside is not None:
            requests = uniform(gl.where(_few_are_computed(batch, C), requests, 0))
        program = _take_number(batch.taken + few, False)
        count = gl.where(few != 0, requests * PROGRAMS, count)
    while lists > 0:
        if program < count:
            split = 0
            place = program
            if C.split:
                split = program % batch.splits
                place = program // batch.splits
            # tiles of heads_at_once heads run before the next heads' tiles, so that their keys stay in the L2 cache
            in_group = place % (batch.tiles * batch.heads_at_once)
            head_tile = place // (batch.tiles * batch.heads_at_once) * batch.heads_at_once
            head_tile += in_group % batch.heads_at_once
            # a causal request's last tiles have the most keys, so they begin first
            tile = batch.tiles - 1 - in_group // batch.heads_at_once
            req = _find_request(batch.query_start_loc, batch.num_reqs, tile, BLOCK_Q)
            least = batch.min_query_len
            most = batch.max_query_len
            if C.mixed:  # noqa: SIM102 (the compiler decides the first, the device the second)
                if few != 0:
                    req = batch.num_reqs - 1 - program // PROGRAMS
                    head_tile = program % PROGRAMS
                    least = 1
                    most = batch.min_query_len - 1
            first_token = gl.load(batch.query_start_loc + req)
            query_len = gl.load(batch.query_start_loc + req + 1) - first_token
            first = (tile - (first_token // BLOCK_Q + req)) * BLOCK_Q
            if C.mixed:
                first = gl.where(few != 0, 0, first)
            if (first < query_len) & (query_len >= least) & (query_len <= most):
                loaded = _load_tile(
                    q_desc, k_desc, v_desc, k_rest_desc, v_rest_desc, shared, batch, k_places, v_places, req,
                    first_token, query_len, first, head_tile, split, told, loaded, C,
                )  # fmt: skip
                told += 1
        else:
            lists -= 1
            few = 1 - few
            count = gl.where(few != 0, requests, batch.tiles) * PROGRAMS
        if C.mixed:
            program = _take_number(batch.taken + few, False)
        else:
            program = gl.num_programs(0) + _take_number(batch.taken, False)
    slot = told % AHEAD
    mbarrier.wait(shared.facts_empty.index(slot), ((told // AHEAD) & 1) ^ 1)
    tell(shared, slot, PromptTile(0, 0, 0, 0, 0, 0, 0, 0))
    mbarrier.arrive(shared.facts_full.index(slot))
    _leave_zeros(batch.taken)
