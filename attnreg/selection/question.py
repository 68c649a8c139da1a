"""Question: one request to select for, and what to call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.request import AttentionRequest


@dataclass(frozen=True)
class Question:
    """One request to explain: what to call it, and (for a model) how many layers it stands for, in words.

    Layers that are no softmax attention have no request, and no verdict.
    """

    request: AttentionRequest | None
    label: str = ""
    layers: str = ""
