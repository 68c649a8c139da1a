"""The grid: what each backend of a registry serves on each architecture, cell by cell, with the line that decides.

A cell is exact about one word alone: some request with it is accepted. Two words together may still be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from docs.capabilities import url_of
from docs.releases import versions
from markupsafe import Markup, escape

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.errors import Location
from attnreg.language.vocabulary import Architecture
from attnreg.models.reader import requests_from_model
from attnreg.registry import Backend, Claim, Registry, Variant
from docs_site.frame import Asset, Page, Site
from docs_site.measured import proofs
from docs_site.picker import data, script
from docs_site.registries import titles
from docs_site.serving import Place

# state of a cell -> the class of its element: the states from the best to the worst
STATES = {"native": "y", "emulated": "e", "unknown": "u", "refused": "r"}
# facet -> the title of its columns
_GROUPS = {
    "attention": "Attention",
    "features": "Features",
    "head_size": "Head size",
    "dtype": "dtype",
    "attn_type": "Layer",
    "kv_dtype": "KV cache",
}
# the platforms by who sells their devices
VENDORS = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel", "cpu": "Processors"}
_ARCH = "sm90"


class Column(NamedTuple):
    """A word of a facet, or a head size."""

    facet: str
    value: Any
    legend: str = ""

    @property
    def key(self) -> str:
        return f"{self.facet}:{self.value}"


class Cell(NamedTuple):
    """A state, a key of `STATES`, and its sentences, each with its line of data."""

    state: str
    said: tuple[tuple[str, Location], ...]


def pages(site: Site) -> Iterator[Page | Asset]:
    """The page of the grid, and for each registry a file with its cells."""
    for name in site.registries:
        yield data(f"grid/{name}", _file(site, name))
    newest = versions(site.registries)["vllm"][-1]
    arch = site.registries[newest].vocabulary.architectures[_ARCH]
    told = {
        "titles": {name: titles(site)[name].removesuffix(" registry") for name in reversed([*site.bundled])},
        "silent": [name for name in site.bundled if name not in site.registries],
        "vendors": VENDORS,
        "models": {name: _needs(name) for name in bundled_configs()},
        "first": {"registry": newest, "arch": arch.name},
    }
    values = {
        "grid": script(told),
        "told": told,
        "arch": arch,
        "newest": newest,
        "table": table(site, newest, arch),
        "absent": absent(site, newest, arch),
    }
    yield Page("grid.html", "grid.html.j2", "What each backend serves", values, kind="tool", registry=newest)


@cache
def _head_sizes() -> tuple[int, ...]:
    """The head sizes of the bundled models."""
    return tuple(sorted({q.head_size for name in bundled_configs() for q in _requests(name)}))


@cache
def _requests(model: str) -> list[Any]:
    groups = requests_from_model(str(bundled_configs()[model])).groups
    return [group.request for group in groups if group.request is not None]


def _needs(model: str) -> list[str]:
    """The columns that a model needs, with its KV cache in its own dtype."""
    keys: dict[str, None] = {}
    for request in _requests(model):
        facets = ("attention", "attn_type", "head_size", "dtype", "kv_dtype")
        keys |= dict.fromkeys(f"{facet}:{getattr(request, facet)}" for facet in facets)
        keys |= dict.fromkeys(f"features:{word}" for word in sorted(request.features))
    return list(keys)


def columns(registry: Registry) -> list[Column]:
    """The columns of a registry."""
    vocabulary = registry.vocabulary
    out = []
    for facet in _GROUPS:
        if facet == "head_size":
            out += [Column(facet, size, f"heads of {size} elements") for size in _head_sizes()]
        else:
            out += [Column(facet, word.name, word.legend) for word in vocabulary.words_of(facet).values()]
    return out


def rows(site: Site, name: str, arch: Architecture) -> Iterator[tuple[Backend, list[Cell]]]:
    """The backends that accept some request on an architecture, each with its cells."""
    key = ("grid", name, arch.name)
    if key not in site.kept:
        registry = site.registries[name]
        places: dict[str, list[Place]] = {}
        for place in site.serving(name).on[arch.name]:
            places.setdefault(place.row.name, []).append(place)
        site.kept[key] = [
            (registry.backends[row], [_cell(registry, some, column) for column in columns(registry)])
            for row, some in places.items()
        ]
    yield from site.kept[key]


def absent(site: Site, name: str, arch: Architecture) -> list[tuple[Backend, str]]:
    """The backends that accept nothing on an architecture, and the condition of their variants."""
    here = {row.name for row, _ in rows(site, name, arch)}
    out = []
    for row in site.registries[name].backends.values():
        if row.name not in here:
            platforms = ", ".join(sorted(row.platforms))
            whens = dict.fromkeys(v.when.describe() for v in row.variants)
            out.append((row, f"only {platforms}" if arch.platform not in row.platforms else "; or ".join(whens)))
    return out


def _cell(registry: Registry, places: Sequence[Place], column: Column) -> Cell:
    """The cell of a backend, from its variants on an architecture."""
    taking: dict[str, list[tuple[str, Location]]] = {}
    for place in places:
        if place.takes(column.facet, column.value):
            state, text, where = _accepts(registry, place, column)
            taking.setdefault(state, []).append((text, where))
    state = next((state for state in STATES if state in taking), "refused")
    said = taking.get(state) or [one for place in places for one in _refuses(place, column)]
    # variants often share a sentence and its line
    return Cell(state, tuple(dict.fromkeys(said)))


def _accepts(registry: Registry, place: Place, column: Column) -> tuple[str, str, Location]:
    """The state of a word that a variant takes, and the sentence with its line."""
    variant, facet, word = place.variant, column.facet, column.value
    if facet == "features":
        if word in variant.features:
            return "native", f"{place.title} lists it", variant.features[word]
        if word in variant.emulated:
            reason, where = variant.emulated[word]
            return "emulated", f"{place.title} serves it slowly: {reason}", where
        unchecked = variant.unchecked.get(word) or variant.unchecked.get(facet)
        if unchecked:
            return "unknown", f"{place.title} lets it through without a check", unchecked
    else:
        claim = _claim(variant, facet)
        if claim is None:
            key = registry.vocabulary.facets[facet].claim or ""
            unchecked = variant.unchecked.get(facet)
            text = "accepts any" if unchecked is None else "lets any through without a check"
            where = unchecked or variant.open.get(key, variant.where)
            return "native" if unchecked is None else "unknown", f"{place.title} {text}", where
        if claim.matcher.matches(word):
            return "native", f"{place.title} accepts {claim.matcher.text}", claim.where
    # its claims refuse the word: where a waiver holds, nobody tests them
    waived = next((w for w in registry.waivers if facet in w.facets), None)
    if waived is None:
        return "unknown", f"{place.title} does not list it, and some request with it passes", variant.where
    return (
        "unknown",
        f"{place.title} does not list it, and this is not tested everywhere: {waived.because}",
        waived.where,
    )


def _claim(variant: Variant, facet: str) -> Claim | None:
    return next((c for c in variant.claims if c.facet == facet), None)


def _refuses(place: Place, column: Column) -> Iterator[tuple[str, Location]]:
    variant, facet, word = place.variant, column.facet, column.value
    claim = _claim(variant, facet)
    if facet == "features" and word not in variant.served:
        yield f"{place.title} does not list it", variant.features_at
    elif claim is not None and not claim.matcher.matches(word):
        yield f"{place.title} accepts {claim.matcher.text}", claim.where
    elif rules := [r for r in variant.rules if _mentions(r.when, facet, word)]:
        # the claims take it, and a combination with what the architecture is does not
        yield from ((f"{place.title}: {rule.reject}", rule.where) for rule in rules)
    else:
        yield f"{place.title} accepts no request with it here", variant.where


def _mentions(when: Any, facet: str, word: Any) -> bool:
    return any(
        clause.facet == facet and (not clause.matcher.mentions or word in clause.matcher.mentions)
        for clause in when.walk()
    )


def table(site: Site, name: str, arch: Architecture) -> Markup:
    """The grid of an architecture as HTML: the same elements as assets/grid/grid.js makes."""
    registry = site.registries[name]
    every = columns(registry)
    groups = _runs(column.facet for column in every)
    ran = _proofs() if name == "default" else {}
    cols = ('<col class="b">' + f'<col span="{count - 1}">' * (count > 1) for _, count in groups)
    parts = ['<table class="grid"><colgroup><col class="name">', *cols, "</colgroup><thead><tr><td></td>"]
    parts += [f'<th scope="colgroup" colspan="{count}">{_GROUPS[facet]}</th>' for facet, count in groups]
    parts.append('</tr><tr><th scope="col">backend</th>')
    for column, starts in zip(every, _starts(groups), strict=True):
        parts.append(f'<th scope="col"{" class=b" * starts}><span>{escape(column.value)}</span></th>')
    parts.append("</tr></thead><tbody>")
    for row, cells in rows(site, name, arch):
        parts.append(f'<tr><th scope="row"><a href="{{root}}{name}/backends/{row.name}.html">{row.name}</a></th>')
        own = [cases for where, _, cases, elsewhere in ran.get(row.name, ()) if where == arch.name and not elsewhere]
        proven = {key for cases in own for key in cases}
        for column, cell, starts in zip(every, cells, _starts(groups), strict=True):
            proof = column.key in proven
            marks = f"{STATES[cell.state]}{' b' * starts}{' proof' * proof}"
            parts.append(f'<td class="{marks}">{cell.state}{", proven" * proof}</td>')
        parts.append("</tr>")
    return Markup("".join([*parts, "</tbody></table>"]))


def _runs(facets: Iterable[str]) -> list[tuple[str, int]]:
    found: dict[str, int] = {}
    for facet in facets:
        found[facet] = found.get(facet, 0) + 1
    return list(found.items())


def _starts(groups: list[tuple[str, int]]) -> list[bool]:
    """For each column whether a group begins with it."""
    return [index == 0 for _, count in groups for index in range(count)]


def _file(site: Site, name: str) -> dict[str, Any]:
    """A registry's cells for the page: each distinct cell once, and each backend's cells by their numbers."""
    registry = site.registries[name]
    every = columns(registry)
    files: dict[str, int] = {}
    numbers: dict[Cell, int] = {}
    for arch in registry.vocabulary.architectures.values():
        for _, cells in rows(site, name, arch):
            for cell in cells:
                numbers.setdefault(cell, len(numbers))
    lines: dict[tuple[int, ...], int] = {}
    on = {}
    for arch in registry.vocabulary.architectures.values():
        here = {}
        for row, cells in rows(site, name, arch):
            line = tuple(numbers[cell] for cell in cells)
            here[row.name] = lines.setdefault(line, len(lines))
        on[arch.name] = {"rows": here, "absent": {row.name: why for row, why in absent(site, name, arch)}}

    def place(where: Location) -> list[Any]:
        return [files.setdefault(where.file, len(files)), where.line]

    return {
        "cells": [[cell.state, [[text, *place(where)] for text, where in cell.said]] for cell in numbers],
        "lines": list(lines),
        "on": on,
        "files": list(files),
        "groups": _GROUPS,
        "columns": [[c.facet, str(c.value), c.legend] for c in every],
        "archs": [[a.name, a.platform, a.title] for a in registry.vocabulary.architectures.values()],
        "sources": {row.name: [row.source, _url(registry, row)] for row in registry.backends.values()},
        "proofs": _proofs() if name == "default" else {},
    }


def _url(registry: Registry, row: Backend) -> str:
    url = url_of(registry, row.source) or ""
    return url if url.startswith("https:") else ""


@cache
def _proofs() -> Mapping[str, list[list[Any]]]:
    """Backend -> its runs that prove today's kernel: architecture, device, cases of each column, and a stand-in.

    The last is true of a run on a device that stood in for one of the architecture: it proves nothing there.
    """
    out: dict[str, list[list[Any]]] = {}
    for name, some in proofs().items():
        for proof in some:
            cases = {
                f"{facet}:{value}": tally["cases"]
                for facet, tallies in proof.claims
                for value, tally in tallies.items()
            }
            if cases:
                out.setdefault(name, []).append(
                    [proof.record.arch, proof.record.device, cases, bool(proof.record.stands_in)]
                )
    return out
