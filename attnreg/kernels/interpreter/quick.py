# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Triton's interpreter without the work whose result it has already, or does not use: more than half of its time."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@contextmanager
def quick() -> Iterator[None]:
    """Has the interpreter work less within a launch; what it computes stays the same, to the bit.

    - It looks at every name of the language in each call of a device function, and finds nothing left to replace.
    - It computes every sum, difference and product of integers twice, and compares, for an assertion that is off.
    - It makes the type of each value anew, with its name and a shape of wrapped numbers, and asks again what two types
      give, to which type and shape each operand is brought, and what constant a number is.
    - It reduces by a function of the kernel number by number. That function is associative, as a GPU needs it, so that
      all neighbours are combined at once, and again, until one is left.
    """
    builder = interpreter.interpreter_builder
    # as Triton 3.6 and 3.7 have them; another may do without
    quicker: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (interpreter, "_patch_lang", _once),
        (interpreter, "_patch_builtin", _without_looking),
        (interpreter, "_get_np_dtype", _kept),
        (interpreter, "_validate_np_data_size", _kept_by_size),
        (interpreter.ReduceOps, "generic_reduce", _in_pairs),
        (TritonSemantic, "binary_op_type_checking_impl", _checked_by_types),
        (TritonSemantic, "computation_type_impl", _by_identity),
        (TritonSemantic, "broadcast_impl_value", _broadcast_by_types),
        (core, "_unwrap_if_constexpr", _unwrapped),
        (tl.block_type, "__init__", _types_by_shape),
        (tl.tensor, "__init__", _tensors_by_type),
        (tl.dtype, "__eq__", _alike_if_the_same),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in quicker if hasattr(place, name)]
    options = builder.options
    try:
        for place, name, function in quicker:
            if hasattr(place, name):
                setattr(place, name, function(getattr(place, name)))
        if not options.debug:
            builder.options = dataclasses.replace(options, sanitize_overflow=False)
        yield
    finally:
        builder.options = options
        for place, name, function in before:
            setattr(place, name, function)


