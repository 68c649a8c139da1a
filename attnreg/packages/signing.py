"""Digests that sign what was measured or proven: a value that an editor changed has another one.

A digest is no secret. Whoever computes it anew can sign anything; it shows changes that were made by hand.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(data: bytes) -> str:
    """The digest of bytes: 16 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def digest_of(value: Any) -> str:
    """The digest of a JSON value, whatever the order of its keys and the layout of its text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return digest(text.encode("ascii"))


def is_digest(value: object) -> bool:
    """Whether a value has the form of a digest."""
    return isinstance(value, str) and len(value) == 16 and not set(value) - set("0123456789abcdef")
