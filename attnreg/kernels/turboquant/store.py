# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The store of a packed cache: new keys and values are rotated, quantised, packed and scattered by one kernel."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.packed.codes import level_of, numbers_at, words_at
from attnreg.kernels.packed.rotation import STEP, flipped, hadamard, signs
from attnreg.kernels.triton.fp8 import float32_to_fp8_bits
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.layout import Cache, Strides
from attnreg.kernels.triton.target import target_of
from attnreg.kernels.triton.tiles import power_of_2
from attnreg.language.packed import Side
from attnreg.runtime.interface import AttentionSpec, KVCache
from attnreg.runtime.turboquant.codec import FACTORS

_LARGEST = tl.constexpr(65504.0)
# a row of smaller numbers has a scale that float16 rounds to 0; the reciprocal of some would overflow
_LEAST_ROW = tl.constexpr(2.0**-40)
# the factors that `fitted` rows are tried with are evenly spaced
_TRIALS, _LEAST, _STEP = (tl.constexpr(x) for x in (len(FACTORS), FACTORS[0], FACTORS[1] - FACTORS[0]))
# rows of a program, and the columns that 4 of its warps hold
_ROWS, _LONG = 16, 128


@triton.jit
def _load_rows(source_ptr, stored, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns rows [BLOCK_R, BLOCK], and whether all numbers of each are finite; a row that has others is 0."""
    offs_d = tl.arange(0, BLOCK)
    x = tl.load(source_ptr[:, None] + offs_d[None, :], mask=stored[:, None] & (offs_d < SIZE)[None, :], other=0.0)
    # NaN compares false too
    is_finite = tl.abs(x.to(tl.float32)) < float("inf")
    finite = tl.min(is_finite.to(tl.int32), 1) == 1
    return tl.where(finite[:, None], x, 0.0).to(x.dtype), finite


@triton.jit
def _store_codes(
    codes, page_ptr, row, stored, first_group, L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores the codes [BLOCK_R, BLOCK], int32, of the rows of pages; first_group: of 8 columns."""
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
def _nearest(y, L: tl.constexpr):
    """Returns the codes, int32, of the levels nearest to rotated numbers, and these levels."""
    CODES: tl.constexpr = 2**L.bits
    HALF: tl.constexpr = CODES // 2
    # levels lie on both sides of 0 alike: so do the middles between them
    size = tl.abs(y)
    passed = tl.zeros(y.shape, dtype=tl.int32)
    for code in tl.static_range(HALF, CODES - 1):
        middle = (level_of(2.0 * code - (CODES - 1), L) + level_of(2.0 * code - (CODES - 3), L)) * 0.5
        passed += (size > middle).to(tl.int32)
    codes = tl.where(y > 0, HALF + passed, HALF - 1 - passed)
    return codes, level_of(codes.to(tl.float32) * 2.0 - (CODES - 1), L)


@triton.jit
def _rotated(turned, matrix, first, WIDTH: tl.constexpr):
    """Returns columns of rotated rows, from one on; matrix: the first columns of the Hadamard matrix, or None."""
    if matrix is None:
        matrix = hadamard(first, turned.shape[1], WIDTH, turned.dtype)
    else:
        turned = flipped(turned, first)
    return tl.dot(turned, matrix, input_precision="ieee")


@triton.jit
def _best_factor(turned, matrix, inverse, L: tl.constexpr, BLOCK_R: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the factor of each row with which its levels, times a scale, have the least squared error."""
    best = tl.zeros([BLOCK_R], dtype=tl.float32)
    chosen = tl.full([BLOCK_R], 1.0, dtype=tl.float32)
    for trial in tl.range(0, _TRIALS, num_stages=1):
        factor = trial * _STEP + _LEAST
        products, squares = tl.zeros([BLOCK_R], dtype=tl.float32), tl.zeros([BLOCK_R], dtype=tl.float32)
        for first in tl.range(0, L.columns, WIDTH, num_stages=1):
            y = _rotated(turned, matrix, first, WIDTH) * inverse[:, None]
            _, levels = _nearest(y / factor, L)
            products += tl.sum(y * levels, 1)
            squares += tl.sum(levels * levels, 1)
        gain = products * products / squares
        chosen = tl.where(gain > best, factor, chosen)
        best = tl.maximum(gain, best)
    return chosen


@triton.jit
def _store_levels(
    source_ptr, page_ptr, row, stored,
    L: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, BLOCK_R: tl.constexpr, WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Stores rows as levels of their codebook and one scale."""
    COLUMNS: tl.constexpr = L.columns
    x, finite = _load_rows(source_ptr, stored, SIZE, COLUMNS)
    numbers = x.to(tl.float32)
    # the square of the norm, of numbers that do not overflow. Below the least scale that is held, a row is 0
    largest = tl.max(tl.abs(numbers), 1)
    largest = tl.where(largest > _LEAST_ROW, largest, 0.0)
    unit = tl.where(largest > 0, largest, 1.0)
    parts = numbers * (1.0 / unit)[:, None]
    square = tl.sum(parts * parts, 1)
    norm = tl.sqrt(square)
    # brings a rotated row to a root mean square of 1
    inverse = tl.where(largest > 0, 1.0 / (unit * tl.where(square > 0, norm, 1.0)), 0.0)
    turned = (numbers * signs(tl.arange(0, COLUMNS))[None, :]).to(x.dtype)
    matrix = hadamard(0, COLUMNS, WIDTH, x.dtype) if KEEP else None
    if SCALE == "fitted":
        chosen = _best_factor(turned, matrix, inverse, L, BLOCK_R, WIDTH)
        inverse = inverse / chosen
    # of the levels with the row, and with themselves
    products = tl.zeros([BLOCK_R, WIDTH], dtype=tl.float32)
    squares = tl.zeros([BLOCK_R, WIDTH], dtype=tl.float32)
    for first in tl.range(0, COLUMNS, WIDTH, num_stages=1):
        y = _rotated(turned, matrix, first, WIDTH) * inverse[:, None]
        codes, levels = _nearest(y, L)
        if SCALE != "norm":
            products += levels * y
        if SCALE != "unbiased":
            squares += levels * levels
        _store_codes(codes, page_ptr, row, stored, first // 8, L, BLOCK_R, WIDTH)
    # of a row whose root mean square is 1, so that norm**2 is COLUMNS
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
    x, finite = _load_rows(source_ptr, stored, SIZE, BLOCK)
    numbers = tl.reshape(x.to(tl.float32), [BLOCK_R, GROUPS, GROUP])
    offs_d = tl.reshape(tl.arange(0, BLOCK), [1, GROUPS, GROUP])
    exists = offs_d < SIZE
    zero = tl.min(tl.where(exists, numbers, float("inf")), 2)  # [BLOCK_R, GROUPS]
    most = tl.max(tl.where(exists, numbers, float("-inf")), 2)
    zero = tl.where(zero < float("inf"), zero, 0.0).to(tl.float16).to(tl.float32)
    scale = tl.maximum((most - zero) / MOST, 0.0).to(tl.float16).to(tl.float32)
    held = finite & (tl.min(((scale < float("inf")) & (tl.abs(zero) < float("inf"))).to(tl.int32), 1) == 1)
    step = tl.where(scale > 0, scale, 1.0)
    codes = tl.floor((numbers - zero[:, :, None]) * (1.0 / step)[:, :, None] + 0.5)
    codes = tl.minimum(tl.maximum(codes, 0.0), MOST)
    codes = tl.where(exists & (scale > 0)[:, :, None] & held[:, None, None], codes, 0.0)
    _store_codes(tl.reshape(codes, [BLOCK_R, BLOCK]).to(tl.int32), page_ptr, row, stored, 0, L, BLOCK_R, BLOCK)
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
    x, finite = _load_rows(source_ptr, stored, SIZE, BLOCK)
    offs_d = tl.arange(0, BLOCK)
    bits = tl.where(finite[:, None], float32_to_fp8_bits(x.to(tl.float32), "e4m3fn"), 0x7F).to(tl.uint8)
    tl.store((page_ptr + row * L.columns)[:, None] + offs_d[None, :], bits,
             mask=stored[:, None] & (offs_d < SIZE)[None, :])  # fmt: skip


@triton.jit
def _store_side(
    source_ptr, page_ptr, row, stored, L: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    if L.code == "levels":
        # the tries of `fitted` rows leave no registers for the matrix
        _store_levels(source_ptr, page_ptr, row, stored, L, SIZE, SCALE, BLOCK_R, WIDTH, KEEP and SCALE != "fitted")
    elif L.code == "uniform":
        _store_uniform(source_ptr, page_ptr, row, stored, L, SIZE, BLOCK_R, BLOCK)
    else:
        _store_fp8(source_ptr, page_ptr, row, stored, L, SIZE, BLOCK)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _store_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slot_mapping_ptr, num_tokens, num_slots,
    KEY: tl.constexpr, VALUE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Stores BLOCK_R (token, head) rows at their tokens' slots; a slot that the cache does not have skips its token.

    KEY, VALUE: the `Strides` of what is stored, of SIZE and SIZE_V elements. K, V: the `CacheLayout` of where. KEEP: a
    part of the Hadamard matrix is made once, not for each part of the columns.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = index // NUM_KV_HEADS, index % NUM_KV_HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    stored = (slot >= 0) & (slot < num_slots)
    block, row = slot // K.block_size, slot % K.block_size
    _store_side(key_ptr + token * KEY.token + head * KEY.head,
                key_cache_ptr + block * K.stride_block + head * K.stride_head, row, stored, K, SIZE, K_SCALE,
                BLOCK_R, BLOCK_D, K_WIDTH, KEEP)  # fmt: skip
    _store_side(value_ptr + token * VALUE.token + head * VALUE.head,
                value_cache_ptr + block * V.stride_block + head * V.stride_head, row, stored, V, SIZE_V, V_SCALE,
                BLOCK_R, BLOCK_DV, V_WIDTH, KEEP)  # fmt: skip


_STORE = Kernel(
    _store_kernel,
    ("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr", "slot_mapping_ptr", "num_tokens", "num_slots"),
)


def _width(side: Side, columns: int, keeps: bool) -> int:
    """The columns that are rotated at once: half as many where other things take the registers.

    Those are the tries of `fitted` rows, and long rows on GPUs that hold every row of an operand twice or have no
    matrix units.
    """
    few = side.scale == "fitted" or (columns > _LONG and not keeps)
    return min(STEP.value // 2 if few else STEP.value, columns)


class _Code(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides."""

    dtype: torch.dtype
    num_kv_heads: int
    cache: Cache
    nvidia: bool
    # whether there are registers for a part of the Hadamard matrix
    keeps: bool

    @property
    def rows(self) -> int:
        return _ROWS

    @property
    def options(self) -> Mapping[str, int]:
        warps = 4 if max(self.cache.head_size, self.cache.head_size_v) <= _LONG else 8
        # told of no limit, ptxas spills to keep one program more on a multiprocessor; told of one, without matrix units
        return {"num_warps": warps, "maxnreg": 128} if self.nvidia and self.keeps else {"num_warps": warps}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        new_key, new_value, keys, values = key
        packed, size, size_v = self.cache.packed, self.cache.head_size, self.cache.head_size_v
        assert packed is not None
        k, v = self.cache.keys(keys, None), self.cache.values(values, None)
        return {
            "KEY": Strides(token=new_key[0], head=new_key[1]),
            "VALUE": Strides(token=new_value[0], head=new_value[1]),
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
            "K_WIDTH": _width(packed.keys, k.columns, self.keeps),
            "V_WIDTH": _width(packed.values, v.columns, self.keeps),
            "KEEP": self.keeps,
        }


def store(spec: AttentionSpec, key: Tensor, value: Tensor, kv_cache: KVCache, slots: Tensor) -> None:
    """Stores each row of key and value at its slot; rows whose slot is negative or past the cache nowhere."""
    num_tokens = min(key.shape[0], slots.shape[0])
    # the layer has validated that there is a cache
    assert spec.block_size is not None
    if not num_tokens:
        return
    cache = Cache("NHD", spec.block_size, spec.head_size, spec.head_size_v, spec.cache_dtype, spec.packed)
    target = target_of(key.device)
    nvidia, keeps = target.backend == "cuda", target.matrix_units and not target.rdna
    code = _Code(spec.dtype, spec.num_kv_heads, cache, nvidia, keeps)
    grid = (-(-num_tokens * spec.num_kv_heads // code.rows), 1, 1)
    variant_key = (key.stride(), value.stride(), kv_cache.key.stride(), kv_cache.value.stride())
    values = (key, value, *kv_cache, slots, num_tokens, kv_cache.key.shape[0] * spec.block_size)
    _STORE.variant(key.device, code).launch(variant_key, grid, values)
