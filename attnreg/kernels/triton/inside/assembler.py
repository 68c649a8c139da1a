# mypy: disable-error-code="import-untyped"
"""Selects the assembler that makes machine code for SM 9.0.

Triton 3.9 uses ptxas 13.4 for SM 9.0 and later, and 12.9 for older GPUs. With Triton's options, 13.4 spills 24 to 440
bytes in kernels that need all registers, and serialises the matrix products of heads of 192. Every release also has
12.9, with which these kernels were measured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from triton import knobs

# the choice is global: while one thread has changed it, no other may compile for SM 9.0 or read it
_LOCK = RLock()


@contextmanager
def assembler_of(backend: str, arch: int | str) -> Iterator[None]:
    """Makes Triton assemble kernels for SM 9.0 with the ptxas for older GPUs, unless the user has chosen another."""
    if (backend, arch) != ("cuda", 90):
        yield
        return
    with _LOCK:
        path = _instead()
    if path is None:
        yield
        return
    with _LOCK, knobs.nvidia.scope():
        knobs.nvidia.ptxas_blackwell = path
        yield


@functools.cache
def _instead() -> str | None:
    """The path of the ptxas to use for SM 9.0; None if Triton uses it anyway, or the user has chosen another."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = str(knobs.nvidia.ptxas.path)
    chosen = os.environ.get("TRITON_PTXAS_BLACKWELL_PATH")
    return None if chosen or get_ptxas(90).path == path else path
