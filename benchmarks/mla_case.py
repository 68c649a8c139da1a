"""A case of benchmarks/mla.py: its name, its mark, and how it is prepared, run and held against float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """Where cases run: on a GPU at their sizes, or as a dry run at small ones, on a processor in Triton's interpreter.

    dtype: of queries; the interpreter multiplies no bfloat16.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    dry: bool = False

    def few(self, size: int, most: int) -> int:
        """A size, in a dry run no more than so much."""
        return min(size, most) if self.dry else size


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A case with its tensors.

    call: what is measured. error: of its last result, ||out - ref|| / ||ref||. moved, operations: the bytes and the
    floating-point operations of the work, at least; copies: as many bytes are written as read. captured: whether a
    CUDA graph can hold the call. peers: name and call of each peer that can be imported.
    """

    call: Callable[[], Any]
    error: Callable[[], float]
    peers: Callable[[], Iterator[tuple[str, Callable[[], Any]]]]
    moved: float = 0.0
    operations: float = 0.0
    copies: bool = False
    captured: bool = True
    max_error: float = 1e-2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A name, microseconds on an H200 that are not to be exceeded, and what prepares the trial."""

    name: str
    mark: float
    prepare: Callable[[], Trial]


def function_of(module: str, name: str) -> Any:
    """A function of a peer, None where it cannot be imported."""
    try:
        return getattr(importlib.import_module(module), name)
    # a package that loads libraries can fail in any way
    except Exception:
        return None
