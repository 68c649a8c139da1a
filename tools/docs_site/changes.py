"""A page for each change between two versions of an engine: the models that move, and the rows that differ."""

from __future__ import annotations

from collections.abc import Iterator

from docs.changes import ARCHS, moved_blocks
from docs.releases import changes

from docs_site.frame import Asset, Page, Site
from docs_site.guides import path_of, render
from docs_site.history import upgrades
from docs_site.registries import titles
from docs_site.tables import CHANGE
from docs_site.timelines import flows


def pages(site: Site) -> Iterator[Page | Asset]:
    """The pages of all changes from a bundled release of an engine to the next, and from its first to its last."""
    for before, after in upgrades(site):
        old, new = site.bundled[before], site.bundled[after]
        rows = [(name, changes(old, new, name)) for name in sorted({*old.backends, *new.backends})]
        moved = moved_blocks(before, after)
        blocks = {name: render(site, "docs/engines/", text, name).html for name, text in moved.items()}
        title = f"{titles(site)[before]} to {titles(site)[after].rpartition(' ')[2]}"
        guide = f"docs/engines/{_short(before)}-to-{_short(after).rpartition('-')[2]}.md"
        values = {
            "before": before,
            "after": after,
            "blocks": blocks,
            "rows": [(name, some) for name, some in rows if some],
            "guide": path_of(guide) if guide == CHANGE else "",
            "flows": flows(before, after),
            "archs": ARCHS,
        }
        above = (("Registries", "registries.html"),)
        yield Page(f"changes/{before}-to-{after}.html", "change.html.j2", title, values, "change", above=above)


def _short(name: str) -> str:
    """``vllm-0.33`` for ``vllm-0.33.0``."""
    return name.removesuffix(".0")
