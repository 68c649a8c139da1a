"""Places in JSON text: the line and column of the value at a path, and of a repeated key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


class RepeatedKeyError(Exception):
    """Raised for an object with a repeated key: one of its values would be lost."""


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values. Raises `RepeatedKeyError`."""
    data = dict(pairs)
    if len(data) < len(pairs):
        raise RepeatedKeyError
    return data


def repeated(text: str) -> tuple[str, int, int]:
    """The first repeated key of an object in the text, with its line and column."""
    inside = [_skip(text, 0)]
    while inside:
        seen = set()
        for key, at in _members(text, inside.pop()):
            if key in seen:
                return str(key), *_line_and_column(text, at)
            seen.add(key)
            inside.append(at)
    raise AssertionError("no key is repeated")


def place(text: str, path: tuple[str | int, ...]) -> tuple[int, int]:
    """Line and column of the value at a path in JSON, or of the nearest enclosing value."""
    at = _skip(text, 0)
    for step in path:
        found = dict(_members(text, at)).get(step)
        if found is None:
            break
        at = found
    return _line_and_column(text, at)


def places(text: str, key: str) -> dict[str | int, tuple[int, int]]:
    """Line and column of each value in the object or array under ``key`` of the outermost object."""
    at = dict(_members(text, _skip(text, 0))).get(key)
    return {} if at is None else {name: _line_and_column(text, at) for name, at in _members(text, at)}


def _line_and_column(text: str, at: int) -> tuple[int, int]:
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def _members(text: str, at: int) -> Iterator[tuple[str | int, int]]:
    """Key and place of each value in the object or array at a place; it stops where the text is not JSON."""
    opening, number, decoder = text[at : at + 1], 0, json.JSONDecoder()
    if opening not in ("{", "["):
        return
    at = _skip(text, at + 1)
    # Python reports a repeated key at the end of its object, so text that breaks off later does not matter
    with suppress(json.JSONDecodeError):
        while text[at : at + 1] not in ("}", "]", ""):
            key: str | int = number
            if opening == "{":
                key, at = decoder.raw_decode(text, at)
                # past the colon
                at = _skip(text, _skip(text, at) + 1)
            yield key, at
            _, at = decoder.raw_decode(text, at)
            at, number = _skip(text, at), number + 1
            if text[at : at + 1] == ",":
                at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    """The place of the next character that is not white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
