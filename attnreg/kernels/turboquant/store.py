# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return, assignment"
# ruff: noqa: N803, N806, RUF005 (constexprs are written in capitals; Triton unpacks no tuples)
"""The store of a packed cache: new keys and values are rotated, quantised, packed and scattered by one kernel."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.packed.codes import level_of, numbers_at, words_at
from attnreg.kernels.packed.rotation import STEP, hadamard, signs
from attnreg.kernels.triton.fp8 import float32_to_fp8_bits
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.layout import Cache, Strides
from attnreg.kernels.triton.target import Target, target_of
from attnreg.kernels.triton.tiles import power_of_2
from attnreg.runtime.interface import AttentionSpec, KVCache
from attnreg.runtime.turboquant.codec import FACTORS

_LARGEST = tl.constexpr(65504.0)
# rows of smaller numbers become 0: their scale rounds to 0 in float16, and the reciprocal of some would overflow
_LEAST_ROW = tl.constexpr(2.0**-40)
# the evenly spaced factors that `fitted` rows try
_TRIALS, _LEAST, _STEP = (tl.constexpr(x) for x in (len(FACTORS), FACTORS[0], FACTORS[1] - FACTORS[0]))
# rows of a program: for few tokens, and for enough tokens to fill a GPU of SM 9.x; the columns that 4 warps hold
_FEW, _MANY, _LONG = 16, 64, 128


@triton.jit
def _load_rows(source_ptr, stored, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns rows [BLOCK_R, BLOCK]; rows that are not stored, and elements past SIZE, are 0."""
    offs_d = tl.arange(0, BLOCK)
    mask = stored[:, None] if SIZE == BLOCK else stored[:, None] & (offs_d < SIZE)[None, :]
    return tl.load(source_ptr[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def _greater(a, b):
    """Returns the greater of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _lesser(a, b):
    """Returns the lesser of two numbers, NaN if one is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_codes(
    codes, page_ptr, row, stored, first_group, L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores codes [BLOCK_R, BLOCK], int32, in the rows of pages, from group first_group of 8 columns on."""
    WORD: tl.constexpr = L.bits & -L.bits
    GROUPS: tl.constexpr = L.columns // 8
    parts = tl.reshape(codes, [BLOCK_R, BLOCK // 8, 8]).to(tl.uint32)
    shifts = (tl.arange(0, 8) * L.bits).to(tl.uint32)
    number = tl.sum(parts << shifts[None, None, :], 2).to(tl.uint32)  # [BLOCK_R, BLOCK // 8]
    offs_g = first_group + tl.arange(0, BLOCK // 8)
    mask = stored[:, None] & (offs_g < GROUPS)[None, :]
    words_ptr = words_at(page_ptr, L)
    DTYPE: tl.constexpr = words_ptr.dtype.element_ty
    pointers = (words_ptr + row * GROUPS)[:, None] + offs_g[None, :]
    for word in tl.static_range(0, L.bits // WORD):
        some = number if WORD == 4 else (number >> (8 * WORD * word)) & ((1 << (8 * WORD)) - 1)
        tl.store(pointers + word * L.block_size * GROUPS, some.to(DTYPE), mask=mask)


@triton.jit
def _middle(above: tl.constexpr, L: tl.constexpr):
    """Returns the middle between the positive levels number `above` and `above` + 1, counted from 0."""
    return (level_of(2.0 * above + 1.0, L) + level_of(2.0 * above + 3.0, L)) * 0.5


@triton.jit
def _nearest(y, L: tl.constexpr):
    """Returns the codes, int32, of the levels nearest to rotated numbers, and the magnitudes of these levels."""
    HALF: tl.constexpr = 2 ** (L.bits - 1)
    # levels are symmetric around 0, so a binary search counts the middles below the magnitude
    size = tl.abs(y)
    half = size > _middle(HALF // 2 - 1, L)
    passed = tl.where(half, HALF // 2, 0)
    if HALF > 2:
        quarter = size > tl.where(half, _middle(3 * HALF // 4 - 1, L), _middle(HALF // 4 - 1, L))
        passed += tl.where(quarter, HALF // 4, 0)
        if HALF > 4:
            upper = tl.where(quarter, _middle(6, L), _middle(4, L))
            lower = tl.where(quarter, _middle(2, L), _middle(0, L))
            passed += (size > tl.where(half, upper, lower)).to(tl.int32)
    levels = level_of(passed.to(tl.float32) * 2.0 + 1.0, L)
    # HALF + passed for positive numbers, else HALF - 1 - passed
    return passed ^ tl.where(y > 0, HALF, HALF - 1), levels


@triton.jit
def _order(WIDTH: tl.constexpr):
    """Returns the column at each place of a rotated tile, [WIDTH], so that threads of NVIDIA's matrix units have
    consecutive columns: such a thread has two of every eight places.
    """
    place = tl.arange(0, WIDTH)
    return place % 8 // 2 * (WIDTH // 4) + place // 8 * 2 + place % 2


@triton.jit
def _in_order(codes, BLOCK_R: tl.constexpr, WIDTH: tl.constexpr):
    """Returns a tile [BLOCK_R, WIDTH] in the order of its columns."""
    parts = tl.reshape(codes, [BLOCK_R, WIDTH // 8, 4, 2])
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3)), [BLOCK_R, WIDTH])


@triton.jit
def _load_blocks(source_ptr, stored, SIZE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns rows as a tuple of blocks of WIDTH columns, [BLOCK_R, WIDTH]; rows that are not stored are 0."""
    blocks = ()
    for first in tl.static_range(0, COLUMNS, WIDTH):
        offs_d = first + tl.arange(0, WIDTH)
        mask = stored[:, None] if first + WIDTH <= SIZE else stored[:, None] & (offs_d < SIZE)[None, :]
        blocks = blocks + (tl.load(source_ptr[:, None] + offs_d[None, :], mask=mask, other=0.0),)
    return blocks


@triton.jit
def _rotated(blocks, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Returns rotated rows, without the rotation's factor, as a tuple of COUNT blocks of columns in `_order`, float32.

    The Hadamard matrix consists of blocks of WIDTH columns, each the smaller Hadamard matrix or its negative.
    """
    matrix = hadamard(_order(WIDTH), WIDTH, blocks[0].dtype)
    parts = ()
    for i in tl.static_range(COUNT):
        turned = blocks[i] * signs(i * WIDTH + tl.arange(0, WIDTH)).to(matrix.dtype)[None, :]
        parts = parts + (tl.dot(turned, matrix, input_precision="ieee"),)
    # for each bit, sums and differences of the blocks whose numbers differ in that bit
    for bit in tl.static_range(COUNT.bit_length() - 1):
        sums = ()
        for i in tl.static_range(COUNT):
            if i >> bit & 1:
                sums = sums + (parts[i - (1 << bit)] - parts[i],)
            else:
                sums = sums + (parts[i] + parts[i + (1 << bit)],)
        parts = sums
    return parts


@triton.jit
def _best_factor(parts, inverse, L: tl.constexpr, COUNT: tl.constexpr, BLOCK_R: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the factor of each row for which its levels, times a scale, have the least squared error."""
    best = tl.zeros([BLOCK_R], dtype=tl.float32)
    chosen = tl.full([BLOCK_R], 1.0, dtype=tl.float32)
    for trial in tl.range(0, _TRIALS, num_stages=1):
        factor = trial * _STEP + _LEAST
        scaled = inverse / factor
        products = tl.zeros([BLOCK_R, WIDTH], dtype=tl.float32)
        squares = tl.zeros([BLOCK_R, WIDTH], dtype=tl.float32)
        for i in tl.static_range(COUNT):
            _, levels = _nearest(parts[i] * scaled[:, None], L)
            products += tl.abs(parts[i]) * levels
            squares += levels * levels
        product = tl.sum(products, 1) * inverse
        gain = product * product / tl.sum(squares, 1)
        chosen = tl.where(gain > best, factor, chosen)
        best = tl.maximum(gain, best)
    return chosen


@triton.jit
def _store_levels(
    source_ptr, page_ptr, row, stored,
    L: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, BLOCK_R: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores rows as levels of their codebook and one scale."""
    COLUMNS: tl.constexpr = L.columns
    COUNT: tl.constexpr = COLUMNS // WIDTH
    blocks = _load_blocks(source_ptr, stored, SIZE, COLUMNS, WIDTH)
    sizes = tl.abs(blocks[0].to(tl.float32))
    for i in tl.static_range(1, COUNT):
        sizes = _greater(sizes, tl.abs(blocks[i].to(tl.float32)))
    largest = tl.reduce(sizes, 1, _greater)
    finite = largest < float("inf")
    # numbers divided by the largest, so that squares do not overflow. A row below the least scale becomes 0
    largest = tl.where(finite & (largest > _LEAST_ROW), largest, 0.0)
    unit = tl.where(largest > 0, largest, 1.0)
    reciprocal = (1.0 / unit)[:, None]
    squares = tl.zeros([BLOCK_R, WIDTH], dtype=tl.float32)
    for i in tl.static_range(COUNT):
        numbers = blocks[i].to(tl.float32) * reciprocal
        squares += numbers * numbers
    square = tl.sum(squares, 1)
    norm = tl.sqrt(square)
    # the factor that brings a rotated row to a root mean square of 1
    inverse = tl.where(largest > 0, 1.0 / (unit * tl.where(square > 0, norm, 1.0)), 0.0)
    parts = _rotated(blocks, COUNT, WIDTH)
    if SCALE == "fitted":
        chosen = _best_factor(parts, inverse, L, COUNT, BLOCK_R, WIDTH)
        inverse = inverse / chosen
    # products of the levels with the row, and with themselves
    products = tl.zeros([BLOCK_R, WIDTH], dtype=tl.float32)
    squares = tl.zeros([BLOCK_R, WIDTH], dtype=tl.float32)
    for i in tl.static_range(COUNT):
        y = parts[i] * inverse[:, None]
        codes, levels = _nearest(y, L)
        if SCALE != "norm":
            products += levels * tl.abs(y)
        if SCALE != "unbiased":
            squares += levels * levels
        _store_codes(_in_order(codes, BLOCK_R, WIDTH), page_ptr, row, stored, i * WIDTH // 8, L, BLOCK_R, WIDTH)
    # the row's root mean square is 1, so norm**2 is COLUMNS
    if SCALE == "norm":
        factor = tl.sqrt(COLUMNS / tl.sum(squares, 1))
    elif SCALE == "unbiased":
        factor = COLUMNS / tl.where(largest > 0, tl.sum(products, 1), 1.0)
    else:
        factor = chosen * tl.sum(products, 1) / tl.sum(squares, 1)
    scale = tl.where(largest > 0, unit * norm * (factor * (1.0 / COLUMNS**0.5)), 0.0)
    scale = tl.where(finite & (scale < _LARGEST + 16.0), scale, float("nan"))
    tl.store(numbers_at(page_ptr, L) + row, scale.to(tl.float16), mask=stored)


@triton.jit
def _store_uniform(
    source_ptr, page_ptr, row, stored, L: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores rows as uniform codes, with a scale and a zero for each group of elements."""
    GROUP: tl.constexpr = L.group if L.group < BLOCK else BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    NUMBERS: tl.constexpr = (L.columns + GROUP - 1) // GROUP
    MOST: tl.constexpr = 2**L.bits - 1
    x = _load_rows(source_ptr, stored, SIZE, BLOCK)
    numbers = tl.reshape(x.to(tl.float32), [BLOCK_R, GROUPS, GROUP])
    least, most = numbers, numbers
    if SIZE != BLOCK:
        exists = tl.reshape(tl.arange(0, BLOCK), [1, GROUPS, GROUP]) < SIZE
        least, most = tl.where(exists, numbers, float("inf")), tl.where(exists, numbers, float("-inf"))
    zero = tl.reduce(least, 2, _lesser)  # [BLOCK_R, GROUPS]
    most = tl.reduce(most, 2, _greater)
    if SIZE != BLOCK:
        # for groups without an element
        zero = tl.where(zero == float("inf"), 0.0, zero)
        most = tl.where(most == float("-inf"), 0.0, most)
    zero = zero.to(tl.float16).to(tl.float32)
    scale = _greater((most - zero) / MOST, 0.0).to(tl.float16).to(tl.float32)
    # these comparisons are false for NaN too
    held = tl.min(((scale < float("inf")) & (tl.abs(zero) < float("inf"))).to(tl.int32), 1) == 1
    # rows that cannot be stored get code 0: their reciprocal is 0, and the maximum of 0 and NaN is 0 below
    reciprocal = tl.where(held[:, None] & (scale > 0), 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
    codes = (numbers - zero[:, :, None]) * reciprocal[:, :, None] + 0.5
    codes = tl.minimum(tl.maximum(codes, 0.0), MOST)
    if SIZE != BLOCK:
        codes = tl.where(exists, codes, 0.0)
    _store_codes(tl.reshape(codes.to(tl.int32), [BLOCK_R, BLOCK]), page_ptr, row, stored, 0, L, BLOCK_R, BLOCK)
    offs_n = tl.arange(0, GROUPS)
    pointers = (numbers_at(page_ptr, L) + row)[:, None] + (offs_n * L.block_size)[None, :]
    mask = stored[:, None] & (offs_n < NUMBERS)[None, :]
    tl.store(pointers, tl.where(held[:, None], scale, float("nan")).to(tl.float16), mask=mask)
    zeros_at = pointers + NUMBERS * L.block_size
    tl.store(zeros_at, tl.where(held[:, None], zero, float("nan")).to(tl.float16), mask=mask)


@triton.jit
def _store_fp8(
    source_ptr, page_ptr, row, stored, L: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores rows as float8_e4m3fn, saturated; NaN where a row has a number that is not finite."""
    x = _load_rows(source_ptr, stored, SIZE, BLOCK).to(tl.float32)
    finite = tl.reduce(tl.abs(x), 1, _greater) < float("inf")
    offs_d = tl.arange(0, BLOCK)
    bits = tl.where(finite[:, None], float32_to_fp8_bits(x, "e4m3fn"), 0x7F).to(tl.uint8)
    tl.store((page_ptr + row * L.columns)[:, None] + offs_d[None, :], bits,
             mask=stored[:, None] & (offs_d < SIZE)[None, :])  # fmt: skip


@triton.jit
def _store_side(
    source_ptr, page_ptr, row, stored, L: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    if L.code == "levels":
        _store_levels(source_ptr, page_ptr, row, stored, L, SIZE, SCALE, BLOCK_R, WIDTH)
    elif L.code == "uniform":
        _store_uniform(source_ptr, page_ptr, row, stored, L, SIZE, BLOCK_R, BLOCK)
    else:
        _store_fp8(source_ptr, page_ptr, row, stored, L, SIZE, BLOCK)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _store_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slot_mapping_ptr, num_tokens, num_slots,
    KEY: tl.constexpr, VALUE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores BLOCK_R (token, head) rows at their tokens' slots; a slot outside the cache skips its token.

    KEY, VALUE: the `Strides` of the source, of SIZE and SIZE_V elements. K, V: the `CacheLayout` of the target.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = index // NUM_KV_HEADS, index % NUM_KV_HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    stored = (slot >= 0) & (slot < num_slots)
    block, row = slot // K.block_size, slot % K.block_size
    _store_side(key_ptr + token * KEY.token + head * KEY.head,
                key_cache_ptr + block * K.stride_block + head * K.stride_head, row, stored, K, SIZE, K_SCALE,
                BLOCK_R, BLOCK_D, K_WIDTH)  # fmt: skip
    _store_side(value_ptr + token * VALUE.token + head * VALUE.head,
                value_cache_ptr + block * V.stride_block + head * V.stride_head, row, stored, V, SIZE_V, V_SCALE,
                BLOCK_R, BLOCK_DV, V_WIDTH)  # fmt: skip


_STORE = Kernel(_store_kernel)


class StoreCode(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides."""

    dtype: torch.dtype
    num_kv_heads: int
    cache: Cache
    # how many rows a program stores
    rows: int
    num_warps: int
    # without a limit, ptxas spills to fit one more program on a multiprocessor. Without matrix units, a limit spills
    max_registers: int | None
    # how many columns a matrix product has
    width: int

    @property
    def options(self) -> Mapping[str, int]:
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps} | limit

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        (key_token, key_head, _), (value_token, value_head, _), keys, values = key
        packed, size, size_v = self.cache.packed, self.cache.head_size, self.cache.head_size_v
        assert packed is not None
        k, v = self.cache.keys(keys, None), self.cache.values(values, None)
        return {
            "KEY": Strides(token=key_token, head=key_head),
            "VALUE": Strides(token=value_token, head=value_head),
            "K": k,
            "V": v,
            "SIZE": size,
            "SIZE_V": size_v,
            "K_SCALE": packed.keys.scale,
            "V_SCALE": packed.values.scale,
            "NUM_KV_HEADS": self.num_kv_heads,
            "BLOCK_R": self.rows,
            "BLOCK_D": max(16, power_of_2(k.columns)),
            "BLOCK_DV": max(16, power_of_2(v.columns)),
            "K_WIDTH": min(self.width, k.columns),
            "V_WIDTH": min(self.width, v.columns),
        }


def store(spec: AttentionSpec, key: Tensor, value: Tensor, kv_cache: KVCache, slots: Tensor) -> None:
    """Stores each row of key and value at its slot; skips rows whose slot is negative or past the cache."""
    num_tokens = min(key.shape[0], slots.shape[0])
    # the layer has validated that there is a cache
    assert spec.block_size is not None
    if not num_tokens:
        return
    cache = Cache("NHD", spec.block_size, spec.head_size, spec.head_size_v, spec.cache_dtype, spec.packed)
    code = _code(spec, cache, num_tokens, target_of(key.device))
    grid = (-(-num_tokens * spec.num_kv_heads // code.rows), 1, 1)
    variant_key = (key.stride(), value.stride(), kv_cache.key.stride(), kv_cache.value.stride())
    _STORE.variant(key.device, code).launch(
        variant_key, grid, key_ptr=key, value_ptr=value, key_cache_ptr=kv_cache.key, value_cache_ptr=kv_cache.value,
        slot_mapping_ptr=slots, num_tokens=num_tokens, num_slots=kv_cache.key.shape[0] * spec.block_size,
    )  # fmt: skip


def _code(spec: AttentionSpec, cache: Cache, num_tokens: int, target: Target) -> StoreCode:
    """The code that stores this number of tokens.

    With more rows, a program's fixed work serves more of them. On SM 9.0, codes of 4 bits take 4 warps 1,571
    instructions for 16 rows, and 8 warps 2,527 for 64. A batch_invariant layer always uses 16 rows, because matrix
    products of two sizes may round differently.
    """
    assert cache.packed is not None
    long = max(cache.head_size, cache.head_size_v) > _LONG
    fitted = "fitted" in (cache.packed.keys.scale, cache.packed.values.scale)
    many = (
        target.backend == "cuda"
        and int(target.arch) // 10 == 9
        and num_tokens * spec.num_kv_heads >= _MANY * target.num_sms
        and not (long or fitted or "batch_invariant" in spec.features)
    )
    limited = target.backend == "cuda" and (fitted or target.matrix_units)
    rows, num_warps = _MANY if many else _FEW, 8 if long or many else 4
    return StoreCode(
        spec.dtype, spec.num_kv_heads, cache, rows, num_warps,
        # `fitted` rows need more registers for their trials
        max_registers=(192 if fitted else 128) if limited else None,
        # 16 columns for each warp of RDNA: with fewer, several warps would compute the same columns
        width=16 * num_warps if target.rdna else STEP.value,
    )  # fmt: skip
