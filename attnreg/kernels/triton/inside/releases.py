# mypy: disable-error-code="import-untyped"
"""The releases of Triton whose internals were read, and how they differ."""

import triton

# for each minor release, the one that was read: runtime/jit.py, runtime/interpreter.py, compiler/compiler.py and the
# drivers and compilers of backends/
READ = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")

# from 3.9 on, LLVM computes the addresses of a loop's matrix products on SM 9.0 before the loop, and ptxas keeps them
# in each thread's registers. Earlier releases derive them from one address in uniform registers, which threads share
MOVES_ADDRESSES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def was_read(version: str) -> bool:
    """Whether the minor release of this version was read."""
    return _minor(version) in map(_minor, READ)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
