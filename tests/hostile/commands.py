"""What reads a stranger's file: attnreg's command, and the Python of the site's picker, which a file is dropped on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from support import ROOT

from attnreg.cli import main as attnreg

PICKER = "picker"
WORDS = ("--arch", "sm90", "--model")


def call(arguments: Sequence[str]) -> int:
    """The exit status of attnreg's command, or of what the picker does with a file of a kind."""
    return _dropped(arguments[1], Path(arguments[2])) if arguments[0] == PICKER else attnreg(arguments)


def _dropped(kind: str, file: Path) -> int:
    """Answer as a page would: a browser hands over the text of a regular file."""
    sys.path.insert(0, str(ROOT / "tools"))
    from picker import browser

    if not file.is_file() or str(file.resolve()).startswith(("/proc", "/dev")):
        return 0
    text = file.read_text(encoding="utf-8", errors="replace")
    asked = browser.overlay(file.name, text, "default") if kind == "overlay" else browser.answer(*WORDS, str(file))
    found = json.loads(asked)
    sys.stdout.write(found.get("error", "an answer") + "\n")
    return 0
