# mypy: disable-error-code="import-untyped"
"""The launch of the kernel in `kernel`, in place of one of TRITON_ATTN's for prompts.

The kernel needs tensors that the copy engine can read in place: addresses and strides are multiples of 16 bytes, and
the rows of a cache are evenly spaced. Other calls run TRITON_ATTN's kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnreg.kernels.hopper.prompts.choices import BUILDS, OF_PROMPTS, SIZES, SMALLEST_BOX, code_of, groups_of
from attnreg.kernels.hopper.prompts.counters import taken
from attnreg.kernels.hopper.prompts.kernel import prefill_kernel
from attnreg.kernels.hopper.prompts.shared import ROWS, Code, is_in_groups
from attnreg.kernels.triton.launch import Kernel, pointers_of
from attnreg.kernels.triton.planned.arguments import MERGED, AttentionBatch, AttentionTensors, BatchNumbers
from attnreg.kernels.triton.schedule import Launch
from attnreg.kernels.triton.softmax import LOG2_E
from attnreg.kernels.triton.splits.beside import Beside
from attnreg.kernels.triton.splits.merge import BoundMerge, MergeKey, OfHeads, Parts, PlannedMerge
from attnreg.kernels.triton.target import target_of
from attnreg.kernels.triton.tiles import power_of_2
from attnreg.runtime.interface import AttentionSpec

_INT32 = 2**31


class MatrixRows(NamedTuple):
    """Keys, or values, as a matrix; and the rows and columns at which blocks and heads begin in it: `shared.Places`."""

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
        """The matrix for the copy engine. in_groups: as groups of 8 rows, in parts of 64 columns."""
        (rows, width), stride = self.shape, self.stride
        if in_groups:
            return Descriptor(base, (rows // 8, width // 64, 8, 64), (8 * stride, 64, stride, 1))
        return Descriptor(base, self.shape, (stride, 1))


def rows_of(shape: Sequence[int], strides: Sequence[int], layout: str) -> MatrixRows | None:
    """Keys or values [blocks, tokens, heads, size] (or HND), or packed [tokens, heads, size], as rows of a matrix.

    None if no matrix of evenly spaced rows holds them, or if the copy engine cannot read that matrix.
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
    return MatrixRows((rows, width), stride, per_block // stride, head_rows, column) if 0 < rows < _INT32 else None


def spacing(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int] | None:
    """The strides of queries or outputs [tokens, heads, size]; None if the copy engine cannot address them."""
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


class PromptDescriptors(NamedTuple):
    """The descriptors of a call's tensors for the copy engine: the kernel's first parameters.

    k_rest, v_rest: for the last part of keys, and of values, if it is narrower than the others.
    """

    q: Descriptor
    k: Descriptor
    v: Descriptor
    o: Descriptor
    k_rest: Descriptor | None
    v_rest: Descriptor | None


class PromptTensors(NamedTuple):
    """The tensors of a launch: the kernel's pointers. A pointer that the code does not use gets any other tensor."""

    query_start_loc: Tensor
    key_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    taken: Tensor
    output: Tensor
    lse: Tensor
    sinks: Tensor
    k_scale: Tensor
    v_scale: Tensor


class PromptCode(NamedTuple):
    """The facts that the kernel's code depends on: its constants alone."""

    code: Code

    @property
    def options(self) -> Mapping[str, int]:
        at_start = BUILDS[self.code.groups].at_start
        return {"num_warps": 4} if at_start is None else {"num_warps": 4, "maxnreg": at_start}

    def constants(self, key: None) -> Mapping[str, Any]:
        return {"C": self.code}


def _described(code: PromptCode, descriptors: Sequence[Descriptor | None]) -> list[TensorDescriptor | None]:
    """The fields of `PromptDescriptors` as Triton's descriptors, each with the block of one copy."""
    return [
        x and TensorDescriptor(x.base, [*x.shape], [*x.strides], [*block], layout)
        for x, (block, layout) in zip(descriptors, blocks_of(code.code), strict=True)
    ]


_PROMPTS = Kernel(prefill_kernel, pointers_of(PromptTensors, Parts), describe=_described)


class Spaced(NamedTuple):
    """How a call's tensors lie in memory, for the copy engine: the strides of queries and outputs; keys and values."""

    query: tuple[int, int, int]
    output: tuple[int, int, int]
    keys: MatrixRows
    values: MatrixRows

    @classmethod
    def of(cls, tensors: AttentionTensors, layout: str) -> Spaced | None:
        """How these tensors lie; None if the copy engine cannot read them."""
        query, output = (spacing(x.shape, x.stride()) for x in (tensors.query, tensors.output))
        keys, values = (rows_of(x.shape, x.stride(), layout) for x in (tensors.key, tensors.value))
        if query is None or output is None or keys is None or values is None:
            return None
        return cls(query, output, keys, values)


class PromptLaunch:
    """The kernel for one launch of a plan, bound to the facts of a call's tensors but not to their memory."""

    def __init__(
        self, spec: AttentionSpec, code: Code, launch: Launch, spaced: Spaced, batch: BatchNumbers,
        tensors: AttentionTensors,
    ) -> None:  # fmt: skip
        """batch: the batch's numbers. tensors: with the facts of the calls' tensors."""
        query, lse = tensors.query, tensors.lse
        self.code, self.spaced, self.device = code, spaced, query.device
        # a repeated call may give tensors of other shapes, with the same strides: the first call's shapes count
        self.shape, self.output_shape = query.shape, tensors.output.shape
        rows, num_sms = query.shape[0], target_of(query.device).num_sms
        head_tiles = code.group // code.pack
        tiles = rows // (code.groups * ROWS.value // code.pack) + batch.num_reqs
        programs = tiles * code.kv_heads * head_tiles * (launch.splits if code.split else 1)
        stride_lse = 0 if lse is None else lse.shape[1]
        self.merge: BoundMerge | None = None
        if code.split:
            device, block_dv = query.device, power_of_2(spec.head_size_v)
            merge = PlannedMerge(spec, launch, block_dv, batch.num_reqs, device, dependent=True)
            key = MergeKey(tensors.output.stride(), OfHeads.of(tensors.sinks), lse is not None, False)
            self.merge = merge.bind(key, rows, {**batch._asdict(), **launch._asdict(), "stride_lse": stride_lse})
        softcap = spec.softcap or 0.0
        # scales the argument of the hyperbolic tangent; the kernel computes it with powers of 2
        scale = spec.softmax_scale / softcap if softcap else spec.softmax_scale
        out_token, out_head, _ = spaced.output
        numbers = {
            "num_reqs": batch.num_reqs,
            "stride_table": batch.stride_table,
            "min_query_len": launch.min_query_len,
            "max_query_len": launch.max_query_len,
            "tiles": tiles,
            "heads_at_once": launch.kv_heads_at_once * head_tiles,
            "of_prompts": int(OF_PROMPTS * num_sms),
            "k_block": spaced.keys.block,
            "k_head": spaced.keys.head,
            "k_column": spaced.keys.column,
            "v_block": spaced.values.block,
            "v_head": spaced.values.head,
            "v_column": spaced.values.column,
            "stride_token": out_token,
            "stride_head": out_head,
            "stride_lse": stride_lse,
            **{
                f"stride_{name}": 0 if x is None else x.stride(0)
                for name, x in (("sink", tensors.sinks), ("k_scale", tensors.k_scale), ("v_scale", tensors.v_scale))
            },
            "splits": launch.splits,
            "slots": 0 if self.merge is None else self.merge.slots,
            "scale": scale * LOG2_E.value,
            "softcap": softcap * LOG2_E.value,
        }
        grid = (min(code.programs * num_sms, programs), 1, 1)
        self.variant = _PROMPTS.variant(query.device, PromptCode(code))
        self._bound = self.variant.bind(None, grid, numbers)

    def run(self, call: AttentionTensors, batch: AttentionBatch, varying: tuple[Any, ...] | None = None) -> None:
        """Computes the requests of the launch."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                self.run(call, batch)
            return
        starts, lengths, output = batch.query_start_loc, batch.seq_lens, call.output
        tensors = PromptTensors(
            starts, starts if batch.key_start_loc is None else batch.key_start_loc, lengths,
            lengths if batch.block_table is None else batch.block_table, taken(self.device), output,
            *(output if x is None else x for x in (call.lse, call.sinks, call.k_scale, call.v_scale)),
        )  # fmt: skip
        described = self.descriptors(call.query, call.key, call.value, output)
        if self.merge is None:
            self._bound.launch((*tensors, *Parts(output, output)), described=described)
            return
        parts = PlannedMerge.parts(call.query, self.merge.elements, self.merge.sums)
        self._bound.launch(tensors, parts, described=described)
        self.merge.bound.launch((*MERGED(call), starts), parts)

    def descriptors(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> PromptDescriptors:
        """The descriptors of a call's tensors."""
        code, spaced = self.code, self.spaced
        keys = spaced.keys.described(key, is_in_groups(code.in_groups, code.size, code.part))
        values = spaced.values.described(value, is_in_groups(code.in_groups, code.size_v, code.part_v))
        return PromptDescriptors(
            Descriptor(query, self.shape, spaced.query),
            keys,
            values,
            Descriptor(output, self.output_shape, spaced.output),
            keys if code.size % code.part else None,
            values if code.size_v % code.part_v else None,
        )


def blocks_of(code: Code) -> list[tuple[tuple[int, ...], Any]]:
    """The block of one copy, and its layout in shared memory: for each field of `PromptDescriptors`."""
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


class ManyQueries(NamedTuple):
    """A batch whose launches of prompts may go to the kernel for SM 9.0.

    causal: whether all requests are, else none is. queries: of each request. numbers: of the batch. changes: override
    the chosen constants, for measurements.
    """

    spec: AttentionSpec
    causal: bool
    queries: Sequence[int]
    numbers: BatchNumbers
    changes: Mapping[str, Any]


def prompts_of(
    many: ManyQueries, launch: Launch, tensors: AttentionTensors, *, mixed: bool = False, beside: Beside | None = None
) -> PromptLaunch | None:
    """The kernel for a launch; None if it cannot run.

    mixed: it also computes requests of fewer queries; with ``beside``, where the device finds that worth it.
    """
    spec, changes = many.spec, {"mixed": mixed, "beside": beside, **many.changes}
    block_size = (spec.block_size or 0) if tensors.key.dim() == 4 else 0
    dtypes = {x.dtype for x in (tensors.query, tensors.key, tensors.value, tensors.output)}
    if (
        spec.head_size not in SIZES or spec.head_size_v not in SIZES or spec.kv_layout == "SPLIT"
        or dtypes not in ({torch.float16}, {torch.bfloat16})
        or block_size % SMALLEST_BOX
    ):  # fmt: skip
        return None
    spaced = Spaced.of(tensors, spec.kv_layout)
    if spaced is None:
        return None
    split, groups = launch.splits > 1, 2
    if not split and not changes["mixed"]:
        groups = groups_of(spec, many.causal, launch, many.queries, target_of(tensors.query.device).num_sms)
    given = [name for name in ("lse", "sinks", "k_scale", "v_scale") if getattr(tensors, name) is not None]
    code = code_of(spec, many.causal, block_size, given, groups, split)
    if not (spaced.keys.in_groups and spaced.values.in_groups):
        code = code._replace(in_groups=False)
    return PromptLaunch(spec, code._replace(**changes), launch, spaced, many.numbers, tensors)
