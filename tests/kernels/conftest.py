"""Fixtures of tests that run layers, or compile kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.compilers.compiler import Compiler
from support.layers.fitting import launches_fit
from support.layers.layers import cpu, make, one_thread

__all__ = ["compiler", "cpu", "launches_fit", "make", "one_thread"]


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    """A process that compiles."""
    compiler = Compiler()
    yield compiler
    compiler.close()
