"""The generated block of docs/attention_backends.md that shows which claims were proven, where, and how closely."""

from __future__ import annotations

import json
from typing import Any

from docs_markdown import table

from attnreg.compile.bundled import registry_root
from attnreg.language.facets import PROVEN
from attnreg.registry import Backend, Registry


def evidence_block(registry: Registry) -> str:
    """A summary of every backend that runs, and below it what each claimed value came to on each device."""
    records = [json.loads(path.read_text()) for path in sorted((registry_root() / "evidence").glob("*.json"))]
    runs = [row for row in registry.backends.values() if row.module and registry.imports]
    rows = [line for row in runs for line in _summaries(row, records)]
    columns = (("backend", 26), ("device", 14), ("cases", 5), ("refusals", 8), ("worst error", 30), ("with", 40))
    return "\n".join([table(columns, rows), *(_details(row, records) for row in runs)])


def _summaries(row: Backend, records: list[dict[str, Any]]) -> list[list[str]]:
    lines = []
    for record, found in _found(row, records):
        shares = [tally["share"] for facet in found["claims"].values() for tally in facet.values()]
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if name != "attnreg")
        worst = f"{max(shares, default=0.0):.0%} of its bound"
        if found["unproven"]:
            worst += f"; not proven there: {', '.join(found['unproven'])}"
        device = _device(record, found)
        lines.append([f"[{row.name}]", device, str(found["cases"]), str(found["refused"]), worst, versions])
    if "rocm" in row.platforms and all(record["platform"] != "rocm" for record, _ in _found(row, records)):
        lines.append([f"[{row.name}]", "AMD GPUs", "—", "—", "not run on AMD hardware", ""])
    elif not lines:
        lines.append([f"[{row.name}]", "—", "—", "—", "not run", ""])
    return lines


def _device(record: dict[str, Any], found: dict[str, Any]) -> str:
    """Where it ran, and what for, if that is something else."""
    platform, arch = found["for"].split()
    return str(record["device"]) + (f", as for {arch}" if platform not in (record["platform"], "cpu") else "")


def _found(row: Backend, records: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(record, record["backends"][row.name]) for record in records if row.name in record["backends"]]


def _details(row: Backend, records: list[dict[str, Any]]) -> str:
    out = []
    for record, found in _found(row, records):
        lines = []
        for facet in (name for name in (*PROVEN, "features") if name in found["claims"]):
            values = ", ".join(
                f"{value} ({tally['cases']}; {tally['error']:.1e})" for value, tally in found["claims"][facet].items()
            )
            lines.append(f"- {facet}: {values}")
        summary = (
            f"<details><summary>{row.name} on {_device(record, found)}: cases and worst error of each claim</summary>"
        )
        out += ["", summary, "", *lines, "", "</details>"]
    return "\n".join(out)
