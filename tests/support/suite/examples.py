"""How much of what could be tried the suite tries: a part each time, and with ATTNREG_FULL=1 everything."""

from __future__ import annotations

import os

from hypothesis import settings

FULL = bool(os.environ.get("ATTNREG_FULL"))


def examples(count: int) -> settings:
    """A decorator that sets the number of examples, scaled by the profile: its `max_examples` over Hypothesis's 100."""
    return settings(max_examples=max(5, count * settings.default.max_examples // 100))
