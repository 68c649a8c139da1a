# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Kernels in Triton's interpreter: right in bfloat16, and in half of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter


def interpret(function: Any, grid: tuple[int, int, int], values: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
    """Runs a kernel in Triton's interpreter, in float32 where it would compute in bfloat16.

    The interpreter keeps bfloat16 as integers of 16 bits: it multiplies these in ``tl.dot`` and cuts off what a GPU
    rounds. So the kernel gets float32 in the place of such tensors, and what it wrote there is rounded afterwards.
    """
    narrow = [_memory_of(x) if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else None for x in values]
    before = [None if x is None else x.float() for x in narrow]
    wide = [None if x is None else x.clone() for x in before]
    given = (
        x if memory is None else memory.as_strided(x.shape, x.stride()) for x, memory in zip(values, wide, strict=True)
    )
    with _quick():
        function[grid](*given, *(tl.float32 if x == tl.bfloat16 else x for x in constants))
    for memory, old, new in zip(narrow, before, wide, strict=True):
        if memory is not None and old is not None and new is not None:
            # by their bits, so that what is not a number stays as it was where nothing was written
            written = old.view(torch.int32) != new.view(torch.int32)
            memory[written] = new[written].bfloat16()


def _memory_of(tensor: Tensor) -> Tensor:
    """The memory from the first element of a tensor to its last, in one dimension."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,))


@contextmanager
def _quick() -> Iterator[None]:
    """Has the interpreter replace the language's functions once in a launch, not in each call of a device function.

    It looks at every name of the language each time, which is a third of its work, and finds nothing left to replace.
    """
    quicker: dict[str, Callable[[Any], Any]] = {"_patch_lang": _once, "_get_np_dtype": _kept}
    # as Triton 3.6 and 3.7 have them; another may do without
    before = {name: getattr(interpreter, name) for name in quicker if hasattr(interpreter, name)}
    try:
        for name, function in before.items():
            setattr(interpreter, name, quicker[name](function))
        yield
    finally:
        for name, function in before.items():
            setattr(interpreter, name, function)


def _once(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a kernel that does once for each module what is to be done to the language that it imports."""
    done: set[int] = set()

    def first(function: Any) -> Any:
        module = id(function.__globals__)
        if module in done:
            return None  # the call of a device function takes no result
        done.add(module)
        return replace(function)

    return first


@cache
def _kept(of_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function from a type of Triton's to NumPy's, which depends on the type of the elements alone; kept by it."""
    of_scalar = cache(of_type)

    def kept(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        # the types of pointers are no keys of a dictionary
        return of_type(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return kept
