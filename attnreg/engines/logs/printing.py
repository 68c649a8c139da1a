"""Prints the explanations of logs: text for people, one JSON document, or a JSON object for each line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnreg.engines.logs.report import ExplainedLine, LogReport
from attnreg.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

# a text and its style
_Styled = tuple[str, str]


class LogPrinter:
    """Prints explanations as they come. console: makes the console for text. write: prints a line of JSON.

    With ``as_json`` it prints one document at the end; with ``follow``, too, an object for each line at once.
    """

    def __init__(
        self, console: Callable[[], Console], write: Callable[[str], None], *, as_json: bool, follow: bool
    ) -> None:
        self.console, self.write, self.as_json, self.follow = console, write, as_json, follow
        self._documents: list[dict[str, Any]] = []
        self._begun = self._streams = False
        self._titled: set[int] = set()
        self._printed: list[ExplainedLine] = []

    def begin(self, log: str, *, several: bool, streams: bool) -> None:
        """Begin a log. several: whether there are others. streams: whether lines are explained as they come."""
        self._titled, self._printed, self._streams = set(), [], streams
        self._documents.append({"log": log, "runs": [], "lines": []})
        if several and not self.as_json:
            self._block([(f"{log}:", "bold")])

    def line(self, line: ExplainedLine) -> None:
        """Print the explanation of one line."""
        self._printed.append(line)
        if not self.as_json:
            self._text(line)
        elif self.follow:
            self.write(json.dumps({"version": __version__, **line.to_dict()}))
        else:
            self._documents[-1]["lines"].append(line.to_dict())

    def end(self, report: LogReport) -> None:
        """End a log: of a stream the lines that were repeated are counted."""
        self._documents[-1]["runs"] = [run.to_dict() for run in report.runs.all]
        repeated = [line for line in self._printed if line.times]
        if self._streams and repeated and not self.as_json:
            self._block([(f"line {line.line:,} was logged {line.repeated}", "dim") for line in repeated])

    def finish(self) -> None:
        """Print the JSON document of all logs."""
        if self.as_json and not self.follow:
            self.write(json.dumps({"version": __version__, "logs": self._documents}, indent=2))

    def _text(self, line: ExplainedLine) -> None:
        if line.run is not None and line.run.number not in self._titled and line.run.facts:
            self._titled.add(line.run.number)
            self._block([(line.run.title, "bold")])
        times = f", {line.times}" if line.times else ""
        lines = [(f"line {line.line:,}{times}: {line.text}", "cyan")]
        lines += [(f"  {text}", "") for text in line.says]
        if line.reason:
            lines.append((f"  not explained: {line.reason}", "bold red"))
        explanation = line.layers.explanation
        if line.by:
            follows = line.table or explanation or line.layers.notes
            lines.append((f"  by {line.by}{':' if follows else ''}", "dim"))
        lines += [(f"    {text}", "") for text in line.table]
        if explanation is None:
            lines += [(f"    note: {note}", "dim") for note in line.layers.notes]
        self._block(lines)
        if explanation is not None:
            self._explanation(explanation)

    def _explanation(self, explanation: Any) -> None:
        from attnreg.explain import render

        console = self.console()
        console.width = max(console.width - 4, 40)
        with console.capture() as captured:
            render(explanation, console)
        self._emit([(f"    {text}" if text else "", "") for text in captured.get().rstrip().splitlines()], wrap=False)

    def _block(self, lines: list[_Styled]) -> None:
        """Print lines behind an empty one."""
        self._emit([("", "")] * self._begun + lines)
        self._begun = True

    def _emit(self, lines: list[_Styled], *, wrap: bool = True) -> None:
        from rich.text import Text

        from attnreg.explain.layout import emit, wrapped

        console, out = self.console(), []
        for text, style in lines:
            # an explanation has its styles as escape sequences
            if not wrap:
                out.append(Text.from_ansi(text))
                continue
            first = text[: len(text) - len(text.lstrip())]
            parts = wrapped(text.lstrip(), console.width, f"{first}  ", first=first) or [""]
            out += [Text(part, style=style) for part in parts]
        emit(out, console)
        console.file.flush()
