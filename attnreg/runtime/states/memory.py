"""Whether two tensors share memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from torch import Tensor


def reach(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last; 0 without elements."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def share_memory(x: Tensor, y: Tensor, *, may_be_alias: bool) -> bool:
    """Whether an element of x may be in the memory of an element of y.

    may_be_alias: False if x is y, element by element. Exact for tensors of the same strides and element size, such as
    two ranges of columns of one tensor. For other tensors, the answer is whether the ranges of their memory overlap.
    """
    shift = y.data_ptr() - x.data_ptr()
    if shift >= reach(x) or -shift >= reach(y):
        return False
    if may_be_alias and shift == 0 and x.dtype == y.dtype and (x.shape, x.stride()) == (y.shape, y.stride()):
        return False
    dims = _steps(x, y)
    return dims is None or _meet(shift, dims, x.itemsize)


def _steps(x: Tensor, y: Tensor) -> list[tuple[int, int, int]] | None:
    """Each dimension's step in bytes, with the least and the largest difference between an index of x and one of y.

    The longest step first. None if x and y have different strides.
    """
    if x.ndim != y.ndim or x.itemsize != y.itemsize:
        return None
    dims = []
    for size, stride, other_size, other_stride in zip(x.shape, x.stride(), y.shape, y.stride(), strict=True):
        # the stride of a dimension with one element means nothing
        step = stride if size > 1 else other_stride
        if size > 1 and other_size > 1 and stride != other_stride:
            return None
        if step and (size > 1 or other_size > 1):
            dims.append((step * x.itemsize, 1 - other_size, size - 1))
    return sorted(dims, reverse=True)


def overlap_problems(written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> Iterator[str]:
    """A problem for each written tensor that shares memory with a tensor that is read, or with another written one."""
    places = {}
    for name, x in (*written.items(), *read.items()):
        begin = x.data_ptr()
        places[name] = x, begin, begin + reach(x)
    for one, other in combinations(places, 2):
        (x, begin, end), (y, other_begin, other_end) = places[one], places[other]
        if one in written and begin < other_end and other_begin < end and share_memory(x, y, may_be_alias=False):
            yield overlap_words(one, other)


def overlap_words(written: str, other: str) -> str:
    """The problem of a written tensor that shares memory with another, by their names."""
    return f"{written} overlaps {other} in memory; it is written while that is read, so give it memory of its own"


def _meet(shift: int, dims: Sequence[tuple[int, int, int]], itemsize: int) -> bool:
    """Whether two elements can overlap, for index differences within each dimension's bounds."""
    if not dims:
        return abs(shift) < itemsize
    step, least, greatest = dims[0]
    # the distances that the other dimensions can add, in both directions
    down, up = (sum(s * bounds[side] for s, *bounds in dims[1:]) for side in (0, 1))
    low, high = -(-(shift - up - itemsize + 1) // step), (shift - down + itemsize - 1) // step
    return any(_meet(shift - d * step, dims[1:], itemsize) for d in range(max(low, least), min(high, greatest) + 1))
