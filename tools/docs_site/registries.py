"""Pages of a whole registry: what it holds, its orders, its files with a link for every line; and the start page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnreg.registry import Registry
from docs_site.frame import Asset, Page, Site, yaml_lines
from docs_site.history import steps


def pages(site: Site) -> Iterator[Page | Asset]:
    """The start page, the list of registries, and for each registry its page, its orders and its files."""
    yield Page("index.html", "index.html.j2", "attnreg", kind="start")
    yield Page(
        "registries.html",
        "registries.html.j2",
        "Registries",
        {"titles": titles(site), "steps": steps(site)},
        kind="list",
    )
    files: dict[str, None] = {}
    for name, registry in site.registries.items():
        title = titles(site)[name]
        above = above_registry(site, name)
        values: dict[str, Any] = {"steps": [step for step in steps(site) if name in step]}
        yield Page(f"{name}/index.html", "registry.html.j2", title, values, "registry", name, above[:1])
        values = {"platforms": platforms(registry)}
        yield Page(f"{name}/orders.html", "orders.html.j2", f"Orders of {title}", values, "orders", name, above)
        files |= dict.fromkeys(registry.files)
    for file in files:
        values = {"lines": yaml_lines(site.text(file))}
        yield Page(f"files/{file}.html", "file.html.j2", file, values, kind="file", searched=False)


def titles(site: Site) -> dict[str, str]:
    """Name of each registry -> how its pages call it."""
    return {name: "attnreg's own registry" if r.imports else _engine(name) for name, r in site.registries.items()}


def above_registry(site: Site, name: str) -> tuple[tuple[str, str], ...]:
    """The (title, path) of the pages that a page of a registry belongs to."""
    return (("Registries", "registries.html"), (titles(site)[name], f"{name}/index.html"))


def _engine(name: str) -> str:
    engine, _, version = name.rpartition("-")
    return f"{ {'vllm': 'vLLM', 'sglang': 'SGLang'}.get(engine, engine) } {version}"


def platforms(registry: Registry) -> list[tuple[str, str]]:
    """Name and legend of each platform that has orders."""
    words = registry.vocabulary.words["platforms"].values()
    return [(word.name, word.legend.rstrip(".")) for word in words if word.name in registry.orders]
