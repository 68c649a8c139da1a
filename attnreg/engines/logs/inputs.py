"""The logs that a user names: files, pipes, standard input, and single lines."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from attnreg.engines.logs.reading.known import known_logs
from attnreg.engines.logs.reading.lines import LogReader, ReadLine, Words, open_log
from attnreg.files import kind_of

# an argument that looks like the name of a log, not like a line of a log
_FILE = re.compile(r"(?:~|\.{1,2})?/\S.*|\S*/\S*|[^\s:]+\.(?:log|txt|out|err|gz)")


class LogSource:
    """The lines of one log, and its name for messages.

    ``streams``: the log comes as it is written. ``count`` is the number of lines that were read, ``filled`` whether one
    has more than blanks.
    """

    def __init__(self, name: str, source: LogReader | list[str], streams: bool = False) -> None:
        self.name, self.source, self.streams = name, source, streams
        self.filled = False
        self.count = 0

    def __iter__(self) -> Iterator[ReadLine]:
        if isinstance(self.source, LogReader):
            yield from self.source
            self.count, self.filled = self.source.count, self.source.filled
            return
        self.count = len(self.source)
        for number, text in enumerate(self.source, 1):
            self.filled = self.filled or bool(text.strip())
            yield ReadLine(number, text)


def logs_of(arguments: Sequence[str], stdin: TextIO, *, follow: bool) -> Iterator[LogSource]:
    """Each log that is given, and all single lines as one; standard input without any argument.

    follow: wait for more at the end of a file. Raises `attnreg.files.FileError` for a file that is no log.
    """
    words = Words(known_logs().words)
    if not arguments:
        name = "standard input"
        yield LogSource(name, LogReader(_bytes(stdin), words, name), kind_of(Path("/dev/stdin")) == "a pipe")
        return
    texts: list[str] = []
    for argument in arguments:
        # an existing path is a log, also a pipe of the shell
        if argument.strip() and kind_of(Path(argument)):
            with open_log(Path(argument)) as file:
                yield LogSource(argument, LogReader(file, words, argument, grows=follow))
        else:
            texts += argument.splitlines() or [argument]
    if texts:
        yield LogSource("the lines given", texts)


def absent_log(arguments: Sequence[str]) -> str | None:
    """The first argument that looks like the name of a log that is not there."""
    for argument in arguments:
        if not kind_of(Path(argument)) and _FILE.fullmatch(argument.strip()):
            return argument
    return None


def _bytes(stream: TextIO) -> BinaryIO:
    """The bytes of standard input; a stream without a file below it is read to its end."""
    below: BinaryIO | None = getattr(stream, "buffer", None)
    return below if below is not None else io.BytesIO(stream.read().encode(errors="replace"))
