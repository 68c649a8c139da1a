"""A case of benchmarks/mla.py: its name, its mark, and how it is prepared, run and held against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A case with its tensors on the GPU.

    call: what is measured. error: of its last result, ||out - ref|| / ||ref||. moved, operations: the bytes and the
    floating-point operations of the work, at least; copies: as many bytes are written as read. peers: name and call of
    each peer that can be imported.
    """

    call: Callable[[], Any]
    error: Callable[[], float]
    peers: Callable[[], Iterator[tuple[str, Callable[[], Any]]]]
    moved: float = 0.0
    operations: float = 0.0
    copies: bool = False
    max_error: float = 1e-2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A name, microseconds on an H200 that are not to be exceeded, and what prepares the trial."""

    name: str
    mark: float
    prepare: Callable[[], Trial]
