"""A page for each architecture of each registry: what layers and models get there, why, and what is proven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.page import lines_of
from docs.releases import versions

from attnreg.language.vocabulary import Architecture
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.selection.selector import evaluate
from docs_site import grid
from docs_site.answers import PLAIN, answer_of
from docs_site.charts import Chart
from docs_site.frame import Asset, Page, Site
from docs_site.gets import on_architecture
from docs_site.history import upgrades
from docs_site.measured import proofs, speed_chart
from docs_site.registries import above_registry, titles
from docs_site.timelines import of_architecture, titled
from docs_site.ways import way


def pages(site: Site) -> Iterator[Page | Asset]:
    """The pages of all architectures."""
    for name, registry in site.registries.items():
        above = above_registry(site, name)
        for arch in registry.vocabulary.architectures.values():
            values = _values(site, name, registry, arch)
            where = f"{name}/architectures/{arch.name}.html"
            yield Page(where, "architecture.html.j2", arch.title, values, "architecture", name, above)


def _values(site: Site, name: str, registry: Registry, arch: Architecture) -> dict[str, Any]:
    platform = Platform(platform=arch.platform, arch=arch.name)
    asked = {what: evaluate(request, platform, registry) for what, request in PLAIN.items()}
    plain = [(what, answer_of(selection), way(selection)) for what, selection in asked.items()]
    absent = grid.absent(site, name, arch)
    return every(site, name, arch) | {
        "lines": list(lines_of(registry, arch)),
        "grid": grid.table(site, name, arch),
        "grid_rows": len(registry.backends) - len(absent),
        "absent": absent,
        "plain": plain,
        "chart": _chart(site, arch, plain[0][1].name) if name == "default" else None,
        "answers": [],
    }


def every(site: Site, name: str, arch: Architecture) -> dict[str, Any]:
    """What the page of an architecture has for every registry, with or without orders."""
    timelines = [(engine, of_architecture(site, engine, arch.name)) for engine in _engines(site, name)]
    moves = sum(span.moved for _, lanes in timelines for lane in lanes for span in lane.spans)
    return {
        "arch": arch,
        "engine": titles(site)[name],
        "groups": on_architecture(site, name, arch.name),
        "proven": _proven(arch, stands_in=False) if name == "default" else {},
        "stood": _proven(arch, stands_in=True) if name == "default" else {},
        "timelines": timelines,
        "moved": f"{moves or 'no'} change{'s' if moves != 1 else ''} of a backend",
        "titled": titled,
        "titles_of_upgrade": upgrades(site)[-1],
    }


def _proven(arch: Architecture, *, stands_in: bool) -> dict[str, int]:
    """Backend -> the cases of its current kernel that runs have proven for an architecture, for those with any.

    stands_in: count the runs on another device in its place, instead of those on its own.
    """
    found = {
        row: sum(p.result["cases"] for p in some if p.record.arch == arch.name and not p.earlier
                 and bool(p.record.stands_in) == stands_in)
        for row, some in proofs().items()
    }  # fmt: skip
    return {row: cases for row, cases in found.items() if cases}


def _chart(site: Site, arch: Architecture, row: str) -> Chart | None:
    """The speeds of a backend, if a product of the architecture was measured."""
    chart = speed_chart(site.root, row)
    device = chart.note.partition(",")[0].split() if chart else []
    return chart if set(device) & set(arch.products) else None


def _engines(site: Site, name: str) -> list[str]:
    """The engines whose releases a page shows: all on attnreg's own, and an engine on its newest of several."""
    releases = versions(site.bundled)
    own = {engine for engine, names in releases.items() if len(names) > 1 and name == names[-1]}
    return [engine for engine in reversed(releases) if name == "default" or engine in own]
