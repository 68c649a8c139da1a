"""`merge_attn_states` and `merge_states`: attention over the union of disjoint parts of the keys.

A state is the output of attention over a part of the keys, [num_tokens, num_heads, head_size], with its LSE,
[num_heads, num_tokens] float32: the natural logarithm of the sum of ``exp(score)``. The merged output is the mean of
the outputs weighted by ``exp(lse)``; the merged LSE is the logarithm of the sum of these weights. A state whose LSE is
-inf or +inf is empty, and its output may hold anything. If all states are empty, the output is zero and the LSE -inf.
NaN in an LSE, or in the output of a state that is not empty, is NaN in the result. The merge computes in float32.

The ops launch on the output's device and on its current stream, and wait for nothing, so a CUDA graph can capture them.
A captured ``prefill_tokens_with_context`` stays the same in all replays.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from attnreg.runtime.batch import tensor_words
from attnreg.runtime.spec import DTYPES
from attnreg.runtime.states.memory import reach, share_memory
from attnreg.runtime.tensors import MOST_REMEMBERED, derivative_problems, signatures, tensor_problems
from attnreg.runtime.validation import refuse, refuse_derivatives

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_TOKENS = "prefill_tokens_with_context"


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Merges two states of each token into ``output``, and their LSE into ``output_lse``.

    Outputs are [num_tokens, num_heads, head_size], all float16, all bfloat16 or all float32. LSEs are [num_heads,
    num_tokens] float32. Strides may be any. prefill_tokens_with_context: tokens from this index on have no prefix.
    Their suffix is copied, and the memory of their prefix is not read. None: all tokens have a prefix. output_scale:
    one float32. With it, the output is float8_e4m3fn or float8_e4m3fnuz: ``x / output_scale``, saturated and rounded to
    nearest even.

    ``output`` may be the memory of prefix_output or suffix_output, and ``output_lse`` the memory of an LSE, if shape,
    type and strides are the same. Other overlaps are refused. Raises `BatchError` before anything is written.
    """
    given = {
        "output": output, "prefix_output": prefix_output, "prefix_lse": prefix_lse, "suffix_output": suffix_output,
        "suffix_lse": suffix_lse,
    }  # fmt: skip
    count, problems = prefill_tokens_with_context, _kind_problems(given, output_lse, output_scale)
    if count is not None and not isinstance(count, torch.SymInt):
        # a tensor's number may be on the device
        if isinstance(count, bool | Tensor) or not hasattr(count, "__index__"):
            problems.append(f"{_TOKENS} is {tensor_words(count)}; expected an integer in host memory, or None")
        else:
            count = index(count)
    refuse(problems)
    op = torch.ops.attnreg.merge_attn_states.default if _traced(output) else _merge_attn_states
    op(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse, count, output_scale)


def merge_states(
    output: Tensor,
    states: Tensor,
    lses: Tensor,
    output_lse: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Merges k states of each token into ``output`` in one pass, in their order, and their LSE into ``output_lse``.

    states [k, num_tokens, num_heads, head_size] float16, bfloat16 or float32, k at least 1; lses [k, num_heads,
    num_tokens] float32; any strides. The output may have another of these types. The rest is as for
    `merge_attn_states`. Raises `BatchError` before anything is written.
    """
    refuse(_kind_problems({"output": output, "states": states, "lses": lses}, output_lse, output_scale))
    op = torch.ops.attnreg.merge_states.default if _traced(output) else _merge_states
    op(output, states, lses, output_lse, output_scale)


def _traced(output: Tensor) -> bool:
    """Whether a compiler or a tracer has to see the op. Otherwise its function is called directly, which costs less."""
    return type(output) is not Tensor or torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _kind_problems(given: dict[str, Any], output_lse: Any, output_scale: Any) -> list[str]:
    """The problems of arguments that are no tensors. The ops' schemas would refuse these without naming a remedy."""
    more = {"output_lse": output_lse, "output_scale": output_scale}
    given = {**given, **{name: x for name, x in more.items() if x is not None}}
    return [f"{name} is {tensor_words(x)}; expected a tensor" for name, x in given.items() if not isinstance(x, Tensor)]


def _merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None,
    tokens: int | None,
    output_scale: Tensor | None,
) -> None:
    tensors = output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse, output_scale
    merge = _validated(tensors, _TWO)
    num_tokens = output.shape[0]
    if tokens is not None and not 0 <= tokens <= num_tokens:
        refuse([f"{_TOKENS} is {tokens}; expected an integer from 0 to {num_tokens}, the tokens of output"])
    if output.numel():
        merge.run(*tensors, num_tokens if tokens is None else tokens)


