"""Float: a number of the data with a point."""

from __future__ import annotations

import re


class Float(str):
    """A number with a point, kept as it was written: ``9.10`` must not become 9.1."""

    __slots__ = ()

    def __float__(self) -> float:
        # YAML writes .inf and .nan, Python inf and nan
        return float(re.sub(r"\.(inf|nan)\Z", r"\1", str(self), flags=re.IGNORECASE))
