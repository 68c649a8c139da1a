"""The page of a run whose registry has no rule for it: every size that its rows tell apart is tried."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from attnreg.explain.block_size import BlockSize
from attnreg.planning.conflicts import smallest
from attnreg.planning.run import Conflict, ConflictFact

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Selection

    # a request -> the selection for it
    Ask = Callable[[AttentionRequest], Selection]

# the usual page in tokens; larger ones are tried before smaller ones
_USUAL = 16


def sizes_of(registry: Registry) -> tuple[int, ...]:
    """The page sizes in tokens that the rows of a registry tell apart, in the order in which they are tried."""
    claims = [c for row in registry.backends.values() for v in row.variants for c in v.claims]
    matchers = [claim.matcher for claim in claims if claim.facet == "block_size"]
    told = {n for m in matchers for n in m.constants | m.moduli if n > 0}
    moduli = {n for m in matchers for n in m.moduli if n > 0}
    sizes = {_USUAL, *told, math.lcm(*moduli), *(math.lcm(a, b) for a in moduli for b in told)}
    return tuple(sorted(sizes, key=lambda size: (size < _USUAL, abs(size - _USUAL))))


def page_of(
    labelled: Sequence[tuple[str, AttentionRequest]], registry: Registry, ask: Ask
) -> tuple[BlockSize | None, Conflict | None]:
    """The page that serves all requests with the earliest backends of their orders, or why there is none.

    labelled: each request of layers with a KV cache, with the label of its layers. (None, None) if one of them has no
    backend without a page either, or has a page already.
    """
    alone = [(label, request, ask(request)) for label, request in labelled]
    if not alone or any(s.backend is None or request.block_size is not None for _, request, s in alone):
        return None, None

    def ranks(size: int, requests: Iterable[AttentionRequest]) -> tuple[int, ...] | None:
        found = [ask(dataclasses.replace(request, block_size=size)).chosen for request in requests]
        return tuple(c.rank for c in found if c is not None) if all(found) else None

    sizes, requests = sizes_of(registry), [request for _, request, _ in alone]
    scored = [(score, i) for i, size in enumerate(sizes) if (score := ranks(size, requests)) is not None]
    if scored:
        size = sizes[min(scored)[1]]
        first = next(s for _, _, s in alone)
        assert first.chosen is not None
        return BlockSize(size, "which the backend of every layer reads", _claim(first)[1]), None

    def excluded(some: Sequence[tuple[str, AttentionRequest, Selection]]) -> bool:
        return all(ranks(size, [request for _, request, _ in some]) is None for size in sizes)

    facts = [ConflictFact(label, *_claim(selection)) for label, _, selection in smallest(alone, excluded)]
    return None, Conflict("no block size of the KV cache serves these layers together", tuple(facts))


def _claim(selection: Selection) -> tuple[str, Location]:
    """What the chosen backend reads, with the line of its claim."""
    variant = selection.variant
    assert variant is not None
    claim = next((c for c in variant.claims if c.facet == "block_size"), None)
    if claim is None:
        return f"{selection.title} reads pages of every size", variant.where
    return f"{selection.title} reads pages of {claim.matcher.text} tokens", claim.where
