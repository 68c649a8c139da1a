"""Document: a YAML file as plain values, with the location of every key and value.

Only YAML's core schema is understood (null, true, false, integers, floats, strings), so `no` is a word and 2026-11-21
is not a date. Tags, merge keys, files over a mebibyte, deep nesting, control characters, and aliases that unfold into
too many values are refused.

This module builds the values from the library's parser events, not with its composer. The composer recurses in C:
500,000 opening brackets cause a segmentation fault before anyone can check their depth.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)  # fmt: skip

from attnreg.compile.source.quoting import FileKind, cut, is_of, may_quote, with_cuts
from attnreg.errors import Location, Problem, RegistryError
from attnreg.files import ALLOW, FileError, outside, read_text
from attnreg.language.numbers import Float

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_NODES = 100_000
MAX_DIGITS = 18
_TOO_LARGE = f"over {MAX_BYTES:,} bytes: nothing that large is read"

Path_ = tuple[str | int, ...]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?[0-9]+\Z|0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z|[-+]?\.inf\Z|\.nan\Z", re.IGNORECASE)
# texts that a person means as a number
_NUMBER = re.compile(r"\s*[-+]?\.?[0-9][0-9_.]*\s*\Z")
# the beginning of a quoted text, a block, or a text with the tag `!`, after an optional anchor
_QUOTED = re.compile(r"(&\S+\s+)?['\"|>!]")
# words that the library's messages quote; a single character is a sign of YAML
_NAMED = re.compile(r"'[^']{2,}'")
# not printable in YAML: C0 except tab and line breaks, C1 except NEL, lone surrogates
_CONTROL = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WORDS: dict[str, Any] = {
    "": None,
    "~": None,
    **dict.fromkeys(("null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}

# words that are booleans for other readers of YAML; here they would be texts, which are true in Python
NO_BOOLEANS = {
    spelling: meaning
    for word, meaning in (("yes", "true"), ("on", "true"), ("no", "false"), ("off", "false"))
    for spelling in (word, word.capitalize(), word.upper())
}


def as_written(value: Any) -> str:
    """A value of the data as YAML text; for a list or a mapping the words ``a list`` or ``a mapping``."""
    if isinstance(value, dict | list):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def shown(value: Any) -> str:
    """A value of the data in the form in which messages quote it."""
    if isinstance(value, dict | list):
        return as_written(value)
    return f"the number {value}" if isinstance(value, Float) else f"`{cut(as_written(value))}`"


def unquoted(value: Any, more: str = " or a point") -> str:
    """The help for a number in quotes; "" for any other value."""
    return f"write it without quotes{more}" if isinstance(value, str) and _NUMBER.match(value) else ""


_Marks = dict[Path_, tuple[int, int, int]]
# text -> its data and marks, for files that this process has read: releases share files, and each document gets a copy
_read_before: dict[str, tuple[Any, _Marks, _Marks]] = {}
_MOST_KEPT = 32


def _copy(data: Any) -> Any:
    """A copy of a file's data that shares no list and no dict with it."""
    if type(data) is dict:
        return {key: _copy(value) for key, value in data.items()}
    if type(data) is list:
        return [_copy(value) for value in data]
    return data


