# mypy: disable-error-code="import-untyped, no-untyped-call"
"""Functions of Triton's language that decide only once what to compute for operands of the same types.

Such a function looks at types, shapes and constants, never at values. It decides which operand is cast, to which shape
each is brought, and which operations of the interpreter's builder follow. Its first call is recorded as a list of these
operations; later calls with operands of the same facts repeat the list. No bit changes: each operation gets arrays of
the same types, shapes and strides as the first time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from attnreg.kernels.interpreter.arrays import BY_ELEMENT, LEAN, again

# computes a call's result from the list of its operands' handles
_Repeat = Callable[[list[Any]], Any]


class _UnknownError(Exception):
    """An operand from which the function may read more than a key holds."""


# types of constants that are equal only if they are the same; the key holds the type too
_EXACT = {int, bool, str, type(None)}
# how many calls of a function are kept; a function with a number as argument has one for each number
_MOST_KEPT = 4096


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the language as kernels call it. It repeats a recorded call for operands with the same facts."""
    # None: the call cannot be repeated
    known: dict[Hashable, _Repeat | None] = {}
    tensor = tl.tensor

    def call(*args: Any, **named: Any) -> Any:
        # the language passes ``_semantic`` among its own functions; their calls belong to the call that is recorded
        if "_semantic" in named:
            return function(*args, **named)
        key: list[Any] = []
        try:
            for x in (*args, *named.values()) if named else args:
                of = type(x)
                if of is tensor:
                    key.append(_kind(x))
                elif of in _EXACT:
                    key.append(of)
                    key.append(x)
                else:
                    key.append(_fact(x))
        except _UnknownError:
            return _plain(function, *_copies(args, named))
        facts = (*key, *named)
        repeat = known.get(facts)
        if repeat is not None:
            return repeat(_handles(args, named))
        # copies, so that the same operand given twice counts as two, and no operation changes an operand's layout
        args, named = _copies(args, named)
        if facts in known:
            return _plain(function, args, named)
        if len(known) == _MOST_KEPT:
            known.clear()
        with _Recorder(_handles(args, named)) as recorder:
            result = _plain(function, args, named)
        known[facts] = recorder.repeat(result)
        return result

    return call


