"""Finds options of an engine in a file that belong to no launch: in what attnreg does not follow."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from attnreg.engines.deploy.launch import EngineLaunch
from attnreg.engines.settings import known_engines

_OPTION = re.compile(r"(?<![\w.-])--[a-z][a-z0-9-]*")
# options that other programs have too
_COMMON = re.compile(r"--(model|config|dtype|mode|tp|device)(-.*)?")
_MOST_LINES = 5


@functools.cache
def _telling() -> frozenset[str]:
    """The options that only an engine has."""
    names = {name.partition(".")[0] for about in known_engines().values() for name in about["options"]}
    return frozenset(name for name in names if not _COMMON.fullmatch(name))


def outside_note(text: str, launches: Iterable[EngineLaunch]) -> str:
    """A note that names the lines whose options no launch has; "" if each option belongs to one."""
    read = {option.where.line for launch in launches for option in launch.options}
    lines = [
        number
        for number, line in enumerate(text.split("\n"), 1)
        if number not in read and not line.lstrip().startswith("#") and not _telling().isdisjoint(_OPTION.findall(line))
    ]
    if not lines:
        return ""
    shown = ", ".join(map(str, lines[:_MOST_LINES])) + ", …" * (len(lines) > _MOST_LINES)
    words = "line {} has" if len(lines) == 1 else "lines {} have"
    return f"not checked: {words.format(shown)} options of an engine, outside each launch that was read"
