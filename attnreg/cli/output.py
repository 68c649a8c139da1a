"""Printing: streams that escape control characters, a console of the right width, JSON, and a run's command line."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import click

from attnreg.cli.screen.links import linked
from attnreg.environment import REGISTRY_VARIABLE
from attnreg.errors import escaped
from attnreg.progress import Report, progress
from attnreg.version import __version__

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult

    from attnreg.platforms import Platform

_PIPED_WIDTH = 110
# the exit status of an answer that is partly not known
PARTLY_KNOWN = 3
# options of the output are left out; those of the platform get the detected values
_LEFT_OUT = ("as_json", "brief")
_PLATFORM = ("platform", "arch", "device", "flags", "packages")
# characters that attnreg prints -> their replacements in an encoding that lacks them
_PLAIN = dict(zip("▸✗✓↳·•–—─×◐’−µ", ">xv-|*---xo'-u", strict=True))
_PLAIN |= {"…": "...", "→": "->", "±": "+-", "≤": "<=", "≥": ">=", "ᵀ": "^T"}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """The error handler for characters that an encoding lacks: it writes similar ASCII, else an escape."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking), error.end


codecs.register_error("attnreg.plain", _plain)


def status(failed: bool, unknown: bool) -> int:
    """The exit status of an answer: 1 for a failure, a finding or a difference, 3 if a part is not known, else 0."""
    return 1 if failed else PARTLY_KNOWN if unknown else 0


class OutputError(Exception):
    """Raised if standard output cannot be written, with an exit status.

    It is not an OSError: for an OSError at a closed pipe click and rich end the process with status 1.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror}")
        self.status = 141 if isinstance(error, BrokenPipeError) else 2


class Stream:
    """The command's standard output or standard error.

    It escapes control characters, and replaces characters that the encoding lacks by similar ASCII or by escapes. It
    drops blanks at the ends of lines. It raises `OutputError` if standard output cannot be written; with ``silent``,
    for standard error, it ignores such errors. ``stream`` is None if it was closed before the command began. With
    ``styled`` it writes escape sequences unchanged.
    """

    def __init__(self, stream: TextIO | None, *, silent: bool = False, styled: bool = False) -> None:
        self.stream = stream
        self.silent = silent
        self.styled = styled
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        # for an ASCII stream click would bypass this object, and rich would draw ASCII tables
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
    """Make standard output and error `Stream` objects inside the block."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Stream(sys.stdout), Stream(sys.stderr, silent=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def discard_output() -> None:
    """Discard the buffer of standard output, so that Python's exit does not fail to write it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal() -> Console:
    """A console for standard output. Without $COLUMNS and without a terminal it is 110 columns wide.

    $NO_COLOR turns off all styles, also bold and dim text. On a terminal with styles, cited lines are links.
    """
    from rich.console import Console

    out = sys.stdout
    # the console writes escape sequences for its styles; the hook below has escaped the texts
    file: Any = Stream(out.stream, styled=True) if isinstance(out, Stream) else out
    # containers set $COLUMNS to 0, and rich would print nothing; with both numbers given it reads no variable
    width, height = shutil.get_terminal_size((_PIPED_WIDTH, 24))
    colours = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(file=file, width=width, height=height, color_system=colours, highlight=False)  # type: ignore[arg-type]
    links = console.color_system is not None and bool(out.isatty())
    hook: Any = _Escaping(links)  # a RenderHook, whose module is not imported without need
    console.push_render_hook(hook)
    return console


def error_terminal(*, shown: bool = True) -> Console | None:
    """A console for progress on standard error; None if output is not read on a terminal, or not ``shown``.

    A program that reads standard output through a pipe, such as a pager, may own the terminal. So there is none either.
    """
    out, err = sys.stdout, sys.stderr
    if not (shown and out.isatty() and err.isatty()):
        return None
    from rich.console import Console

    file: Any = Stream(err.stream, silent=True, styled=True) if isinstance(err, Stream) else err
    return Console(file=file, highlight=False, markup=False)


@contextlib.contextmanager
def working(what: str, *, shown: bool = True) -> Iterator[Report]:
    """Shows progress on some work inside the block: `attnreg.progress.progress` on `error_terminal`.

    It is a decorator too: ``working("comparing")(compare)(before, after)``.
    """
    with progress(error_terminal(shown=shown), what) as report:
        yield report


class _Escaping:
    """A hook of a console that escapes control characters in everything that it renders.

    links: whether it makes cited lines of files links to them.
    """

    def __init__(self, links: bool) -> None:
        self.links = links

    def process_renderables(self, renderables: Iterable[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(renderable, self.links) for renderable in renderables]


class _Escaped:
    """A wrapper of a renderable that escapes control characters in its output; with ``links`` it adds them."""

    def __init__(self, renderable: ConsoleRenderable, links: bool) -> None:
        self.renderable = renderable
        self.links = links

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.renderable, options):
            text = segment.text if segment.control else escaped(segment.text, keep="\n")
            plain = segment if text == segment.text else segment._replace(text=text)
            yield from linked(plain) if self.links and not segment.control else (plain,)


def print_lines(text: str) -> None:
    """Print lines of text, each wrapped at the width of the terminal and indented like its first part."""
    from rich.text import Text

    from attnreg.explain.layout import emit, wrapped

    console = terminal()
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        parts = wrapped(line.lstrip(), console.width, f"{indent}  ", first=indent) or [""]
        emit(map(Text, parts), console)


def print_json(data: Mapping[str, Any]) -> None:
    """Print data as JSON, after the version of attnreg; a format that has a version of its own keeps that."""
    click.echo(json.dumps({"version": __version__, **data}, indent=2))


def command_line(context: click.Context, platform: Platform | None) -> str:
    """The command of a context with its options.

    platform: the detected platform; its words replace the options of a platform. None: options name the platform.
    $ATTNREG_REGISTRY becomes the option ``--registry``.
    """
    values = dict(context.params)
    if not values.get("engine"):
        values["registry"] = values.get("registry") or os.environ.get(REGISTRY_VARIABLE)
    if platform is not None:
        versions = [f"{name}=={version}" if version else name for name, version in platform.packages or ()]
        packages = versions or ([] if platform.packages is None else ["none"])
        device = () if platform.device is None else (platform.device,)
        detected = (platform.platform, (platform.arch,), device, sorted(platform.flags), packages)
        values |= dict(zip(_PLATFORM, detected, strict=True))
    words = context.command_path.split()
    for param in context.command.params:
        if param.name not in _LEFT_OUT:
            words += _words(param, values.get(param.name or ""))
    return shlex.join(words)


def _words(param: click.Parameter, value: Any) -> Iterator[str]:
    """The words of one option; empty for an option with its default value."""
    if value is None or value is False or value == param.default:
        return
    if value is True:
        yield param.opts[0]
        return
    for each in value if param.multiple else (value,):
        yield from (param.opts[0], str(each))
