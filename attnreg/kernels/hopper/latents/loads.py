# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, assignment"
# ruff: noqa: N803, N806, RUF005 (constexprs are written in capitals, and Gluon unpacks no tuples)
"""Loads the tiles of keys for the kernel in `kernel`: a warp by the copy engine, or a warpgroup row by row.

The copy engine reads pages of 16 rows or more, of the queries' type. The warpgroup reads any rows: 8-bit latents, which
it converts in its registers, and single tokens that an indexer chose.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnreg.kernels.hopper.latents.outputs import HALF, SWIZZLED
from attnreg.kernels.hopper.memory import in_groups
from attnreg.kernels.hopper.releases import copy_box, copy_rows, reinterpret

KEYS, ROPE = (gl.constexpr(n) for n in (64, 64))
# a half tile as its copies write it, [boxes, groups of 8 rows, parts of 64 columns, rows, columns], with one copy for
# each box. With a copy for each 64 columns, a tile over pages of 16 takes 36 copies, and up to 19 % more time (H200)
BOXES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5))
IN_GROUPS = gl.constexpr(in_groups(KEYS.value, HALF.value))
PARTS = gl.constexpr(HALF.value // 64)
# each thread loads 16 bytes, as words of four 8-bit floats; what 8 threads store at once lies in different banks
CONVERTERS = gl.constexpr(4)
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [CONVERTERS.value, 1], [1, 0]))
LINES = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [CONVERTERS.value, 1], [1, 0]))
# each thread copies 16 bytes, eight 16-bit numbers: in the rows of `WORDS`; and for tiles that are only copied
COPIED_BESIDE = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [CONVERTERS.value, 1], [1, 0]))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def half_of(tiles, i):
    """Returns half i of the tiles, as products read it: [64, 256]."""
    return reinterpret(tiles.index(i), tiles.dtype, [KEYS, HALF], IN_GROUPS)


@gluon.jit
def _part_of(tiles, i, PART: gl.constexpr):
    """Returns 64 columns of half i of the tiles, [64, 64]."""
    return half_of(tiles, i).slice(64 * PART, 64, 1)


@gluon.jit
def rotary_of(tiles, i):
    """Returns the rotary part of tile i, as products read it: [64, 64]."""
    return reinterpret(tiles.index(i), tiles.dtype, [KEYS, ROPE], SWIZZLED)


@gluon.jit
def _load_pages(block_table_ptr, n, last_block, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr):
    """Returns the cache block of each box of the tile of keys from n on; after the last block, that block again."""
    blocks = ()
    for x in gl.static_range(KEYS // BOX):
        blocks = blocks + (gl.load(block_table_ptr + gl.minimum((n + x * BOX) // BLOCK_SIZE, last_block)),)
    return blocks


@gluon.jit
def _fetch(
    wide_desc, narrow_desc, left, right, rope, left_full, left_empty, right_full, right_empty,
    block_table_ptr, start, tiles, last_block, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Loads the tiles of keys from `start` on by the copy engine, the last tile first."""
    if tiles > 0:
        first = start + (tiles - 1) * KEYS
        pages = _load_pages(block_table_ptr, first, last_block, BLOCK_SIZE, BOX)
        for i in range(tiles):
            n = first - i * KEYS
            now = pages
            stage, free = i & 1, ((i >> 1) & 1) ^ 1
            mbarrier.wait(left_empty.index(stage), free)
            mbarrier.expect(left_full.index(stage), KEYS * HALF * 2)
            for x in gl.static_range(KEYS // BOX):
                group = (n + x * BOX) % BLOCK_SIZE // 8
                copy_box(wide_desc, [now[x], group, 0, 0, 0], left_full.index(stage), left.index(stage).slice(x, 1, 0))
            # loads the next tile's block ids before its memory is free
            pages = _load_pages(block_table_ptr, gl.maximum(n - KEYS, start), last_block, BLOCK_SIZE, BOX)
            mbarrier.wait(right_empty.index(stage), free)
            mbarrier.expect(right_full.index(stage), KEYS * (HALF + ROPE) * 2)
            for x in gl.static_range(KEYS // BOX):
                group = (n + x * BOX) % BLOCK_SIZE // 8
                copy_box(
                    wide_desc, [now[x], group, 4, 0, 0], right_full.index(stage), right.index(stage).slice(x, 1, 0)
                )
                copy_box(
                    narrow_desc, [now[x], group, 8, 0, 0], right_full.index(stage), rope.index(stage).slice(x, 1, 0)
                )


@gluon.jit
def _key(n, stop, LAYOUT: gl.constexpr):
    """Returns the positions of the keys from n on, [64]; from `stop` on, the position of the last key."""
    return gl.minimum(n + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT)), stop - 1)


