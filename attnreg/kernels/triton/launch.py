# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Launching a Triton kernel by the names of its parameters, at little cost on the host.

Triton's own launch path inspects every argument to find the compiled kernel, which takes longer than a short kernel
runs. Here the caller passes a key of all that the code depends on, so finding it is one look-up in a dictionary.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Protocol

import torch
import triton
import triton.language as tl
from triton import knobs

# stands for an argument that differs from launch to launch
GIVEN_LATER: Final = object()


class Code(Protocol):
    """The part of a kernel's compile-time parameters that is fixed before a launch. Hashable, and holds no tensors.

    Constants are numbers, text, dtypes, and named tuples of numbers and text: what Triton can write down for its hooks.
    """

    @property
    def options(self) -> Mapping[str, int]:
        """Triton's compile options, such as num_warps."""

    def constants(self, key: Any) -> Mapping[str, Any]:
        """The constexpr parameters by name, in the kernel's order, for a launch with this key."""


class Kernel:
    """A Triton kernel and its variants."""

    def __init__(self, function: Any) -> None:
        kinds = function.fn.__annotations__
        self.function = function
        # the parameters that are no constants, in the kernel's order
        self._places = {name: GIVEN_LATER for name in function.arg_names if kinds.get(name) is not tl.constexpr}
        self._variants: dict[Hashable, Variant] = {}

    def arguments(self, **fixed: Any) -> dict[str, Any]:
        """The kernel's arguments in its order: the fixed ones, and `GIVEN_LATER` for those of each launch.

        Raises TypeError where the kernel has no such parameter.
        """
        arguments = self._places | fixed
        if len(arguments) != len(self._places):
            unknown = ", ".join(fixed.keys() - self._places.keys())
            raise TypeError(f"{self.function.__name__} has no parameter {unknown}; it takes {', '.join(self._places)}")
        return arguments

    def variant(self, device: torch.device, code: Code) -> Variant:
        """The one variant for a device and this code."""
        key = (device, code)
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = Variant(self.function, device.index or 0, code)
        return variant


class Variant:
    """A kernel for one device and code; each key of `launch` is compiled once."""

    def __init__(self, function: Any, device: int, code: Code) -> None:
        self.function, self.device, self.code = function, device, code
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def launch(self, key: Hashable, grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
        """Runs the kernel on ``arguments``: those of `Kernel.arguments`, each with a value.

        key: all that the code depends on beyond the variant, such as strides, which arguments are None, and whether the
        pointers whose alignment the kernel relies on are aligned to 16 bytes.
        """
        entry = self._compiled.get(key)
        if entry is None:
            self._compile(key, grid, arguments)
            return
        compiled, constants = entry
        stream = triton.runtime.driver.active.get_current_stream(self.device)
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if enter.calls or leave.calls:
            # a profiler is active, and needs Triton's description of the launch
            compiled[grid](*arguments.values(), *constants)
        else:
            # Triton's internal call, which may change: tests/kernels/test_launch.py compares the two
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *arguments.values(), *constants,
            )  # fmt: skip

    def _compile(self, key: Hashable, grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
        """Launches through Triton, which compiles. Raises TypeError where the arguments are not the kernel's."""
        constants = self.code.constants(key)
        names = [*arguments, *constants]
        missing = [name for name, value in arguments.items() if value is GIVEN_LATER]
        if missing or names != self.function.arg_names:
            raise TypeError(
                f"{self.function.__name__} takes {', '.join(self.function.arg_names)}, in this order; "
                f"given {', '.join(names)}" + (f", without a value {', '.join(missing)}" if missing else "")
            )
        compiled = self.function[grid](*arguments.values(), *constants.values(), **self.code.options)
        # Triton's interpreter compiles nothing
        if isinstance(self.function, triton.JITFunction):
            self._compiled[key] = compiled, tuple(constants.values())
