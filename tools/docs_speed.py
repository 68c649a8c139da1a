"""The generated blocks of docs/running.md: the recorded figures of benchmarks/attention.py and benchmarks/host.py."""

from __future__ import annotations

import json
from pathlib import Path

from docs_markdown import table


def speed_block(root: Path) -> str:
    """The machine and its ceilings, and a table of the cases: figure, mark, and peers in the same run."""
    record = json.loads((root / "benchmarks/results/attention.json").read_text(encoding="utf-8"))
    rows = []
    for figure in record["figures"]:
        peers = ", ".join(f"{name} {_time(value)}" for name, value in figure.get("peers", {}).items())
        error = f"{figure['error']:.1e}" if figure.get("error") is not None else ""
        met = "met" if figure["met"] else "missed"
        rows.append([figure["case"], _time(figure["us"]), f"{figure['mark']:,}, {met}", peers, error])
    machine = record["machine"]
    head = f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}; µs."
    ceilings = ", ".join(f"{name} {value:,}" for name, value in record["ceilings"].items())
    columns = (("case", 34), ("attnreg", 11), ("mark", 12), ("peers", 60), ("error", 8))
    return f"{head} Ceilings measured in the same run: {ceilings}.\n\n{table(columns, rows)}"


def host_block(root: Path) -> str:
    """The machine, and a table of the host's costs: figure and mark."""
    record = json.loads((root / "benchmarks/results/host.json").read_text(encoding="utf-8"))
    rows = []
    for figure in record["figures"]:
        mark = figure["mark"]
        met = "" if mark is None else f"{mark:,}, {'met' if figure['us'] <= mark else 'missed'}"
        rows.append([figure["case"], _time(figure["us"]), met])
    machine = record["machine"]
    head = f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, Python {machine['python']}"
    return f"{head}, {machine['date']}; µs.\n\n{table((('case', 40), ('attnreg', 11), ('mark', 12)), rows)}"


def _time(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"
