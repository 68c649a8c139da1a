# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return, assignment"
# ruff: noqa: N803, RUF005 (constexprs are written in capitals; Triton unpacks no tuples)
"""The merge of partial states in one pass over their memory, which bounds its speed."""

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.fp8 import stored_as
from attnreg.kernels.triton.launch import Bound, Kernel, pointers_of
from attnreg.kernels.triton.layout import FP8
from attnreg.kernels.triton.target import target_of
from attnreg.kernels.triton.tiles import power_of_2

# the sizes and strides of a launch: the strides of a state, a token, a head and an element, if a tensor has them. The
# first three of outputs are in units of ALIGNED elements
_NUMBERS = (
    "num_tokens", "num_heads", "tokens_with_prefix",
    "output_token", "output_head", "output_element",
    "prefix_state", "prefix_token", "prefix_head", "prefix_element",
    "suffix_token", "suffix_head", "suffix_element",
    "output_lse_head", "output_lse_token",
    "prefix_lse_state", "prefix_lse_head", "prefix_lse_token",
    "suffix_lse_head", "suffix_lse_token",
)  # fmt: skip


@triton.jit
def _lse(pointers, mask):
    """Returns the LSE of states, -inf if a state is empty. Some kernels return +inf for an empty state."""
    lse = tl.load(pointers, mask=mask, other=float("-inf"))
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def _within(token, head, stride_token, stride_head, NEAR: tl.constexpr):
    """Returns the offsets of rows within a tile, in 32 bits if NEAR."""
    if NEAR:
        offsets = token * stride_token.to(tl.int32) + head * stride_head.to(tl.int32)
    else:
        offsets = token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
    return offsets


@triton.jit
def _columns(offs_d, stride, DENSE: tl.constexpr):
    """Returns the offsets of a row's elements."""
    return offs_d if DENSE else offs_d.to(tl.int64) * stride


@triton.jit
def _weighted(state, lse, weight):
    """Returns the states' summands of the mean. An empty state, which may hold NaN, gives -0.0, which adds nothing."""
    # by its bits, because Triton turns the literal -0.0 into 0.0
    nothing = tl.full([], -(2**31), tl.int32).to(tl.float32, bitcast=True)
    return tl.where((lse == float("-inf"))[:, None], nothing, state.to(tl.float32)) * weight[:, None]


