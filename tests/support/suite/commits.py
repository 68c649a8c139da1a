"""The commit of this tree."""

from __future__ import annotations

import subprocess

from support import ROOT


def commit() -> str | None:
    """The commit that is checked out, None where the tree is not git's."""
    said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False).stdout
    return said.strip() or None
