# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Triton's interpreter without repeated or unused work, which takes more than half of its time."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from attnreg.kernels.interpreter.operations import remembering


@contextmanager
def quick() -> Iterator[None]:
    """Makes the interpreter do less work during launches. Its results stay the same, to the bit. Without this,

    - each call of a device function looks at every name of the language, and finds nothing left to replace;
    - every sum, difference and product of integers is computed twice and compared, for an assertion that is off;
    - each call of a function of the language works out the types again: which operand is cast, to which shape each is
      brought, which type results;
    - a reduction by a function of the kernel combines one number at a time. GPUs need that function to be associative,
      so here all neighbours are combined at once, and again, until one number is left.

    It also makes two releases behave as the others do:

    - Triton 3.9.0 keeps a comparison of two numbers as an integer, and refuses it as a mask. Here it is a bool.
    - Triton 3.6 keeps the bounds of a loop as arrays of one dimension, which NumPy 2.4 does not convert to numbers.
    """
    builder = interpreter.interpreter_builder
    options = builder.options
    # functions of Triton 3.6 to 3.9; other releases may lack some
    quicker: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (interpreter, "_patch_lang", _once),
        (interpreter, "_get_np_dtype", _kept),
        (interpreter, "_validate_np_data_size", _kept_by_size),
        (interpreter.ReduceOps, "generic_reduce", _in_pairs),
        (interpreter, "_patch_lang_tensor", _counting),
        (interpreter.InterpreterBuilder, "create_masked_load", _masked(1)),
        (interpreter.InterpreterBuilder, "create_masked_store", _masked(2)),
    ]
    changes = [(place, name, of(getattr(place, name))) for place, name, of in quicker if hasattr(place, name)]
    before: list[tuple[Any, str, Any]] = []

    def change(place: Any, name: str, to: Any) -> None:
        before.append((place, name, getattr(place, name)))
        setattr(place, name, to)

    def replace(place: Any, *_: Any) -> None:
        for name, member, function in _built_in(place, options.debug):
            # most are replaced already
            if getattr(place, name) is member:
                change(place, name, function)

    try:
        for each in changes:
            change(*each)
        change(interpreter, "_patch_builtin", replace)
        if not options.debug:
            builder.options = dataclasses.replace(options, sanitize_overflow=False)
        yield
    finally:
        builder.options = options
        for place, name, function in reversed(before):
            setattr(place, name, function)


def _once(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A patch of the language that runs once for each module that imports it, not in each call of a function."""
    done: set[int] = set()

    def first(function: Any) -> Any:
        module = id(function.__globals__)
        if module in done:
            return None  # the call of a device function takes no result
        done.add(module)
        return replace(function)

    return first


@cache
def _built_in(place: Any, debug: bool) -> list[tuple[str, Any, Any]]:
    """The functions that a module or class of the language has built in: names, originals, and replacements.

    debug: Triton's debug mode, which is part of the key: recorded calls then include its assertions.
    """
    return [(name, x, remembering(x)) for name, x in inspect.getmembers(place) if core.is_builtin(x)]


@cache
def _kept(of_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton's conversion of a type to NumPy's, cached by the type of the elements, on which alone it depends."""
    of_scalar = cache(of_type)

    def kept(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        # types of pointers cannot be keys of a dictionary
        return of_type(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return kept


def _kept_by_size(fits: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """The check that an array's elements fit a type, cached by their size and the type."""
    known: dict[tuple[int, int], tuple[bool, Any]] = {}

    def kept(array: Any, of: Any) -> bool:
        key = (array.itemsize, id(of))
        found = known.get(key)
        if found is None:
            found = known[key] = fits(array, of), of
        return found[0]

    return kept


def _counting(replace: Callable[..., Any]) -> Callable[..., Any]:
    """A patch that lets values act as integers, such as the bounds of a loop, as Triton 3.7 and later do."""

    def counting(tensor: Any, scope: Any) -> None:
        replace(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return counting


def _masked(place: int) -> Callable[[Any], Any]:
    """A patch that converts the mask of a load or a store, its argument at ``place``, to bool: not zero is true."""

    def of(member: Callable[..., Any]) -> Callable[..., Any]:
        def masked(self: Any, *args: Any, **named: Any) -> Any:
            mask = args[place]
            if type(mask) is TensorHandle and mask.data.dtype != bool:
                args = (*args[:place], TensorHandle(mask.data.astype(bool), tl.int1), *args[place + 1 :])
            return member(self, *args, **named)

        return masked

    return of


def _in_pairs(one_by_one: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction by any function: it combines neighbours along the axis, again and again until one element is left."""

    def quicker(self: Any, values: tuple[Any, ...]) -> Any:
        axis = self.axis
        if axis is None:
            return one_by_one(self, values)
        arrays = [x.handle.data.swapaxes(0, axis) for x in values]
        types = [x.dtype for x in values]
        # the sizes of blocks are powers of two
        while len(arrays[0]) > 1:
            pairs = [self.to_tensor(x[i::2], of) for i in (0, 1) for x, of in zip(arrays, types, strict=True)]
            combined = self.combine_fn.fn(*pairs)
            combined = combined if isinstance(combined, tuple) else (combined,)
            arrays = [new.handle.data.astype(old.dtype) for new, old in zip(combined, arrays, strict=True)]
        arrays = [x.swapaxes(0, axis) if self.keep_dims else x.swapaxes(0, axis).squeeze(axis) for x in arrays]
        return [self.to_tensor(x, of) for x, of in zip(arrays, types, strict=True)]

    return quicker
