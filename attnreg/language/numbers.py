"""Float: a number with a decimal point, as the YAML file spells it."""

from __future__ import annotations

import re
from typing import Any


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
