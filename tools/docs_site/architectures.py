"""A page for each architecture of each registry: the orders of its backends, and what each backend serves."""

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
from docs_site.answers import PLAIN, answer
from docs_site.frame import Asset, Page, Site
from docs_site.history import upgrades
from docs_site.registries import above_registry
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
    title, request = next(iter(PLAIN.items()))
    drawn = evaluate(request, platform, registry)
    return {
        "arch": arch,
        "lines": list(lines_of(registry, arch)),
        "asked": title,
        "stops": way(drawn),
        "grid": grid.table(site, name, arch),
        "absent": grid.absent(site, name, arch),
        "timelines": [(engine, of_architecture(site, engine, arch.name)) for engine in _engines(site, name)],
        "titled": titled,
        "titles_of_upgrade": upgrades(site)[-1],
        "plain": [(what, answer(asked, platform, registry)) for what, asked in PLAIN.items()],
    }


def _engines(site: Site, name: str) -> list[str]:
    """The engines whose releases the pages of a registry show: all for attnreg's own, its own for a newest release."""
    releases = versions(site.bundled)
    return [engine for engine in reversed(releases) if name in ("default", releases[engine][-1])]
