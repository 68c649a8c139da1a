"""Whether two tensors have memory in common."""

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
    """Whether an element of x may be memory of an element of y.

    may_be_alias: not where x is y, element by element. Exact for tensors of the same strides and element size, such as
    two ranges of columns of one tensor; for others, whether the ranges of their memory meet.
    """
    shift = y.data_ptr() - x.data_ptr()
    if shift >= reach(x) or -shift >= reach(y):
        return False
    if may_be_alias and shift == 0 and x.dtype == y.dtype and (x.shape, x.stride()) == (y.shape, y.stride()):
        return False
    dims = _steps(x, y)
    return dims is None or _meet(shift, dims, x.itemsize)


def _steps(x: Tensor, y: Tensor) -> list[tuple[int, int, int]] | None:
    """Each dimension's bytes from one index to the next, and the bounds of the difference of an index of x and of y.

    The longest first; None where x and y do not step alike.
    """
    if x.ndim != y.ndim or x.itemsize != y.itemsize:
        return None
    dims = []
    for size, stride, other_size, other_stride in zip(x.shape, x.stride(), y.shape, y.stride(), strict=True):
        # of one element, the stride says nothing
        step = stride if size > 1 else other_stride
        if size > 1 and other_size > 1 and stride != other_stride:
            return None
        if step and (size > 1 or other_size > 1):
            dims.append((step * x.itemsize, 1 - other_size, size - 1))
    return sorted(dims, reverse=True)


def overlap_problems(written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> Iterator[str]:
    """The problem of each tensor that is written and has memory in common with one that is read, or written too."""
    places = {}
    for name, x in (*written.items(), *read.items()):
        begin = x.data_ptr()
        places[name] = x, begin, begin + reach(x)
    for one, other in combinations(places, 2):
        (x, begin, end), (y, other_begin, other_end) = places[one], places[other]
        if one in written and begin < other_end and other_begin < end and share_memory(x, y, may_be_alias=False):
            yield overlap_words(one, other)


def overlap_words(written: str, other: str) -> str:
    """The problem of a tensor that is written and has memory in common with another, by their names."""
    return f"{written} overlaps {other} in memory; it is written while that is read, so give it memory of its own"


def _meet(shift: int, dims: Sequence[tuple[int, int, int]], itemsize: int) -> bool:
    """Whether two elements, their indices in each dimension apart within its bounds, are less than one apart."""
    if not dims:
        return abs(shift) < itemsize
    step, least, greatest = dims[0]
    # what the other dimensions can make up, in both directions
    down, up = (sum(s * bounds[side] for s, *bounds in dims[1:]) for side in (0, 1))
    low, high = -(-(shift - up - itemsize + 1) // step), (shift - down + itemsize - 1) // step
    return any(_meet(shift - d * step, dims[1:], itemsize) for d in range(max(low, least), min(high, greatest) + 1))
