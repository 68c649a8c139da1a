# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"
# ruff: noqa: N803 (constexprs are written in capitals)
"""The merge of partial states in one pass over their memory, which bounds its speed."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnreg.kernels.triton.fp8 import stored_as
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.layout import FP8
from attnreg.kernels.triton.target import target_of
from attnreg.kernels.triton.tiles import power_of_2

# the sizes and strides of a launch; strides of a state, a token, a head and an element, as far as a tensor has them
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
    """Returns the LSE of states, -inf where a state is empty. Some kernels say +inf there."""
    lse = tl.load(pointers, mask=mask, other=float("-inf"))
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def _columns(offs_d, stride, DENSE: tl.constexpr):
    """Returns the offsets of a row's elements."""
    return offs_d if DENSE else offs_d.to(tl.int64) * stride


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
    ALIGNED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merges BLOCK_T tokens of BLOCK_H heads: NUM_PREFIXES states of the tokens that have a prefix, and the suffix.

    FORMAT: of an 8-bit output, else "". DENSE: rows are contiguous. ALIGNED: rows begin at multiples of it.
    """
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64) * BLOCK_T + row // BLOCK_H  # [rows]
    head = (tl.program_id(0) % head_blocks).to(tl.int64) * BLOCK_H + row % BLOCK_H
    is_row = (token < num_tokens) & (head < num_heads)
    has_prefix = is_row & (token < tokens_with_prefix)

    suffix_lse = _lse(suffix_lse_ptr + head * suffix_lse_head + token * suffix_lse_token, is_row)
    prefix_lses = prefix_lse_ptr + head * prefix_lse_head + token * prefix_lse_token
    pivot = suffix_lse
    for i in range(NUM_PREFIXES):
        pivot = tl.maximum(pivot, _lse(prefix_lses + tl.cast(i, tl.int64) * prefix_lse_state, has_prefix))
    # all states empty: -inf less -inf is no number
    pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
    total = tl.exp(suffix_lse - pivot)
    for i in range(NUM_PREFIXES):
        total += tl.exp(_lse(prefix_lses + tl.cast(i, tl.int64) * prefix_lse_state, has_prefix) - pivot)
    no_keys = total == 0.0
    divisor = tl.where(no_keys, 1.0, total)

    # stands for the output of an empty state, which may be NaN: -0.0, which changes no number when it is added. Triton
    # makes 0.0 of the literal
    nothing = tl.full([], -(2**31), tl.int32).to(tl.float32, bitcast=True)
    output_scale = 1.0 if output_scale_ptr is None else tl.load(output_scale_ptr)
    suffix_rows = tl.multiple_of(token * suffix_token + head * suffix_head, ALIGNED)
    prefix_rows = tl.multiple_of(token * prefix_token + head * prefix_head, ALIGNED)
    output_rows = tl.multiple_of(token * output_token + head * output_head, ALIGNED)
    for first in range(0, HEAD_SIZE, BLOCK_D):
        offs_d = first + tl.arange(0, BLOCK_D)
        is_d = (offs_d < HEAD_SIZE)[None, :]
        state = tl.load(suffix_ptr + suffix_rows[:, None] + _columns(offs_d, suffix_element, DENSE)[None, :],
                        mask=is_row[:, None] & is_d, other=0.0).to(tl.float32)  # fmt: skip
        weight = tl.div_rn(tl.exp(suffix_lse - pivot), divisor)[:, None]
        acc = tl.where((suffix_lse == float("-inf"))[:, None], nothing, state) * weight
        for i in range(NUM_PREFIXES):
            at = tl.cast(i, tl.int64)
            rows = prefix_rows + tl.multiple_of(at * prefix_state, ALIGNED)
            state = tl.load(prefix_ptr + rows[:, None] + _columns(offs_d, prefix_element, DENSE)[None, :],
                            mask=has_prefix[:, None] & is_d, other=0.0).to(tl.float32)  # fmt: skip
            lse = _lse(prefix_lses + at * prefix_lse_state, has_prefix)
            weight = tl.div_rn(tl.exp(lse - pivot), divisor)[:, None]
            acc += tl.where((lse == float("-inf"))[:, None], nothing, state) * weight
        acc = tl.where(no_keys[:, None], 0.0, acc)
        tl.store(output_ptr + output_rows[:, None] + _columns(offs_d, output_element, DENSE)[None, :],
                 stored_as(acc, output_scale, output_ptr, FORMAT), mask=is_row[:, None] & is_d)  # fmt: skip
    if output_lse_ptr is not None:
        lse = tl.where(no_keys, float("-inf"), pivot + tl.log(divisor))
        # every warp loads the LSEs of all rows, and this may be their memory
        tl.debug_barrier()
        tl.store(output_lse_ptr + head * output_lse_head + token * output_lse_token, lse, mask=is_row)


_MERGE = Kernel(
    _merge_states_kernel,
    ("output_ptr", "prefix_ptr", "suffix_ptr", "output_lse_ptr", "prefix_lse_ptr", "suffix_lse_ptr",
     "output_scale_ptr", *_NUMBERS),
)  # fmt: skip


class Config(NamedTuple):
    """The tile of a program: tokens, heads, and the elements of a head at a time."""

    block_t: int
    block_h: int
    block_d: int
    num_warps: int


class Code(NamedTuple):
    """The facts that the kernel's code depends on, apart from strides and optional tensors."""

    dtype: torch.dtype
    output_dtype: torch.dtype
    num_prefixes: int
    head_size: int
    config: Config

    @property
    def options(self) -> Mapping[str, int]:
        return {"num_warps": self.config.num_warps}

    def constants(self, key: tuple[Any, ...]) -> Mapping[str, Any]:
        dense, aligned, *_ = key
        return {
            "NUM_PREFIXES": self.num_prefixes,
            "HEAD_SIZE": self.head_size,
            "FORMAT": FP8.get(self.output_dtype, ""),
            "DENSE": dense,
            "ALIGNED": aligned,
            "BLOCK_T": self.config.block_t,
            "BLOCK_H": self.config.block_h,
            "BLOCK_D": self.config.block_d,
        }


