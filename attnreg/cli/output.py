"""Printing: streams that no name can take over, a console of the right width, and JSON."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import click

from attnreg.errors import escaped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult

_PIPED_WIDTH = 110
# characters that attnreg prints -> what takes their place in an encoding that lacks them
_PLAIN = dict(zip("▸✗✓↳·•–—─×◐’−µ", ">xv-|*---xo'-u", strict=True))
_PLAIN |= {"…": "...", "→": "->", "±": "+-", "≤": "<=", "≥": ">=", "ᵀ": "^T"}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """The handler of characters that an encoding lacks: their likes in ASCII, or else their escapes."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking), error.end


codecs.register_error("attnreg.plain", _plain)


class OutputError(Exception):
    """Raised where standard output cannot be written, with an exit status.

    It is no OSError, because click and rich end the process with status 1 at a closed pipe.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror}")
        self.status = 141 if isinstance(error, BrokenPipeError) else 2


class Stream:
    """Standard output or error as the command writes it.

    Control characters become escapes, characters that the encoding lacks their likes in ASCII or else escapes, and
    blanks at the ends of lines are left out. Where standard output cannot be
    written `OutputError` is raised; of standard error (``silent``) nobody could be told. ``stream`` is None where it
    was closed before the command began. With ``styled``, escape sequences are written as they are.
    """

    def __init__(self, stream: TextIO | None, *, silent: bool = False, styled: bool = False) -> None:
        self.stream = stream
        self.silent = silent
        self.styled = styled
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        # click writes past a stream whose encoding is ascii; rich draws tables in ascii for it
        self.encoding = self._encoding if styled else "utf-8"

    def write(self, text: str) -> int:
        shown = re.sub(" +\n", "\n", text if self.styled else escaped(text, keep="\n\t"))
        with self._errors():
            if self.stream is None:
                raise OSError(errno.EBADF, "it is closed")
            self.stream.write(shown.encode(self._encoding, "attnreg.plain").decode(self._encoding))
        return len(text)

    def flush(self) -> None:
        with self._errors():
            if self.stream is not None:
                self.stream.flush()

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if not self.silent:
                raise OutputError(e) from None


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Have standard output and error be `Stream` objects."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Stream(sys.stdout), Stream(sys.stderr, silent=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def discard_output() -> None:
    """Send what standard output still holds nowhere, so that Python's exit does not fail to write it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal() -> Console:
    """A console for standard output. It is 110 columns wide where neither $COLUMNS nor a terminal says its width.

    $NO_COLOR leaves out all styles: bold and dim text too.
    """
    from rich.console import Console

    out = sys.stdout
    # the console writes the escape sequences of its styles; the texts are escaped before
    file: Any = Stream(out.stream, styled=True) if isinstance(out, Stream) else out
    # rich would take a $COLUMNS of 0, as containers have it, and print nothing; with both it reads neither variable
    width, height = shutil.get_terminal_size((_PIPED_WIDTH, 24))
    colours = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(file=file, width=width, height=height, color_system=colours, highlight=False)  # type: ignore[arg-type]
    hook: Any = _Escaping()  # a RenderHook, whose module is not imported without need
    console.push_render_hook(hook)
    return console


class _Escaping:
    """A hook of a console: everything is rendered without control characters."""

    def process_renderables(self, renderables: Iterable[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(renderable) for renderable in renderables]


class _Escaped:
    """What another renderable is rendered to, without control characters."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.renderable, options):
            text = segment.text if segment.control else escaped(segment.text, keep="\n")
            yield segment if text == segment.text else segment._replace(text=text)


def print_json(data: Any) -> None:
    """Print data as JSON."""
    click.echo(json.dumps(data, indent=2))
