"""The generated block of docs/attention_backends.md with the evidence: claims proven, devices and errors."""

from __future__ import annotations

import json
from typing import Any

from docs_markdown import table

from attnreg.compile.bundled import registry_root
from attnreg.language.facets import PROVEN
from attnreg.registry import Backend, Registry


def evidence_block(registry: Registry) -> str:
    """A table with a summary of every backend that has a module, then the cases and errors of each claimed value."""
    files = sorted((registry_root() / "evidence").glob("*.json"))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    runs = [row for row in registry.backends.values() if row.modules and registry.imports]
    rows = [line for row in runs for line in _summaries(row, records)]
    columns = (("backend", 26), ("device", 14), ("cases", 5), ("refusals", 8), ("worst error", 30), ("with", 40))
    return "\n".join([table(columns, rows), *_tools(records), *(_details(row, records) for row in runs)])


def _tools(records: list[dict[str, Any]]) -> list[str]:
    """A table of the runs of all kernels under a tool, if there are any."""
    rows = []
    for record in records:
        for name, run in record.get("runs", {}).items():
            counts = [f"{run[what]} {what}" for what in ("minutes", "cases", "batches", "tests") if what in run]
            if "kernels" in run:
                counts.append(f"{sum(run['kernels'].values())} variants of {len(run['kernels'])} kernels")
            versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items() if k != "attnreg")
            errors = str(run["errors"])
            rows.append([name, str(record["device"]), ", ".join(counts), errors, versions, run["commit"][:9]])
    columns = (("run", 9), ("device", 11), ("of", 34), ("errors", 6), ("with", 62), ("commit", 9))
    return ["", table(columns, rows)] if rows else []


def _summaries(row: Backend, records: list[dict[str, Any]]) -> list[list[str]]:
    lines = []
    for record, result in _results(row, records):
        shares = [tally["share"] for facet in result["claims"].values() for tally in facet.values()]
        # a program has no version
        named = (f"{name} {version}".strip() for name, version in result["versions"].items() if name != "attnreg")
        versions = ", ".join(named)
        worst = f"{max(shares, default=0.0):.0%} of its bound"
        if result["unproven"]:
            worst += f"; not proven there: {', '.join(result['unproven'])}"
        device = _device(record, result)
        # a variant has no place of its own on the page
        title = result["title"].replace(row.name, f"[{row.name}]", 1)
        lines.append([title, device, str(result["cases"]), str(result["refused"]), worst, versions])
    if "rocm" in row.platforms and all(record["platform"] != "rocm" for record, _ in _results(row, records)):
        lines.append([f"[{row.name}]", "AMD GPUs", "—", "—", "not run on AMD hardware", ""])
    elif not lines:
        lines.append([f"[{row.name}]", "—", "—", "—", "not run", ""])
    return lines


def _device(record: dict[str, Any], result: dict[str, Any]) -> str:
    """The device of the run: ``NVIDIA H200, as for gfx942`` if it stood in for another."""
    platform, arch = result["for"].split()
    return str(record["device"]) + (f", as for {arch}" if platform not in (record["platform"], "cpu") else "")


def _results(row: Backend, records: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(record, its entry for the backend) of each record that has one."""
    titles = [row.name, *(f"{row.name}/{variant}" for variant in row.variant_names)]
    return [
        (record, {"title": t, **record["backends"][t]}) for t in titles for record in records if t in record["backends"]
    ]


def _details(row: Backend, records: list[dict[str, Any]]) -> str:
    out = []
    for record, result in _results(row, records):
        lines = []
        for facet in (name for name in (*PROVEN, "features") if name in result["claims"]):
            values = ", ".join(
                f"{value} ({tally['cases']}; {tally['error']:.1e})" for value, tally in result["claims"][facet].items()
            )
            lines.append(f"- {facet}: {values}")
        where = f"{result['title']} on {_device(record, result)}"
        summary = f"<details><summary>{where}: cases and worst error of each claim</summary>"
        out += ["", summary, "", *lines, "", "</details>"]
    return "\n".join(out)
