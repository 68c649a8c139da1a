"""The record of a sweep, and the reasons of whatever in it does not agree with eager."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data" / "transformers"
RECORD, REASONS = DATA / "sweep.jsonl", DATA / "reasons.yaml"
JOURNALS = ROOT / ".cache" / "transformers-sweep"
Row = dict[str, Any]
Reason = dict[str, Any]


def no_row(model_type: str, name: str, outcome: str, said: str) -> Row:
    """The row of a class that gives nothing to compare."""
    return {"family": model_type, "class": name, "by": "", "outcomes": {"build": [outcome, said]}}


def read_record() -> tuple[dict[str, str], list[Row]]:
    """The versions that the record is of, and a row for each class.

    A row: family, class, by (who computed attention), and outcomes: scenario -> ["agrees"], or the outcome, its
    message, and the name of its reason.
    """
    if not RECORD.exists():
        return {}, []
    versions, *rows = map(json.loads, RECORD.read_text(encoding="utf-8").splitlines())
    return versions, rows


def write_record(versions: Mapping[str, str], rows: list[Row]) -> None:
    """Writes the record, with the name of the reason of each exception; empty where there is none."""
    reasons = read_reasons()
    for row in rows:
        for scenario, outcome, said in exceptions(row):
            row["outcomes"][scenario] = [outcome, said, reason_of(row, scenario, outcome, said, reasons)]
    ordered = sorted(rows, key=lambda row: (row["family"], row["class"]))
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in (dict(versions), *ordered)]
    RECORD.write_text("".join(lines), encoding="utf-8")


class Journal:
    """What a run has found so far, kept so that it can be resumed: a line of versions, then one for each family."""

    def __init__(self, name: str, versions: Mapping[str, str]) -> None:
        self._path = JOURNALS / f"{name}.jsonl"
        self._versions = dict(versions)

    def begin(self) -> dict[str, list[Row]]:
        """Begins anew, with nothing found."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._versions) + "\n", encoding="utf-8")
        return {}

    def read(self) -> dict[str, list[Row]]:
        """The rows of each family that the last run came to; begins anew where it was of other versions."""
        if not self._path.exists():
            return self.begin()
        # a run that was killed may have left half a line
        first, *lines = (x for x in self._path.read_text(encoding="utf-8").splitlines(keepends=True) if x[-1] == "\n")
        if json.loads(first) != self._versions:
            return self.begin()
        self._path.write_text("".join([first, *lines]), encoding="utf-8")
        return dict(map(json.loads, lines))

    def add(self, family: str, rows: list[Row]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([family, rows], ensure_ascii=False) + "\n")


def by_family(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each family."""
    out: dict[str, list[Row]] = {}
    for row in rows:
        out.setdefault(row["family"], []).append(row)
    return out


def changes(rows: list[Row], recorded: list[Row]) -> list[Row]:
    """What of a family is not as recorded, by outcomes; what an error says may change."""

    def essence(row: Row) -> Row:
        return row | {"outcomes": {name: outcome for name, (outcome, *_) in row["outcomes"].items()}}

    before = [essence(row) for row in recorded]
    gone = [row for row in recorded if row["class"] not in {new["class"] for new in rows}]
    return [row for row in rows if essence(row) not in before] + gone


def read_reasons() -> dict[str, Reason]:
    """Name -> outcome; says, a pattern of the message; families, where not all; and because."""
    reasons: dict[str, Reason] = yaml.safe_load(REASONS.read_text(encoding="utf-8"))
    return reasons


def exceptions(row: Row) -> Iterator[tuple[str, str, str]]:
    """Scenario, outcome and message, wherever a class does not agree with eager."""
    for scenario, (outcome, *said) in row["outcomes"].items():
        if outcome != "agrees":
            yield scenario, outcome, said[0]


def reason_of(row: Row, scenario: str, outcome: str, said: str, reasons: Mapping[str, Reason]) -> str:
    """The name of the first reason that explains an exception; empty where none does."""
    for name, reason in reasons.items():
        if (
            reason["outcome"] == outcome
            and re.search(reason["says"], said)
            and scenario in reason.get("scenarios", [scenario])
            and row["family"] in reason.get("families", [row["family"]])
        ):
            return name
    return ""
