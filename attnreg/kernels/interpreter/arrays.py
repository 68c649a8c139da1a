# mypy: disable-error-code="import-untyped, no-untyped-call"
"""The operations that kernels use most, computed by NumPy directly once all types are known.

Each function here returns such an operation. It takes the method of the interpreter's builder, and the result and the
arguments of a first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as _memory
from triton.runtime.interpreter import TensorHandle


def _handle(data: Any, of: Any) -> TensorHandle:
    """A handle, made without the check that its array fits its type."""
    made = object.__new__(TensorHandle)
    made.data, made.dtype, made.attr = data, of, {}
    return made


def again(member: Any, result: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """The method itself, with the constants of the first call."""
    at = [i for i, x in enumerate(args) if type(x) is TensorHandle]
    template = [None if type(x) is TensorHandle else x for x in args]

    def step(*handles: TensorHandle) -> Any:
        given = template.copy()
        for i, handle in zip(at, handles, strict=True):
            given[i] = handle
        return member(*given)

    return step


def _by_element(member: Any, result: TensorHandle, args: tuple[Any, ...]) -> Callable[..., Any]:
    *operands, function = args
    of, kept = result.dtype, result.data.dtype
    if len(operands) == 2 and all(x.data.dtype == bool for x in operands) and not _as_numpy(member, args):
        return again(member, result, args)

    def two(lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        data = function(lhs.data, rhs.data)
        return _handle(data if data.dtype is kept else data.astype(kept), of)

    def any_number(*handles: TensorHandle) -> TensorHandle:
        data = function(*[x.data for x in handles])
        return _handle(data if data.dtype is kept else data.astype(kept), of)

    return two if len(operands) == 2 else any_number


def _as_numpy(member: Any, args: tuple[TensorHandle, TensorHandle, Any]) -> bool:
    """Whether NumPy computes an operation of two bools as Triton does. From Triton 3.9 on, bools add as single bits."""
    lhs, rhs, function = args
    pairs = np.array([False, False, True, True]), np.array([False, True, False, True])
    theirs = member(*[_handle(x, of.dtype) for x, of in zip(pairs, (lhs, rhs), strict=True)], function).data
    try:
        own = function(*pairs)
    # NumPy has no difference of bools
    except TypeError:
        return False
    return np.array_equal(own.astype(theirs.dtype), theirs)


def _cast(member: Any, result: TensorHandle, args: tuple[Any, ...]) -> Callable[..., Any]:
    if tl.bfloat16 in (args[0].dtype.scalar, result.dtype):
        return again(member, result, args)
    of, kept = result.dtype, result.data.dtype
    return lambda x: _handle(x.data.astype(kept), of)


def _broadcast(member: Any, result: TensorHandle, args: tuple[Any, ...]) -> Callable[..., Any]:
    if not args[0].data.flags.c_contiguous:
        return again(member, result, args)
    of, shape, kept, strides = result.dtype, result.data.shape, result.data.dtype, result.data.strides
    return lambda x: _handle(np.ndarray(shape, kept, x.data, 0, strides), of)


def _splat(member: Any, result: TensorHandle, args: tuple[Any, ...]) -> Callable[..., Any]:
    of, shape, kept = result.dtype, result.data.shape, result.data.dtype

    def step(x: TensorHandle) -> TensorHandle:
        data = np.ndarray(shape, kept)
        data[...] = x.data
        return _handle(data, of)

    return step


def _reshaped(member: Any, result: TensorHandle, args: tuple[Any, ...]) -> Callable[..., Any]:
    of, shape = result.dtype, result.data.shape
    return lambda x: _handle(x.data.reshape(shape), of)


def _moved(member: Any, result: TensorHandle, args: tuple[Any, ...]) -> Callable[..., Any]:
    of = result.dtype
    size = max(1, args[0].get_element_ty().primitive_bitwidth // 8)
    return lambda pointer, offset: _handle(pointer.data + size * offset.data.astype(np.uint64), of)


def _masks_are_truth_values(masks: tuple[Any, ...]) -> bool:
    return all(x.data.dtype == bool for x in masks if type(x) is TensorHandle)


def _loaded(member: Any, result: TensorHandle, args: tuple[Any, ...]) -> Callable[..., Any]:
    of, kept = result.dtype, result.data.dtype
    if not _masks_are_truth_values(args[1:2]):
        return again(member, result, args)
    everywhere, nothing = np.ones_like(args[0].data, dtype=bool), np.zeros_like(args[0].data, dtype=kept)

    def step(
        pointers: TensorHandle, mask: TensorHandle | None = None, other: TensorHandle | None = None
    ) -> TensorHandle:
        where = everywhere if mask is None else mask.data
        return _handle(_memory.load(pointers.data, where, nothing if other is None else other.data, kept), of)

    return step


def _stored(member: Any, result: None, args: tuple[Any, ...]) -> Callable[..., Any]:
    if not _masks_are_truth_values(args[2:3]):
        return again(member, result, args)
    everywhere = np.ones_like(args[0].data, dtype=bool)

    def step(pointers: TensorHandle, value: TensorHandle, mask: TensorHandle | None = None) -> None:
        _memory.store(pointers.data, value.data, everywhere if mask is None else mask.data)

    return step


BY_ELEMENT = {"binary_op", "ternary_op", "create_addptr"}
LEAN: dict[str, Callable[..., Callable[..., Any]]] = {
    "binary_op": _by_element,
    "ternary_op": _by_element,
    "unary_op": _by_element,
    "cast_impl": _cast,
    "create_broadcast": _broadcast,
    "create_splat": _splat,
    "create_expand_dims": _reshaped,
    "create_addptr": _moved,
    "create_load": _loaded,
    "create_masked_load": _loaded,
    "create_store": _stored,
    "create_masked_store": _stored,
}
