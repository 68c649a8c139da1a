"""The reading of logs for `attnreg why`: its inputs, its registries, and its printed explanations."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from attnreg.cli.configs import find_config, known_config
from attnreg.cli.inputs import PlatformInputs
from attnreg.cli.output import print_json, terminal
from attnreg.cli.refusals import BadInput
from attnreg.engines.logs.reading import LogReader, ReadLine, Words, open_log, plain
from attnreg.engines.logs.report import ExplainedLine, LogReport
from attnreg.files import kind_of
from attnreg.loader import load_registry

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

# an argument that looks like the name of a log, not like a line of a log
_FILE = re.compile(r"(?:~|\.{1,2})?/\S.*|\S*/\S*|[^\s:]+\.(?:log|txt|out|err|gz)")
_EXAMPLE = "vLLM says `Using X attention backend out of potential backends: [...]`"
_STDIN = "standard input"


@dataclass(frozen=True)
class LogOptions:
    """The options of `attnreg why`."""

    registry: str | None = None
    arch: str | None = None
    model: str | None = None
    follow: bool = False
    as_json: bool = False
    allow_outside: bool = False


class CommandSurroundings:
    """The registries, the GPU and the configs that the command's options name; each registry is loaded once."""

    def __init__(self, options: LogOptions) -> None:
        self.options = options
        self._registries: dict[str, Registry] = {}
        self._config = find_config(options.model) if options.model is not None else None

    def load(self, registry: str) -> Registry:
        """The registry of a name."""
        if registry not in self._registries:
            self._registries[registry] = load_registry(registry, allow_outside=self.options.allow_outside)
        return self._registries[registry]

    def platform(self, registry: Registry, name: str | None) -> Platform | None:
        """The platform of ``--arch``, else the one of a product. Raises `BadInput` for an unknown ``--arch``."""
        if self.options.arch is not None:
            return PlatformInputs(arch=(self.options.arch,)).platforms(registry)[0]
        if name is None or registry.vocabulary.architecture(name) is None:
            return None
        return PlatformInputs(arch=(name,)).platforms(registry)[0]

    def config(self, names: list[str]) -> tuple[str, str] | None:
        """The config of ``--model``, else one in the hub's cache or an example with one of some names."""
        return (self._config, "") if self._config is not None else known_config(names)


def explain_logs(arguments: tuple[str, ...], options: LogOptions) -> None:
    """Explain each log or line that is given, and standard input without any; print what follows from them.

    Raises `BadInput` if nothing is there to explain, and for lines that are not explained.
    """
    around = CommandSurroundings(options)
    printer = _Printer(options.as_json, options.follow)
    total, reports = 0, []
    for label, lines in _logs(arguments, options):
        report = LogReport(around, options.registry)
        reports.append((label, report, lines))
        streams = options.follow or lines.streams
        printer.begin(label if len(arguments) > 1 else "", report, streams)
        try:
            for line in lines:
                entry = report.read(plain(line, report.known.messages), now=streams)
                if entry is not None:
                    printer.entry(entry)
            for entry in report.explain_all():
                printer.entry(entry)
        finally:
            # a server's log ends by Ctrl-C
            printer.end()
        total += lines.count
    printer.finish()
    _refuse(arguments, [report for _, report, _ in reports], total, any(lines.filled for _, _, lines in reports))


class _Lines:
    """The lines of one log. ``filled``: whether a line has more than blanks. ``streams``: the log comes as it is written."""

    def __init__(self, source: LogReader | list[str], streams: bool = False) -> None:
        self.source, self.streams = source, streams
        self.filled = False
        self.count = 0

    def __iter__(self) -> Iterator[ReadLine]:
        if isinstance(self.source, LogReader):
            for line in self.source:
                self.filled = True
                yield line
            self.count = self.source.count
            self.filled = self.filled or self.source.filled
            return
        self.count = len(self.source)
        for number, text in enumerate(self.source, 1):
            self.filled = self.filled or bool(text.strip())
            yield ReadLine(number, text)


def _logs(arguments: tuple[str, ...], options: LogOptions) -> Iterator[tuple[str, _Lines]]:
    """Each log that is given, and all single lines as one. Raises `attnreg.files.FileError` for a file that is no log."""
    from attnreg.engines.logs.known import known_logs

    words = Words(known_logs().words)
    if not arguments:
        file = _standard_input()
        yield _STDIN, _Lines(LogReader(file, words, _STDIN), streams=kind_of(Path("/dev/stdin")) == "a pipe")
        return
    texts: list[str] = []
    for argument in arguments:
        # an existing path is a log, also a pipe of the shell
        if argument.strip() and kind_of(Path(argument)):
            with open_log(Path(argument)) as file:
                yield argument, _Lines(LogReader(file, words, argument, grows=options.follow))
        else:
            texts += argument.splitlines() or [argument]
    if texts:
        yield "the lines given", _Lines(texts)