def _once(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a kernel that does once for each module what is to be done to the language that it imports."""
    done: set[int] = set()

    def first(function: Any) -> Any:
        module = id(function.__globals__)
        if module in done:
            return None  # the call of a device function takes no result
        done.add(module)
        return replace(function)

    return first


@cache
def _without_looking(replace: Callable[..., Any]) -> Callable[..., Any]:
    """The function that replaces what a module or class has built in, without a look through it in each launch."""
    known: dict[Any, list[tuple[str, Any, Any]]] = {}

    def quicker(place: Any, *how: Any) -> None:
        if place not in known:
            known[place] = [(name, x, _unasked(x)) for name, x in inspect.getmembers(place) if core.is_builtin(x)]
        for name, member, function in known[place]:
            # within a launch most are replaced already
            if getattr(place, name) is member:
                interpreter._patch_attr(place, name, function, *how)

    return quicker


_ASKING = core.builtin(lambda: None).__code__


def _unasked(member: Any) -> Any:
    """A function of the language without the question whether it is called in a kernel: here it is."""
    return member.__wrapped__ if getattr(member, "__code__", None) is _ASKING else member


@cache
def _kept(of_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function from a type of Triton's to NumPy's, which depends on the type of the elements alone; kept by it."""
    of_scalar = cache(of_type)

    def kept(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        # the types of pointers are no keys of a dictionary
        return of_type(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return kept


def _kept_by_size(fits: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """The question whether an array's elements fit a type, kept by their size and the type."""
    known: dict[tuple[int, int], tuple[bool, Any]] = {}

    def kept(array: Any, of: Any) -> bool:
        key = (array.itemsize, id(of))
        found = known.get(key)
        if found is None:
            found = known[key] = fits(array, of), of
        return found[0]

    return kept


def _in_pairs(one_by_one: Callable[..., Any]) -> Callable[..., Any]:
    """The reduction by any function: of neighbours along the axis, halving it until one element is left."""

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


def _checked_by_types(check: Callable[..., Any]) -> Callable[..., Any]:
    """The function that casts and broadcasts two operands, which decides by their types once what is to be done."""
    operands = {tl.tensor, int, float, bool}
    # what the operands become; and the operands, which hold the types that the key names
    known: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def quicker(self: Any, lhs: Any, rhs: Any, *how: bool, **named: bool) -> Any:
        if named or type(lhs) not in operands or type(rhs) not in operands:
            return check(self, lhs, rhs, *how, **named)
        key = (*_fact(lhs), *_fact(rhs), how)
        found = known.get(key)
        if found is None:
            results = check(self, lhs, rhs, *how)
            known[key] = _becomes(lhs, results[0]), _becomes(rhs, results[1]), (lhs, rhs)
            return results
        return self.broadcast_impl_value(_become(self, lhs, found[0]), _become(self, rhs, found[1]))

    return quicker


def _fact(operand: Any) -> tuple[Any, Any]:
    """What an operand has in common with others that are treated alike: its type, or which number it is."""
    # blocks of one type share their shape
    return (id(operand.shape), id(operand.dtype)) if type(operand) is tl.tensor else (type(operand), operand)


def _becomes(old: Any, new: Any) -> Any:
    """What an operand becomes: a number a value, a value one of the type of the elements, or None for its own."""
    if type(old) is not tl.tensor:
        return new
    return None if new.dtype is old.dtype else new.dtype


def _become(semantic: Any, operand: Any, what: Any) -> Any:
    if type(operand) is not tl.tensor:
        return what
    return operand if what is None else semantic.cast(operand, what)


def _by_identity(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that keeps its results by which objects it was given, and holds these: no other takes their place."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def kept(*args: Any) -> Any:
        key = tuple([id(x) for x in args])
        found = known.get(key)
        if found is None:
            found = known[key] = function(*args), args
        return found[0]

    return kept


def _types_by_shape(init: Callable[..., None]) -> Callable[..., None]:
    """The initialiser of a block's type: types of the same elements and shape share all they are made of."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def quicker(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        key = (id(element_ty), *sizes)
        if key not in known:
            init(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            # it holds the type of the elements, so no other takes its place
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return quicker


def _tensors_by_type(init: Callable[..., None]) -> Callable[..., None]:
    """The initialiser of a value: values of the same type share all but the handle."""
    known: dict[tuple[int, int], tuple[dict[str, Any], Any]] = {}

    def quicker(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        facts = type.__dict__
        # equal types of blocks are many objects, which share what they are made of
        key = (id(facts["shape"]), id(facts["element_ty"])) if "shape" in facts else (id(type), 0)
        found = known.get(key)
        if found is None:
            init(self, handle, type)
            found = known[key] = dict(self.__dict__), type
        self.__dict__.update(found[0])
        self.handle = handle

    return quicker


def _alike_if_the_same(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _broadcast_by_types(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """The function that brings two values to one shape, which is decided by their types once."""
    # the types that values take, None for those that stay; the values hold the types that the key names
    known: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}

    def quicker(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.__dict__.get("shape"), rhs.type.__dict__.get("shape")
        if left is right:
            return lhs, rhs
        key = (id(left), id(lhs.dtype), id(right), id(rhs.dtype))
        found = known.get(key)
        if found is None:
            results = broadcast(self, lhs, rhs)
            left, right = (None if new is old else new.type for old, new in zip((lhs, rhs), results, strict=True))
            known[key] = left, right, (lhs, rhs)
            return results
        return _as_of(lhs, found[0]), _as_of(rhs, found[1])

    return quicker


def _as_of(value: Any, of: Any) -> Any:
    """A value broadcast to the shape of a type, None for its own."""
    if of is None:
        return value
    handle = value.handle
    data = np.empty(of.shape, handle.data.dtype)
    data[...] = handle.data
    return tl.tensor(interpreter.TensorHandle(data, handle.dtype), of)


def _unwrapped(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function that takes constants out of their wrappers: most of what it is called with has none."""
    bare = {tl.tensor, tl.dtype, int, float, bool}
    return lambda x: x if type(x) in bare else unwrap(x)
