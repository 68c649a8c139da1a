"""Reads single values out of a logged configuration: ``model='a/b', dtype=x`` or ``{'model_path': 'a/b'}``.

Each key is looked for by itself, so a configuration that is cut in the middle gives what it still holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PLAIN = re.compile(r"[^,)}\]\s'\"]{1,200}")
_QUOTED = re.compile(r"'([^'\\]{0,400})'|\"([^\"\\]{0,400})\"")
_KEY_ENDS = ("=", "': ", '": ')
# the most places of one key that are looked at
_MOST_PLACES = 20


def values(text: str, keys: Iterable[str]) -> dict[str, str]:
    """The value of each key that a text has, without its quotes; the first place of a key counts.

    A key whose value is None, an empty text or a nested object is left out.
    """
    found = {}
    for key in keys:
        value = _value(text, key)
        if value not in (None, "", "None", "null"):
            assert value is not None
            found[key] = value
    return found


def _value(text: str, key: str) -> str | None:
    at = -1
    for _ in range(_MOST_PLACES):
        at = text.find(key, at + 1)
        if at < 0:
            return None
        before, end = text[at - 1 : at], at + len(key)
        if before and (before.isalnum() or before in "_.-"):
            continue
        for mark in _KEY_ENDS:
            if text.startswith(mark, end):
                quoted = _QUOTED.match(text, end + len(mark))
                if quoted is not None:
                    return quoted[1] if quoted[1] is not None else quoted[2]
                plain = _PLAIN.match(text, end + len(mark))
                return plain[0] if plain is not None and plain[0][0] not in "{[(" else None
    return None


def member(text: str) -> str:
    """A value as attnreg writes it: ``torch.bfloat16`` and ``AttentionType.DECODER`` lose their prefix."""
    found = re.fullmatch(r"[A-Za-z]\w{0,60}\.([A-Za-z]\w{0,60})", text)
    return found[1].lower() if found else text
