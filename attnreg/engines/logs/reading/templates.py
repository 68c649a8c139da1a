"""Templates of log lines: literal parts and named fields, matched in a time that is linear in the line's length.

A template is the engine's own format string with a field for each value: ``Using {backend} backend.`` The literals are
found one after the other by `str.find`. A field between two literals must be of its kind, and is never tried anew, so
no line makes the matching go back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

# the most characters of a field that ends with the line, or before the next literal
MOST_TEXT = 2000
# the most places of a template's first literal that are tried in one line
_MOST_STARTS = 8
_FIELD = re.compile(r"\{(\w+)\}")
_MEMBER = "AttentionBackendEnum."
_VLLM_NAME = re.compile(r"[A-Z][A-Z0-9_]{1,79}")
_WORD = re.compile(r"[\w.+-]{1,100}")
_NUMBER = re.compile(r"-?\d{1,9}")
_RELEASE = re.compile(r"v?\d{1,6}\.\d{1,6}\.\w{1,16}(?:\.\w{1,40}){0,4}(?:\+[\w.]{1,60})?")


class Match(NamedTuple):
    """A line that a template fits: the matched part of the line, its place in the line, and the fields' values."""

    text: str
    start: int
    fields: dict[str, str]


def _word(text: str) -> str | None:
    return text if _WORD.fullmatch(text) else None


def _backend(text: str) -> str | None:
    name = text.strip("'\"").removeprefix(_MEMBER)
    return name if _WORD.fullmatch(name) else None


def _upper(text: str) -> str | None:
    name = text.removeprefix(_MEMBER)
    return name if _VLLM_NAME.fullmatch(name) else None


def _backends(text: str) -> str | None:
    names = [_upper(part.strip().strip("'\"")) for part in text.split(",")]
    return None if None in names else ", ".join(name for name in names if name)


def _number(text: str) -> str | None:
    return text if _NUMBER.fullmatch(text) else None


def _release(text: str) -> str | None:
    return text.removeprefix("v") if _RELEASE.fullmatch(text) else None


def _any(text: str) -> str | None:
    return text


# the first part of a field's name -> the function that returns its value, or None for a text of another kind
KINDS: Mapping[str, Callable[[str], str | None]] = {
    "BACKEND": _upper,
    "backend": _backend,
    "backends": _backends,
    "word": _word,
    "number": _number,
    "release": _release,
    "text": _any,
}
# fields of these kinds at the end of a template take one word of the line, the others the rest of it
_OPEN = ("text", "backends")


class Template:
    """A format string of an engine. Raises ValueError for a field of an unknown kind, or without a literal first.

    A field's name is its kind, or its kind and a number: ``{word}``, ``{word_2}``. ``anchor`` is the longest literal.
    """

    def __init__(self, text: str) -> None:
        parts = _FIELD.split(text)
        self.text = text
        self.literals, self.names = parts[::2], parts[1::2]
        self.kinds = [name.partition("_")[0] for name in self.names]
        unknown = [name for name, kind in zip(self.names, self.kinds, strict=True) if kind not in KINDS]
        if unknown:
            raise ValueError(f"unknown kind of field {unknown[0]!r}; there are {', '.join(KINDS)}")
        if not self.literals[0] or not all(self.literals[1:-1]):
            raise ValueError("a template begins with a literal, and has one between two fields")
        self.anchor = max(self.literals, key=len)

    def match(self, line: str) -> Match | None:
        """The first place where the template fits a line; None where it does not."""
        if self.anchor not in line:
            return None
        start = -1
        for _ in range(_MOST_STARTS):
            start = line.find(self.literals[0], start + 1)
            if start < 0:
                return None
            found = self._at(line, start)
            if found is not None:
                return found
        return None

    def _at(self, line: str, start: int) -> Match | None:
        at = start + len(self.literals[0])
        fields: dict[str, str] = {}
        for name, kind, literal in zip(self.names, self.kinds, self.literals[1:], strict=True):
            if literal:
                end = line.find(literal, at, at + MOST_TEXT + len(literal))
                if end < 0:
                    return None
            else:
                end = min(len(line), at + MOST_TEXT) if kind in _OPEN else _word_end(line, at)
            value = KINDS[kind](line[at:end])
            if value is None:
                return None
            fields[name] = value
            at = end + len(literal)
        return Match(line[start:at], start, fields)


def _word_end(line: str, at: int) -> int:
    """The end of the word that begins at a place; a full stop, a comma or a colon at its end is not part of it."""
    end, last = at, min(len(line), at + 200)
    while end < last and (line[end].isalnum() or line[end] in "_.+-'\""):
        end += 1
    while end > at and line[end - 1] in ".-":
        end -= 1
    return end
