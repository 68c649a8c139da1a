# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Launching a Triton kernel by the names of its parameters, at little cost on the host.

Triton's own launch path inspects every argument to find the compiled kernel, which takes longer than a short kernel
runs. Here the caller passes a key: the facts that the code depends on. The launch adds the facts about each pointer for
which Triton compiles. Finding the kernel is then one look-up in a dictionary. A caller that launches repeatedly with
the same numbers keeps a `Bound`, which has all but the addresses ready.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from attnreg.kernels.triton.inside.assembler import assembler_of
from attnreg.kernels.triton.inside.launcher import Start as Start
from attnreg.kernels.triton.inside.launcher import starter as starter

# Triton compiles for AMD with 32-bit offsets where a tensor's memory is no larger than this
_NEAR = 2**31 - 1
_AMD = torch.version.hip is not None
# torch.cuda.current_device without its check that CUDA is initialised: a launch has tensors there, so it is
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


# Whether the compiler fuses a product and a sum, which rounds once, depends on the code around them. UNFUSED is for
# kernels whose code for different batches must give the same bits. A launch always passes one of the two: releases of
# Triton differ in their default
FUSED = {"enable_fp_fusion": True}
UNFUSED = {"enable_fp_fusion": False}


class KernelCode(Protocol):
    """The part of a kernel's compile-time parameters that is fixed before a launch. Hashable, and holds no tensors.

    Constants are numbers, text, dtypes, and named tuples of numbers and text: Triton can serialise them for its hooks.
    """

    @property
    def options(self) -> Mapping[str, int]:
        """Triton's compile options, such as num_warps; `FUSED` is added unless they contain `UNFUSED`."""

    def constants(self, key: Any) -> Mapping[str, Any]:
        """The constexpr parameters by name, in the kernel's order, for a launch with this key."""


def pointers_of(*tensors: Any) -> tuple[str, ...]:
    """The names of a kernel's pointers that take the fields of these named tuples, in their order."""
    return tuple(f"{name}_ptr" for one in tensors for name in one._fields)


# makes Triton's tensor descriptors, for the copy engine, from the code and the facts that a launch has of each tensor
Describe = Callable[[Any, Sequence[Any]], Sequence[Any]]


class Kernel:
    """A Triton kernel and its variants.

    pointers: in the kernel's order, as plans give tensors; None: launches give all values by name. varying: the numbers
    that a launch of a `Bound` may replace; they are adjacent in the kernel's order. describe: for a kernel whose first
    parameters are tensor descriptors. Raises TypeError if the kernel's parameters differ.
    """

    def __init__(
        self, function: Any, pointers: Sequence[str] | None = None, varying: Sequence[str] = (),
        describe: Describe | None = None,
    ) -> None:  # fmt: skip
        name, kinds = function.__name__, function.fn.__annotations__
        self.function, self.describe = function, describe
        own = [name for name in function.arg_names if kinds.get(name) is not tl.constexpr]
        self.names = tuple(own)
        # values by name -> in the kernel's order
        self.in_order: Callable[[Mapping[str, Any]], tuple[Any, ...]] = itemgetter(*own)
        # the parameters before the pointers
        self.described = [*takewhile(lambda name: name.endswith("_desc"), own)]
        own = own[len(self.described) :]
        self.pointers = [name for name in own if name.endswith("_ptr")]
        if pointers is not None and [*pointers] != self.pointers:
            raise TypeError(f"{name} takes {', '.join(self.pointers)}; given {', '.join(pointers)}")
        # the pointers whose alignment changes the compiled code; none for Triton's interpreter, which compiles nothing
        params = function.params if isinstance(function, triton.JITFunction) else ()
        self.aligned = [p.name for p in params if p.name in self.pointers and not p.do_not_specialize_on_alignment]
        # a launch finds the aligned pointers by their places
        if own[: len(self.pointers)] != self.pointers or self.pointers[: len(self.aligned)] != self.aligned:
            raise TypeError(f"{name} must take its pointers first, and of these the aligned ones")
        self.numbers = own[len(self.pointers) :]
        first = self.numbers.index(varying[0]) if varying else len(self.numbers)
        # the place of the varying numbers among all
        self.varying = slice(first, first + len(varying))
        if self.numbers[self.varying] != [*varying]:
            raise TypeError(f"{name} must take {', '.join(varying)} one behind the other")
        self._variants: dict[Hashable, KernelVariant] = {}

    def variant(self, device: torch.device, code: KernelCode) -> KernelVariant:
        """The one variant for a device and this code."""
        key = (device, code)
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = KernelVariant(self, device, code)
        return variant