class Document:
    """One data file: ``data`` as plain values, and the location of every key and value by its path.

    kind: the expected kind of the file; `may_quote` decides whether messages quote it. keep: whether to cache the data
    for the next document with the same text. merges: whether ``<<`` is a key like any other; else it is refused.

    Raises `RegistryError`, with the location, for an unreadable file and for a file of another kind.
    """

    def __init__(
        self, text: str, file: str, kind: FileKind | None = None, *, keep: bool = False, merges: bool = False
    ) -> None:
        self.file, self.kind, self.merges = file, kind, merges
        self.text = text.removeprefix("\ufeff")
        self.keys, self.values = dict[Path_, tuple[int, int, int]](), dict[Path_, tuple[int, int, int]]()
        self.problems: list[Problem] = []
        self._lines: list[str] | None = None
        self._quoted: bool | None = None
        if keep and (known := _read_before.get(self.text)) is not None:
            self.data, self.keys, self.values = _copy(known[0]), {**known[1]}, {**known[2]}
            self._refuse_foreign()
            return
        self.data = self._read()
        self._refuse_foreign()
        if self.problems:
            raise RegistryError(self.problems)
        if keep:
            if len(_read_before) >= _MOST_KEPT:
                _read_before.clear()
            _read_before[self.text] = _copy(self.data), {**self.keys}, {**self.values}

    @classmethod
    def load(
        cls, path: Path, label: str | None = None, kind: FileKind | None = None, below: Path | None = None
    ) -> Document:
        """The document in a file of some kind, which messages call ``label``; no link leads out of ``below``."""
        try:
            if below is not None and (why := outside(path.name, below)):
                raise FileError(label or str(path), f"the file {why}: copy it, or {ALLOW}")
            return cls(read_text(path, MAX_BYTES, label or ""), label or str(path), kind, keep=True)
        except FileError as e:
            raise RegistryError([e.problem]) from None

    @property
    def quoted(self) -> bool:
        """Whether messages may quote the file; before it is parsed, its text decides."""
        if self._quoted is None:
            self._quoted = may_quote(self.kind, self.text)
        return self._quoted

    def word(self, text: str) -> str:
        """A word of the file for a message; `…` if the file may not be quoted."""
        return cut(text) if self.quoted else "…"

    def _refuse_foreign(self) -> None:
        self._quoted = may_quote(self.kind, self.data)
        if self.kind is not None and self.data not in (None, {}) and not is_of(self.kind, self.data):
            near, message, help_ = self.kind.foreign(self.data)
            raise RegistryError([Problem(self.key_at(*near), message, help_)])

    def at(self, *path: str | int) -> Location:
        """The location of the value at ``path``, or of the nearest enclosing value if the file lacks that path."""
        line, column, _ = self._mark(self.values, path)
        return Location(self.file, line, column)

    def key_at(self, *path: str | int) -> Location:
        """The location of the key at the end of ``path``; a list item has no key, so its own location."""
        line, column, _ = self.keys.get(path) or self._mark(self.values, path)
        return Location(self.file, line, column)

    def problem(self, path: Path_, message: str, help: str = "", *, key: bool = False) -> Problem:  # noqa: A002
        """A `Problem` at the value of ``path`` or, with ``key``, at its key, with the line of text."""
        mark = self.keys.get(path) if key else None
        line, column, width = mark or self._mark(self.values, path)
        return self._problem(line, column, width, message, help)

    def boolean_elsewhere(self, value: Any, *path: str | int) -> str:
        """The boolean that other YAML readers see in the text at ``path``; "" for quoted text and any other word."""
        line, column, _ = self._mark(self.values, path)
        quoted = _QUOTED.match(self._line(line), column - 1)
        return NO_BOOLEANS.get(value, "") if isinstance(value, str) and not quoted else ""

    def _line(self, number: int) -> str:
        if self._lines is None:
            self._lines = self.text.splitlines()
        return self._lines[number - 1] if number <= len(self._lines) else ""

    def _mark(self, marks: dict[Path_, tuple[int, int, int]], path: Path_) -> tuple[int, int, int]:
        while path not in marks and path:
            path = path[:-1]
        return marks.get(path, (1, 1, 1))

    def _problem(self, line: int, column: int, width: int, message: str, help_: str = "") -> Problem:
        text = self._line(line) if self.quoted else ""
        return Problem(Location(self.file, line, column), with_cuts(message, self.kind), with_cuts(help_), text, width)

    def _read(self) -> Any:
        if len(self.text) > MAX_BYTES or len(self.text.encode(errors="replace")) > MAX_BYTES:
            raise RegistryError([Problem(Location(self.file, 1, 1), _TOO_LARGE)])
        control = _CONTROL.search(self.text)
        if control is not None:
            before = (self.text[: control.start()] + "|").splitlines()
            message = f"the control character U+{ord(control[0]):04X} is not allowed"
            raise RegistryError([self._problem(len(before), len(before[-1]), 1, message)])
        try:
            return _Reader(self).document()
        except yaml.MarkedYAMLError as e:
            raise RegistryError([self._syntax_error(e)]) from None

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> Problem:
        what = " ".join(filter(None, (error.context, error.problem)))
        # the library's Python parser, used if the compiled one is missing, quotes words of the text
        what = what if self.quoted else _NAMED.sub("…", what)
        written = self.text.rstrip()
        # a fault at the end of the file is reported where the unfinished value begins
        marks = [m for m in (error.problem_mark, error.context_mark) if m is not None and m.index < len(written)]
        if not marks:
            lines = written.splitlines() or [""]
            return self._problem(len(lines), len(lines[-1]) + 1, 1, f"not valid YAML: {what}")
        mark = marks[0]
        help_ = "indent with spaces, not with tabs" if self.text[mark.index] == "\t" else ""
        return self._problem(mark.line + 1, mark.column + 1, 1, f"not valid YAML: {what}", help_)


