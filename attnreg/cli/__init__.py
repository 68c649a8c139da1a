"""The command `attnreg`."""

from __future__ import annotations

import gc
from collections.abc import Sequence

__all__ = ["main"]

# new objects after which Python looks for cycles among them: most of what a short command makes stays until its end,
# and with Python's 700 a sixth of a cold `attnreg explain` is looking through it
_COLLECT_AFTER = 100_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script: the exit status of `attnreg.cli.commands.main`."""
    threshold = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER)
    # imported where an interrupt is caught: the imports take most of the time of a short command
    try:
        from attnreg.cli import commands

        return commands.main(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        gc.set_threshold(*threshold)
