"""Whether two tensors have memory in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from torch import Tensor


def reach(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last; 0 without elements."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def share_memory(x: Tensor, y: Tensor, *, may_be_alias: bool) -> bool:
    """Whether an element of x may be memory of an element of y.

    may_be_alias: not where x is y, element by element. Exact for tensors of the same shape, strides and element size,
    such as two columns of one tensor; for others, whether the ranges of their memory meet.
    """
    shift = y.data_ptr() - x.data_ptr()
    if shift >= reach(x) or -shift >= reach(y):
        return False
    alike = x.shape == y.shape and x.stride() == y.stride() and x.itemsize == y.itemsize
    if may_be_alias and alike and shift == 0 and x.dtype == y.dtype:
        return False
    if not alike:
        return True
    pairs = zip(x.stride(), x.shape, strict=True)
    dims = sorted(((stride * x.itemsize, size) for stride, size in pairs if size > 1 and stride), reverse=True)
    return _meet(shift, dims, x.itemsize)


def overlap_problems(written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> Iterator[str]:
    """The problem of each tensor that is written and has memory in common with one that is read, or written too."""
    places = {}
    for name, x in (*written.items(), *read.items()):
        begin = x.data_ptr()
        places[name] = x, begin, begin + reach(x)
    for one, other in combinations(places, 2):
        (x, begin, end), (y, other_begin, other_end) = places[one], places[other]
        if one in written and begin < other_end and other_begin < end and share_memory(x, y, may_be_alias=False):
            yield f"{one} overlaps {other} in memory; it is written while that is read, so give it memory of its own"


def _meet(shift: int, dims: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """Whether two elements, their indices in each dimension less than its size apart, are less than one apart."""
    if not dims:
        return abs(shift) < itemsize
    stride, size = dims[0]
    rest = sum(s * (n - 1) for s, n in dims[1:]) + itemsize
    # the differences of the index from which the other dimensions can make up what is left
    low, high = -(-(shift - rest) // stride), (shift + rest) // stride
    return any(
        _meet(shift - d * stride, dims[1:], itemsize) for d in range(max(low, 1 - size), min(high, size - 1) + 1)
    )
