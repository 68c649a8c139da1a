"""The cache of the selector: the selections from one registry, kept for as long as the registry lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Selection

    Arguments = tuple[AttentionRequest, Platform, str | None, bool, bool]

LIMIT = 8192
_ATTRIBUTE = "_answers"


def answers_of(registry: Registry) -> dict[Arguments, Selection]:
    """The cached selections of one registry, by the arguments of each.

    The cache is an attribute of the registry and no field, so copies, comparisons and pickles leave it out. A table of
    all registries would keep each registry alive for ever, because every selection holds its registry.
    """
    attributes = registry.__dict__
    answers: dict[Arguments, Selection] | None = attributes.get(_ATTRIBUTE)
    # setdefault is one step, so that threads agree on one cache
    return attributes.setdefault(_ATTRIBUTE, {}) if answers is None else answers


def remember(answers: dict[Arguments, Selection], arguments: Arguments, selection: Selection) -> None:
    """Cache a selection; a cache that is full is emptied first."""
    if len(answers) >= LIMIT:
        answers.clear()
    answers[arguments] = selection
