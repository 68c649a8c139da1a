"""What `attnreg check` says of files that deploy engines: as text, JSON, GitHub's annotations, and SARIF."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnreg.analysis.check.codes import codes
from attnreg.analysis.check.finding import Finding
from attnreg.engines.deploy.files import launches_in_text, text_of
from attnreg.engines.deploy.launch import EngineLaunch, LaunchError, NoEngineError
from attnreg.engines.deploy.outside import outside_note
from attnreg.engines.launches import Checked, check_launch
from attnreg.engines.surroundings import LaunchSurroundings
from attnreg.errors import Problem, counted, escaped
from attnreg.version import __version__

# findings of runs that start
_WARNINGS = {"removed-variable", "repeated-option", "replaced-backend", "restated-default"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass
class FileReport:
    """What was found in one file: its launches, each with its findings, and the problems of what was not read.

    runs_engine: False for a file that was read and runs no engine. outside: a note about options of no launch.
    """

    file: str
    launches: list[tuple[EngineLaunch, Checked]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    runs_engine: bool = True
    outside: str = ""

    @property
    def error(self) -> LaunchError | None:
        """The problems as one error; None without one."""
        return LaunchError(self.problems) if self.problems else None

    @property
    def findings(self) -> list[Finding]:
        """The findings of all launches by place, each once."""
        found = dict.fromkeys(finding for _, checked in self.launches for finding in checked.findings)
        return sorted(found, key=lambda finding: (finding.where.line, finding.where.column))

    @property
    def notes(self) -> list[str]:
        """What was assumed and what was not checked, each once."""
        if not self.runs_engine and not self.problems:
            return [f"{self.file}: nothing in the file runs an engine"]
        found = ((*checked.by.assumed, checked.note) for _, checked in self.launches)
        notes = [*(note for notes in found for note in notes if note), *filter(None, [self.outside])]
        return list(dict.fromkeys(f"{self.file}: {note}" for note in notes))


def check_files(files: Iterable[str], around: LaunchSurroundings, accept: Callable[[str], None]) -> list[FileReport]:
    """A report on each file. ``accept`` gets the engine of each launch, and may refuse it.

    A file that runs no engine is a problem only if no other file runs one.
    """
    reports = []
    for file in files:
        report = FileReport(file)
        for launch in _read(report, around):
            accept(launch.engine)
            try:
                report.launches.append((launch, check_launch(launch, around)))
            except LaunchError as error:
                report.problems += error.problems
        reports.append(report)
    if any(report.launches for report in reports):
        for report in reports:
            report.problems = [] if not report.runs_engine else report.problems
    return reports


def _read(report: FileReport, around: LaunchSurroundings) -> list[EngineLaunch]:
    try:
        text = text_of(Path(report.file))
        launches = launches_in_text(text, Path(report.file), around.engine)
        report.outside = outside_note(text, launches)
        return launches
    except LaunchError as error:
        report.runs_engine = not isinstance(error, NoEngineError)
        report.problems += error.problems
        return []


def text_lines(reports: Sequence[FileReport]) -> list[str]:
    """The findings, the notes, and a summary."""
    findings = [finding for report in reports for finding in report.findings]
    notes = [note for report in reports for note in report.notes]
    return [*map(str, findings), *(f"note: {note}" for note in notes), _summary(reports, len(findings))]


def _summary(reports: Sequence[FileReport], findings: int) -> str:
    launches = sum(len(report.launches) for report in reports)
    unread = sum(bool(report.problems) for report in reports)
    started = f"{launches} launch{'es' * (launches != 1)}"
    words = f"{counted(len(reports), 'file')}, {started}: {counted(findings, 'finding')}"
    return f"{words}; {counted(unread, 'file')} not read whole" if unread else words


def as_data(reports: Sequence[FileReport]) -> dict[str, Any]:
    """The reports as JSON-ready values."""
    return {
        "findings": [finding.to_dict() for report in reports for finding in report.findings],
        "notes": [note for report in reports for note in report.notes],
        "launches": [
            {
                "where": str(launch.where),
                "registry": checked.by.registry.name,
                "arch": checked.by.architecture.name if checked.by.architecture else None,
                "model": checked.by.model or None,
                "checked_whole": not checked.note,
            }
            for report in reports
            for launch, checked in report.launches
        ],
        "not_read": [
            {"where": str(problem.where), "message": problem.message, "help": problem.help}
            for report in reports
            for problem in report.problems
        ],
    }


def github_lines(reports: Sequence[FileReport]) -> Iterator[str]:
    """A line for each finding and each problem, as GitHub's runners read them from a job's output."""
    for report in reports:
        for finding in report.findings:
            yield _annotation(_level(finding), finding.where, finding.title, _said(finding))
        for problem in report.problems:
            yield _annotation(
                "error", problem.where, "not read", "; ".join(filter(None, (problem.message, problem.help)))
            )


def sarif(reports: Sequence[FileReport]) -> dict[str, Any]:
    """The findings as a SARIF log. A file that was not read is a notification of the tool."""
    findings = [finding for report in reports for finding in report.findings]
    problems = [problem for report in reports for problem in report.problems]
    known = codes()
    rules = [
        {"id": name, "shortDescription": {"text": known[name].says}, "help": {"text": known[name].mend}}
        for name in sorted({finding.code for finding in findings})
    ]
    results = [
        {
            "ruleId": finding.code,
            "level": _level(finding),
            "message": {"text": _said(finding)},
            "locations": [_location(finding.where)],
        }
        for finding in findings
    ]
    notifications = [
        {"level": "error", "message": {"text": escaped(p.message)}, "locations": [_location(p.where)]} for p in problems
    ]
    run = {
        "tool": {"driver": {"name": "attnreg", "version": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not problems, "toolExecutionNotifications": notifications}],
        "results": results,
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _level(finding: Finding) -> str:
    return "warning" if finding.code in _WARNINGS else "error"


def _said(finding: Finding) -> str:
    return escaped(f"{finding.message}; {finding.help}" if finding.help else finding.message)


def _annotation(level: str, where: Any, title: str, message: str) -> str:
    values = {"file": where.file, "line": where.line, "col": where.column, "title": title}
    words = ",".join(f"{name}={_property(str(value))}" for name, value in values.items())
    return f"::{level} {words}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _location(where: Any) -> dict[str, Any]:
    region = {"startLine": where.line, "startColumn": where.column}
    uri = Path(where.file).as_posix()
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
