"""Question: one request to select a backend for, with a label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnreg.request import AttentionRequest

    Anew = Callable[[Mapping[str, Any]], tuple[AttentionRequest, ...]]


@dataclass(frozen=True)
class Question:
    """One request to explain. ``label`` names it; ``layers`` says in words for how many layers of a model it stands.

    ``members`` tells these layers apart from those of other questions; a layer that asks twice is in both. ``kind`` is
    that of a model's layers: full, sliding, chunked, cross, ... ``numbers`` are those of its features that a model
    states, which no condition may name: ``(("sliding_window", 4096),)``.
    ``anew``, of a model's, gives each request that these layers have once a user gives further facets as options, none
    where they are not asked about then. ``request`` is None for layers without softmax attention: no backend is
    selected for them.
    """

    request: AttentionRequest | None
    label: str = ""
    layers: str = ""
    members: frozenset[object] = frozenset()
    kind: str = ""
    numbers: tuple[tuple[str, float], ...] = ()
    anew: Anew | None = field(default=None, repr=False, compare=False)
