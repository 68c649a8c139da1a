# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Runs kernels in Triton's interpreter, with bfloat16 rounded as on a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from attnreg.kernels.interpreter.quick import quick
from attnreg.locks import ForkSafeLock

_lock = ForkSafeLock()


def interpret(function: Any, grid: tuple[int, int, int], values: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
    """Runs a kernel in Triton's interpreter, in float32 where it would compute in bfloat16.

    The interpreter keeps bfloat16 as 16-bit integers. It multiplies these integers in ``tl.dot``, and truncates where a
    GPU rounds. So the kernel gets float32 tensors instead, and what it wrote to them is rounded to bfloat16 afterwards.
    NumPy's warnings are off, because rows that a mask drops compute with arbitrary memory; a GPU does not warn either.
    Launches from several threads run one after the other: the interpreter keeps the current program, and its patches of
    the language, in global state.
    """
    with _lock:
        _interpret(function, grid, values, constants)


def _interpret(function: Any, grid: tuple[int, int, int], values: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
    narrow = [_memory_of(x) if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else None for x in values]
    before = [None if x is None else x.float() for x in narrow]
    wide = [None if x is None else x.clone() for x in before]
    given = (
        x if memory is None else memory.as_strided(x.shape, x.stride()) for x, memory in zip(values, wide, strict=True)
    )
    with quick(), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        function[grid](*given, *(tl.float32 if x == tl.bfloat16 else x for x in constants))
    for memory, old, new in zip(narrow, before, wide, strict=True):
        if memory is not None and old is not None and new is not None:
            # compares bits, so that a NaN that was not written stays unchanged
            written = old.view(torch.int32) != new.view(torch.int32)
            memory[written] = new[written].bfloat16()


def _memory_of(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, as one dimension."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,))
