"""Logs, once in a process, the installed versions with which a backend that runs was not proven."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from attnreg.packages.proven import Unproven

_log = logging.getLogger("attnreg.runtime")
_told: set[str] = set()


def tell_unproven(title: str, unproven: Iterable[Unproven]) -> None:
    """Warns of each package that is newer than any with which the backend ``title`` was proven."""
    for one in unproven:
        text = f"{title}: {one.text}"
        if text not in _told:
            _told.add(text)
            _log.warning("%s", text)
