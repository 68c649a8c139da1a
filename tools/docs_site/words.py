"""A page for each feature and each KV dtype of each registry: the backends that serve it, by architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from attnreg.language.vocabulary import Architecture, Word
from attnreg.request import AttentionRequest
from docs_site.answers import PLAIN, Answer, table
from docs_site.frame import Asset, Page, Site
from docs_site.registries import above_registry

# facet -> the folder of its pages, and their subject
FOLDERS = {"features": ("features", "feature"), "kv_dtype": ("kv_dtypes", "KV dtype")}


def pages(site: Site) -> Iterator[Page | Asset]:
    """The pages of all words."""
    for name, registry in site.registries.items():
        above = above_registry(site, name)
        for facet, (folder, kind) in FOLDERS.items():
            for word in registry.vocabulary.words_of(facet).values():
                values = _values(site, name, facet, word)
                yield Page(f"{name}/{folder}/{word.name}.html", "word.html.j2", word.name, values, kind, name, above)


def _values(site: Site, name: str, facet: str, word: Word) -> dict[str, Any]:
    requests = [_asking(plain, facet, word.name) for plain in PLAIN.values()]
    served: dict[str, set[str]] = {}
    rows: list[tuple[list[Architecture], list[Answer | None], list[tuple[str, str, str]]]] = []
    for archs, answers in table(site, name, requests):
        for arch in archs:
            serving = [
                (place.row.name, place.title, place.how(facet, word.name))
                for place in site.serving(name).on[arch.name]
                if place.takes(facet, word.name)
            ]
            for row, _, _ in serving:
                served.setdefault(row, set()).add(arch.name)
            if rows and rows[-1][1:] == (answers, serving) and rows[-1][0][0].platform == arch.platform:
                rows[-1][0].append(arch)
            else:
                rows.append(([arch], answers, serving))
    facts = {key: value for key, value in word.facts.items() if isinstance(value, (str, int, float))}
    return {"word": word, "facet": facet, "asked": list(PLAIN), "rows": rows, "served": served, "facts": facts}


def _asking(plain: AttentionRequest, facet: str, word: str) -> AttentionRequest:
    if facet == "features":
        return dataclasses.replace(plain, features=frozenset({word}))
    return dataclasses.replace(plain, kv_dtype=word)