class _Reader:
    """Builds values from parser events; it checks depth and size before it builds a value."""

    def __init__(self, document: Document) -> None:
        self.doc = document
        # the next event of the parser or, while an alias repeats events, `_replayed`
        self._parsed: Callable[[], Any] = _Loader(document.text).get_event
        self._next = self._parsed
        self.anchors: dict[str, list[Any]] = {}
        self.replay: list[Iterator[Any]] = []
        self.nodes = 0
        self.keys, self.values = document.keys, document.values

    def document(self) -> Any:
        event = self._next()
        while isinstance(event, StreamStartEvent | DocumentStartEvent):
            event = self._next()
        if isinstance(event, StreamEndEvent):
            return None
        value = self._value(event, (), 0)
        self._next()  # the document's end
        event = self._next()
        if isinstance(event, DocumentStartEvent):
            self._refuse(event, "a second document in one file", "remove the `---` line, or split the file in two")
        return value

    def _replayed(self) -> Any:
        while self.replay:
            event = next(self.replay[-1], None)
            if event is not None:
                return event
            self.replay.pop()
        self._next = self._parsed
        return self._parsed()

    def _replay(self, events: list[Any]) -> None:
        """Repeat some events before the next event of the parser."""
        self.replay.append(iter(events))
        self._next = self._replayed

    def _refuse(self, event: Any, message: str, help_: str = "") -> None:
        mark = event.start_mark
        raise RegistryError([self.doc._problem(mark.line + 1, mark.column + 1, 1, message, help_)])

    def _refuse_size(self, event: Any) -> None:
        self._refuse(event, f"more than {MAX_NODES:,} values (an alias counts as all that it repeats)")

    def _value(self, event: Any, path: Path_, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._refuse_size(event)
        if depth > MAX_DEPTH:
            self._refuse(event, f"nested more than {MAX_DEPTH} deep")
        kind = type(event)
        if kind is AliasEvent:
            return self._alias(event, path, depth)
        if event.tag is not None and event.tag != "!":
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(
                event, f"the tag `{self.doc.word(tag)}` is not understood", "remove it; plain YAML is enough here"
            )
        if event.anchor is not None:
            event = self._record(event)
        if path not in self.values:
            start, end = event.start_mark, event.end_mark
            line, column = start.line, start.column
            self.values[path] = (line + 1, column + 1, max(end.column - column, 1) if end.line == line else 1)
        if kind is ScalarEvent:
            return self._scalar(event)
        if kind is SequenceStartEvent:
            items: list[Any] = []
            while type(inner := self._next()) is not SequenceEndEvent:
                items.append(self._value(inner, (*path, len(items)), depth + 1))
            return items
        return self._mapping(path, depth)

    def _mapping(self, path: Path_, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        marks = self.values
        while type(event := self._next()) is not MappingEndEvent:
            if type(event) is not ScalarEvent or event.anchor is not None or event.tag is not None:
                self._refuse(event, "a key must be a plain word, without anchor, alias or tag")
            key = self._text(event)
            if key == "<<" and event.implicit[0] and not self.doc.merges:
                help_ = "write the keys out, or repeat a whole value with `*name`"
                self._refuse(event, "merge keys (`<<`) are not understood", help_)
            inner, mark = (*path, key), event.start_mark
            column = mark.column
            here = (mark.line + 1, column + 1, max(1, event.end_mark.column - column))
            first = self.keys.setdefault(inner, here)
            if key in out:
                message = f"`{cut(key)}` is given twice (first on line {first[0]})"
                self.doc.problems.append(self.doc._problem(*here, message, "keep one of the two"))
            event = self._next()
            # the fast path: plain scalars within the limits that `_value` checks
            if (
                type(event) is ScalarEvent
                and event.anchor is event.tag is None
                and depth < MAX_DEPTH
                and inner not in marks
            ):
                self.nodes += 1
                if self.nodes > MAX_NODES:
                    self._refuse_size(event)
                begin: Any = event.start_mark
                end: Any = event.end_mark
                column, line = begin.column, begin.line
                marks[inner] = (line + 1, column + 1, max(end.column - column, 1) if end.line == line else 1)
                out[key] = self._scalar(event)
            else:
                out[key] = self._value(event, inner, depth + 1)
        return out

    def _text(self, event: Any) -> str:
        """The text of a scalar. An escape in quotes may be a control character, which is refused."""
        text: str = event.value
        if not event.implicit[0] and (control := _CONTROL.search(text)) is not None:
            self._refuse(event, f"the control character U+{ord(control[0]):04X} is not allowed")
        return text

    def _scalar(self, event: Any) -> Any:
        text = self._text(event)
        if not event.implicit[0]:  # quoted or a block: always text
            return text
        if text in _WORDS:
            return _WORDS[text]
        first = text[0]
        if first.isdigit() or first in "+-.":
            if _INTEGER.match(text):
                if len(text) > MAX_DIGITS:
                    self._refuse(event, f"an integer of more than {MAX_DIGITS} digits", "quote it, if it is text")
                return int(text, 0 if text[:2] in ("0o", "0x") else 10)
            if _FLOAT.match(text):
                return Float(text)
        return text

    def _record(self, event: Any) -> Any:
        """Record the events of an anchored value, so that an alias can repeat them."""
        recorded, depth = [event], 0
        while True:
            last = recorded[-1]
            depth += isinstance(last, SequenceStartEvent | MappingStartEvent)
            depth -= isinstance(last, SequenceEndEvent | MappingEndEvent)
            if depth == 0:
                break
            if depth > MAX_DEPTH:
                self._refuse(last, f"nested more than {MAX_DEPTH} deep")
            recorded.append(self._next())
            if isinstance(recorded[-1], AliasEvent) and recorded[-1].anchor == event.anchor:
                self._refuse(recorded[-1], f"`*{self.doc.word(event.anchor)}` stands in the value that it repeats")
        self.anchors[event.anchor] = recorded
        self._replay(recorded[1:])
        return event

    def _alias(self, event: Any, path: Path_, depth: int) -> Any:
        recorded = self.anchors.get(event.anchor)
        if recorded is None:
            name = self.doc.word(event.anchor)
            self._refuse(event, f"`*{name}` names no anchor", f"write `&{name}` before its first use")
            return None
        mark = event.start_mark
        self.doc.values[path] = (mark.line + 1, mark.column + 1, event.end_mark.column - mark.column)
        first = _without_anchor(recorded[0])
        self._replay(recorded[1:])
        return self._value(first, path, depth)


def _without_anchor(event: Any) -> Any:
    bare = copy.copy(event)
    bare.anchor = None
    return bare