@triton.jit(
    do_not_specialize=list(_NUMBERS),
    do_not_specialize_on_alignment=["output_lse_ptr", "prefix_lse_ptr", "suffix_lse_ptr", "output_scale_ptr"],
)
def _merge_states_kernel(
    output_ptr, prefix_ptr, suffix_ptr, output_lse_ptr, prefix_lse_ptr, suffix_lse_ptr, output_scale_ptr,
    num_tokens, num_heads, tokens_with_prefix, output_token, output_head, output_element,
    prefix_state, prefix_token, prefix_head, prefix_element, suffix_token, suffix_head, suffix_element,
    output_lse_head, output_lse_token, prefix_lse_state, prefix_lse_head, prefix_lse_token,
    suffix_lse_head, suffix_lse_token,
    NUM_PREFIXES: tl.constexpr, HEAD_SIZE: tl.constexpr, FORMAT: tl.constexpr, DENSE: tl.constexpr,
    NEAR: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    UNROLLED: tl.constexpr,
):  # fmt: skip
    """Merges BLOCK_T tokens of BLOCK_H heads: NUM_PREFIXES states of the tokens that have a prefix, and the suffix.

    FORMAT: of an 8-bit output, else "". DENSE: rows are contiguous. NEAR: a tile spans less than 2**31 elements.
    ALIGNED: the unit of the strides of states, tokens and heads. UNROLLED: how many prefixes are loaded at once.
    """
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    # int64 before any multiply, for the tile's own place alone: offsets of rows within it fit 32 bits
    first_token = (tl.program_id(0) // head_blocks).to(tl.int64) * BLOCK_T
    first_head = (tl.program_id(0) % head_blocks).to(tl.int64) * BLOCK_H
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    token, head = row // BLOCK_H, row % BLOCK_H  # [rows]
    is_row = (token < num_tokens - first_token) & (head < num_heads - first_head)
    has_prefix = is_row & (token < tokens_with_prefix - first_token)

    output_ptr += (first_token * output_token + first_head * output_head) * ALIGNED
    prefix_ptr += (first_token * prefix_token + first_head * prefix_head) * ALIGNED
    suffix_ptr += (first_token * suffix_token + first_head * suffix_head) * ALIGNED
    prefix_lse_ptr += first_head * prefix_lse_head + first_token * prefix_lse_token
    suffix_lse_ptr += first_head * suffix_lse_head + first_token * suffix_lse_token
    output_rows = (_within(token, head, output_token, output_head, NEAR) * ALIGNED)[:, None]
    prefix_rows = (_within(token, head, prefix_token, prefix_head, NEAR) * ALIGNED)[:, None]
    suffix_rows = (_within(token, head, suffix_token, suffix_head, NEAR) * ALIGNED)[:, None]
    prefix_lses = prefix_lse_ptr + _within(token, head, prefix_lse_token, prefix_lse_head, NEAR)

    suffix_lse = _lse(suffix_lse_ptr + _within(token, head, suffix_lse_token, suffix_lse_head, NEAR), is_row)
    output_scale = 1.0 if output_scale_ptr is None else tl.load(output_scale_ptr)
    lse = suffix_lse
    if first_token >= tokens_with_prefix:
        # no row of the tile has a prefix
        for first in range(0, HEAD_SIZE, BLOCK_D):
            offs_d = first + tl.arange(0, BLOCK_D)
            mask = is_row[:, None] & (offs_d < HEAD_SIZE)[None, :]
            state = tl.load(suffix_ptr + suffix_rows + _columns(offs_d, suffix_element, DENSE)[None, :], mask=mask)
            tl.debug_barrier()
            state = tl.where((suffix_lse == float("-inf"))[:, None], 0.0, state.to(tl.float32))
            # NaN of an LSE stays visible, as in tiles where some rows have a prefix
            state = tl.where((suffix_lse != suffix_lse)[:, None], suffix_lse[:, None], state)
            tl.store(output_ptr + output_rows + _columns(offs_d, output_element, DENSE)[None, :],
                     stored_as(state, output_scale, output_ptr, FORMAT), mask=mask)  # fmt: skip
    else:
        for first in range(0, HEAD_SIZE, BLOCK_D):
            offs_d = first + tl.arange(0, BLOCK_D)
            is_d = (offs_d < HEAD_SIZE)[None, :]
            suffix = tl.load(suffix_ptr + suffix_rows + _columns(offs_d, suffix_element, DENSE)[None, :],
                             mask=is_row[:, None] & is_d, other=0.0)  # fmt: skip
            # issues all loads before the first result is needed
            states, lses = (), ()
            for i in tl.static_range(UNROLLED):
                at = tl.cast(i, tl.int64)
                lses = lses + (_lse(prefix_lses + at * prefix_lse_state, has_prefix),)
                columns = at * prefix_state * ALIGNED + _columns(offs_d, prefix_element, DENSE)
                states = states + (tl.load(prefix_ptr + prefix_rows + columns[None, :],
                                           mask=has_prefix[:, None] & is_d, other=0.0),)  # fmt: skip
            # a barrier: the assembler would move some loads behind the sums, and wait for memory twice. Also every warp
            # loads the LSEs of all rows, and the output LSE may be in the same memory
            tl.debug_barrier()
            pivot = suffix_lse
            for i in tl.static_range(UNROLLED):
                pivot = tl.maximum(pivot, lses[i])
            for i in range(UNROLLED, NUM_PREFIXES):
                pivot = tl.maximum(pivot, _lse(prefix_lses + tl.cast(i, tl.int64) * prefix_lse_state, has_prefix))
            # if all states are empty: -inf - -inf is NaN
            pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
            weight = tl.exp(suffix_lse - pivot)
            total = weight
            for i in tl.static_range(UNROLLED):
                total += tl.exp(lses[i] - pivot)
            for i in range(UNROLLED, NUM_PREFIXES):
                total += tl.exp(_lse(prefix_lses + tl.cast(i, tl.int64) * prefix_lse_state, has_prefix) - pivot)
            no_keys = total == 0.0
            divisor = tl.where(no_keys, 1.0, total)
            share = 1.0 / divisor
            acc = _weighted(suffix, suffix_lse, weight * share)
            for i in tl.static_range(UNROLLED):
                acc += _weighted(states[i], lses[i], tl.exp(lses[i] - pivot) * share)
            for i in range(UNROLLED, NUM_PREFIXES):
                at = tl.cast(i, tl.int64)
                columns = at * prefix_state * ALIGNED + _columns(offs_d, prefix_element, DENSE)
                state = tl.load(prefix_ptr + prefix_rows + columns[None, :], mask=has_prefix[:, None] & is_d, other=0.0)
                one = _lse(prefix_lses + at * prefix_lse_state, has_prefix)
                acc += _weighted(state, one, tl.exp(one - pivot) * share)
            acc = tl.where(no_keys[:, None], 0.0, acc)
            tl.store(output_ptr + output_rows + _columns(offs_d, output_element, DENSE)[None, :],
                     stored_as(acc, output_scale, output_ptr, FORMAT), mask=is_row[:, None] & is_d)  # fmt: skip
            lse = tl.where(no_keys, float("-inf"), pivot + tl.log(divisor))
    if output_lse_ptr is not None:
        output_lse_ptr += first_head * output_lse_head + first_token * output_lse_token
        tl.store(output_lse_ptr + _within(token, head, output_lse_token, output_lse_head, NEAR), lse, mask=is_row)


class StateTensors(NamedTuple):
    """The tensors of a merge: the kernel's pointers."""

    output: Tensor
    prefix: Tensor
    suffix: Tensor
    output_lse: Tensor | None
    prefix_lse: Tensor
    suffix_lse: Tensor
    output_scale: Tensor | None


_MERGE = Kernel(_merge_states_kernel, pointers_of(StateTensors))


class StatesTile(NamedTuple):
    """The tile of a program: tokens, heads, and the elements of a head at a time."""

    block_t: int
    block_h: int
    block_d: int
    num_warps: int


class StatesKey(NamedTuple):
    """The facts about a call's tensors that the code depends on.

    dense, near, aligned: as the kernel's. wide: which numbers take 64 bits, None where none does.
    """

    dense: bool
    near: bool
    aligned: int
    no_output_lse: bool
    no_output_scale: bool
    wide: tuple[bool, ...] | None


class StatesCode(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    output_dtype: torch.dtype
    num_prefixes: int
    head_size: int
    config: StatesTile

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": self.config.num_warps}

    def constants(self, key: StatesKey) -> Mapping[str, Any]:
        return {
            "NUM_PREFIXES": self.num_prefixes,
            "HEAD_SIZE": self.head_size,
            "FORMAT": FP8.get(self.output_dtype, ""),
            "DENSE": key.dense,
            "NEAR": key.near,
            "ALIGNED": key.aligned,
            "BLOCK_T": self.config.block_t,
            "BLOCK_H": self.config.block_h,
            "BLOCK_D": self.config.block_d,
            "UNROLLED": min(self.num_prefixes, 8),
        }


def config_for(num_tokens: int, num_heads: int, head_size: int, num_sms: int) -> StatesTile:
    """The tile for states of these sizes: of one head, whose LSEs lie together, and small enough to use all SMs.

    On an H200, 16 tokens of a head of 128 took 423 us with 4 warps and 433 us with 8; 8 tokens took 436 us
    (2026-11-22).
    """
    block_d = min(512, max(16, power_of_2(head_size)))
    rows = max(1, 2048 // block_d)
    while rows > 4 and num_tokens * num_heads < 4 * num_sms * rows:
        rows //= 2
    return StatesTile(rows, 1, block_d, 4)


class TritonMerge:
    """The launch that merges states of certain shapes and strides.

    prefixes [k, tokens, heads, head_size] or without the first dimension, suffix and output [tokens, heads, head_size];
    prefix_lses [k, heads, tokens] or without the first dimension, suffix_lse and output_lse [heads, tokens] float32,
    natural logarithm; any strides. output_scale: one float32, with an output of 8 bits. config: for measurements.
    """

    def __init__(
        self,
        output: Tensor,
        output_lse: Tensor | None,
        prefixes: Tensor,
        prefix_lses: Tensor,
        suffix: Tensor,
        suffix_lse: Tensor,
        output_scale: Tensor | None,
        config: StatesTile | None = None,
    ) -> None:
        num_tokens, num_heads, head_size = output.shape
        target = target_of(output.device)
        config = config or config_for(num_tokens, num_heads, head_size, target.num_sms)
        stacked = prefixes.ndim == 4
        count = prefixes.shape[0] if stacked else 1
        states = output.stride(), prefixes.stride() if stacked else (0, *prefixes.stride()), suffix.stride()
        lses = (
            (0, 0) if output_lse is None else output_lse.stride(),
            prefix_lses.stride() if stacked else (0, *prefix_lses.stride()),
            suffix_lse.stride(),
        )
        dense = head_size == 1 or all(one[-1] == 1 for one in states)
        aligned = math.gcd(16, *chain(*(one[:-1] for one in states)))
        # in units of ``aligned`` elements, which tell the compiler how many elements are contiguous
        units = ((*(stride // aligned for stride in one[:-1]), one[-1]) for one in states)
        self.sizes, self.strides = (num_tokens, num_heads), tuple(chain(*units, *lses))
        tokens, heads = config.block_t - 1, config.block_h - 1
        reaches = [tokens * one[-3] + heads * one[-2] for one in states]
        reaches += [tokens * one[-1] + heads * one[-2] for one in lses]
        # Triton takes numbers as 32 or 64 bits, by their size
        wide = tuple(n >= 2**31 for n in (*self.sizes, *self.strides))
        self.key = StatesKey(
            dense, max(reaches) < 2**31, aligned, output_lse is None, output_scale is None, wide if any(wide) else None,
        )  # fmt: skip
        self.variant = _MERGE.variant(output.device, StatesCode(suffix.dtype, output.dtype, count, head_size, config))
        self.grid = -(-num_tokens // config.block_t) * -(-num_heads // config.block_h), 1, 1
        # number of tokens with a prefix -> the bound launch
        self._bound: dict[int, Bound] = {}
        self.as_bits = output.dtype in FP8 and not target.converts(output.dtype)

    def run(
        self,
        output: Tensor,
        output_lse: Tensor | None,
        prefixes: Tensor,
        prefix_lses: Tensor,
        suffix: Tensor,
        suffix_lse: Tensor,
        output_scale: Tensor | None,
        tokens_with_prefix: int,
    ) -> None:
        """Writes the states over the union of all keys: of the prefixes for the first tokens, of the suffix for all.

        The memory of prefixes past the first tokens is not read. Output and output_lse may be the memory of one of the
        states, element by element.
        """
        if self.as_bits:
            output = output.view(torch.uint8)
        bound = self._bound.get(tokens_with_prefix)
        if bound is None:
            # keeps the launches of one step only: the next step has other numbers
            self._bound.clear()
            numbers = dict(zip(_NUMBERS, (*self.sizes, tokens_with_prefix, *self.strides), strict=True))
            bound = self._bound[tokens_with_prefix] = self.variant.bind(self.key, self.grid, numbers)
        bound.launch(StateTensors(output, prefixes, suffix, output_lse, prefix_lses, suffix_lse, output_scale))
