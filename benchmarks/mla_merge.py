"""The merge of partial states for benchmarks/mla.py, beside vLLM's CUDA and Triton kernels and FlashInfer's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from kernel_case import Case, Place, Trial, function_of
from measuring import Peer, Peers

from attnreg import ops


def cases(place: Place) -> Iterator[Case]:
    # tokens, heads, head size, the part of the tokens that has context, mark
    for tokens, heads, size, part, mark in (
        (16384, 128, 128, 1.0, 390.0), (16384, 128, 128, 0.5, 325.0), (16384, 16, 128, 1.0, 57.0),
        (4096, 128, 128, 1.0, 105.0), (1024, 16, 128, 1.0, 9.4),
    ):  # fmt: skip
        some = "" if part == 1 else f", context for {part:.0%}"
        name = f"merge {tokens // 1024}k tokens h{heads} d{size}{some}"
        rows, heads = place.few(tokens, 40), place.few(heads, 4)
        yield Case(name=name, mark=mark, prepare=partial(_two, place, rows, heads, size, int(rows * part)))
    # no peer merges more than two; the mark is the time of the bytes
    for states, tokens, heads, size, mark in ((8, 64, 128, 512, 21.0), (4, 256, 32, 128, 9.0)):
        name = f"merge {states} states of {tokens} tokens h{heads} d{size}"
        rows, heads = place.few(tokens, 40), place.few(heads, 4)
        yield Case(name=name, mark=mark, prepare=partial(_many, place, states, rows, heads, size))


def _random(place: Place, states: int, tokens: int, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(states, tokens, heads, size, device=place.device, dtype=place.dtype)
    return x, torch.randn(states, heads, tokens, device=place.device) * 3


def _error(output: torch.Tensor, states: torch.Tensor, lses: torch.Tensor, with_prefix: int) -> float:
    """The relative error of the last call against float64, on random tokens."""
    rows = torch.randint(output.shape[0], (256,), device=output.device)
    weights = lses[:, :, rows].double().transpose(1, 2)
    weights[:-1, rows >= with_prefix] = -math.inf
    exact = (torch.softmax(weights, 0)[..., None] * states[:, rows].double()).sum(0)
    return float((output[rows].double() - exact).norm() / exact.norm())


def _two(place: Place, tokens: int, heads: int, size: int, with_prefix: int) -> Trial:
    states, lses = _random(place, 2, tokens, heads, size)
    output, lse = torch.full_like(states[0], math.nan), torch.full_like(lses[0], math.nan)
    arguments = (output, states[0], lses[0], states[1], lses[1], lse, with_prefix)

    def error(found: torch.Tensor = output) -> float:
        return _error(found, states, lses, with_prefix)

    def peers() -> Peers:
        other = torch.full_like(output, math.nan)
        for name, module in (
            ("vLLM CUDA", "vllm._custom_ops"),
            ("vLLM Triton", "vllm.v1.attention.ops.triton_merge_attn_states"),
        ):
            function = function_of(module, "merge_attn_states")
            if function is not None:
                yield Peer(name, partial(function, other, *arguments[1:]), lambda _: error(other))
        flashinfer = function_of("flashinfer", "merge_state")
        if flashinfer is not None and with_prefix == tokens:
            # its logarithms have base 2 and tokens first
            by_token = (lses / math.log(2)).transpose(1, 2).contiguous()
            merge = partial(flashinfer, states[0], by_token[0], states[1], by_token[1])
            yield Peer("FlashInfer", merge, lambda merged: error(merged[0]))

    return Trial(
        call=partial(ops.merge_attn_states, *arguments),
        error=error,
        peers=peers,
        # a state is read of tokens without context, two of the others, and one is written
        moved=(states[0, 0].nbytes + 4 * heads) * (2 * tokens + with_prefix),
        copies=True,
    )


def _many(place: Place, count: int, tokens: int, heads: int, size: int) -> Trial:
    states, lses = _random(place, count, tokens, heads, size)
    output, lse = torch.full_like(states[0], math.nan), torch.full_like(lses[0], math.nan)
    return Trial(
        call=partial(ops.merge_states, output, states, lses, lse),
        error=partial(_error, output, states, lses, tokens),
        peers=lambda: iter(()),
        moved=states.nbytes + lses.nbytes + output.nbytes + lse.nbytes,
    )