def _standard_input() -> BinaryIO:
    stream = getattr(sys.stdin, "buffer", None)
    if stream is not None:
        try:
            stream.fileno()
        except (OSError, ValueError):
            stream = None
    if stream is not None:
        found: BinaryIO = stream
        return found
    # a stream of a test, or of a notebook, that is no file
    text = sys.stdin.read()
    return io.BytesIO(text.encode(errors="replace"))


class _Printer:
    """Prints explanations: text for people, one JSON document, or with ``follow`` one JSON object for each line."""

    def __init__(self, as_json: bool, follow: bool) -> None:
        self.as_json, self.follow = as_json, follow
        self.logs: list[dict[str, Any]] = []
        self.report: LogReport | None = None
        self._begun = self._streams = False
        self._titled: set[int] = set()
        self._printed: list[ExplainedLine] = []

    def begin(self, label: str, report: LogReport, streams: bool) -> None:
        """Begin a log; the label is printed if there are several. streams: whether lines are explained as they come."""
        self.report, self._titled, self._printed, self._streams = report, set(), [], streams
        self.logs.append({"log": label, "runs": [], "lines": []})
        if label and not self.as_json:
            self._block([(f"{label}:", "bold")])

    def entry(self, entry: ExplainedLine) -> None:
        """Print one explanation."""
        self._printed.append(entry)
        if self.as_json:
            if self.follow:
                click.echo(json.dumps(entry.to_dict()))
                sys.stdout.flush()
            else:
                self.logs[-1]["lines"].append(entry.to_dict())
            return
        if entry.run is not None and entry.run.number not in self._titled and entry.run.facts:
            self._titled.add(entry.run.number)
            self._block([(entry.run.title, "bold")])
        lines = [(f"line {entry.line:,}{f', {entry.times}' if entry.times else ''}: {entry.text}", "cyan")]
        lines += [(f"  {text}", "") for text in entry.says]
        if entry.reason:
            lines.append((f"  not explained: {entry.reason}", "bold red"))
        if entry.by:
            follows = entry.table or entry.layers.explanation or entry.layers.notes
            lines.append((f"  by {entry.by}{':' if follows else ''}", "dim"))
        lines += [(f"    {text}", "") for text in entry.table]
        self._block(lines)
        if entry.layers.explanation is not None:
            from attnreg.explain import render

            console = terminal()
            with console.capture() as captured:
                render(entry.layers.explanation, console)
            click.echo("".join(f"    {line}\n" if line else "\n" for line in captured.get().rstrip().splitlines()), nl=False)
        else:
            for note in entry.layers.notes:
                self._lines([(f"    note: {note}", "dim")])
        sys.stdout.flush()

    def end(self) -> None:
        """End a log: a stream has the lines that were repeated."""
        assert self.report is not None
        self.logs[-1]["runs"] = [run.to_dict() for run in self.report.runs.all]
        if self.as_json:
            return
        repeated = [entry for entry in self._printed if entry.times]
        if self._streams and repeated:
            self._block([(f"line {entry.line:,} was logged {'by ' * (len(entry.ranks) > 1)}{entry.times}", "dim") for entry in repeated])

    def finish(self) -> None:
        """Print what is left: the JSON document."""
        if self.as_json and not self.follow:
            print_json({"logs": self.logs})

    def _block(self, lines: list[tuple[str, str]]) -> None:
        if self._begun:
            click.echo("")
        self._begun = True
        self._lines(lines)

    def _lines(self, lines: list[tuple[str, str]]) -> None:
        from attnreg.explain.layout import emit, wrapped

        console = terminal()
        from rich.text import Text

        out = []
        for text, style in lines:
            indent = text[: len(text) - len(text.lstrip())]
            out += [Text(part, style=style) for part in wrapped(text.lstrip(), console.width, f"{indent}  ", first=indent)]
        emit(out, console)


def _refuse(arguments: tuple[str, ...], reports: list[LogReport], total: int, filled: bool) -> None:
    """Raises `BadInput` if no line was explained, or not all of those about attention were."""
    entries = [entry for report in reports for entry in report.entries]
    if not filled:
        where = "the lines given are" if arguments else "standard input is"
        raise BadInput(f"{where} empty", "give lines of a log, the name of one, or pipe one into the command")
    if not entries:
        for argument in arguments:
            if not kind_of(Path(argument)) and _FILE.fullmatch(argument.strip()):
                raise BadInput(f"{argument}: no such file", "give the name of a log, or lines of one in quotes")
        what = "the line is not" if total == 1 else f"none of the {total:,} lines is"
        raise BadInput(f"{what} one that engines are known to log of an attention backend", _EXAMPLE)
    passed = sum(report.passed_over for report in reports)
    refused = sum(bool(entry.reason) for entry in entries)
    if passed:
        raise BadInput(
            f"the log has more than {len(entries):,} different lines about attention: {passed:,} were passed over",
            "give a part of the log",
        )
    if refused:
        what = f"{refused:,} of {len(entries):,} lines {'is' if refused == 1 else 'are'} not explained"
        raise BadInput(what, "the reason stands below each")
