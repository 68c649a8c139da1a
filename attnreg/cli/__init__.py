"""The command `attnreg`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script: the exit status of `attnreg.cli.commands.main`."""
    # imported where an interrupt is caught: the imports take most of the time of a short command
    try:
        from attnreg.cli import commands

        return commands.main(arguments)
    except KeyboardInterrupt:
        return 130
