"""Logs, once in a process, the installed versions with which a backend that runs was not proven."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.selection.trace import Selection

_log = logging.getLogger("attnreg.runtime")
_told: set[str] = set()


def tell_unproven(selection: Selection) -> None:
    """Warns of each package of a selection that is newer than any with which the backend was proven."""
    for one in selection.unproven:
        text = f"{selection.title}: {one.text}"
        if text not in _told:
            _told.add(text)
            _log.warning("%s", text)
