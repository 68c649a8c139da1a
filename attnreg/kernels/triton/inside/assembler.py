# mypy: disable-error-code="import-untyped"
"""The assembler that makes machine code for SM 9.0.

Triton 3.9 takes ptxas 13.4 from SM 9.0 on, and 12.9 below. Where a kernel needs all registers, 13.4 with the options
that Triton gives it spills 24 to 440 bytes of them, and serialises the matrix products of heads of 192. Every release
has 12.9 too, by which these kernels were measured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from triton import knobs

# the choice is the process's: while one thread has it changed, no other may compile for SM 9.0, or look at it
_LOCK = RLock()


@contextmanager
def assembler_of(backend: str, arch: int | str) -> Iterator[None]:
    """Has Triton assemble kernels for SM 9.0 by the ptxas that it has for older GPUs, unless the user chose another."""
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
    """The ptxas to take for SM 9.0; None where Triton takes it anyway, or the user chose before the first kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = str(knobs.nvidia.ptxas.path)
    chosen = os.environ.get("TRITON_PTXAS_BLACKWELL_PATH")
    return None if chosen or get_ptxas(90).path == path else path
