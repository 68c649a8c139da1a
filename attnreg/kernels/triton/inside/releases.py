# mypy: disable-error-code="import-untyped"
"""The releases of Triton whose inside was read, and what differs between them."""

import triton

# of each minor release the one that was read: runtime/jit.py, runtime/interpreter.py, compiler/compiler.py and the
# drivers and compilers of backends/
READ = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")

# from 3.9 on LLVM moves the addresses of a loop's matrix products on SM 9.0 before the loop, and ptxas keeps them in
# registers of each thread; before, it makes them of one address in registers that threads share
MOVES_ADDRESSES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def was_read(version: str) -> bool:
    """Whether the minor release that a version is of was read."""
    return _minor(version) in map(_minor, READ)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
