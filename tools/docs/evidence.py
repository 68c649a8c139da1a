"""The generated blocks of docs/proofs.md, with the evidence: claims proven, devices and errors."""

from __future__ import annotations

from attnreg.compile.inputs.bundled import registry_root
from attnreg.language.facets import PROVEN
from attnreg.packages.records import Record, Records, whole_records
from attnreg.registry import Backend, Registry
from docs.markdown import slug, table


def evidence_blocks(registry: Registry) -> dict[str, str]:
    """The block `evidence`, and the links from it to the backends."""
    text = _evidence(registry)
    used = [name for name in registry.backends if f"[{name}]" in text]
    links = "\n".join(f"[{name}]: attention_backends.md#{slug(name)}" for name in used)
    return {"evidence": text, "links": links}


def _evidence(registry: Registry) -> str:
    """A table that summarises each backend with a module, then the cases and errors of each claimed value.

    The row of a record of an earlier kernel has the words "of an earlier kernel". Its claims are not listed, because
    they do not apply to today's kernel. Raises `attnreg.packages.records.RecordsError` if a record has a problem.
    """
    files = whole_records(registry_root())
    runs = [row for row in registry.backends.values() if row.modules and registry.imports]
    rows = [line for row in runs for line in _summaries(registry, row, files)]
    columns = (("backend", 26), ("device", 14), ("cases", 5), ("refusals", 8), ("worst error", 30), ("with", 40))
    details = [_details(registry, row, files) for row in runs]
    return "\n".join([table(columns, rows), *_tools(files), *details])


def _tools(files: list[Records]) -> list[str]:
    """A table of the runs of all kernels under a tool, if there are any."""
    rows = []
    for file in files:
        for name, run in file.runs.items():
            counts = [f"{run[what]} {what}" for what in ("minutes", "cases", "batches", "tests") if what in run]
            if "kernels" in run:
                counts.append(f"{sum(run['kernels'].values())} variants of {len(run['kernels'])} kernels")
            versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items() if k != "attnreg")
            errors, commit = str(run["errors"]), (run["commit"] or "not known")[:9]
            rows.append([name, file.device, ", ".join(counts), errors, versions, commit])
    columns = (("run", 9), ("device", 11), ("of", 34), ("errors", 6), ("with", 62), ("commit", 9))
    return ["", table(columns, rows)] if rows else []


def _summaries(registry: Registry, row: Backend, files: list[Records]) -> list[list[str]]:
    lines = []
    for record in _of(row, files):
        result = record.result
        shares = [tally["share"] for facet in result["claims"].values() for tally in facet.values()]
        worst = f"{max(shares, default=0.0):.0%} of its bound"
        if result["unproven"]:
            worst += f"; not proven there: {', '.join(result['unproven'])}"
        if not record.is_current(registry):
            worst = "of an earlier kernel"
        # only backends have a place on the page, so the link is the backend's
        title = record.title.replace(row.name, f"[{row.name}]", 1)
        lines.append([title, _device(record), str(result["cases"]), str(result["refused"]), worst, record.versions])
    if "rocm" in row.platforms and all(record.machine != "rocm" for record in _of(row, files)):
        lines.append([f"[{row.name}]", "AMD GPUs", "—", "—", "not run on AMD hardware", ""])
    elif not lines:
        lines.append([f"[{row.name}]", "—", "—", "—", "not run", ""])
    return lines


def _device(record: Record) -> str:
    """The device of the run: ``NVIDIA H200, as for gfx942`` if an H200 ran the kernel's code for gfx942."""
    return record.device + (f", as for {record.arch}" if record.stands_in else "")


def _of(row: Backend, files: list[Records]) -> list[Record]:
    """The records of a backend and of its variants."""
    titles = [row.name, *(f"{row.name}/{variant}" for variant in row.variant_names)]
    return [record for title in titles for file in files for record in file.rows if record.title == title]


def _details(registry: Registry, row: Backend, files: list[Records]) -> str:
    out = []
    for record in (r for r in _of(row, files) if r.is_current(registry)):
        lines, claims = [], record.result["claims"]
        for facet in (name for name in (*PROVEN, "features") if name in claims):
            values = ", ".join(
                f"{value} ({tally['cases']}; {tally['error']:.1e})" for value, tally in claims[facet].items()
            )
            lines.append(f"- {facet}: {values}")
        where = f"{record.title} on {_device(record)}, {record.versions}"
        summary = f"<details><summary>{where}: cases and worst error of each claim</summary>"
        out += ["", summary, "", *lines, "", "</details>"]
    return "\n".join(out)
