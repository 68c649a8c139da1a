"""What the benchmarks of whole engines share: the command line, marks, and the file of figures with their kernels."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from measuring import kernels, parser_of

Rows = list[dict[str, Any]]
# a load, figures (the first that both have counts), a backend, and attnreg's figure as a multiple of its:
# at least where the mark is above 1, else at most
Mark = tuple[str, tuple[str, ...], str, float]


def engine_parser(
    program: str, doc: str | None, models: Iterable[str], backends: Iterable[str], minutes: float
) -> argparse.ArgumentParser:
    """The options of a benchmark of whole engines. minutes: those of each backend, by default."""
    parser = parser_of(program, doc)
    parser.add_argument("--model", choices=list(models), help="only this model")
    parser.add_argument("--backend", choices=list(backends), help="only this backend")
    parser.add_argument("--load", default="", metavar="WORD", help="only loads with this in their names")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="for each backend; what was measured by then counts"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser


def installed(program: str, package: str) -> str:
    """The version of an engine. Ends the program where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        sys.exit(f"benchmarks/{program}.py measures the engine of {package}, which is not installed here")


def marks_of(rows: Rows, models: Iterable[str], marks: Iterable[Mark]) -> Rows:
    """How attnreg stands against its marks, for every model whose figures are there."""
    by = {(row["model"], row["backend"], row["load"]): row for row in rows}
    found: Rows = []
    for model, (load, figures, beside, mark) in itertools.product(models, marks):
        ours, theirs = by.get((model, "attnreg", load), {}), by.get((model, beside, load), {})
        if figure := next((figure for figure in figures if figure in ours and figure in theirs), None):
            ratio = ours[figure] / theirs[figure]
            met = ratio >= mark if mark > 1 else ratio <= mark
            found.append({"model": model, "load": load, "figure": figure, "beside": beside,
                          "ratio": round(ratio, 3), "mark": round(mark, 3), "met": met})  # fmt: skip
    return found


def show(rows: Rows, found: Rows, figures: Sequence[str], loads: Sequence[str]) -> None:
    """Print the rows as a table with these figures, the loads in their order, and then the marks."""
    from rich.console import Console
    from rich.table import Table

    table, names = Table(), ("model", "load", "backend")
    for column in (*names, *figures):
        table.add_column(column, justify="left" if column in names else "right", no_wrap=True)
    for row in sorted((row for row in rows if row["load"]), key=lambda row: (row["model"], loads.index(row["load"]))):
        table.add_row(*(str(row.get(column, "")) for column in (*names, *figures)))
    console = Console(width=130)
    console.print(table)
    for row in found:
        console.print(
            f"{row['model']}, {row['load']}: {row['ratio']} of {row['beside']}'s {row['figure']}, "
            f"mark {row['mark']}: {'met' if row['met'] else 'missed'}"
        )


def merged(record: Path, facts: dict[str, Any], rows: Rows) -> Rows:
    """The rows, and those of the record that were not measured anew, if its machine, versions and kernels are these."""
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {"machine": {}, "figures": []}
    if {**before["machine"], "date": ""} != {**facts, "date": ""} or before.get("kernels") != kernels():
        return rows
    measured = {(row["model"], row["backend"], row["load"]) for row in rows}
    pairs = {(model, backend) for model, backend, _ in measured}
    # a problem of an earlier run goes with the run that has none
    kept = [
        row
        for row in before["figures"]
        if (row["model"], row["backend"], row["load"]) not in measured
        and (row["load"] or (row["model"], row["backend"]) not in pairs)
    ]
    return kept + rows


def write(record: Path, facts: dict[str, Any], found: Rows, rows: Rows) -> None:
    """Write the file of figures, with the digests of today's kernels."""
    result = {"machine": facts, "kernels": kernels(), "marks": found, "figures": rows}
    record.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
