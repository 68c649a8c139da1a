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

    from attnreg.kernels.triton.splits.merge import PlannedMerge

    knobs.compilation.listener = _count
    parts_of = PlannedMerge.parts

    def poisoned(*sizes: Any) -> Any:
        """The memory of parts, which holds no number."""
        parts = parts_of(*sizes)
        parts.memory.fill_(float("nan"))
        return parts

    PlannedMerge.parts = staticmethod(poisoned)  # type: ignore[method-assign,assignment]


def pytest_unconfigure() -> None:
    """Prints one line of JSON."""
    sys.stdout.write(f"\ncompiled {json.dumps(_KERNELS)}\n")
    sys.stdout.flush()
