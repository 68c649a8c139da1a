"""What the selector remembers: the answers to what a registry was asked, for as long as the registry lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Selection

    Asked = tuple[AttentionRequest, Platform, str | None, bool]

LIMIT = 8192
_ATTRIBUTE = "_answers"


def answers_of(registry: Registry) -> dict[Asked, Selection]:
    """The answers that are remembered for one registry, by what was asked.

    They hang on the registry and are no field of it: a copy, a comparison or a pickle knows nothing of them. A table of
    all registries would keep each alive for ever, as every answer holds its registry; this way both go together.
    """
    attributes = registry.__dict__
    answers: dict[Asked, Selection] | None = attributes.get(_ATTRIBUTE)
    # one step, so that threads agree on one memory
    return attributes.setdefault(_ATTRIBUTE, {}) if answers is None else answers


def remember(answers: dict[Asked, Selection], asked: Asked, selection: Selection) -> None:
    """Keep an answer; a memory that is full starts again."""
    if len(answers) >= LIMIT:
        answers.clear()
    answers[asked] = selection
