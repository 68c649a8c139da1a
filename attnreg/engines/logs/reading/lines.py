"""Reads logs of any size: the lines that may be about attention, from bytes, in blocks of one megabyte.

Only lines with one of the data's words are decoded. Long lines are cut. Colour codes are taken out, and the message is
taken out of a line of JSON.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from attnreg.files import FileError, kind_of

# bytes of a line that are read
MOST_BYTES = 1 << 16
_BLOCK = 1 << 20
# seconds between two looks at a log that grows
_PAUSE = 0.2
_COLOUR = re.compile(r"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\^_])")
_ZIPPED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_WIDE = (b"\xff\xfe", b"\xfe\xff")
# bytes at the beginning of a file that decide whether it is text
_HEAD = 1 << 13


class ReadLine(NamedTuple):
    """A line of a log. ``number`` counts from 1; ``cut`` says that the line has more bytes than are read."""

    number: int
    text: str
    cut: bool = False


class Words:
    """Words: a line without any of them is not read. The case of letters counts."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(dict.fromkeys(words))
        self._found = re.compile(b"|".join(re.escape(word.encode()) for word in self.words))

    def lines(self, block: bytes, first: int) -> Iterator[ReadLine]:
        """The lines of a block that have a word. first: the number of the block's first line."""
        at, number = 0, first
        found = self._found.search(block)
        while found is not None:
            start = block.rfind(b"\n", at, found.start()) + 1 or at
            number += block.count(b"\n", at, start)
            end = block.find(b"\n", found.end())
            end = len(block) if end < 0 else end
            text = block[start : min(end, start + MOST_BYTES)].decode(errors="replace")
            yield ReadLine(number, text, end - start > MOST_BYTES)
            at = end
            found = self._found.search(block, end)


def plain(line: ReadLine, keys: Sequence[str]) -> ReadLine:
    """A line without colour codes; of a line of JSON the message alone, which is under one of some keys."""
    text = line.text
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    # a progress bar writes over its own line
    if "\r" in text:
        text = text.rstrip("\r").rpartition("\r")[2] if len(text) < 400 else text.replace("\r", " ")
    opened = text.find("{")
    if 0 <= opened <= 200 and text.rstrip().endswith("}") and '"' in text:
        text = _message(text, opened, keys) or text
    return line._replace(text=text)


def _message(text: str, opened: int, keys: Sequence[str]) -> str:
    """The message in a JSON object that begins in a line and ends with it; "" for a line of another form."""
    try:
        data = json.loads(text[opened:])
    except (ValueError, RecursionError):
        return ""
    for key in keys if isinstance(data, dict) else ():
        value = data.get(key)
        if isinstance(value, str) and value.strip():
            return _COLOUR.sub("", value).rstrip("\n")
    return ""


class LogReader:
    """The lines of an open log that have one of some words, each as soon as its end has been read.

    ``count`` is the number of lines that were read so far, ``filled`` whether one has more than blanks. grows: whether
    to wait for more at the end of the file. label: the file's name in messages. Iterating raises `FileError` for a file
    that is no text.
    """

    def __init__(self, file: BinaryIO, words: Words, label: str, *, grows: bool = False) -> None:
        self.file, self.words, self.label, self.grows = file, words, label, grows
        self.count = 0
        self.filled = False

    def __iter__(self) -> Iterator[ReadLine]:
        number, rest, skipping, head = 1, b"", False, b""
        # what can be read at once: a pipe gives a line as soon as it was written
        read = getattr(self.file, "read1", self.file.read)
        while True:
            data = read(_BLOCK)
            if not data:
                if not self.grows:
                    break
                time.sleep(_PAUSE)
                continue
            if len(head) < _HEAD:
                head += data[:_HEAD]
                _refuse_binary(head[:_HEAD], self.label)
            if skipping:
                end = data.find(b"\n")
                if end < 0:
                    continue
                data, skipping = data[end:], False
            block = rest + data if rest else data
            self.filled = self.filled or not data.isspace()
            last = block.rfind(b"\n") + 1
            yield from self.words.lines(block[:last], number)
            number += block.count(b"\n", 0, last)
            self.count = number - 1
            rest = block[last:]
            if len(rest) > MOST_BYTES:
                # of a line that does not end, the beginning alone is read
                yield from (line._replace(cut=True) for line in self.words.lines(rest, number))
                rest, skipping = b"", True
        yield from self.words.lines(rest, number)
        self.count += bool(rest) or skipping


def _refuse_binary(head: bytes, label: str) -> None:
    """Raises `FileError` for the beginning of a file that is no text."""
    packed = next((name for start, name in _ZIPPED.items() if head.startswith(start)), None)
    if packed is not None:
        raise FileError(label, f"is compressed by {packed}; unpack it, and pipe it into the command")
    if head.startswith(_WIDE):
        raise FileError(label, "is text in UTF-16; convert it to UTF-8: iconv -f UTF-16 -t UTF-8")
    # a log that was cut at its beginning while a server wrote it has a hole there, which reads as zeros
    text = head.lstrip(b"\0")
    if b"\0" in text or (head and not text and len(head) == _HEAD):
        raise FileError(label, "is a binary file; give the text that the engine logged")


def open_log(path: Path) -> BinaryIO:
    """A log, opened. Raises `FileError` unless it is a regular file or a pipe of the shell."""
    kind = kind_of(path)
    if kind not in ("a regular file", "a pipe"):
        what = {"": "No such file or directory", "a directory": "Is a directory"}.get(kind, f"it is {kind}")
        raise FileError(str(path), f"cannot be read: {what}")
    try:
        return open(path, "rb", buffering=0)
    except OSError as e:
        raise FileError(str(path), f"cannot be read: {e.strerror or e}") from None
