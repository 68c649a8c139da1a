"""The one validation of tensor arguments: type, shape, device, strides, and memory that a call writes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnreg.runtime.batch import tensor_words

# kernels take the strides of tables as 32-bit numbers
_INT32 = 2**31 - 1


def signatures(tensors: Iterable[Tensor | None]) -> list[tuple[Any, ...] | None]:
    """The facts about each tensor that `tensor_problems` depends on. Raises RuntimeError for one without strides."""
    return [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in tensors]


def tensor_problems(
    name: str,
    tensor: Any,
    shape: Sequence[int | None],
    dtype: torch.dtype | None,
    *,
    device: torch.device | None = None,
    beside: str = "the batch",
    dense: bool = True,
    written: bool = False,
) -> Iterator[str]:
    """The problems of an argument; None in ``shape``: any size; dtype None: any floating one; device None: any.

    dense: the last dimension is contiguous. written: no two elements are one memory. beside: what is on ``device``.
    """
    if not isinstance(tensor, Tensor):
        yield f"{name} is {tensor_words(tensor)}; expected a tensor"
        return
    if tensor.layout is not torch.strided or tensor.is_nested:
        yield f"{name} is {tensor_words(tensor)} {tensor.layout}; expected a tensor with strides"
        return
    right_type = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    fits = tensor.ndim == len(shape) and all(a in (None, b) for a, b in zip(shape, tensor.shape, strict=True))
    if not (fits and right_type):
        sizes = ", ".join("any" if s is None else str(s) for s in shape)
        words = "of a floating type" if dtype is None else str(dtype).removeprefix("torch.")
        yield f"{name} is {tensor_words(tensor)}; expected [{sizes}] {words}"
    elif dense and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        yield f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1 (call .contiguous())"
    elif written and overlaps(tensor):
        yield (
            f"{name} has strides {list(tensor.stride())}, by which several of its elements are one memory; it is "
            "written, so give it memory of its own"
        )
    if tensor.is_neg():
        yield f"{name} is a negated view, whose memory holds other numbers (call .resolve_neg())"
    if device is not None and tensor.device != device:
        yield f"{name} is on {tensor.device}, {beside} on {device}"


def table_problems(name: str, tensor: Tensor) -> Iterator[str]:
    """The problem of strides that a kernel cannot take as numbers."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride > _INT32:
            yield f"{name} has strides {list(tensor.stride())}; expected up to {_INT32} (call .contiguous())"
            return


def overlaps(tensor: Tensor) -> bool:
    """Whether several elements of a tensor may be one memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)) if tensor.numel() else ():
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
