"""The releases of Triton whose inside was read."""

# of each minor release the one that was read: runtime/jit.py, runtime/interpreter.py, compiler/compiler.py and the
# drivers and compilers of backends/
READ = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")


def was_read(version: str) -> bool:
    """Whether the minor release that a version is of was read."""
    return _minor(version) in map(_minor, READ)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
