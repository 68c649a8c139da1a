# mypy: disable-error-code="import-untyped, no-untyped-call, no-any-return"
"""Launching a Triton kernel at little cost on the host: compiled once per set of constants, then called by position.

Triton's own launch path looks at every argument to find the kernel that fits, which takes longer than a short kernel
runs. Here the caller says what the kernel depends on, and that is one look-up in a dictionary.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import triton
from triton import knobs

Compiled = dict[Hashable, Any]
_compiled: dict[Hashable, Compiled] = {}


def compiled_for(kernel: Any, key: Hashable) -> Compiled:
    """What `launch` has compiled of a kernel for a key: its constants and options, the device, and the dtypes."""
    return _compiled.setdefault((kernel, key), {})


def launch(
    compiled: Compiled,
    key: Hashable,
    kernel: Any,
    device: int,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    **options: int,
) -> None:
    """Runs ``kernel[grid](*args, *constants)``, constants being the values of its last, constexpr parameters.

    compiled: from `compiled_for`. key: what the code depends on beyond compiled's own key, such as strides, which
    arguments are None, and whether the pointers whose alignment the kernel relies on are aligned to 16 bytes.
    """
    known = compiled.get(key)
    if known is None:
        found = kernel[grid](*args, *constants, **options)
        # Triton's interpreter compiles nothing
        if isinstance(kernel, triton.JITFunction):
            compiled[key] = found
        return
    stream = triton.runtime.driver.active.get_current_stream(device)
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if enter.calls or leave.calls:
        # a profiler listens: it also wants the launch described
        known[grid](*args, *constants)
    else:
        known.run(*grid, stream, known.function, known.packed_metadata, None, None, None, *args, *constants)
