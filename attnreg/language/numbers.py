"""Numbers of YAML files: `Float` keeps the spelling of the file, and `bounds_help` turns printed bounds into data."""

from __future__ import annotations

import re
from typing import Any

# bounds as attnreg prints them: multiples of 8 from 64 to 256
_BOUNDS = re.compile(
    r"(?:multiples? of (?P<multiple_of>\d{1,9}))?(?: ?(?:from )?(?P<min>\d{1,9})(?: or more|(?= to |\Z)))?"
    r"(?: ?(?:up )?to (?P<max>\d{1,9}))?"
)


class Float(str):
    """A number with a decimal point that keeps the spelling of the file: ``9.10`` must not become 9.1."""

    __slots__ = ()

    def __float__(self) -> float:
        # YAML writes .inf and .nan, Python inf and nan
        return float(re.sub(r"\.(inf|nan)\Z", r"\1", str(self), flags=re.IGNORECASE))


def as_data(value: Any) -> Any:
    """A value of the data in which every `Float`, at any depth, is a float."""
    if isinstance(value, Float):
        return float(value)
    if isinstance(value, list):
        return [as_data(item) for item in value]
    return {key: as_data(item) for key, item in value.items()} if isinstance(value, dict) else value


def bounds_help(value: object) -> str:
    """The help for bounds in words: ``write {multiple_of: 16}`` for ``multiples of 16``; "" for any other value."""
    match = _BOUNDS.fullmatch(value.strip()) if isinstance(value, str) else None
    bounds = {name: bound for name, bound in match.groupdict().items() if bound} if match else {}
    return f"write {{{', '.join(f'{name}: {bound}' for name, bound in bounds.items())}}}" if bounds else ""
