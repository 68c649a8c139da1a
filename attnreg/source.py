"""YAML read with positions: plain values, and for each of them the line that says it.

Only YAML's core schema is understood (null, true, false, integers, floats, strings), so that `no` is a word and
2026-11-21 is not a date. Tags are refused, and so is anything that a small file should not hold: over a mebibyte, deep
nesting, or aliases that unfold into more than it could say itself.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from attnreg.errors import Location, Problem, RegistryError

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_NODES = 100_000

Path_ = tuple[str | int, ...]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?[0-9]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z|[-+]?\.inf\Z|\.nan\Z", re.IGNORECASE)
_WORDS: dict[str, Any] = {"null": None, "~": None, "": None, "true": True, "false": False}


class Float(str):
    """A number with a point, kept as it was written: ``9.10`` must not become 9.1."""

    __slots__ = ()


class Document:
    """One data file: ``data`` as plain values, and the place of every key and value by its path.

    Raises `RegistryError` for anything that cannot be read, with the place.
    """

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.text = text
        self.keys: dict[Path_, tuple[int, int, int]] = {}
        self.values: dict[Path_, tuple[int, int, int]] = {}
        self.problems: list[Problem] = []
        self._lines: list[str] | None = None
        self.data = self._read()
        if self.problems:
            raise RegistryError(self.problems)

    @classmethod
    def load(cls, path: Path, label: str | None = None) -> Document:
        """The document in a file, named ``label`` in messages."""
        file = label or str(path)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise _error(file, f"the file has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read")
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise _error(file, f"not UTF-8 text: {e.reason} at byte {e.start}") from None
        except OSError as e:
            raise _error(file, f"cannot be read: {e.strerror or e}") from None
        return cls(text, file)

    def at(self, *path: str | int) -> Location:
        """Where the value at ``path`` begins; of the nearest enclosing value, where that path is not in the file."""
        line, column, _ = self._mark(self.values, path)
        return Location(self.file, line, column)

    def key_at(self, *path: str | int) -> Location:
        """Where the key that names ``path`` stands (list items have no key: where the item begins)."""
        line, column, _ = self.keys.get(path) or self._mark(self.values, path)
        return Location(self.file, line, column)

    def problem(self, path: Path_, message: str, help: str = "", *, key: bool = False) -> Problem:  # noqa: A002
        """A `Problem` at the value (or, with ``key``, at the key) of ``path``, with its source line."""
        mark = self.keys.get(path) if key else None
        line, column, width = mark or self._mark(self.values, path)
        return self._problem(line, column, width, message, help)

    def _mark(self, marks: dict[Path_, tuple[int, int, int]], path: Path_) -> tuple[int, int, int]:
        while path not in marks and path:
            path = path[:-1]
        return marks.get(path, (1, 1, 1))

    def _problem(self, line: int, column: int, width: int, message: str, help_: str = "") -> Problem:
        if self._lines is None:
            self._lines = self.text.splitlines()
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        return Problem(Location(self.file, line, column), message, help_, text, width)

    def _read(self) -> Any:
        if len(self.text.encode()) > MAX_BYTES:
            raise _error(self.file, f"the text has over {MAX_BYTES:,} bytes; nothing that large is read")
        reader = _Reader(self)
        try:
            return reader.document()
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            what = " ".join(filter(None, (e.context, e.problem)))
            raise RegistryError([self._problem(line, column, 1, f"not valid YAML: {what}")]) from None
        except yaml.YAMLError as e:
            raise _error(self.file, f"not valid YAML: {' '.join(str(e).split())}") from None


class _Reader:
    """Builds values from parser events; depth and size are bounded before anything is built."""

    def __init__(self, document: Document) -> None:
        self.doc = document
        self.events: Iterator[Any] = yaml.parse(document.text, Loader=_Loader)
        self.anchors: dict[str, list[Any]] = {}
        self.replay: list[Iterator[Any]] = []
        self.nodes = 0

    def document(self) -> Any:
        event = self._next()
        while isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent):
            event = self._next()
        if isinstance(event, yaml.StreamEndEvent):
            return None
        value = self._value(event, (), 0)
        self._next()  # the document's end
        event = self._next()
        if isinstance(event, yaml.DocumentStartEvent):
            self._refuse(event, "a second document in one file", "remove the `---` line, or split the file in two")
        return value

    def _next(self) -> Any:
        while self.replay:
            event = next(self.replay[-1], None)
            if event is not None:
                return event
            self.replay.pop()
        return next(self.events)

    def _refuse(self, event: Any, message: str, help_: str = "") -> None:
        mark = event.start_mark
        raise RegistryError([self.doc._problem(mark.line + 1, mark.column + 1, 1, message, help_)])

    def _value(self, event: Any, path: Path_, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._refuse(event, f"unfolds into more than {MAX_NODES:,} values", "write fewer aliases (`*name`)")
        if depth > MAX_DEPTH:
            self._refuse(event, f"nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path, depth)
        if event.tag is not None and event.tag != "!":
            self._refuse(event, f"the tag {event.tag} is not understood", "remove it; plain YAML is enough here")
        if event.anchor is not None:
            event = self._record(event)
        start, end = event.start_mark, event.end_mark
        width = end.column - start.column if end.line == start.line else 1
        if path not in self.doc.values:
            self.doc.values[path] = (start.line + 1, start.column + 1, max(width, 1))
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(inner := self._next(), yaml.SequenceEndEvent):
                items.append(self._value(inner, (*path, len(items)), depth + 1))
            return items
        return self._mapping(path, depth)

    def _mapping(self, path: Path_, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self._refuse(event, "a key must be a plain word")
            key = event.value
            mark = event.start_mark
            here = (mark.line + 1, mark.column + 1, max(1, event.end_mark.column - mark.column))
            if key in out:
                first = self.doc.keys[(*path, key)][0]
                message = f"`{key}` is given twice (first on line {first})"
                self.doc.problems.append(self.doc._problem(*here, message, "keep one of the two"))
            self.doc.keys[(*path, key)] = here
            out[key] = self._value(self._next(), (*path, key), depth + 1)
        return out

    def _record(self, event: Any) -> Any:
        """Keep the events of an anchored value, so that an alias can repeat them."""
        taken, depth = [event], 0
        while True:
            last = taken[-1]
            depth += isinstance(last, yaml.SequenceStartEvent | yaml.MappingStartEvent)
            depth -= isinstance(last, yaml.SequenceEndEvent | yaml.MappingEndEvent)
            if depth == 0:
                break
            if depth > MAX_DEPTH or len(taken) > MAX_NODES:
                self._refuse(last, f"nested more than {MAX_DEPTH} deep" if depth > MAX_DEPTH else "too many values")
            taken.append(self._next())
        self.anchors[event.anchor] = taken
        self.replay.append(iter(taken[1:]))
        return event

    def _alias(self, event: Any, path: Path_, depth: int) -> Any:
        taken = self.anchors.get(event.anchor)
        if taken is None:
            self._refuse(event, f"`*{event.anchor}` names no anchor", f"write `&{event.anchor}` before its first use")
            return None
        mark = event.start_mark
        self.doc.values[path] = (mark.line + 1, mark.column + 1, event.end_mark.column - mark.column)
        first = _without_anchor(taken[0])
        self.replay.append(iter(taken[1:]))
        return self._value(first, path, depth)


def _without_anchor(event: Any) -> Any:
    bare = copy.copy(event)
    bare.anchor = None
    return bare


def _scalar(event: Any) -> Any:
    text: str = event.value
    if not event.implicit[0]:  # quoted or a block: always text
        return text
    if text in _WORDS:
        return _WORDS[text]
    first = text[0]
    if first.isdigit() or first in "+-.":
        if _INTEGER.match(text):
            return int(text) if len(text) < 20 else text
        if _FLOAT.match(text):
            return Float(text)
    return text


def _error(file: str, message: str) -> RegistryError:
    return RegistryError([Problem(Location(file, 1, 1), message)])
