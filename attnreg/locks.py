"""A lock that a forked child can use."""

from __future__ import annotations

import os
import threading
from types import TracebackType


class ForkSafeLock:
    """A lock for ``with`` that is free in a forked child, even if a thread of the parent holds it."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.Lock()