@gluon.jit
def _blocks(block_table_ptr, n, stop, CACHE: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the cache blocks of the keys from n on, [64] int32."""
    return gl.load(block_table_ptr + _key(n, stop, LAYOUT) // CACHE.block_size)


@gluon.jit
def _rows(blocks, n, stop, CACHE: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns where the keys from n on begin in the cache, [64] int64; blocks: the cache blocks that hold them."""
    token = _key(n, stop, LAYOUT) % CACHE.block_size
    return blocks.to(gl.int64) * CACHE.stride_block + token.to(gl.int64) * CACHE.stride_token


@gluon.jit
def _load(ptr, rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Returns COUNT words of the keys, from word FIRST on, [64, COUNT]. A byte would take a whole register."""
    words = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, WORDS))
    # rows begin at multiples of 16 bytes; the compiler uses this hint only on the sum
    return gl.load(gl.multiple_of(ptr + rows[:, None] + words[None, :], [16, 16]))


@gluon.jit
def _ask_for(ptr, rows):
    """Prefetches rows of 512 bytes or more into the L2 cache, for later loads."""
    lines = 32 * gl.arange(0, 4, gl.SliceLayout(0, LINES))
    pointers = ptr + rows[:, None] + lines[None, :]
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load_half(ptr, rows, FIRST: gl.constexpr):
    """Returns the words of half a latent from column FIRST on, as a tensor for each 64 columns."""
    parts = ()
    for x in gl.static_range(PARTS):
        parts = parts + (_load(ptr, rows, FIRST // 4 + 16 * x, 16),)
    return parts


@gluon.jit
def _scales(tile_scale_ptr, rows, FIRST: gl.constexpr):
    """Returns the scales of the two tiles of 128 columns of half a latent, each [64]; without scales, unused values."""
    if tile_scale_ptr is None:
        found = (rows, rows)
    else:
        found = (gl.load(tile_scale_ptr + rows + FIRST // 128), gl.load(tile_scale_ptr + rows + FIRST // 128 + 1))
    return found


@gluon.constexpr_function
def _conversion(fp8, dtype, scaled):
    """The assembly that converts a word ($4) to four 16-bit numbers, multiplied by their scale ($5) if there is one."""
    lines = ["mov.b32 {p, q}, $4;"]
    for pair, source, first in (("x", "p", 0), ("y", "q", 2)):
        if fp8 == "e5m2":
            # an e5m2 float is the upper half of a float16
            lines.append(f"prmt.b32 {pair}, $4, 0, {0x1404 if first == 0 else 0x3424:#x};")
        else:
            lines.append(f"cvt.rn.f16x2.e4m3x2 {pair}, {source};")
        if dtype == "bf16":
            lines += [f"mov.b32 {{r, s}}, {pair};", "cvt.f32.f16 a, r;", "cvt.f32.f16 b, s;"]
            lines += ["mul.f32 a, a, $5;", "mul.f32 b, b, $5;"] if scaled else []
            lines.append(f"cvt.rn.bf16x2.f32 {pair}, b, a;")
        lines.append(f"mov.b32 {{${first}, ${first + 1}}}, {pair};")
    return f"{{ .reg .b32 x, y; .reg .b16 p, q, r, s; .reg .f32 a, b; {' '.join(lines)} }}"


@gluon.jit
def _converted(words, scale, SCALED: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr):
    """Returns the 8-bit floats of words as 16-bit floats [64, 4 words]: exactly, apart from a product with scales."""
    ASM: gl.constexpr = _conversion(FP8, "bf16" if gl.bfloat16 == DTYPE else "fp16", SCALED)
    if SCALED:
        four = gl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,r,f", [words, scale[:, None]], dtype=(gl.int16, gl.int16, gl.int16, gl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        four = gl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,r", [words], dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=1
        )
    pairs = gl.join(gl.join(four[0], four[1]), gl.join(four[2], four[3]))
    return pairs.permute([0, 1, 3, 2]).reshape([KEYS, 4 * words.shape[1]]).to(DTYPE, bitcast=True)


@gluon.jit
def _store_half(tiles, i, words, scales, SCALED: gl.constexpr, FP8: gl.constexpr):
    """Stores half a latent as 16-bit floats, 64 columns at a time: converted numbers take twice the registers."""
    for x in gl.static_range(PARTS):
        _part_of(tiles, i, x).store(_converted(words[x], scales[x // 2], SCALED, FP8, tiles.dtype))


@gluon.jit
def _copy(ptr, rows, shared, FIRST: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Copies COLUMNS columns of the keys, from FIRST on, to shared memory [64, COLUMNS]."""
    columns = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    copy_rows(shared, gl.multiple_of(ptr + rows[:, None] + columns[None, :], [16, 16]))


@gluon.jit
def _convert(
    latent_ptr, tile_scale_ptr, left, right, rope, left_full, left_empty, right_full, right_empty, block_table_ptr,
    start, stop, tiles, CACHE: gl.constexpr,
):  # fmt: skip
    """Loads the tiles of keys from `start` on, the last tile first, and stores them as 16-bit floats.

    The next loads run while the loaded words are converted. With scales for tiles, rotary parts are 16-bit already.
    """
    SCALED: gl.constexpr = tile_scale_ptr is not None
    FP8: gl.constexpr = CACHE.fp8
    if tiles > 0:
        n = start + (tiles - 1) * KEYS
        rows = _rows(_blocks(block_table_ptr, n, stop, CACHE, WORDS), n, stop, CACHE, WORDS)
        words, scales = _load_half(latent_ptr, rows, 0), _scales(tile_scale_ptr, rows, 0)
        for i in range(tiles):
            stage, free = i & 1, ((i >> 1) & 1) ^ 1
            right_words, right_scales = _load_half(latent_ptr, rows, HALF), _scales(tile_scale_ptr, rows, HALF)
            # loads the next tile's block ids before its latents are prefetched
            n = gl.maximum(n - KEYS, start)
            blocks = _blocks(block_table_ptr, n, stop, CACHE, WORDS)
            far = gl.maximum(n - KEYS, start)
            _ask_for(latent_ptr, _rows(_blocks(block_table_ptr, far, stop, CACHE, LINES), far, stop, CACHE, LINES))
            mbarrier.wait(left_empty.index(stage), free)
            if SCALED:
                mbarrier.wait(right_empty.index(stage), free)
                pointer = latent_ptr.to(gl.pointer_type(rope.dtype), bitcast=True)
                twice = gl.convert_layout(rows * 2, gl.SliceLayout(1, COPIED_BESIDE))
                _copy(pointer, twice, rotary_of(rope, stage), HALF + 8, ROPE, COPIED_BESIDE)
                async_copy.commit_group()
            _store_half(left, stage, words, scales, SCALED, FP8)
            fence_async_shared()
            mbarrier.arrive(left_full.index(stage))
            if not SCALED:
                rotary = _load(latent_ptr, rows, HALF // 2, ROPE // 4)
            rows = _rows(blocks, n, stop, CACHE, WORDS)
            words, scales = _load_half(latent_ptr, rows, 0), _scales(tile_scale_ptr, rows, 0)
            if not SCALED:
                mbarrier.wait(right_empty.index(stage), free)
            _store_half(right, stage, right_words, right_scales, SCALED, FP8)
            if SCALED:
                async_copy.wait_group(0)
            else:
                rotary_of(rope, stage).store(_converted(rotary, rows, False, FP8, rope.dtype))
            fence_async_shared()
            mbarrier.arrive(right_full.index(stage))


@gluon.jit
def _gather(
    latent_ptr, left, right, rope, left_full, left_empty, right_full, right_empty, block_table_ptr, start, stop, tiles,
    CACHE: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of keys from `start` on row by row, the last tile first."""
    if tiles > 0:
        n = start + (tiles - 1) * KEYS
        rows = _rows(_blocks(block_table_ptr, n, stop, CACHE, COPIED), n, stop, CACHE, COPIED)
        for i in range(tiles):
            stage, free = i & 1, ((i >> 1) & 1) ^ 1
            mbarrier.wait(left_empty.index(stage), free)
            _copy(latent_ptr, rows, half_of(left, stage), 0, HALF, COPIED)
            async_copy.commit_group()
            mbarrier.wait(right_empty.index(stage), free)
            _copy(latent_ptr, rows, half_of(right, stage), HALF, HALF, COPIED)
            _copy(latent_ptr, rows, rotary_of(rope, stage), 2 * HALF, ROPE, COPIED)
            async_copy.commit_group()
            n = gl.maximum(n - KEYS, start)
            rows = _rows(_blocks(block_table_ptr, n, stop, CACHE, COPIED), n, stop, CACHE, COPIED)
            async_copy.wait_group(1)
            fence_async_shared()
            mbarrier.arrive(left_full.index(stage))
            # not in the next iteration: the warpgroup that frees its left half waits for this right half first
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(right_full.index(stage))


@gluon.jit
def bring(
    wide_desc, narrow_desc, latent_ptr, tile_scale_ptr, left, right, rope, left_full, left_empty, right_full,
    right_empty, block_table_ptr, start, stop, tiles, last_block, CACHE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Loads the tiles of keys from `start` on, the last tile first, in the way that the kernel's arguments select."""
    if wide_desc is not None:
        _fetch(wide_desc, narrow_desc, left, right, rope, left_full, left_empty, right_full, right_empty,
               block_table_ptr, start, tiles, last_block, CACHE.block_size, BOX)  # fmt: skip
    elif CACHE.fp8 != "":
        _convert(latent_ptr, tile_scale_ptr, left, right, rope, left_full, left_empty, right_full, right_empty,
                 block_table_ptr, start, stop, tiles, CACHE)  # fmt: skip
    else:
        _gather(latent_ptr, left, right, rope, left_full, left_empty, right_full, right_empty, block_table_ptr, start,
                stop, tiles, CACHE)  # fmt: skip
