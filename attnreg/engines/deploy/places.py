"""Texts, words of commands and YAML documents that know the place of each character in their file."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import Location

if TYPE_CHECKING:
    from attnreg.compile.source.yaml_source import Document

# the words of JSON that matter for the place of a key
_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]')
_CHUNK = re.compile(r"\S+")
# how far behind its expected place a word of a YAML value is searched in the file's text
_SLACK = 400


class Text:
    """Pieces of text one after the other; each begins at a place and goes on there without gaps."""

    def __init__(self, pieces: Iterable[tuple[str, Location]]) -> None:
        self._pieces = [(text, where) for text, where in pieces if text]
        self.text = "".join(text for text, _ in self._pieces)
        self._starts: list[int] = []
        start = 0
        for text, _ in self._pieces:
            self._starts.append(start)
            start += len(text)
        self._breaks: dict[int, list[int]] = {}

    def at(self, offset: int) -> Location:
        """The place of a character."""
        if not self._pieces:
            return Location("", 1, 1)
        i = max(bisect_right(self._starts, offset) - 1, 0) if len(self._pieces) > 1 else 0
        text, where = self._pieces[i]
        into = offset - self._starts[i]
        if i not in self._breaks:
            self._breaks[i] = [match.start() for match in re.finditer("\n", text)]
        line = bisect_right(self._breaks[i], into - 1)
        if not line:
            return where._replace(column=where.column + into)
        return Location(where.file, where.line + line, into - self._breaks[i][line - 1])

    def pieces(self, start: int, end: int) -> list[tuple[str, Location]]:
        """The text between two offsets, cut where the places jump."""
        found = []
        while start < end:
            i = bisect_right(self._starts, start) - 1
            stop = min(end, self._starts[i] + len(self._pieces[i][0]))
            found.append((self.text[start:stop], self.at(start)))
            start = stop
        return found


class PlacedWord(NamedTuple):
    """A word of a command with its place. maybe: a branch of a script decides whether the command has it."""

    text: str
    where: Location
    maybe: bool = False
    source: Text | None = None

    @property
    def as_text(self) -> Text:
        """The word's text with the place of each character."""
        return self.source or Text([(self.text, self.where)])


class Yaml:
    """A YAML document whose values know the place of each word.

    within: the text of a file that holds the document, if it is not the file itself. Merge keys are resolved; a merged
    value has the place of the mapping that takes it.
    """

    def __init__(self, document: Document, within: Text | None = None) -> None:
        self.document, self.within = document, within
        self.data = _merged(document.data)
        self._starts = [0, *(match.end() for match in re.finditer("\n", document.text))]

    def value(self, *path: str | int) -> Any:
        """The value at a path; None if there is none."""
        value = self.data
        for step in path:
            known = isinstance(value, dict) or (isinstance(value, list) and isinstance(step, int))
            try:
                value = value[step] if known else None
            except (KeyError, IndexError):
                return None
        return value

    def at(self, *path: str | int) -> Location:
        """The place of the value at a path."""
        return self.place(self.document.at(*path))

    def key_at(self, *path: str | int) -> Location:
        """The place of the key at the end of a path."""
        return self.place(self.document.key_at(*path))

    def keys_below(self, *path: str | int) -> dict[tuple[str, ...], Location]:
        """The place of each key below a path, by the keys between."""
        below = (keys for keys in self.document.keys if keys[: len(path)] == path and len(keys) > len(path))
        return {tuple(map(str, keys[len(path) :])): self.key_at(*keys) for keys in below}

    def place(self, where: Location) -> Location:
        """The place in the file of a place in the document."""
        return where if self.within is None else self.within.at(self._offset(where))

    def word(self, *path: str | int, maybe: bool = False) -> PlacedWord:
        """The value at a path as a word of a command."""
        text = self.text(*path)
        return PlacedWord(text.text, self.at(*path), maybe, text)

    def text(self, *path: str | int) -> Text:
        """The value at a path as text, "" for null.

        A word that is written otherwise in the file, such as one with an escape, has the place of the word before it.
        """
        text, where = as_text(self.value(*path)), self.document.at(*path)
        if path not in self.document.values:
            return Text([(text, self.place(where))])
        raw, at = self.document.text, self._offset(where)
        at += raw[at : at + 1] in ("'", '"')
        if raw.startswith(text, at):
            return Text(self._pieces(at, at + len(text)))
        pieces: list[tuple[str, Location]] = []
        end, last = 0, self.place(where)
        for match in _CHUNK.finditer(text):
            found = raw.find(match[0], at, at + len(match[0]) + _SLACK)
            if found >= 0:
                at = found + len(match[0])
                last = self._place(found)
            # the blanks before a word count as a part of the word before
            pieces += [(text[end : match.start()], last), (match[0], last)]
            end = match.end()
        pieces.append((text[end:], last))
        return Text(pieces)

    def _offset(self, where: Location) -> int:
        return self._starts[where.line - 1] + where.column - 1

    def _place(self, offset: int) -> Location:
        line = bisect_right(self._starts, offset)
        return self.place(Location(self.document.file, line, offset - self._starts[line - 1] + 1))

    def _pieces(self, start: int, end: int) -> list[tuple[str, Location]]:
        if self.within is not None:
            return self.within.pieces(start, end)
        return [(self.document.text[start:end], self._place(start))]


def json_places(text: Text, start: int) -> dict[tuple[str, ...], Location]:
    """The place of each key of the JSON object that begins at an offset, by the keys around it and its own."""
    found: dict[tuple[str, ...], Location] = {}
    path: list[str] = [""]
    key, is_key = ("", 0), False
    for match in _JSON.finditer(text.text, start):
        word = match[0]
        if word in "{[":
            path.append("")
        elif word in "}]":
            path.pop()
            if len(path) < 2:
                break
        elif word == ":" and is_key:
            path[-1] = key[0]
            found[tuple(path[1:])] = text.at(key[1])
        is_key = word[0] == '"'
        key = (word[1:-1], match.start()) if is_key else key
    return found


def as_text(value: Any) -> str:
    """A value of a YAML file or a JSON object as text, "" for null."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _merged(value: Any) -> Any:
    """A value whose mappings have the keys of what they merge."""
    if isinstance(value, list):
        return [_merged(item) for item in value]
    if not isinstance(value, dict):
        return value
    own = {key: _merged(item) for key, item in value.items() if key != "<<"}
    merged = value.get("<<")
    for other in merged if isinstance(merged, list) else [merged]:
        taken = _merged(other)
        own = {**taken, **own} if isinstance(taken, dict) else own
    return own
