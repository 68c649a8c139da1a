"""The command `attnreg`."""

from __future__ import annotations

import gc
from collections.abc import Sequence

__all__ = ["main"]

# the number of new objects after which Python searches for cycles; a short command keeps most objects until its end.
# With Python's default of 700 the search takes a sixth of a cold `attnreg explain`
_COLLECT_AFTER = 100_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script: the exit status of `attnreg.cli.commands.main`."""
    threshold = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER)
    # imported inside `try`: an interrupt most often comes during the imports, which take most of the time
    try:
        from attnreg.cli import commands

        return commands.main(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        gc.set_threshold(*threshold)