class KernelVariant:
    """A kernel for one device and code; each key of `launch` is compiled once."""

    def __init__(self, kernel: Kernel, device: torch.device, code: KernelCode) -> None:
        self.kernel, self.function, self.code = kernel, kernel.function, code
        self.options: Mapping[str, int] = FUSED | dict(code.options)
        self.device = device.index or 0
        self.on_gpu = device.type == "cuda"
        self._aligned = len(kernel.aligned)
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self._bound = Kept[Bound]()

    def launch(self, key: Hashable, grid: tuple[int, int, int], **values: Any) -> None:
        """Runs the kernel on ``values``, by the names of its parameters, on the variant's device.

        key: all that the code depends on beyond the variant and the pointers, such as strides and which values are
        None.
        """
        if len(values) != len(self.kernel.names):
            names = ", ".join(self.kernel.names)
            raise TypeError(f"{self.function.__name__} takes {names}; given {', '.join(values)}")
        in_order, pointers = self.kernel.in_order(values), len(self.kernel.pointers)
        of_tensors, numbers = in_order[:pointers], in_order[pointers:]
        known = key, grid, numbers, dtypes_of(of_tensors)
        self._bound.of(known, lambda: Bound(self, key, grid, numbers)).launch(of_tensors)

    def bind(self, key: Hashable, grid: tuple[int, int, int], numbers: Mapping[str, Any]) -> Bound:
        """A launch without its memory; key: as in `launch`.

        numbers: by name; must hold the kernel's numbers but for the varying ones, and may hold others.
        """
        names = self.kernel.numbers
        numbers = {**dict.fromkeys(names[self.kernel.varying]), **numbers}
        return Bound(self, key, grid, tuple(numbers[name] for name in names))

    def pointer_facts(self, tensors: Sequence[Tensor | None]) -> Hashable:
        """The facts about pointers that the compiled code depends on, in the kernel's order; None: all are aligned.

        For each aligned pointer of the kernel: whether its address is no multiple of 16. On AMD also, for each pointer:
        whether its memory is too large for 32-bit offsets.
        """
        odd = [tensor.data_ptr() % 16 != 0 for tensor in tensors[: self._aligned] if tensor is not None]
        far = [x is None or x.untyped_storage().size() > _NEAR for x in tensors] if _AMD else []
        return (*odd, *far) if any(odd) or far else None

    def compiled(self, key: Hashable, facts: Hashable) -> tuple[Any, tuple[Any, ...]] | None:
        """The code for a key and pointers with these facts and types, and its constants; None: not compiled yet."""
        return self._compiled.get((key, facts))

    def compile(self, key: Hashable, facts: Hashable, grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        """Launches through Triton, which compiles. Raises TypeError where the constants are not the kernel's."""
        constants = self.code.constants(key)
        names = self.function.arg_names[len(values) :]
        if names != list(constants):
            raise TypeError(f"{self.function.__name__} takes {', '.join(names)}; given {', '.join(constants)}")
        if not isinstance(self.function, triton.JITFunction):
            from attnreg.kernels.interpreter.interpret import interpret  # numpy, which a GPU's launches do not need

            interpret(self.function, grid, values, tuple(constants.values()))
            return
        if self.kernel.describe is not None:
            count = len(self.kernel.described)
            values = (*self.kernel.describe(self.code, values[:count]), *values[count:])
        target = triton.runtime.driver.active.get_current_target()
        with assembler_of(target.backend, target.arch):
            compiled = self.function[grid](*values, *constants.values(), **self.options)
        self._compiled[key, facts] = compiled, tuple(constants.values())


MOST_BOUND = 1024
_Made = TypeVar("_Made")


class Kept(dict[Hashable, _Made]):
    """Values by key, each made once. It is emptied when it has MOST_BOUND keys, so that it cannot fill the memory."""

    def of(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """The value of a key; ``make`` makes it if there is none."""
        found = self.get(key)
        if found is None:
            if len(self) >= MOST_BOUND:
                self.clear()
            found = self[key] = make()
        return found


def dtypes_of(tensors: Sequence[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    """The dtypes of a launch's pointers, None without a tensor. Code compiled for one dtype misreads another."""
    return tuple([None if x is None else x.dtype for x in tensors])


class Scratch(NamedTuple):
    """Memory for a launch's last two pointers. The second points ``elements`` elements after the first."""

    memory: Tensor
    elements: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.memory[: self.elements], self.memory[self.elements :]


class Bound:
    """A launch without its memory: with grid, numbers and constants. Each call gives the tensors."""

    def __init__(
        self, variant: KernelVariant, key: Hashable, grid: tuple[int, int, int], numbers: tuple[Any, ...]
    ) -> None:
        self.variant, self.key, self.grid, self.numbers = variant, key, grid, numbers
        self._aligned, self._device, self._on_gpu = len(variant.kernel.aligned), variant.device, variant.on_gpu
        # by facts about the pointers
        self._starts: dict[Hashable, Start] = {}
        # the constants, the same for all starts, and the numbers followed by them
        self._constants: tuple[Any, ...] = ()
        self._rest: tuple[Any, ...] = ()

    def launch(
        self, tensors: Sequence[Tensor | None], scratch: Scratch | None = None, numbers: tuple[Any, ...] | None = None,
        described: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """Runs the kernel on tensors in the order of its pointers; those of ``scratch`` come last.

        numbers: in place of the bound ones, from `given`. described: facts of tensors, for the parameters before the
        pointers.
        """
        if self._on_gpu and _current_device() != self._device:
            with torch.cuda.device(self._device):
                self.launch(tensors, scratch, numbers, described)
            return
        # addresses, because Triton passes a number as it is and asks the driver about every tensor
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        if scratch is not None:
            memory, elements = scratch
            first = memory.data_ptr()
            addresses += first, first + elements * memory.itemsize
        odd = 0
        for address in addresses[: self._aligned]:
            odd |= address  # type: ignore[operator]
        facts = None
        if odd % 16 or _AMD:
            facts = self.variant.pointer_facts(tensors if scratch is None else (*tensors, *scratch.tensors))
        start, hooks = self._starts.get(facts), knobs.runtime
        if start is not None and not (hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls):
            rest = self._rest if numbers is None else (*numbers, *self._constants)
            arguments = [*described, *addresses] if described else addresses
            start(triton.runtime.driver.active.get_current_stream(self._device), arguments, rest)
            return
        values = (*described, *tensors, *(() if scratch is None else scratch.tensors), *(numbers or self.numbers))
        # the types are in the key, because other launches of the variant may have tensors of other types
        typed = facts, dtypes_of(tensors)
        known = self.variant.compiled(self.key, typed)
        if known is None:
            self.variant.compile(self.key, typed, self.grid, values)
        elif start is not None:
            # a profiler is active, and needs Triton's description of the launch
            compiled, constants = known
            compiled[self.grid](*values, *constants)
        else:
            compiled, self._constants = known
            self._rest = *self.numbers, *self._constants
            self._starts[facts] = starter(compiled, self.grid)
            self.launch(tensors, scratch, numbers, described)

    def given(self, varying: tuple[Any, ...]) -> tuple[Any, ...]:
        """The numbers of the launch, the varying ones replaced by these."""
        place, numbers = self.variant.kernel.varying, self.numbers
        return (*numbers[: place.start], *varying, *numbers[place.stop :])
