"""A page for each backend of each registry."""

from __future__ import annotations

from collections.abc import Iterator

from docs_site.frame import Asset, Page, Site


def pages(site: Site) -> Iterator[Page | Asset]:
    """The pages of all backends."""
    for name, registry in site.registries.items():
        for row in registry.backends.values():
            yield Page(f"{name}/backends/{row.name}.html", "backend.html.j2", row.name, {"row": row}, "backend", name)
