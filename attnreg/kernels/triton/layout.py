# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""The memory layout of rows as constants of a kernel, and the loads of a tile of keys or values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.fp8 import fp8_to_float16
from attnreg.kernels.triton.target import Target
from attnreg.kernels.triton.tiles import power_of_2
from attnreg.language.packed import Packed, Side
from attnreg.runtime.interface import Layout
from attnreg.runtime.turboquant.codebooks import codebook

# PyTorch's 8-bit floats and their names in `attnreg.kernels.triton.fp8`
FP8 = {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}
# with up to this many warps, packed values become operands in the registers that they are loaded into
_FEW_WARPS = 2
# how many bits codes have if a thread loads 8 of them as one word of 32 bits
_WORD_BITS = 4
# the dtypes of products
TL_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def on_bytes(run: Callable[..., None], tensors: Iterable[Tensor | None], target: Target) -> Callable[..., None]:
    """A function of the named tuple of tensors, for those like these; floats that no hardware converts go as bytes."""

    def unconverted(x: Tensor | None) -> bool:
        return x is not None and x.dtype in FP8 and not target.converts(x.dtype)

    if not any(map(unconverted, tensors)):
        return run

    def run_on_bytes(some: Any, *others: Any) -> None:
        run(some._make([x.view(torch.uint8) if unconverted(x) else x for x in some]), *others)

    return run_on_bytes


# GIVEN in place of a head stride: the stride is an argument of the launch, in units of UNIT elements
GIVEN, UNIT = tl.constexpr(-1), tl.constexpr(16)


class Strides(NamedTuple):
    """The strides of queries, of outputs, or of new keys or values: of a token and of a head.

    fp8: the format of 8-bit elements, else "". scale: the stride of the KV heads' scales. unrotated: how many elements
    queries have that are rotated when they are loaded, else 0.
    """

    token: int
    head: int
    fp8: str = ""
    scale: int = 0
    unrotated: int = 0


class PerHead(NamedTuple):
    """The strides of sinks and of ALiBi slopes, one number for each query head."""

    sink: int
    slope: int


class CacheLayout(NamedTuple):
    """The layout of keys, or of values, in memory. Packed keys and values are a single block: block_size 0.

    A row's ``size`` elements lie in groups of ``vector``, ``stride_x`` apart; vector 0: all are contiguous. fp8: the
    format of 8-bit elements, else "". stride_scale: the stride of the heads' scales. stride_head may be GIVEN. code:
    what the codes of a packed cache stand for (`attnreg.language.packed.Side`), else "". Codes have ``bits`` bits, and
    a row stores ``columns`` of them. Uniform codes of a ``group`` share a scale and a zero. linear, cubic, fifth: the
    coefficients of the levels' polynomial. lop3: the GPU has NVIDIA's instruction of that name. together: the columns
    of a word are adjacent in a tile.
    """

    block_size: int
    stride_block: int
    stride_token: int
    stride_head: int
    stride_x: int
    vector: int
    size: int
    fp8: str
    stride_scale: int
    code: str = ""
    bits: int = 0
    columns: int = 0
    group: int = 0
    linear: float = 0.0
    cubic: float = 0.0
    fifth: float = 0.0
    lop3: bool = False
    together: bool = False


