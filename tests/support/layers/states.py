"""Partial states for tests, and what merging them gives in float64."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def states_of(
    count: int, tokens: int, heads: int, size: int, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random states [count, tokens, heads, size] and LSEs [count, heads, tokens], of which each fifth is empty.

    Empty ones are written as -inf or +inf, and their output is NaN or infinite; some tokens have no key at all.
    """
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(count, tokens, heads, size, generator=generator)
    lses = torch.randn(count, heads, tokens, generator=generator) * 10
    kind = torch.randint(10, lses.shape, generator=generator)
    kind[:, torch.rand(heads, tokens, generator=generator) < 0.1] = 0
    lses[kind == 0], lses[kind == 1] = -torch.inf, torch.inf
    states[kind.transpose(1, 2) == 0], states[kind.transpose(1, 2) == 1] = torch.nan, torch.inf
    return states.to(DEVICE, dtype), lses.to(DEVICE)


def merged(states: Tensor, lses: Tensor, with_prefix: int | None = None) -> tuple[Tensor, Tensor]:
    """The merged state and its LSE, in float64; from token ``with_prefix`` on, of the last state alone."""
    lses = lses.double().transpose(1, 2).clone()
    lses[lses == torch.inf] = -torch.inf
    if with_prefix is not None:
        lses[:-1, with_prefix:] = -torch.inf
    is_empty = lses == -torch.inf
    # not by logsumexp: log(2) is lost beside 1e30
    largest = lses.amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weights = (lses - largest).exp()
    total = weights.sum(0)
    mean = weights / total.masked_fill(total == 0, 1)
    return (states.double().masked_fill(is_empty[..., None], 0) * mean[..., None]).sum(0), (largest + total.log()).T
