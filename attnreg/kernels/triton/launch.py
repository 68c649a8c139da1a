# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Launching a Triton kernel by the names of its parameters, at little cost on the host.

Triton's own launch path inspects every argument to find the compiled kernel, which takes longer than a short kernel
runs. Here the caller passes a key of what the code depends on, and the launch adds what Triton makes of each pointer,
so finding the kernel is one look-up in a dictionary.
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
# Triton compiles for AMD with 32-bit offsets where a tensor's memory is no larger than this
_NEAR = 2**31 - 1
_AMD = torch.version.hip is not None


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
        self.pointers = tuple(name for name in self._places if name.endswith("_ptr"))
        # the pointers for whose alignment Triton compiles; its interpreter compiles nothing
        params = function.params if isinstance(function, triton.JITFunction) else ()
        self.aligned = tuple(p.name for p in params if p.name in self.pointers and not p.do_not_specialize_on_alignment)
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
            variant = self._variants[key] = Variant(self, device, code)
        return variant


class Variant:
    """A kernel for one device and code; each key of `launch` is compiled once."""

    def __init__(self, kernel: Kernel, device: torch.device, code: Code) -> None:
        self.kernel, self.function, self.code = kernel, kernel.function, code
        self.device = device.index or 0
        self._on_gpu = device.type == "cuda"
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def launch(self, key: Hashable, grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
        """Runs the kernel on ``arguments``: those of `Kernel.arguments`, each with a value, on the variant's device.

        key: all that the code depends on beyond the variant and the pointers, such as strides and which arguments are
        None.
        """
        if self._on_gpu and triton.runtime.driver.active.get_current_device() != self.device:
            with torch.cuda.device(self.device):
                self._launch(key, grid, arguments)
        else:
            self._launch(key, grid, arguments)

    def pointer_facts(self, arguments: Mapping[str, Any]) -> int:
        """The facts about each pointer for which Triton compiles, as bits.

        Whether the address is a multiple of 16, where the kernel relies on it; on AMD also whether the memory behind a
        pointer can be reached by 32-bit offsets.
        """
        facts = 1
        for name in self.kernel.aligned:
            facts += facts + (arguments[name].data_ptr() % 16 == 0)
        if _AMD:
            for name in self.kernel.pointers:
                tensor = arguments[name]
                facts += facts + (tensor is not None and tensor.untyped_storage().size() <= _NEAR)
        return facts

    def _launch(self, key: Hashable, grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
        key = key, self.pointer_facts(arguments)
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

    def _compile(self, key: tuple[Any, int], grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
        """Launches through Triton, which compiles. Raises TypeError where the arguments are not the kernel's."""
        constants = self.code.constants(key[0])
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
