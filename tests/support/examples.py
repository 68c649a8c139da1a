"""The number of examples that Hypothesis tries for a property."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """A decorator that sets the number of examples, scaled by the profile: its `max_examples` over Hypothesis's 100."""
    return settings(max_examples=max(5, count * settings.default.max_examples // 100))
