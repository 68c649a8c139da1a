"""The lengths of a batch's requests in host memory, as numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_char
from functools import lru_cache
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple, Self

from torch import Tensor

# two positions, or a position and a window, fit into 32 bits when added
LONGEST = 2**30


class Queries(NamedTuple):
    """The queries of each request, from their prefix sums: the counts, first and last sum, least and most."""

    each: list[int]
    begin: int
    total: int
    least: int
    most: int


class Lengths(NamedTuple):
    """A batch's `Queries` with their `content`, its keys, and the most of them; above LONGEST if one is negative."""

    starts: bytes
    queries: Queries
    keys: list[int]
    longest: int

    @classmethod
    def of(cls, starts: bytes, lengths: bytes) -> Self:
        """The lengths in the `content` of two int32 tensors: prefix sums of the queries, and keys."""
        keys = numbers_in(lengths)
        longest = max(keys, default=0) if min(keys, default=0) >= 0 else LONGEST + 1
        return cls(starts, queries_of(starts), keys, longest)


@lru_cache(maxsize=1024)
def bytes_of(size: int) -> Any:
    """The type of ctypes arrays of ``size`` bytes; their ``raw`` is the fastest way to read memory at an address."""
    return c_char * size


def content(tensor: Tensor) -> bytes:
    """The elements of a tensor in host memory, in order."""
    whole = tensor if tensor.is_contiguous() else tensor.contiguous()
    return bytes_of(whole.nbytes).from_address(whole.data_ptr()).raw  # type: ignore[no-any-return]


def numbers_in(content: bytes) -> list[int]:
    """The numbers of an int32 tensor, from its `content`."""
    numbers: list[int] = memoryview(content).cast("i").tolist()
    return numbers


# cached, because the steps of a decode have the same queries
@lru_cache(maxsize=128)
def queries_of(starts: bytes) -> Queries:
    """The queries of each request, from the `content` of their prefix sums, an int32 tensor that is not empty."""
    sums = numbers_in(starts)
    each = list(map(sub, sums[1:], sums))
    return Queries(each, sums[0], sums[-1], min(each, default=0), max(each, default=0))


def prefix_sums(lengths: Sequence[int]) -> list[int]:
    """Where each length begins, and where the last ends."""
    return [0, *accumulate(lengths)]


@lru_cache(maxsize=128)
def starts_of(lengths: bytes) -> bytes:
    """The prefix sums of lengths; argument and result are the memory of 32-bit integers."""
    return array("i", prefix_sums(memoryview(lengths).cast("I").tolist())).tobytes()
