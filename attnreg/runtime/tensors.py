"""The validation of tensor arguments, in one place: type, shape, device, strides, and overlaps of written memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# kernels take the strides of tables as 32-bit numbers
_INT32 = 2**31 - 1
T = TypeVar("T")
_unpack: Any = forward_ad.unpack_dual
_Named = TypeVar("_Named", bound=tuple[Any, ...])
# the named tuple of a class with these fields in order, in half the time that the class itself takes
named: Callable[[type[_Named], Iterable[Any]], _Named] = tuple.__new__
# tells whether tensors are like some others
Alike = Callable[..., bool]
# index of a tensor -> a dimension of it: the size of this dimension does not matter, nor do strides but the last
Free = Mapping[int, int]
NONE_FREE: Free = MappingProxyType({})


class Remembered(Generic[T]):
    """A dictionary whose keys are the facts about some tensors on which `tensor_problems` depends.

    Reading the facts of a call's tensors one by one takes longer than a short kernel runs. So PyTorch's own comparison
    recognises tensors like recent ones, by all facts at once. free: facts that do not matter.
    """

    def __init__(self, free: Free = NONE_FREE) -> None:
        self._free = free
        self._values: dict[Any, T] = {}
        self._recent: tuple[tuple[Alike, T], ...] = ()

    def find(self, tensors: Sequence[Tensor]) -> tuple[Alike, T] | None:
        """The value for tensors like these, with the function that recognises them; None if there is no value."""
        for known in self._recent:
            if known[0](*tensors):
                return known
        value = self._values.get(_facts(tensors, self._free))
        return None if value is None else self._put_first(tensors, value)

    def put(self, tensors: Sequence[Tensor], value: T) -> tuple[Alike, T]:
        """Keeps a value for tensors like these, unless one of them has no strides."""
        facts = _facts(tensors, self._free)
        if facts is None:
            return _never, value
        if len(self._values) >= MOST_REMEMBERED:
            self._values.clear()
        self._values[facts] = value
        return self._put_first(tensors, value)

    def _put_first(self, tensors: Sequence[Tensor], value: T) -> tuple[Alike, T]:
        known = comparison(tensors, self._free), value
        self._recent = (known, *self._recent[: MOST_RECENT - 1])
        return known


class Kinds:
    """One object for each kind of call: calls are of one kind if they give the same tensors with the same facts."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Remembered[object]] = {}

    def of(self, given: Hashable, tensors: Sequence[Tensor]) -> object:
        """The object for tensors like these. given: a key that tells which of a call's arguments the tensors are."""
        known = self._known.get(given)
        if known is None:
            known = self._known.setdefault(given, Remembered())
        return (known.find(tensors) or known.put(tensors, object()))[1]


# how many kinds of tensors a dictionary keeps, and how many of them it recognises at once
MOST_REMEMBERED, MOST_RECENT = 1024, 4


def signatures(tensors: Iterable[Any]) -> list[tuple[Any, ...] | None]:
    """The facts about each tensor that `tensor_problems` depends on. Raises RuntimeError for one without strides."""
    return [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.layout, x.is_neg()) for x in tensors]


def _without(free: Free, shapes: list[list[Any]], strides: list[list[Any]]) -> None:
    """Replaces the sizes and strides that do not matter by None."""
    for i, dimension in free.items():
        # a tensor that validation refuses may lack the dimension
        shapes[i] = [None if d == dimension else size for d, size in enumerate(shapes[i])]
        strides[i][:-1] = [None] * (len(strides[i]) - 1)


def _facts(tensors: Sequence[Any], free: Free = NONE_FREE) -> tuple[Any, ...] | None:
    """The facts about tensors; None if one of them is no tensor or has no strides."""
    try:
        facts: list[Any] = signatures(tensors)
    except (AttributeError, RuntimeError, TypeError):
        return None
    if free:
        shapes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
        _without(free, shapes, strides)
        facts = [(*a, *b, *more) for a, b, (_, _, *more) in zip(shapes, strides, facts, strict=True)]
    # a subclass may have no memory
    return (*facts, *map(type, tensors))