def _plain(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return function(*args, **named, _semantic=interpreter.interpreter_semantic)


def _handles(args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    return [x.handle for x in ((*args, *named.values()) if named else args) if type(x) is tl.tensor]


def _copies(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands, with new handles to the same arrays."""
    return tuple([_copy(x) for x in args]), {name: _copy(x) for name, x in named.items()}


def _copy(operand: Any) -> Any:
    if type(operand) is not tl.tensor or type(operand.handle) is not TensorHandle:
        return operand
    return tl.tensor(dataclasses.replace(operand.handle), operand.type)


_numbers: dict[Hashable, int] = {}


def _kind(value: tl.tensor) -> int:
    """A number for all facts of a value besides its elements: values with the same number are treated alike."""
    kind: int | None = value.__dict__.get("kind")
    if kind is None:
        handle, of = value.handle, value.type
        if type(handle) is not TensorHandle:
            raise _UnknownError
        data, memory = handle.data, getattr(of.scalar, "address_space", None)
        facts = (of.name, memory, handle.dtype.name, data.dtype, data.shape, data.strides)
        kind = value.kind = _numbers.setdefault(facts, len(_numbers))
    return kind


def _fact(constant: Any) -> Hashable:
    """A key for a constant, which differs for all others. Raises `_UnknownError` for a type that may hold a value."""
    of = type(constant)
    if of in _EXACT:
        return of, constant
    if of is float:
        # -0.0 is not 0.0
        return of, constant.hex()
    if of is slice:
        return of, _fact((constant.start, constant.stop, constant.step))
    if isinstance(constant, tuple | list):
        return of, tuple([_fact(x) for x in constant])
    if of is tl.constexpr:
        return of, _fact(constant.value)
    if of in (tl.dtype, tl.pointer_type, tl.block_type):
        return of, constant.name, getattr(constant.scalar, "address_space", None)
    raise _UnknownError


class _Step(NamedTuple):
    """One operation of the builder that was recorded."""

    name: str
    function: Callable[..., Any]
    operands: tuple[TensorHandle, ...]
    result: Any


class _Recorder:
    """Replaces the interpreter's builder during a call, and records the operations."""

    def __init__(self, operands: list[TensorHandle]) -> None:
        self._builder = interpreter.interpreter_semantic.builder
        self._operands = operands
        self._constants: list[TensorHandle] = []
        self._steps: list[_Step] = []
        # the operands, constants and results of steps, by identity
        self._known = {id(x) for x in operands}
        self._repeatable = True

    def __enter__(self) -> _Recorder:
        interpreter.interpreter_semantic.builder = self
        return self

    def __exit__(self, *_: object) -> None:
        interpreter.interpreter_semantic.builder = self._builder

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        return partial(self._operation, name, member) if callable(member) else member

    def _operation(self, name: str, member: Any, *args: Any) -> Any:
        if member.__name__ == "<lambda>":
            # most methods call another operation, which is recorded instead
            result = member.__func__(self, *args)
            if id(result) in self._known:
                return result
        operands = tuple([x for x in args if type(x) is TensorHandle])
        arrays = [x.data for x in operands]
        result = member(*args)
        # create_ashr gives its operands new arrays, which may have other strides
        self._repeatable &= all(x.data is old for x, old in zip(operands, arrays, strict=True))
        if name.startswith(("get_", "create_make_range")):
            # a type, or a value that is the same in each call
            if type(result) is TensorHandle:
                self._constants.append(result)
                self._known.add(id(result))
            return result
        parts = result if isinstance(result, tuple) else (result,)
        self._repeatable &= all(id(x) in self._known for x in operands)
        self._repeatable &= all(x is None or type(x) is TensorHandle for x in parts)
        self._repeatable &= not any(type(y) is TensorHandle for x in args if isinstance(x, tuple | list) for y in x)
        if self._repeatable:
            self._steps.append(_Step(name, LEAN.get(name, again)(member, result, args), operands, result))
            if isinstance(result, tuple):
                self._steps += [_Step("", itemgetter(i), (result,), part) for i, part in enumerate(result)]
            self._known |= {id(result), *map(id, parts)}
        return result

    def repeat(self, result: Any) -> _Repeat | None:
        """A function that repeats the call with this result, a value or a tuple of values; None if it cannot be."""
        ends = result if type(result) is tuple else (result,)
        if not self._repeatable or not all(type(x) is tl.tensor and id(x.handle) in self._known for x in ends):
            return None
        noted = _without_broadcasts(self._steps, {id(x.handle) for x in ends})
        places = {id(x): i for i, x in enumerate([*self._operands, *self._constants, *[x.result for x in noted]])}
        constants = self._constants
        steps = [(x.function, tuple([places[id(y)] for y in x.operands])) for x in noted]
        made = [(places[id(x.handle)], _value_like(x)) for x in ends]

        def several(values: list[Any]) -> Any:
            values += constants
            for step, operands in steps:
                values.append(step(*[values[i] for i in operands]))
            return tuple([make(values[at]) for at, make in made])

        if type(result) is tuple:
            return several
        ((at, make),) = made
        # most calls are one operation of all operands
        if len(steps) == 1 and at == len(places) - 1 and steps[0][1] == tuple(range(len(self._operands))):
            step = steps[0][0]
            return lambda values: make(step(*values))
        return lambda values: several(values)[0]


def _value_like(value: tl.tensor) -> Callable[[Any], tl.tensor]:
    """A function that makes a value with the facts of this one from a handle."""
    new, tensor = object.__new__, tl.tensor
    shape, numel, of, dtype = value.shape, value.numel, value.type, value.dtype
    # the result of a store has no handle
    kind = None if value.handle is None else _kind(value)

    def make(handle: Any) -> tl.tensor:
        made = new(tensor)
        made.handle = handle
        made.shape = shape
        made.numel = numel
        made.type = of
        made.dtype = dtype
        made.kind = kind
        return made

    return make


def _without_broadcasts(steps: list[_Step], needed: set[int]) -> list[_Step]:
    """The steps without broadcasts before operations by element: NumPy broadcasts the operands itself.

    needed: the ids of the handles that the result holds.
    """
    wide = [x for x in steps if x.name in ("create_broadcast", "create_splat")]
    # a splat is kept if it changes the type of the elements
    narrow = {id(x.result): x.operands[0] for x in wide if x.operands[0].data.dtype == x.result.data.dtype}
    kept: list[_Step] = []
    for step in steps:
        if step.name in BY_ELEMENT:
            for i in range(len(step.operands)):
                while (source := narrow.get(id(step.operands[i]))) is not None:
                    operands = (*step.operands[:i], source, *step.operands[i + 1 :])
                    if _layout(step.function(*operands)) != _layout(step.result):
                        break
                    step = step._replace(operands=operands)
        kept.append(step)
    needed = needed | {id(x) for step in kept for x in step.operands}
    return [x for x in kept if id(x.result) in needed or id(x.result) not in narrow]


def _layout(handle: TensorHandle) -> Hashable:
    return handle.data.dtype, handle.data.shape, handle.data.strides
