"""The command `attnreg`."""

from attnreg.cli.commands import main

__all__ = ["main"]