def _merge_states(
    output: Tensor, states: Tensor, lses: Tensor, output_lse: Tensor | None, output_scale: Tensor | None
) -> None:
    tensors = output, output_lse, states, lses, output_scale
    merge = _validated(tensors, _MANY)
    if output.numel():
        merge.run(output, output_lse, *_apart(states, lses), output_scale, output.shape[0])


def _apart(states: Tensor, lses: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stacked states as prefixes, and the last as the suffix."""
    return states[:-1], lses[:-1], states[-1], lses[-1]


@cache
def kernel_of(device: str) -> Any:
    """The class that merges on a kind of device. Kernels are reached by name; Triton's are for GPUs."""
    module, name = ("triton_merge", "TritonMerge") if device == "cuda" else ("torch_merge", "TorchMerge")
    return getattr(importlib.import_module(f"attnreg.kernels.states.{module}"), name)


class _Kind(NamedTuple):
    """An op: the names of its tensors in the order of its calls, and which of these are states and which are LSEs."""

    names: tuple[str, ...]
    states: tuple[str, ...]
    lses: tuple[str, ...]


_TWO = _Kind(
    ("output", "output_lse", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_scale"),
    ("prefix_output", "suffix_output"),
    ("prefix_lse", "suffix_lse"),
)
_MANY = _Kind(("output", "output_lse", "states", "lses", "output_scale"), ("states",), ("lses",))
# the signatures of calls that passed validation -> their merge, each tensor's bytes from its first element to the end
# of its last, and which tensors are like the written ones
_FITTED: dict[Any, tuple[Any, tuple[int, ...], tuple[list[bool], ...]]] = {}


def _validated(tensors: tuple[Tensor | None, ...], kind: _Kind) -> Any:
    """The merge for the tensors of a call. Raises `BatchError` if they do not fit each other."""
    refuse(derivative_problems(tensors, lambda: kind.names))
    try:
        key = (kind.states, *signatures(tensors))
    except RuntimeError:
        # a tensor without strides, for the validation to report
        key = None
    fitted = _FITTED.get(key)
    if fitted is None:
        named = dict(zip(kind.names, tensors, strict=True))
        refuse([*_problems(named, kind.states, kind.lses)])
        if len(_FITTED) >= MOST_REMEMBERED:
            _FITTED.clear()
        reaches = tuple(0 if x is None else reach(x) for x in tensors)
        fitted = _FITTED[key] = _prepared(tensors, kind), reaches, _alike(tensors)
    merge, reaches, alike = fitted
    begins = [0 if x is None else x.data_ptr() for x in tensors]
    output, lse, *others = ends = [(begin, begin + size) for begin, size in zip(begins, reaches, strict=True)]
    # a tensor like a written one that begins at the same address is that tensor itself, which is allowed
    if _meet(output, lse) or any(
        _meet(written, x) and not (twin and x == written)
        for written, twins in zip((output, lse), alike, strict=True)
        for x, twin in zip(others, twins, strict=True)
    ):
        refuse([*_overlaps(dict(zip(kind.names, zip(tensors, ends, strict=True), strict=True)), kind)])
    return merge


def _alike(tensors: tuple[Tensor | None, ...]) -> tuple[list[bool], ...]:
    """For each read tensor: whether it has the signature of the output; and whether it has that of the output LSE."""
    facts = signatures(tensors)
    return tuple([fact is not None and fact == written for fact in facts[2:]] for written in facts[:2])


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two ranges of memory overlap."""
    return one[0] < other[1] and other[0] < one[1]


def _prepared(tensors: tuple[Any, ...], kind: _Kind) -> Any:
    """The merge for tensors that fit; None if the output is empty."""
    output, output_lse, *states, scale = tensors
    if not output.numel():
        return None
    return kernel_of(output.device.type)(output, output_lse, *(_apart(*states) if kind is _MANY else states), scale)


def _problems(named: dict[str, Any], states: tuple[str, ...], lses: tuple[str, ...]) -> Iterator[str]:
    output, scale = named["output"], named["output_scale"]
    if output.ndim != 3 or output.dtype not in (*DTYPES.values(), *_FP8):
        words = "float16, bfloat16, float32, float8_e4m3fn or float8_e4m3fnuz"
        yield f"output is {tensor_words(output)}; expected [num_tokens, num_heads, head_size] {words}"
        return
    num_tokens, num_heads, head_size = output.shape
    if head_size == 0:
        yield f"output is {tensor_words(output)}; expected a head_size of at least 1"
    if (scale is not None) != (output.dtype in _FP8):
        has = "without" if scale is None else "with"
        yield f"output is {tensor_words(output)}, {has} an output_scale; an output of 8 bits has one, no other has"
    device = output.device
    stack: tuple[int | None, ...] = (None,) if states == ("states",) else ()
    if stack and named["states"].ndim == 4:
        stack = (named["states"].shape[0],)
        if stack == (0,):
            yield "states has no state; expected one at least"
    # stacked states may be more precise than the output
    first = named[states[-1]].dtype
    dtype = first if stack or output.dtype in _FP8 else output.dtype
    if dtype not in DTYPES.values():
        yield f"{states[-1]} is {tensor_words(named[states[-1]])}; expected float16, bfloat16 or float32"
        return
    places = {"device": device, "beside": "output", "dense": False}
    yield from tensor_problems("output", output, output.shape, output.dtype, written=True, **places)
    for name in states:
        yield from tensor_problems(name, named[name], (*stack, num_tokens, num_heads, head_size), dtype, **places)
    for name in lses:
        yield from tensor_problems(name, named[name], (*stack, num_heads, num_tokens), torch.float32, **places)
    if named["output_lse"] is not None:
        sizes = num_heads, num_tokens
        yield from tensor_problems("output_lse", named["output_lse"], sizes, torch.float32, written=True, **places)
    if scale is not None:
        shape = () if scale.ndim == 0 else (1,)
        yield from tensor_problems("output_scale", scale, shape, torch.float32, **places)


def _overlaps(named: dict[str, tuple[Any, tuple[int, int]]], kind: _Kind) -> Iterator[str]:
    """The problems of memory that is written and also read; an output that is one of the states is allowed.

    named: each tensor, with where its memory begins and ends.
    """
    for written, may_be in (("output", kind.states), ("output_lse", kind.lses)):
        x, place = named[written]
        for name, (other, other_place) in named.items():
            # compares the two written tensors with each other only once
            if name in ("output", written) or not _meet(place, other_place):
                continue
            # compares with each of stacked states
            parts = other if name in may_be and other.ndim > x.ndim else (other,)
            if any(share_memory(x, part, may_be_alias=name in may_be) for part in parts):
                yield (
                    f"{written} overlaps {name} in memory; it is written while that is read, so give it memory of its "
                    "own, or exactly that of a state"
                )


def _write_nothing(output: Tensor, *more: object) -> None:
    """The ops for tensors without data. They do nothing, because they return nothing and only write to arguments.

    PyTorch also calls this function if only one of several tensors has no data.
    """
    devices = [x.device for x in more if isinstance(x, Tensor) and x.device != output.device]
    refuse([f"output is on {output.device}, another argument on {device}" for device in devices[:1]])


_MERGE_TWO = (
    "merge_attn_states(Tensor(a!) output, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, "
    f"Tensor suffix_lse, Tensor(b!)? output_lse, SymInt? {_TOKENS}, Tensor? output_scale) -> ()"
)
_MERGE_MANY = (
    "merge_states(Tensor(a!) output, Tensor states, Tensor lses, Tensor(b!)? output_lse, Tensor? output_scale) -> ()"
)
_library: Any = torch.library.Library("attnreg", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _function in ((_MERGE_TWO, _merge_attn_states), (_MERGE_MANY, _merge_states)):
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    refuse_derivatives(_library, _name, _function)
    torch.library.register_fake(f"attnreg::{_name}", _write_nothing, lib=_library)
