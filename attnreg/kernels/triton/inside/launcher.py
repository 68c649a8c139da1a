# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Starts compiled kernels by Triton's internal calls.

tests/kernels/test_launch.py compares these calls with the installed Triton's own. attnreg/kernels/interpreter uses the
internals of the interpreter; tests/kernels/test_interpreter.py compares them with the installed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

from attnreg.kernels.triton.inside.releases import was_read

# starts a kernel on a stream, with its pointers' addresses and its other arguments
Start = Callable[[int, Sequence[int | None], tuple[Any, ...]], None]


def starter(compiled: Any, grid: tuple[int, int, int]) -> Start:
    """A function that starts a compiled kernel; through Triton itself for a release whose source nobody has read."""
    x, y, z = grid

    def as_triton_does(stream: int, addresses: Sequence[int | None], rest: tuple[Any, ...]) -> None:
        compiled[grid](*addresses, *rest, stream=stream)

    if not was_read(triton.__version__):
        return as_triton_does
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def plainly(stream: int, addresses: Sequence[int | None], rest: tuple[Any, ...]) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *addresses, *rest)

    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return plainly
    # Triton 3.8's sanitizer adds arguments, and waits for the kernel
    if getattr(run, "gsan_enabled", False):
        return plainly
    # apart from scratch memory and the sanitizer, CudaLauncher only makes this call
    launch, cooperative, dependent = run.launch, run.launch_cooperative_grid, run.launch_pdl
    if not hasattr(run, "kernel_signature"):

        def as_in_3_6(stream: int, addresses: Sequence[int | None], rest: tuple[Any, ...]) -> None:
            launch(
                x, y, z, stream, function, cooperative, dependent, None, None, metadata, None, None, None,
                *addresses, *rest,
            )  # fmt: skip

        return as_in_3_6
    annotations, signature = run.arg_annotations, run.kernel_signature

    def from_3_7_on(stream: int, addresses: Sequence[int | None], rest: tuple[Any, ...]) -> None:
        launch(
            x, y, z, stream, function, cooperative, dependent, metadata, None, None, None, None, None,
            annotations, signature, (*addresses, *rest),
        )  # fmt: skip

    return from_3_7_on
