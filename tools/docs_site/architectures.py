"""A page for each architecture of each registry: the orders of its backends, and what each backend serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.page import lines_of

from attnreg.language.vocabulary import Architecture
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.selection.selector import evaluate
from docs_site.answers import PLAIN, answer
from docs_site.frame import Asset, Page, Site
from docs_site.pictures import path
from docs_site.registries import above_registry
from docs_site.serving import Place


def pages(site: Site) -> Iterator[Page | Asset]:
    """The pages of all architectures."""
    for name, registry in site.registries.items():
        above = above_registry(site, name)
        for arch in registry.vocabulary.architectures.values():
            values = _values(site, name, registry, arch)
            where = f"{name}/architectures/{arch.name}.html"
            yield Page(where, "architecture.html.j2", arch.title, values, "architecture", name, above)


def _values(site: Site, name: str, registry: Registry, arch: Architecture) -> dict[str, Any]:
    places = site.serving(name).on[arch.name]
    platform = Platform(platform=arch.platform, arch=arch.name)
    title, request = next(iter(PLAIN.items()))
    drawn = evaluate(request, platform, registry)
    return {
        "arch": arch,
        "lines": list(lines_of(registry, arch)),
        "picture": path(f"path-{arch.name}", drawn, f"{title} on {arch.title}: the way through the order"),
        "words": {
            "features": [
                (word, _serving(places, "features", word.name)) for word in registry.vocabulary.features.values()
            ],
            "kv_dtypes": [
                (word, _serving(places, "kv_dtype", word.name))
                for word in registry.vocabulary.words_of("kv_dtype").values()
            ],
        },
        "plain": [(what, answer(asked, platform, registry)) for what, asked in PLAIN.items()],
    }


def _serving(places: list[Place], facet: str, word: str) -> list[tuple[Place, str]]:
    return [(place, place.how(facet, word)) for place in places if place.takes(facet, word)]
