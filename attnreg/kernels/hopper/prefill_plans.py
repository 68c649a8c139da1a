# mypy: disable-error-code="import-untyped"
"""The launch of the kernel in `prefill`, in place of one of TRITON_ATTN's for prompts.

It can where the copy engine reads the tensors as they lie: addresses and strides are multiples of 16 bytes, and the
rows of a cache are evenly spaced. Other calls run TRITON_ATTN's kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnreg.kernels.hopper.prefill import LOG2_E, prefill_kernel
from attnreg.kernels.hopper.prefill_shared import GROUPS, ROWS, Code
from attnreg.kernels.triton.launch import Start, starter
from attnreg.kernels.triton.schedule import Launch
from attnreg.kernels.triton.target import target_of
from attnreg.runtime.interface import AttentionSpec
from attnreg.runtime.lengths import LONGEST

# head sizes that the kernel computes, of keys and of values; the columns that the copy engine can swizzle
SIZES = (64, 80, 96, 128, 192, 256)
COPIED = 64
# the smallest box of keys
SMALLEST_BOX = 16
# the share of the multiprocessors' time that tiles with all of their keys have to fill
BUSY = 0.6
# the tiles of each, in a narrow window
SEVERAL = 4
_INT32 = 2**31


class Rows(NamedTuple):
    """Keys, or values, as a matrix, and where blocks and heads begin in it: `prefill.Places`."""

    shape: tuple[int, int]
    stride: int
    block: int
    head: int
    column: int


def rows_of(shape: Sequence[int], strides: Sequence[int], layout: str) -> Rows | None:
    """Keys or values [blocks, tokens, heads, size] (or HND), or packed [tokens, heads, size], as rows of a matrix.

    None where no matrix of evenly spaced rows holds them, or the copy engine cannot read it.
    """
    if len(shape) == 3:
        shape, strides, layout = (1, *shape), (0, *strides), "NHD"
    token, head = (1, 2) if layout == "NHD" else (2, 1)
    blocks, tokens, heads, size = shape[0], shape[token], shape[head], shape[3]
    stride, per_head, per_block = strides[token], strides[head], strides[0]
    if heads == 1:
        per_head = 0
    if blocks == 1:
        per_block = 0
    if stride <= 0 or stride % 8 or per_head % 8 or per_head < 0 or per_block % stride or per_block < 0:
        return None
    if per_head % stride == 0:
        head_rows, column, width = per_head // stride, 0, size
    elif (heads - 1) * per_head + size <= stride:
        head_rows, column, width = 0, per_head, (heads - 1) * per_head + size
    else:
        return None
    if width > stride:
        return None
    rows = (blocks - 1) * (per_block // stride) + (heads - 1) * head_rows + tokens
    return Rows((rows, width), stride, per_block // stride, head_rows, column) if 0 < rows < _INT32 else None


def spacing(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int] | None:
    """The strides of queries or outputs [tokens, heads, size]; None where the copy engine cannot address them."""
    tokens, heads, size = shape
    token, head = strides[0], strides[1] if heads > 1 else size
    apart = heads * head <= token or (tokens * token <= head and heads * head < _INT32)
    fits = 0 < tokens < _INT32 and min(token, head) > 0 and token % 8 == 0 == head % 8
    return (token, head, 1) if apart and fits else None


class Descriptor(NamedTuple):
    """The facts of a `TensorDescriptor` that a launch reads."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class Prompts:
    """The kernel for one launch of a plan, bound to the facts of a call's tensors but not to their memory."""

    def __init__(
        self, spec: AttentionSpec, code: Code, launch: Launch, strides: tuple[Any, Any], keys: Rows, values: Rows,
        numbers: Sequence[int], tensors: Sequence[Any],
    ) -> None:  # fmt: skip
        """strides: of query and output. numbers: those of the batch, of `plans`. tensors: like those of the calls."""
        query, _, _, _, lse, sinks, *_ = tensors
        self.code, self.strides, self.keys, self.values, self.device = code, strides, keys, values, query.device
        # calls that repeat another may give tensors of other shapes, in memory that is spaced alike
        self.shapes = query.shape, tensors[3].shape
        requests, rows = numbers[0], query.shape[0]
        head_tiles = code.group // code.pack
        tiles = rows // (GROUPS.value * ROWS.value // code.pack) + requests
        programs = tiles * code.kv_heads * head_tiles
        self.grid = (min(target_of(query.device).num_sms, programs), 1, 1)
        softcap = spec.softcap or 0.0
        # the argument of the hyperbolic tangent, which is made of powers of 2
        scale = spec.softmax_scale / softcap if softcap else spec.softmax_scale
        self.numbers = (
            requests, numbers[2], launch.min_query_len, launch.max_query_len, tiles,
            launch.kv_heads_at_once * head_tiles,
            keys.block, keys.head, keys.column, values.block, values.head, values.column, *strides[1][:2],
            0 if lse is None else lse.shape[1], 0 if sinks is None else sinks.stride(0),
            scale * LOG2_E.value, softcap * LOG2_E.value,
        )  # fmt: skip
        self._start: Start | None = None

    def run(self, call: Sequence[Any], batch: Sequence[Any], varying: tuple[Any, ...] | None = None) -> None:
        """Computes the requests of the launch."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                self.run(call, batch)
            return
        query, key, value, output, lse, sinks, *_ = call
        starts, key_starts, lengths, _, table, *_ = batch
        key_starts = starts if key_starts is None else key_starts
        tensors = (
            starts, key_starts, lengths, lengths if table is None else table, self._taken(lengths), output,
            output if lse is None else lse, output if sinks is None else sinks,
        )  # fmt: skip
        descriptors = self._descriptors(query, key, value, output)
        if self._start is None:
            compiled = _compiled.get(self._kind(query, sinks))
            if compiled is None:
                self._compile(descriptors, tensors, sinks)
                return
            self._start = starter(compiled, self.grid)
        stream = triton.runtime.driver.active.get_current_stream(self.device.index or 0)
        arguments: list[Any] = [*descriptors, *[x.data_ptr() for x in tensors]]
        self._start(stream, arguments, (*self.numbers, self.code))

    def _taken(self, lengths: Tensor) -> Tensor:
        """The number of programs that were taken, of each run its own."""
        return torch.zeros(1, dtype=torch.int32, device=self.device) if self.code.dynamic else lengths

    def _kind(self, query: Tensor, sinks: Tensor | None) -> Any:
        return self.device, query.dtype, None if sinks is None else sinks.dtype, self.code

    def _descriptors(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> tuple[Descriptor, ...]:
        keys, values = self.keys, self.values
        return (
            Descriptor(query, self.shapes[0], self.strides[0]),
            Descriptor(key, keys.shape, (keys.stride, 1)),
            Descriptor(value, values.shape, (values.stride, 1)),
            Descriptor(output, self.shapes[1], self.strides[1]),
        )

    def _compile(self, descriptors: Sequence[Descriptor], tensors: Sequence[Tensor], sinks: Tensor | None) -> None:
        """Runs the kernel through Triton, which compiles it."""
        query = descriptors[0].base
        described = [
            TensorDescriptor(x.base, [*x.shape], [*x.strides], [*block], layout)
            for x, (block, layout) in zip(descriptors, blocks_of(self.code), strict=True)
        ]
        compiled = prefill_kernel[self.grid](*described, *tensors, *self.numbers, self.code, num_warps=4)
        _compiled[self._kind(query, sinks)] = compiled


# compiled kernels by device, types and code
_compiled: dict[Any, Any] = {}


def blocks_of(code: Code) -> list[tuple[tuple[int, ...], Any]]:
    """The block of one copy of queries, keys, values and outputs, and its layout in shared memory."""
    rows = ROWS.value // code.pack, code.pack
    queries, outputs = ((*rows, part) for part in (code.part, code.part_v))
    keys, values = ((code.box, part) for part in (code.part, code.part_v))
    return [(block, gl.NVMMASharedLayout(128, 16, len(block))) for block in (queries, keys, values, outputs)]


def pack_of(spec: AttentionSpec) -> int:
    """The query heads of a tile: the largest power of 2 that divides those of a KV head."""
    group = spec.num_heads // spec.num_kv_heads
    return int(min(group & -group, ROWS.value))


def code_of(spec: AttentionSpec, causal: bool, block_size: int, *, sinks: bool, lse: bool) -> Code:
    """The constants of the kernel for a layer; block_size: 0 without a cache."""
    group = spec.num_heads // spec.num_kv_heads
    left, right = spec.sides(causal)
    size, size_v = spec.head_size, spec.head_size_v
    block_n = 64 if max(size - 64, size_v) > 128 or _is_narrow(spec, causal) else 128
    wide = size > 128
    output_in_query = size_v <= size and wide
    # parts of the output are those of the queries then
    whole = size == size_v or not output_in_query
    return Code(
        kv_heads=spec.num_kv_heads,
        group=group,
        pack=pack_of(spec),
        size=size,
        size_v=size_v,
        part=_part(size) if whole else COPIED,
        part_v=_part(size_v) if whole else COPIED,
        block_n=block_n,
        box=min(block_size & -block_size, block_n) if block_size else block_n,
        block_size=block_size,
        stages=2,
        # a position and each of these fit into 32 bits together
        left=min(left, LONGEST),
        right=min(right, LONGEST),
        softcap=bool(spec.softcap),
        sinks=sinks,
        lse=lse,
        q_stages=1 if wide else 2,
        output_in_query=output_in_query,
        take_turns=True,
        dynamic=True,
    )


def _part(size: int) -> int:
    """The columns of a part: all where they are a power of 2."""
    return COPIED if size & (size - 1) else size


def prompts_of(
    spec: AttentionSpec, causal: bool, launch: Launch, numbers: Sequence[int], tensors: Sequence[Any],
    changes: Mapping[str, Any],
) -> Prompts | None:  # fmt: skip
    """The kernel for a launch, None where it cannot run. numbers: of the batch. changes: of the chosen constants."""
    query, key, value, output, lse, sinks, *_ = tensors
    block_size = (spec.block_size or 0) if key.dim() == 4 else 0
    if (
        spec.head_size not in SIZES or spec.head_size_v not in SIZES or spec.kv_layout == "SPLIT"
        or {query.dtype, key.dtype, value.dtype, output.dtype} not in ({torch.float16}, {torch.bfloat16})
        or block_size % SMALLEST_BOX
    ):  # fmt: skip
        return None
    strides = spacing(query.shape, query.stride()), spacing(output.shape, output.stride())
    keys, values = (rows_of(x.shape, x.stride(), spec.kv_layout) for x in (key, value))
    if keys is None or values is None or None in strides:
        return None
    code = code_of(spec, causal, block_size, sinks=sinks is not None, lse=lse is not None)
    return Prompts(spec, code._replace(**changes), launch, strides, keys, values, numbers, tensors)


def takes(spec: AttentionSpec, causal: bool, launch: Launch, queries: Sequence[int], num_sms: int) -> bool:
    """Whether this kernel is better at a launch of prompts than TRITON_ATTN's, which can split keys.

    Split keys keep all multiprocessors busy, but take a merge, and TRITON_ATTN's kernel about 1.6 times the work. In a
    narrow window a tile takes less than it costs to begin, until each multiprocessor has several.
    """
    # the tiles of a batch may not decide a request's result
    narrow = _is_narrow(spec, causal) and "batch_invariant" not in spec.features
    if launch.splits == 1 and not narrow:
        return True
    group, pack = spec.num_heads // spec.num_kv_heads, pack_of(spec)
    block_q = GROUPS.value * ROWS.value // pack
    members = (n for n in queries if launch.min_query_len <= n)
    tiles = sum(-(-n // block_q) for n in members) * spec.num_kv_heads * (group // pack)
    busy = tiles >= BUSY * -(-tiles // num_sms) * num_sms > 0
    return bool((busy or launch.splits == 1) and (tiles >= SEVERAL * num_sms or not narrow))


def _is_narrow(spec: AttentionSpec, causal: bool) -> bool:
    """Whether a row sees so few keys that blocks of 64 are better than those of 128."""
    left, right = spec.sides(causal)
    return bool(left >= 0 and right >= 0 and left + right < 256)
