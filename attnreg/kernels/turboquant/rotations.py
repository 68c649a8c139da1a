# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Rotations by a random-sign Hadamard matrix: of queries into the basis of rotated keys, and of outputs back.

The attention kernel rotates the queries of a decode itself (`attnreg.kernels.packed.rotation`). These launches rotate
the queries of other batches, and all outputs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.packed.rotation import STEP, hadamard, sign_of, signs
from attnreg.kernels.triton.launch import Kernel

# how many rows a program rotates; the same for every batch, so that the order of sums does not depend on the batch
_ROWS = 16


@triton.jit(do_not_specialize=["num_reqs", "num_rows"], do_not_specialize_on_alignment=["query_start_loc_ptr"])
def _rotate_kernel(
    source_ptr, target_ptr, query_start_loc_ptr, num_reqs, num_rows,
    SOURCE_TOKEN: tl.constexpr, SOURCE_HEAD: tl.constexpr, TARGET_TOKEN: tl.constexpr, TARGET_HEAD: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr, BLOCK_R: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rotates the rows (token, head) of a batch, or with BACK rotates them back; padding is neither read nor written.

    Grid: (cdiv(num_rows, BLOCK_R)). Rows have SIZE elements in the model's basis, and COLUMNS in the basis of codes.
    BACK: the source is float32, and is multiplied as the sum of two numbers of the target's type.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = row // HEADS, row % HEADS
    exists = (row < num_rows) & (token < tl.load(query_start_loc_ptr + num_reqs))
    source_ptr += (token * SOURCE_TOKEN + head * SOURCE_HEAD)[:, None]
    target_ptr += (token * TARGET_TOKEN + head * TARGET_HEAD)[:, None]
    DTYPE: tl.constexpr = target_ptr.dtype.element_ty
    FACTOR: tl.constexpr = 1.0 / COLUMNS**0.5
    # one block serves for all of the matrix: the others are this one or its negative
    matrix = hadamard(tl.arange(0, WIDTH), WIDTH, DTYPE)
    for first in tl.range(0, COLUMNS, WIDTH, num_stages=1):
        offs_t = first + tl.arange(0, WIDTH)
        y = tl.zeros([BLOCK_R, WIDTH], dtype=tl.float32)
        # rows are read again for each part of the columns, because a whole row would fill the registers
        for d in tl.range(0, COLUMNS, WIDTH, num_stages=1):
            offs_d = d + tl.arange(0, WIDTH)
            mask = exists[:, None] if BACK else exists[:, None] & (offs_d < SIZE)[None, :]
            x = tl.load(source_ptr + offs_d[None, :], mask=mask, other=0.0).to(tl.float32) * sign_of(d & first)
            x = x * FACTOR if BACK else x * signs(offs_d)[None, :]
            high = x.to(DTYPE)
            y = tl.dot(high, matrix, y, input_precision="ieee")
            if BACK:
                y = tl.dot((x - high.to(tl.float32)).to(DTYPE), matrix, y, input_precision="ieee")
        y = y * signs(offs_t)[None, :] if BACK else y * FACTOR
        mask = exists[:, None] & (offs_t < SIZE)[None, :] if BACK else exists[:, None]
        tl.store(target_ptr + offs_t[None, :], y.to(DTYPE), mask=mask)


_ROTATE = Kernel(_rotate_kernel)


class RotateCode(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides."""

    dtype: torch.dtype
    heads: int
    size: int
    columns: int
    back: bool

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": 4}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        (source_token, source_head, _), (target_token, target_head, _) = key
        return {
            "SOURCE_TOKEN": source_token,
            "SOURCE_HEAD": source_head,
            "TARGET_TOKEN": target_token,
            "TARGET_HEAD": target_head,
            "HEADS": self.heads,
            "SIZE": self.size,
            "COLUMNS": self.columns,
            "BACK": self.back,
            "BLOCK_R": _ROWS,
            "WIDTH": min(STEP.value, self.columns),
        }


def rotate(source: Tensor, target: Tensor, query_start_loc: Tensor, size: int, columns: int, *, back: bool) -> None:
    """Writes the rotated rows of source [tokens, heads, size or columns] to target, or with ``back`` rotates them back.

    Rows from ``query_start_loc[-1]`` on are padding. Without ``back``, source and target have the same type; with it,
    the source is float32. size, columns: SIZE and COLUMNS of `_rotate_kernel`.
    """
    tokens, heads, _ = source.shape
    if not tokens:
        return
    code = RotateCode(target.dtype, heads, size, columns, back)
    grid = (-(-tokens * heads // _ROWS), 1, 1)
    _ROTATE.variant(source.device, code).launch(
        (source.stride(), target.stride()),
        grid,
        source_ptr=source,
        target_ptr=target,
        query_start_loc_ptr=query_start_loc,
        num_reqs=query_start_loc.shape[0] - 1,
        num_rows=tokens * heads,
    )
