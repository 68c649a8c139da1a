# mypy: disable-error-code="import-untyped"
"""The launch of the kernel in `kernel`, in place of one of TRITON_ATTN's for prompts.

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

from attnreg.kernels.hopper.prompts.choices import BUILDS, OF_PROMPTS, SIZES, SMALLEST_BOX, code_of, groups_of
from attnreg.kernels.hopper.prompts.counters import taken
from attnreg.kernels.hopper.prompts.kernel import prefill_kernel
from attnreg.kernels.hopper.prompts.shared import ROWS, Code, is_in_groups
from attnreg.kernels.triton.inside.assembler import assembler_of
from attnreg.kernels.triton.launch import FUSED, Start, starter
from attnreg.kernels.triton.plans import MERGED
from attnreg.kernels.triton.schedule import Launch
from attnreg.kernels.triton.softmax import LOG2_E
from attnreg.kernels.triton.splits.merge import MergeKey, PlannedMerge
from attnreg.kernels.triton.target import target_of
from attnreg.kernels.triton.tiles import power_of_2
from attnreg.runtime.interface import AttentionSpec

_INT32 = 2**31


class Rows(NamedTuple):
    """Keys, or values, as a matrix, and where blocks and heads begin in it: `shared.Places`."""

    shape: tuple[int, int]
    stride: int
    block: int
    head: int
    column: int

    @property
    def in_groups(self) -> bool:
        """Whether blocks and heads begin at groups of 8 rows, and of 64 columns."""
        return not (self.block % 8 or self.head % 8 or self.column % 64)

    def described(self, base: Tensor, in_groups: bool) -> Descriptor:
        """The matrix for the copy engine; in groups of 8 rows, those in parts of 64 columns."""
        (rows, width), stride = self.shape, self.stride
        if in_groups:
            return Descriptor(base, (rows // 8, width // 64, 8, 64), (8 * stride, 64, stride, 1))
        return Descriptor(base, self.shape, (stride, 1))


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
        query, _, _, _, lse, sinks, _, _, k_scale, v_scale, *_ = tensors
        self.code, self.strides, self.keys, self.values, self.device = code, strides, keys, values, query.device
        # calls that repeat another may give tensors of other shapes, in memory that is spaced alike
        self.shapes = query.shape, tensors[3].shape
        requests, rows = numbers[0], query.shape[0]
        head_tiles = code.group // code.pack
        tiles = rows // (code.groups * ROWS.value // code.pack) + requests
        programs = tiles * code.kv_heads * head_tiles * (launch.splits if code.split else 1)
        num_sms = target_of(query.device).num_sms
        self.grid = (min(code.programs * num_sms, programs), 1, 1)
        self._merge: Any = None
        slots = 0
        if code.split:
            merge = PlannedMerge(spec, launch, power_of_2(spec.head_size_v), requests, query.device, dependent=True)
            facts = MergeKey(
                tensors[3].stride(), None if sinks is None else (sinks.stride(0), sinks.dtype), lse is not None, False
            )
            stride_lse = 0 if lse is None else lse.shape[1]
            of_merge = {"num_reqs": requests, "min_query_len": launch.min_query_len,
                        "max_query_len": launch.max_query_len, "stride_lse": stride_lse}  # fmt: skip
            self._merge, slots, self._elements, self._sums = merge.after(rows, of_merge, facts)
        softcap = spec.softcap or 0.0
        # the argument of the hyperbolic tangent, which is made of powers of 2
        scale = spec.softmax_scale / softcap if softcap else spec.softmax_scale
        self.numbers = (
            requests, numbers[2], launch.min_query_len, launch.max_query_len, tiles,
            launch.kv_heads_at_once * head_tiles, int(OF_PROMPTS * num_sms),
            keys.block, keys.head, keys.column, values.block, values.head, values.column, *strides[1][:2],
            0 if lse is None else lse.shape[1], *(0 if x is None else x.stride(0) for x in (sinks, k_scale, v_scale)),
            launch.splits, slots, scale * LOG2_E.value, softcap * LOG2_E.value,
        )  # fmt: skip
        self._start: Start | None = None

    def run(self, call: Sequence[Any], batch: Sequence[Any], varying: tuple[Any, ...] | None = None) -> None:
        """Computes the requests of the launch."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                self.run(call, batch)
            return
        query, key, value, output, lse, sinks, _, _, k_scale, v_scale, *_ = call
        starts, lengths, key_starts, _, table, *_ = batch
        key_starts = starts if key_starts is None else key_starts
        parts = None if self._merge is None else PlannedMerge.parts(query, self._elements, self._sums)
        tensors = (
            starts, key_starts, lengths, lengths if table is None else table, taken(self.device), output,
            *(output if x is None else x for x in (lse, sinks, k_scale, v_scale)),
            *((output, output) if parts is None else parts.tensors),
        )  # fmt: skip
        self._launch(query, self._descriptors(query, key, value, output), tensors, sinks)
        if parts is not None:
            self._merge.launch((*MERGED(call), starts), parts)

    def _launch(
        self, query: Tensor, descriptors: Sequence[Descriptor | None], tensors: Sequence[Tensor], sinks: Tensor | None
    ) -> None:
        if self._start is None:
            compiled = _compiled.get(self._kind(query, sinks))
            if compiled is None:
                self._compile(query, descriptors, tensors, sinks)
                return
            self._start = starter(compiled, self.grid)
        stream = triton.runtime.driver.active.get_current_stream(self.device.index or 0)
        arguments: list[Any] = [*descriptors, *[x.data_ptr() for x in tensors]]
        self._start(stream, arguments, (*self.numbers, self.code))

    def _kind(self, query: Tensor, sinks: Tensor | None) -> Any:
        return self.device, query.dtype, None if sinks is None else sinks.dtype, self.code

    def _descriptors(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> tuple[Descriptor | None, ...]:
        code = self.code
        keys = self.keys.described(key, is_in_groups(code.in_groups, code.size, code.part))
        values = self.values.described(value, is_in_groups(code.in_groups, code.size_v, code.part_v))
        return (
            Descriptor(query, self.shapes[0], self.strides[0]),
            keys,
            values,
            Descriptor(output, self.shapes[1], self.strides[1]),
            keys if code.size % code.part else None,
            values if code.size_v % code.part_v else None,
        )

    def _compile(
        self, query: Tensor, descriptors: Sequence[Descriptor | None], tensors: Sequence[Tensor], sinks: Tensor | None
    ) -> None:
        """Runs the kernel through Triton, which compiles it."""
        described = [
            x and TensorDescriptor(x.base, [*x.shape], [*x.strides], [*block], layout)
            for x, (block, layout) in zip(descriptors, blocks_of(self.code), strict=True)
        ]
        at_start = BUILDS[self.code.groups].at_start
        options = {"num_warps": 4, **FUSED, **({} if at_start is None else {"maxnreg": at_start})}
        with assembler_of("cuda", 90):
            compiled = prefill_kernel[self.grid](*described, *tensors, *self.numbers, self.code, **options)
        _compiled[self._kind(query, sinks)] = compiled


# compiled kernels by device, types and code
_compiled: dict[Any, Any] = {}


def blocks_of(code: Code) -> list[tuple[tuple[int, ...], Any]]:
    """The block of one copy of queries, keys, values and outputs, and of the narrower last parts of keys and values.

    With its layout in shared memory.
    """
    rows = ROWS.value // code.pack, code.pack
    queries, outputs = ((*rows, part) for part in (code.part, code.part_v))
    keys, values = (
        (code.box // 8, size // 64, 8, 64) if is_in_groups(code.in_groups, size, part) else (code.box, part)
        for size, part in ((code.size, code.part), (code.size_v, code.part_v))
    )
    rests = ((code.box, size % part) for size, part in ((code.size, code.part), (code.size_v, code.part_v)))
    return [
        (block, gl.NVMMASharedLayout(min(2 * block[-1], 128) or 128, 16, len(block)))
        for block in (queries, keys, values, outputs, *rests)
    ]


def prompts_of(
    spec: AttentionSpec, causal: bool, launch: Launch, queries: Sequence[int], numbers: Sequence[int],
    tensors: Sequence[Any], changes: Mapping[str, Any],
) -> Prompts | None:  # fmt: skip
    """The kernel for a launch, None where it cannot run.

    queries: of each request. numbers: of the batch. changes: of the chosen constants.
    """
    query, key, value, output, lse, sinks, _, _, k_scale, v_scale, *_ = tensors
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
    optional = {"lse": lse, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    split, groups = launch.splits > 1, 2
    if not split and not changes.get("mixed"):
        groups = groups_of(spec, causal, launch, queries, target_of(query.device).num_sms)
    given = [name for name, x in optional.items() if x is not None]
    code = code_of(spec, causal, block_size, given, groups, split)
    if not (keys.in_groups and values.in_groups):
        code = code._replace(in_groups=False)
    return Prompts(spec, code._replace(**changes), launch, strides, keys, values, numbers, tensors)
