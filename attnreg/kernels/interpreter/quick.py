# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Triton's interpreter without the work whose result it has already, or does not use: more than half of its time."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

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
      give.
    """
    builder = interpreter.interpreter_builder
    # as Triton 3.6 and 3.7 have them; another may do without
    quicker: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (interpreter, "_patch_lang", _once),
        (interpreter, "_patch_builtin", _without_looking),
        (interpreter, "_get_np_dtype", _kept),
        (TritonSemantic, "computation_type_impl", _by_identity),
        (TritonSemantic, "broadcast_impl_value", _as_they_are),
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
    known: dict[Any, list[tuple[str, Any]]] = {}

    def quicker(place: Any, *how: Any) -> None:
        if place not in known:
            known[place] = [(name, x) for name, x in inspect.getmembers(place) if core.is_builtin(x)]
        for name, member in known[place]:
            # within a launch most are replaced already
            if getattr(place, name) is member:
                interpreter._patch_attr(place, name, member, *how)

    return quicker


@cache
def _kept(of_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function from a type of Triton's to NumPy's, which depends on the type of the elements alone; kept by it."""
    of_scalar = cache(of_type)

    def kept(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        # the types of pointers are no keys of a dictionary
        return of_type(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return kept


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


def _as_they_are(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """The function that brings two values to one shape: two of the same shape, or two scalars, have it."""

    def quicker(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.__dict__.get("shape") is rhs.type.__dict__.get("shape"):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return quicker


def _unwrapped(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function that takes constants out of their wrappers: most of what it is called with has none."""
    bare = {tl.tensor, tl.dtype, int, float, bool}
    return lambda x: x if type(x) in bare else unwrap(x)