def comparison(tensors: Sequence[Tensor], free: Free = NONE_FREE) -> Alike:
    """A function that tells whether other tensors, as many as these, have the same facts. It keeps none of these alive.

    If PyTorch has it and no tensor comes twice, this is the function by which torch.compile tests its inputs. It also
    compares types, gradients, and whether PyTorch is in inference mode.
    """
    sizes: Any = [[*x.shape] for x in tensors]
    strides: Any = [[*x.stride()] for x in tensors]
    _without(free, sizes, strides)
    try:
        alike: Alike = torch._C._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        if alike(*tensors):
            return alike
    except (AttributeError, RuntimeError, TypeError):
        pass
    facts = _facts(tensors, free)
    return lambda *others: _facts(others, free) == facts


def _never(*tensors: Tensor) -> bool:
    return False


def tensor_problems(
    name: str,
    tensor: Any,
    shape: Sequence[int | None],
    dtype: torch.dtype | None,
    *,
    device: torch.device | None = None,
    beside: str = "the batch",
    dense: bool = True,
    written: bool = False,
) -> Iterator[str]:
    """The problems of an argument. None in ``shape``: any size; dtype None: any floating one; device None: any.

    dense: the last dimension must be contiguous. written: no two elements may share memory. beside: what ``device`` is
    the device of, for the message.
    """
    if not isinstance(tensor, Tensor):
        yield f"{name} is {tensor_words(tensor)}; expected a tensor"
        return
    if tensor.layout is not torch.strided or tensor.is_nested:
        yield f"{name} is {tensor_words(tensor)} {tensor.layout}; expected a tensor with strides"
        return
    right_type = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    fits = tensor.ndim == len(shape) and all(a in (None, b) for a, b in zip(shape, tensor.shape, strict=True))
    if not (fits and right_type):
        sizes = ", ".join("any" if s is None else str(s) for s in shape)
        words = "of a floating type" if dtype is None else str(dtype).removeprefix("torch.")
        yield f"{name} is {tensor_words(tensor)}; expected [{sizes}] {words}"
    elif dense and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        yield f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1 (call .contiguous())"
    elif written and overlaps(tensor):
        yield (
            f"{name} has strides {list(tensor.stride())}, by which several of its elements are one memory; it is "
            "written, so give it memory of its own"
        )
    if tensor.is_neg():
        yield f"{name} is a negated view, whose memory holds other numbers (call .resolve_neg())"
    if device is not None and tensor.device != device:
        yield f"{name} is on {tensor.device}, {beside} on {device}"


def derivative_problems(tensors: Sequence[Tensor | None], names: Callable[[], Sequence[str]]) -> list[str]:
    """The problem of the first argument whose derivatives the call would lose; names: of these arguments."""
    for i, x in enumerate(tensors) if torch.is_grad_enabled() else ():
        if x is not None and x.requires_grad:
            return [f"{names()[i]} requires a gradient, and attnreg computes none; call under torch.no_grad()"]
    for i, x in enumerate(tensors) if forward_ad._current_level >= 0 else ():
        if x is not None and _unpack(x).tangent is not None:
            return [f"{names()[i]} has a tangent, and attnreg has no derivatives in forward mode; detach it"]
    return []


def has_memory(x: Tensor) -> bool:
    """Whether a tensor has an address, or no element. FakeTensors, tensors in torch.func and other wrappers have none.

    A kernel would read from address 0 as from any other.
    """
    try:
        return not isinstance(x, FakeTensor) and (x.data_ptr() != 0 or not x.numel())
    except RuntimeError:
        return False


_MODES = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE


def is_traced() -> bool:
    """Whether PyTorch only records or simulates operations, as for torch.export. It does not see what kernels do."""
    return is_in_torch_dispatch_mode() and (
        any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES)
        # operations may be recorded before they are dispatched
        or _len_torch_dispatch_stack_pre_dispatch() > 0  # type: ignore[no-untyped-call]
    )


def is_captured(tensor: Tensor) -> bool:
    """Whether a launch on a tensor becomes part of a CUDA graph now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def table_problems(name: str, tensor: Tensor) -> Iterator[str]:
    """The problem of strides that do not fit a kernel's 32-bit numbers."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride > _INT32:
            yield f"{name} has strides {list(tensor.stride())}; expected up to {_INT32} (call .contiguous())"
            return


def overlaps(tensor: Tensor) -> bool:
    """Whether several elements of a tensor may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)) if tensor.numel() else ():
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def tensor_words(value: Any) -> str:
    """An argument as text: the shape and type of a tensor; of anything else its value, or its type if that is long."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
