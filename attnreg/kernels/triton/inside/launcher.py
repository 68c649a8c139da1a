# mypy: disable-error-code="import-untyped, no-untyped-call"
"""How a compiled kernel is started, by Triton's internal calls.

tests/kernels/test_launch.py compares them with what the installed Triton does itself. The interpreter's inside is taken
in attnreg/kernels/interpreter, which tests/kernels/test_interpreter.py compares with the installed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

from attnreg.kernels.triton.inside.releases import was_read

# starts a kernel on a stream, of its pointers' addresses and its other arguments
Start = Callable[[int, Sequence[int | None], tuple[Any, ...]], None]


def starter(compiled: Any, grid: tuple[int, int, int]) -> Start:
    """A function that starts a compiled kernel, through Triton where the installed release was not read."""
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
    # the sanitizer of 3.8 adds arguments, and waits for the kernel
    if getattr(run, "gsan_enabled", False):
        return plainly
    # without either, a CudaLauncher does no more than to call this
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
