# mypy: disable-error-code="import-untyped"
"""Plans of attention over packed codes on SM 9.0: few queries run the kernel in `decode`, others TRITON_ATTN's."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from attnreg.kernels.hopper.decode_plans import FewQueries, Split, either, rows_of, same_kernel_alone, walked
from attnreg.kernels.hopper.packed.decode import PackedDecode, packed_decode_kernel
from attnreg.kernels.hopper.programs import PAGE, WARPS
from attnreg.kernels.hopper.target import computes
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.layout import GIVEN, packed_strides
from attnreg.kernels.triton.planned.arguments import (
    POINTERS,
    AttentionBatch,
    AttentionKey,
    AttentionTensors,
    HeadStrides,
)
from attnreg.kernels.triton.planned.launches import Run
from attnreg.kernels.triton.plans import AttentionPlan, bound_launches
from attnreg.kernels.triton.schedule import ALONE, SHORT_QUERIES, Costs, Launch, Shares, costs_of
from attnreg.kernels.triton.target import target_of
from attnreg.kernels.turboquant.rotations import rotate
from attnreg.language.packed import Packed
from attnreg.runtime.interface import AttentionSpec, BatchMetadata
from attnreg.runtime.lengths import queries_of
from attnreg.runtime.turboquant.codebooks import codebook

# the features that the kernel computes
COMPUTED = frozenset(
    ["asymmetric_window", "batch_invariant", "causal_by_request", "kv_connector", "lse", "non_causal", "sinks",
     "sliding_window", "softcap"]
)  # fmt: skip


class KeyWalk(NamedTuple):
    """How a program walks keys.

    pages: that a warp loads at once. programs: of a multiprocessor, that keys are split for. late: a load waits until
    the registers of the previous one are free. registers: the most of a thread; None: the compiler decides.
    """

    pages: int
    programs: int
    late: bool = False
    registers: int | None = None


class CodeKind(NamedTuple):
    """The facts by which the kernel tells formats apart.

    keys: the bits of a key's code; it stands for a level, or is a float8_e4m3fn of 8 bits. values: the bits of a
    value's code. code: what a value's code stands for.
    """

    keys: int
    values: int
    code: str


# by the kind of a format, then by columns and rows. On an H200, 8 rows of 128 columns were timed with 64 requests and
# with one. Of codes of 4 and 8 bits several shapes were timed, of codes of 3 bits these alone
SHAPES = {
    CodeKind(4, 4, "uniform"): {
        (64, 8): KeyWalk(2, 4), (64, 16): KeyWalk(2, 3), (128, 8): KeyWalk(2, 3, late=True, registers=168),
        (128, 16): KeyWalk(1, 2),
    },
    CodeKind(8, 4, "uniform"): {
        (64, 8): KeyWalk(2, 4), (64, 16): KeyWalk(2, 3, registers=168), (128, 8): KeyWalk(2, 3, registers=168),
        (128, 16): KeyWalk(1, 2),
    },
    CodeKind(4, 4, "levels"): {
        (64, 8): KeyWalk(2, 4), (64, 16): KeyWalk(2, 3), (128, 8): KeyWalk(2, 3, late=True, registers=168),
        (128, 16): KeyWalk(1, 2),
    },
    CodeKind(3, 4, "uniform"): {
        (64, 8): KeyWalk(2, 4, late=True), (64, 16): KeyWalk(2, 2, late=True),
        (128, 8): KeyWalk(2, 3, late=True), (128, 16): KeyWalk(2, 2, late=True),
    },
    CodeKind(3, 3, "uniform"): {
        (64, 8): KeyWalk(2, 4, late=True, registers=128), (64, 16): KeyWalk(2, 2, late=True),
        (128, 8): KeyWalk(2, 3, late=True, registers=168), (128, 16): KeyWalk(2, 2, late=True),
    },
    CodeKind(3, 3, "levels"): {
        (64, 8): KeyWalk(2, 4, late=True, registers=128), (64, 16): KeyWalk(2, 2, late=True),
        (128, 8): KeyWalk(2, 3, late=True, registers=168), (128, 16): KeyWalk(2, 2, late=True),
    },
}  # fmt: skip

# the keys that a program computes while one begins and ends, and while a part is merged; on an H200, by
# benchmarks/splits.py
_BEGINS, _MERGED = 400, 8

_DECODE = Kernel(packed_decode_kernel, POINTERS, HeadStrides._fields)


def kind_of(packed: Packed) -> CodeKind | None:
    """The kind of a format, a key of `SHAPES`; None if the kernel does not read the format."""
    keys, values = packed.keys, packed.values
    kind = CodeKind(keys.bits, values.bits, values.code)
    return kind if kind in SHAPES and keys.code != "uniform" and not values.group else None


def costs_of_split(spec: AttentionSpec, per_sm: int) -> Costs:
    """The costs of a split for this kernel."""
    return costs_of(2 * spec.head_size, spec.head_size, per_sm)._replace(begin=_BEGINS, merge=_MERGED, alone=ALONE)


@functools.cache
def polynomial(bits: int, columns: int) -> tuple[int, int, float]:
    """(inner, outer, unit): the constants of a polynomial in x that gives a code's level.

    x is the code's distance from the middle of all codes, over 2**bits. For codes of 4 bits the level is
    ``unit * x * ((x**2 + inner)**2 + outer)``. For codes of 3 bits it is ``unit * x * (x**2 + inner)``. inner and outer
    are the bits of float16 numbers. The unit fits the levels of the codebook by least squares.
    """
    book = codebook(bits, columns)
    linear, cubic, fifth = book.coefficients
    x = [(code + 0.5) / 2**bits - 0.5 for code in range(2**bits)]
    # the codebook's coefficients belong to 2 * code - largest code, which is 2**(bits + 1) * x
    if bits == 4:
        inner = _rounded(cubic / fifth / 2**11)
        outer = _rounded(linear / fifth / 2**20 - inner * inner)
        squares = [y * y + inner for y in x]
        shape = [y * (square * square + outer) for y, square in zip(x, squares, strict=True)]
    else:
        inner, outer = _rounded(linear / cubic / 2**8), 0.0
        shape = [y * (y * y + inner) for y in x]
    # no `sum` and no powers: versions of Python round the first differently, and processors the second
    unit = math.fsum(a * b for a, b in zip(shape, book.levels, strict=True)) / math.fsum(a * a for a in shape)
    return _bits(inner), _bits(outer), unit


def _bits(x: float) -> int:
    return int.from_bytes(struct.pack("<e", x), "little")


def _rounded(x: float) -> float:
    number: float = struct.unpack("<e", struct.pack("<e", x))[0]
    return number


class PackedDecodeCode(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides and optional tensors."""

    spec: AttentionSpec
    kind: CodeKind
    rows: int
    shape: KeyWalk
    unrotated: int
    sides: tuple[int, int]
    split: bool
    shares: Shares | None

    @property
    def options(self) -> Mapping[str, int]:
        most = {} if self.shape.registers is None else {"maxnreg": self.shape.registers}
        return {"num_warps": WARPS.value} | most

    def constants(self, key: AttentionKey) -> Mapping[str, Any]:
        q_token, q_head, _ = key.query
        out_token, out_head, _ = key.output
        (k_block, _, _), (v_block, _, _) = key.keys, key.values
        spec, kind = self.spec, self.kind
        inner, outer, unit = polynomial(kind.keys, spec.head_size) if kind.keys < 8 else (0, 0, 1.0)
        left, right = self.sides
        return {
            "C": PackedDecode(
                kv_heads=spec.num_kv_heads,
                group=spec.num_heads // spec.num_kv_heads,
                rows=self.rows,
                size=spec.head_size,
                unrotated=self.unrotated,
                block_size=spec.block_size or 0,
                pages=self.shape.pages,
                late=self.shape.late,
                key_bits=kind.keys,
                value_bits=kind.values,
                levels=kind.code == "levels",
                inner=inner,
                outer=outer,
                unit=unit,
                left=left,
                right=right,
                softcap=bool(spec.softcap),
                split=self.split,
                q_token=q_token,
                q_head=q_head,
                out_token=out_token,
                out_head=out_head,
                k_block=k_block,
                v_block=v_block,
                sink=key.sinks.stride if key.sinks else 1,
            ),
            "SHARES": self.shares,
        }


