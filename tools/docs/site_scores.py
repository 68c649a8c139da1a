"""The generated table of docs/site.md: what pages cost in a browser, from benchmarks/results/site_pages.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docs.markdown import table
from docs.speed import one_record


def scores_block(root: Path) -> dict[str, str]:
    """The machine and the versions, and a table of the pages: for each profile the score and the largest paint."""
    record = one_record(root, "site_pages")
    machine, figures = record["machine"], record["figures"]
    profiles = [*dict.fromkeys(figure["profile"] for figure in figures)]
    by = {(figure["page"], figure["profile"]): figure for figure in figures}
    rows = []
    for page in dict.fromkeys(figure["page"] for figure in figures):
        some = [by[page, profile] for profile in profiles]
        rows.append([page, *map(_profile, some), _most(some, "layout shift"), _bytes(some), _most(some, "axe")])
    columns = (
        ("page", 14),
        *((profile, 26) for profile in profiles),
        ("layout shift", 12),
        ("kB", 6),
        ("axe", 4),
    )
    head = (
        f"Chromium {machine['chromium']}, axe-core {machine['axe-core']}, {machine['cores']} cores of an "
        f"{machine['processor']}, {machine['date']}; the load before was {machine['load before']}."
    )
    return {"scores": f"{head}\n\n{table(columns, rows)}"}


def _profile(figure: dict[str, Any]) -> str:
    return f"{figure['score']}: {figure['largest paint ms']:,.0f} ms, {figure['blocked ms']:,.0f} ms"


def _most(figures: list[dict[str, Any]], name: str) -> str:
    return f"{max(figure[name] for figure in figures):g}"


def _bytes(figures: list[dict[str, Any]]) -> str:
    return f"{max(figure['bytes'] for figure in figures) / 1000:.0f}"
