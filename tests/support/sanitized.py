"""A plugin of pytest for runs under a sanitizer.

It prints how many variants of each Triton kernel a run used, whether compiled or cached. The memory for the parts of
split keys begins as NaN: the merge loads parts before it knows which of them are empty, and an empty one that took part
would show in the numbers.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

_KERNELS: Counter[str] = Counter()


def _count(*, src: Any, **_: Any) -> None:
    _KERNELS[src.name] += 1


def pytest_configure() -> None:
    """Listens to Triton's compiler, and fills the parts."""
    from triton import knobs

    from attnreg.kernels.triton.plans import _PlannedMerge

    knobs.compilation.listener = _count
    parts_of = _PlannedMerge.parts

    def poisoned(self: _PlannedMerge, *arguments: Any) -> Any:
        """The parts of so many rows."""
        parts = parts_of(self, *arguments)
        for part in parts[:2]:
            part.fill_(float("nan"))
        return parts

    _PlannedMerge.parts = poisoned  # type: ignore[method-assign]


def pytest_unconfigure() -> None:
    """Prints one line of JSON."""
    sys.stdout.write(f"\ncompiled {json.dumps(_KERNELS)}\n")
    sys.stdout.flush()