class HopperPackedPlan(AttentionPlan):
    """A plan of attention over packed codes, whose launches of few queries run the kernel for SM 9.0.

    If all launches run it, it rotates the queries itself. For a batch_invariant layer it never does: how a query is
    rotated must not depend on the rest of the batch.
    """

    # these override the chosen ones, for measurements
    splits: int | None = None
    shape: KeyWalk | None = None

    def __init__(self, spec: AttentionSpec, batch: BatchMetadata, *, unrotated: int = 0) -> None:
        super().__init__(spec, batch, unrotated=unrotated)
        self.spec, self.causal, self.unrotated = spec, batch.causal, unrotated
        own = all(self._shape_of(planned.chosen) for planned in self.launches)
        self._turns = own and unrotated > 0 and not self.rotates and "batch_invariant" not in spec.features
        self.rotates = self.rotates or self._turns

    def _bind(self, tensors: AttentionTensors) -> list[Run]:
        portable = tensors
        if self._turns:
            # TRITON_ATTN's kernel reads rotated queries, in other memory with other strides
            portable = tensors._replace(query=self._rotated_like(tensors.query))
        runs = [self._turned(run) if self._turns else run for run in super()._bind(portable)]
        for i, planned in enumerate(self.launches):
            own = self._own(planned.chosen, tensors)
            if own is not None:
                runs[i] = either(own, runs[i])
        return runs

    def _rotated_like(self, query: torch.Tensor) -> torch.Tensor:
        """Memory for rotated queries."""
        return query.new_empty(*query.shape[:2], self.spec.head_size)

    def _turned(self, portable: Run) -> Run:
        """A function that rotates the queries and then runs ``portable``."""

        def run(call: AttentionTensors, batch: AttentionBatch, varying: tuple[Any, ...] | None = None) -> None:
            turned = self._rotated_like(call.query)
            rotate(call.query, turned, batch.query_start_loc, self.unrotated, self.spec.head_size, back=False)
            portable(call._replace(query=turned), batch, varying)

        return run

    def _shape_of(self, launch: Launch) -> KeyWalk | None:
        """The shape with which the kernel computes a launch; None if it does not compute it."""
        spec, packed = self.spec, self.spec.packed
        if (
            launch.max_query_len > SHORT_QUERIES or not computes(self.causal, spec, COMPUTED)
            or packed is None or spec.head_size != spec.head_size_v
        ):  # fmt: skip
            return None
        kind = kind_of(packed)
        found = SHAPES[kind].get((spec.head_size, rows_of(spec, launch))) if kind is not None else None
        return found and (self.shape or found)

    def _own(self, launch: Launch, tensors: AttentionTensors) -> Run | None:
        """The function that runs a launch by the kernel for SM 9.0; None if the kernel does not compute it."""
        spec, shape, device = self.spec, self._shape_of(launch), tensors.query.device
        if shape is None or not all(_walked(x) for x in (tensors.key, tensors.value)):
            return None
        if not same_kernel_alone(spec, tensors):
            return None
        assert isinstance(self.causal, bool)
        assert spec.packed is not None
        rows, kind = rows_of(spec, launch), kind_of(spec.packed)
        assert kind is not None
        tile = Split(WARPS.value * PAGE.value * shape.pages, target_of(device).num_sms, shape.programs)
        few = FewQueries(spec, self.causal, queries_of(self.host).each, self.keys, device, self.splits)
        costs = costs_of_split(spec, shape.programs)
        chosen = few.cut(launch, tile, costs)
        shares = few.shares(chosen, tile, costs)
        unrotated = self.unrotated if self.rotates else 0
        code = PackedDecodeCode(spec, kind, rows, shape, unrotated, spec.sides(self.causal), chosen.splits > 1, shares)
        (run,) = bound_launches([few.launch(chosen, _DECODE, code, shares)], self._numbers, tensors)
        return run


def _walked(pages: torch.Tensor) -> bool:
    """Whether pages [num_blocks, num_kv_heads, page] can be loaded by 16 bytes."""
    (_, head, _), _ = packed_strides(pages.stride())
    return head == GIVEN.value and walked(pages.shape, pages.stride())
