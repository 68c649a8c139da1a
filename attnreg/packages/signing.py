"""Digests that sign measurements and proofs: a value that is edited by hand no longer has its digest.

A digest is not a secret: anyone can compute a new one and sign anything. It only reveals changes by hand.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(data: bytes) -> str:
    """The digest of bytes: 16 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def digest_of(value: Any) -> str:
    """The digest of a JSON value; the order of its keys and the layout of its text do not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return digest(text.encode("ascii"))


def is_digest(value: object) -> bool:
    """Whether a value has the form of a digest."""
    return isinstance(value, str) and len(value) == 16 and not set(value) - set("0123456789abcdef")
