"""How much of what could be tried the suite tries: a part each time, and with ATTNREG_FULL=1 everything."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")
FULL = bool(os.environ.get("ATTNREG_FULL"))


# the name of a run, which all its processes know
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")


def some(values: Sequence[T], count: int) -> list[T]:
    """So many of the values, others in each run of several processes; all with ATTNREG_FULL=1."""
    return list(values) if FULL else random.Random(_RUN).sample(values, min(count, len(values)))


def examples(count: int) -> settings:
    """A decorator that sets the number of examples, scaled by the profile: its `max_examples` over Hypothesis's 100."""
    return settings(max_examples=max(5, count * settings.default.max_examples // 100))