class Cache(NamedTuple):
    """The properties of a cache that all layers of a spec share; for packed keys and values, block_size is 0."""

    layout: Layout
    block_size: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    packed: Packed | None = None
    # NVIDIA's instruction that takes packed codes apart
    lop3: bool = False

    def keys(self, strides: Sequence[int], stride_scale: int | None) -> CacheLayout:
        """The layout of keys, from the strides of their tensor and of their scales (None without scales)."""
        if self.packed is not None:
            return self._pages(strides, self.packed.keys, self.head_size)
        # SPLIT holds 16 bytes of a key together
        return self._layout(strides, 16 // self.dtype.itemsize, self.head_size, stride_scale)

    def values(self, strides: Sequence[int], stride_scale: int | None, num_warps: int = 0) -> CacheLayout:
        """The layout of values, from the strides of their tensor and of their scales (None without scales).

        num_warps: how many warps share a tile of values that they load.
        """
        if self.packed is not None:
            pages = self._pages(strides, self.packed.values, self.head_size_v)
            # other tiles go through shared memory, and storing whole words there takes fewer stores
            return pages._replace(together=num_warps > _FEW_WARPS or pages.bits != _WORD_BITS)
        return self._layout(strides, 1, self.head_size_v, stride_scale)

    def _layout(self, strides: Sequence[int], vector: int, size: int, stride_scale: int | None) -> CacheLayout:
        if self.layout == "SPLIT" and self.block_size:
            block, head, x, token = strides[:4]
        else:
            (token, head), x, vector = strides[-3:-1], 0, 0
            if self.layout == "HND":
                head, token = token, head
            block = strides[0] if self.block_size else 0
        return CacheLayout(
            block_size=self.block_size,
            stride_block=block,
            stride_token=token,
            stride_head=head,
            stride_x=x,
            vector=vector,
            size=size,
            fp8=FP8.get(self.dtype, ""),
            stride_scale=stride_scale or 0,
        )

    def _pages(self, strides: Sequence[int], side: Side, size: int) -> CacheLayout:
        """The layout of a packed cache [num_blocks, num_kv_heads, page]: `attnreg.runtime.turboquant.cache_bytes`."""
        columns = side.columns(size)
        levels = codebook(side.bits, columns).coefficients if side.code == "levels" else (0.0, 0.0, 0.0)
        linear, cubic, fifth = levels
        return CacheLayout(
            block_size=self.block_size,
            stride_block=strides[0],
            # for codes of 8 bits, the rows' stride
            stride_token=columns,
            stride_head=strides[1],
            stride_x=0,
            vector=0,
            size=columns if side.code == "levels" else size,
            fp8="e4m3fn" if side.code == "fp8" else "",
            stride_scale=0,
            code=side.code,
            bits=side.bits,
            columns=columns,
            group=min(side.group or power_of_2(columns), power_of_2(columns)),
            linear=linear,
            cubic=cubic,
            fifth=fifth,
            lop3=self.lop3,
        )


def packed_strides(strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The strides of packed keys or values as constants of a kernel, and the head's stride as an argument (else 0).

    In transformers' caches, heads are as far apart as the cache is long. With a constant, each length would compile the
    kernel anew.
    """
    token, head, last = strides
    # a launch takes numbers of 32 bits
    if head % UNIT.value or head // UNIT.value >= 2**31:
        return (token, head, last), 0
    return (token, GIVEN.value, last), head // UNIT.value


@triton.jit
def times(index, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """Returns index * STRIDE for an index below COUNT; in 64 bits if 32 may not hold it."""
    return index * STRIDE if COUNT * STRIDE < 2**31 else index.to(tl.int64) * STRIDE


@triton.jit
def head_offset(head, stride_head, LAYOUT: tl.constexpr, COUNT: tl.constexpr):
    """Returns the offset of a KV head below COUNT; stride_head: in UNIT elements, if the layout's stride is GIVEN."""
    if LAYOUT.stride_head == GIVEN:
        offset = head.to(tl.int64) * stride_head * UNIT
    else:
        offset = times(head, LAYOUT.stride_head, COUNT)
    return offset


@triton.jit
def columns(offs_d, LAYOUT: tl.constexpr):
    """Returns the offsets of a row's elements in this layout."""
    if LAYOUT.vector == 0:
        offsets = offs_d
    else:
        # tiles are at most twice as wide as a row
        groups: tl.constexpr = 2 * LAYOUT.size // LAYOUT.vector
        offsets = times(offs_d // LAYOUT.vector, LAYOUT.stride_x, groups) + offs_d % LAYOUT.vector
    return offsets


@triton.jit
def load_blocks(block_table_ptr, start, stop, last_block, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the cache blocks of the BLOCK_N keys from start on, int64: one if all share it, else [BLOCK_N]."""
    if BLOCK_SIZE == 0:
        # packed keys are one block
        block = tl.cast(0, tl.int64)
    elif BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(block_table_ptr + start // BLOCK_SIZE, mask=start < stop, other=0).to(tl.int64)
    else:
        index = (start + tl.arange(0, BLOCK_N)) // BLOCK_SIZE
        block = tl.load(block_table_ptr + index, mask=index <= (stop - 1) // BLOCK_SIZE, other=last_block).to(tl.int64)
    return block


@triton.jit
def load_tile(
    cache_ptr, block, first_row, start, stop, first_column,
    LAYOUT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, EXIST: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns the keys or values [BLOCK_N, BLOCK] of one KV head from `start` on, in the dtype of the products.

    WHOLE: all keys are before `stop`. Otherwise the last key is repeated from `stop` on: memory after it may hold NaN,
    and 0 * NaN is NaN. EXIST: rows have all BLOCK columns; otherwise columns past a row are 0.
    """
    FP8: tl.constexpr = LAYOUT.fp8
    key = start + tl.arange(0, BLOCK_N)
    if not WHOLE:
        key = tl.minimum(key, stop - 1)
    rows = block * LAYOUT.stride_block  # [BLOCK_N]
    rows += (first_row + (key if LAYOUT.block_size == 0 else key % LAYOUT.block_size)) * LAYOUT.stride_token
    if WHOLE and LAYOUT.vector == 1 and LAYOUT.stride_token == 1 and LAYOUT.stride_block % 16 == 0:
        # the compiler cannot know that keys of a block have the same entry in the table, and so are contiguous
        rows = tl.max_contiguous(tl.multiple_of(rows, 16), 16)
    offs_d = first_column + tl.arange(0, BLOCK)
    pointers = cache_ptr + rows[:, None] + columns(offs_d, LAYOUT)[None, :]
    tile = tl.load(pointers) if EXIST else tl.load(pointers, mask=(offs_d < LAYOUT.size)[None, :], other=0.0)
    if tile.dtype.primitive_bitwidth == 8:
        numbers = fp8_to_float16(tile, FP8)
        if LAYOUT.code == "fp8" and tile.dtype == tl.uint8:
            # a row of a packed cache may be marked with NaN
            numbers = tl.where((tile & 0x7F) == 0x7F, float("nan"), numbers)
        tile = numbers
    return tile.to(COMPUTE_DTYPE)


def compute_dtype(dtype: torch.dtype, cache_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the products: float16 holds every 8-bit float exactly; bfloat16 would need another conversion."""
    if cache_dtype in FP8:
        return dtype if dtype == torch.float32 else torch.float16
    # codes of a packed cache become float16 too
    return torch.float16 if cache_dtype == torch.uint8 else dtype if cache_dtype == dtype else torch.float32


def value_dtype(dtype: torch.dtype, cache: Cache) -> torch.dtype:
    """The dtype of the products with values: that with keys, except for levels, which may exceed float16."""
    levels = cache.packed is not None and cache.packed.values.code == "levels"
    return dtype if levels else compute_dtype(dtype, cache.dtype)


def stride_of(tensor: Tensor | None, dim: int) -> int:
    """A stride of a tensor, 0 for a dimension with fewer than two elements."""
    return 0 if tensor is None or tensor.shape[dim] < 2 else tensor.stride(dim)
