"""Batches of every kind, which a layer runs before requests arrive, so that none waits while a kernel is compiled.

The lengths of a batch decide which kernel computes it, and with which constants. It matters whether requests have one
query or several, are few or many, have short or long contexts, and whether tokens come beside prompts. The batches
here cover all of these within an engine's bounds. An engine calls its layer with each of them as it will with real
ones, because strides and optional tensors decide too. They read only the first block of a cache, and write to none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from attnreg.runtime.batch import BatchError, BatchMetadata
from attnreg.runtime.spec import AttentionSpec

# how many queries of a request lead to different kernels: few, by the rows of their tiles; and those of prompts
_FEW = (1, 2, 3, 5, 9, 16)
_PROMPTS = (17, 64, 90, 150, 400, 640, 2048)
# how many keys before the queries, and how many requests, lead to different kernels
_CONTEXTS = (0, 300, 1500, 3000, 10_000, 40_000)
_COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# pairs of query counts for requests that differ within one launch
_UNEVEN = ((1, 2), (1, 5), (2, 16), (4, 8), (1, 200), (8, 600), (17, 64), (17, 400), (64, 2048))

Lengths = tuple[tuple[int, int], ...]


def warm_up_batches(
    spec: AttentionSpec,
    *,
    max_num_tokens: int,
    max_num_reqs: int,
    max_seq_len: int,
    device: torch.device | str = "cuda",
) -> Iterator[BatchMetadata]:
    """Batches of every kind for a layer of a spec, those of few tokens first.

    max_num_tokens, max_num_reqs: the most of a step. max_seq_len: the most keys of a request. device: of the batches'
    tensors. A batch has ``num_tokens`` rows of query, and as many of key and value. Slots are -1, and every entry of a
    block table is block 0. Raises `BatchError` for a bound that is not an integer of at least 1.
    """
    bounds = {"max_num_tokens": max_num_tokens, "max_num_reqs": max_num_reqs, "max_seq_len": max_seq_len}
    problems = [
        f"{name} is {bound!r}; expected an integer of at least 1"
        for name, bound in bounds.items()
        if type(bound) is not int or bound < 1
    ]
    if problems:
        raise BatchError(problems)
    table = slots = None
    if spec.block_size is not None:
        blocks = -(-max_seq_len // spec.block_size)
        table = torch.zeros(max_num_reqs, blocks, dtype=torch.int32, device=device)
        slots = torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device)
    for lengths in lengths_of(max_num_tokens, max_num_reqs, max_seq_len, cached=table is not None):
        queries, n = [q for q, _ in lengths], len(lengths)
        for causal in _masks(spec, n):
            yield BatchMetadata.build(
                queries,
                [k for _, k in lengths],
                device=device,
                block_table=None if table is None else table[:n],
                slot_mapping=None if slots is None else slots[: sum(queries)],
                causal=causal,
                mm_prefix=_ranges(spec, n, device),
                tree_mask=_tree(spec, sum(queries), max(queries), device),
            )


def _masks(spec: AttentionSpec, requests: int) -> list[bool | list[bool]]:
    """The values of ``causal`` that a layer's batches have."""
    if spec.attn_type != "decoder":
        return [False]
    by_request = [[i % 2 == 0 for i in range(requests)]] if "causal_by_request" in spec.features else []
    return [True, *([False] if "non_causal" in spec.features else []), *by_request]


def _ranges(spec: AttentionSpec, requests: int, device: torch.device | str) -> Tensor | None:
    if "mm_prefix" not in spec.features:
        return None
    return torch.zeros(requests, 1, 2, dtype=torch.int32, device=device)


def _tree(spec: AttentionSpec, tokens: int, longest: int, device: torch.device | str) -> Tensor | None:
    return torch.ones(tokens, longest, dtype=torch.bool, device=device) if "tree_mask" in spec.features else None


def lengths_of(tokens: int, reqs: int, seq_len: int, *, cached: bool) -> list[Lengths]:
    """The queries and keys of each request, for each batch within the bounds; cached: the layer has a cache."""
    found: dict[Lengths, None] = {}

    def add(*groups: tuple[int, int, int]) -> None:
        """Adds a batch of groups (requests, queries, keys before these) if it fits the bounds; keys are cut to fit."""
        lengths = [(q, min(q + context, seq_len)) for n, q, context in groups for _ in range(n)]
        if len(lengths) <= reqs and sum(q for q, _ in lengths) <= tokens and all(q <= k for q, k in lengths):
            found[tuple(lengths)] = None

    contexts = _CONTEXTS if cached else (0,)
    for q in (*_FEW, *_PROMPTS, min(tokens, seq_len)):
        for context in (*contexts, seq_len if cached else 0):
            add((1, q, context))
        for n, context in product((*_COUNTS, reqs), contexts[::2]):
            add((n, q, context))
    beside = sorted({min(n, reqs - 1) for n in (1, 3, 8, 16, 40, 64)} - {0})
    for (few, many), context, n in product(_UNEVEN, contexts, beside):
        add((n, few, context), (1, many, context))
        add((n, few, 0), (1, many, context))
    for n in (*_COUNTS, *(count + 1 for count in _COUNTS), reqs):
        # one token with many more keys than the others
        add((n - 1, 1, 0), (1, 1, seq_len if cached else 0))
    for q, context, n, prompt in product(_FEW, contexts[::2], beside, _PROMPTS if cached else ()):
        add((n, q, context), (1, prompt, 0))
    return sorted(found, key=lambda lengths: (sum(q for q, _ in lengths), len(lengths)))
