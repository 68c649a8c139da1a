"""Families that end as a class may end, for the tests of the sweep's processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from transformers_sweep.record import Row, no_row


def end(family: str, begin: Callable[[str], None]) -> list[Row]:
    """A family of one class, which ends as the family's name says."""
    begin(f"{family.title()}Model")
    if family == "exit":
        sys.exit(3)
    if family == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if family == "memory":
        os.kill(os.getpid(), signal.SIGKILL)
    while family == "hang":
        pass
    return [no_row(family, f"{family.title()}Model", "not built", "said")]
