"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """A decorator: as many examples, times what the profile has of Hypothesis's own 100 (`quick`: a tenth)."""
    return settings(max_examples=max(5, count * settings.default.max_examples // 100))
