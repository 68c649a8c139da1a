"""Question: one request to select a backend for, with a label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnreg.request import AttentionRequest

    Anew = Callable[[Mapping[str, Any]], tuple[AttentionRequest, ...]]


# the kind of layers of an unknown family whose config has fields that change attention in a way that nothing here reads
UNREAD = "unread"


@dataclass(frozen=True)
class Question:
    """One request to explain. ``label`` names it; ``layers`` says in words which layers of a model ask it.

    ``members`` identifies these layers; a layer that asks two questions is in both. ``kind`` is the kind of the layers:
    full, sliding, chunked, cross, ... ``numbers`` has a number for each feature to which the model's config gives one:
    ``(("sliding_window", 4096),)``. No condition may name these numbers.
    ``anew`` belongs to a model's layers. It returns their requests after a user sets further facets as options; an
    empty tuple means that they no longer ask. ``request`` is None for layers without softmax attention, which get no
    backend and for layers of the kind ``unread``, whose attention is not known. ``state`` is what a request keeps in a
    layer without softmax attention, an `attnreg.models.states.StateDims`; None if it is not known.
    """

    request: AttentionRequest | None
    label: str = ""
    layers: str = ""
    members: frozenset[object] = frozenset()
    kind: str = ""
    numbers: tuple[tuple[str, float], ...] = ()
    state: Any = None
    anew: Anew | None = field(default=None, repr=False, compare=False)