def config_for(num_tokens: int, num_heads: int, head_size: int, num_sms: int) -> Config:
    """The tile for states of these sizes: 8 tokens, whose LSEs are 32 bytes of memory, or fewer to use all SMs."""
    block_d = min(1024, max(16, power_of_2(head_size)))
    rows = max(1, 2048 // block_d)
    while rows > 4 and num_tokens * num_heads < 4 * num_sms * rows:
        rows //= 2
    block_t = min(8, rows)
    return Config(block_t, rows // block_t, block_d, 4)


def merge(
    output: Tensor,
    output_lse: Tensor | None,
    prefixes: Tensor,
    prefix_lses: Tensor,
    suffix: Tensor,
    suffix_lse: Tensor,
    tokens_with_prefix: int,
    output_scale: Tensor | None,
    *,
    config: Config | None = None,
) -> None:
    """Writes the states over the union of all keys: of the prefixes for the first tokens, and of the suffix for all.

    prefixes [k, tokens, heads, head_size], suffix and output [tokens, heads, head_size]; prefix_lses [k, heads,
    tokens], suffix_lse and output_lse [heads, tokens] float32, natural logarithm; any strides. output_scale: one
    float32, with an output of 8 bits. config: for measurements. The memory of prefixes past the first tokens is not
    read. Output and output_lse may be the memory of one of the states, element by element.
    """
    num_tokens, num_heads, head_size = output.shape
    device = output.device
    target = target_of(device)
    config = config or config_for(num_tokens, num_heads, head_size, target.num_sms)
    code = Code(suffix.dtype, output.dtype, prefixes.shape[0], head_size, config)
    output_strides, prefix_strides, suffix_strides = output.stride(), prefixes.stride(), suffix.stride()
    numbers = (
        num_tokens, num_heads, tokens_with_prefix, *output_strides, *prefix_strides, *suffix_strides,
        *((0, 0) if output_lse is None else output_lse.stride()), *prefix_lses.stride(), *suffix_lse.stride(),
    )  # fmt: skip
    dense = head_size == 1 or output_strides[2] == prefix_strides[3] == suffix_strides[2] == 1
    aligned = math.gcd(16, *output_strides[:2], *prefix_strides[:3], *suffix_strides[:2])
    # Triton takes numbers as 32 bits or 64, as they need
    wide = tuple(n >= 2**31 for n in numbers) if max(numbers) >= 2**31 else None
    if output.dtype in FP8 and not target.converts(output.dtype):
        output = output.view(torch.uint8)
    programs = -(-num_tokens // config.block_t) * -(-num_heads // config.block_h)
    _MERGE.variant(device, code).launch(
        (dense, aligned, output_lse is None, output_scale is None, wide),
        (programs, 1, 1),
        (output, prefixes, suffix, output_lse, prefix_lses, suffix_lse, output_scale, *numbers),
    )
