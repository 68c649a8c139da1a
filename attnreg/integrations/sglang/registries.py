"""The registry that has attnreg's own backend of SGLang as a row, and the values of $ATTNREG_SGLANG."""

from __future__ import annotations

import functools

import attnreg
from attnreg.environment import SGLANG_VARIABLE
from attnreg.errors import did_you_mean
from attnreg.integrations.sglang.record import VERSION

# attnreg's own backend: the name of its row, which is also its name in SGLang
NAME = "attnreg"
# the backend of SGLang whose place attnreg's takes
TAKEN = "triton"
OVERLAY = f"sglang-{VERSION}+{NAME}"
# the values of the variable: what takes part under which name
OFF, BY_NAME, IN_PLACE, REQUIRED = "0", "1", "triton", "require"


class SglangError(ValueError):
    """Raised for a run of SGLang that attnreg's backend does not serve, with every reason; nothing has been written."""


def mode_of(value: str) -> str:
    """The value of $ATTNREG_SGLANG as one of the known values. Raises `SglangError` for any other."""
    known = {"": OFF, OFF: OFF, BY_NAME: BY_NAME, IN_PLACE: IN_PLACE, REQUIRED: REQUIRED}
    if value not in known:
        hint = did_you_mean(value, [BY_NAME, IN_PLACE, REQUIRED])
        raise SglangError(f"${SGLANG_VARIABLE} is {value!r}; expected 0, {BY_NAME}, {IN_PLACE} or {REQUIRED}; {hint}")
    return known[value]


@functools.cache
def registry() -> attnreg.Registry:
    """The bundled registry with attnreg's row, without the steps of SGLang's start: these are over."""
    return attnreg.load_registry(OVERLAY).selector
