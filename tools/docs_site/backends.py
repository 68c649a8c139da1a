"""A page for each backend of each registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from docs.capabilities import link, needs, runs_on
from markupsafe import Markup

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.errors import Location
from attnreg.registry import Backend, Order, Registry, Variant
from attnreg.selection.consequences import consequence_words
from docs_site.frame import Asset, Page, Site, yaml_lines
from docs_site.gets import getting
from docs_site.history import row_history
from docs_site.measured import proofs, speed_chart
from docs_site.registries import above_registry


class Cell(NamedTuple):
    """A variant's entry for a claim or a feature, with its line; ``mark`` and ``sign`` are classes of CSS."""

    text: str
    where: Location | None = None
    mark: str = ""
    sign: str = ""


class Stated(NamedTuple):
    """A rule or a consequence: its sentence, its condition, its line, its source, and the variants that have it."""

    text: str
    when: str
    where: Location
    source: str
    variants: list[str]


@dataclass(frozen=True)
class Standing:
    """A place in an order, with the backends before and behind it."""

    order: Order
    rank: int
    condition: str

    @property
    def before(self) -> str:
        return self.order.entries[self.rank - 2].backend if self.rank > 1 else ""

    @property
    def behind(self) -> str:
        return self.order.entries[self.rank].backend if self.rank < len(self.order.entries) else ""


def pages(site: Site) -> Iterator[Page | Asset]:
    """The pages of all backends."""
    for name, registry in site.registries.items():
        above = above_registry(site, name)
        for row in registry.backends.values():
            values = _values(site, name, registry, row)
            yield Page(f"{name}/backends/{row.name}.html", "backend.html.j2", row.name, values, "backend", name, above)
            if values["chart"]:
                yield values["chart"].file()


def _values(site: Site, name: str, registry: Registry, row: Backend) -> dict[str, Any]:
    own = name == "default"
    chart = speed_chart(site.root, row.name) if own else None
    claims, standings = _claims(registry, row), _standings(registry, row)
    return {
        "row": row,
        "variants": [(v, runs_on(registry, row, v), needs(v)) for v in row.variants],
        "modules": _modules(row),
        "claims": claims,
        "heads": _accepted(claims, "head_sizes"),
        "kv_dtypes": _accepted(claims, "kv_dtypes"),
        "features": _features(registry, row),
        "unserved": [f for f in registry.vocabulary.features if not any(f in v.served for v in row.variants)],
        "rules": _rules(registry, row),
        "follows": follows(registry, row),
        "notes": list(dict.fromkeys((*row.notes, *(note for v in row.variants for note in v.notes)))),
        "standings": standings,
        "first": [at for at in standings if at.rank == 1],
        "getting": getting(site, name, row.name),
        "known": len(bundled_configs()),
        "places": _places(site, name, row),
        "proofs": (ran := proofs().get(row.name, []) if own else []),
        "current": [proof for proof in ran if not proof.earlier],
        "chart": chart,
        "history": row_history(site, name, row.name),
        "yaml": yaml_of(site, row.where),
        "source": link(registry, row.source),
    }


def _modules(row: Backend) -> list[tuple[tuple[str, Location | None], list[str]]]:
    """Each kernel module with its line, and the variants that it runs."""
    found: dict[tuple[str, Location | None], list[str]] = {}
    for variant in row.variants:
        if variant.module is not None:
            found.setdefault((variant.module, variant.module_at), []).append(variant.name or "")
    return list(found.items())


def _claims(registry: Registry, row: Backend) -> list[tuple[str, str, list[Cell]]]:
    """For each claim its key, its legend, and the values that each variant accepts."""
    out = []
    for key, facet in registry.vocabulary.claims.items():
        cells = []
        for variant in row.variants:
            claim = next((c for c in variant.claims if c.key == key), None)
            cells.append(
                Cell(claim.matcher.text, claim.where) if claim else Cell("any", variant.open.get(key), "muted")
            )
        out.append((key, facet.legend, cells))
    return out


def _accepted(claims: list[tuple[str, str, list[Cell]]], key: str) -> str:
    """The values of a claim that the variants accept, each once."""
    texts = (cell.text for name, _, cells in claims if name == key for cell in cells)
    return "; ".join(dict.fromkeys(texts)) or "any"


def _features(registry: Registry, row: Backend) -> list[tuple[str, str, list[Cell]]]:
    """The same for each feature that some variant serves."""
    out = []
    for name, word in registry.vocabulary.features.items():
        if any(name in v.served for v in row.variants):
            out.append((name, word.legend, [_feature(v, name) for v in row.variants]))
    return out


def _feature(variant: Variant, name: str) -> Cell:
    if name in variant.features:
        return Cell("native", variant.features[name], "", "native")
    if name in variant.emulated:
        reason, where = variant.emulated[name]
        return Cell(f"slowly: {reason}", where, "", "emulated")
    if name in variant.unchecked:
        return Cell("accepted without a check", variant.unchecked[name], "", "unknown")
    return Cell("refused", variant.features_at, "muted", "refused")


def _rules(registry: Registry, row: Backend) -> list[Stated]:
    found: dict[tuple[str, Location], Stated] = {}
    for variant in row.variants:
        for rule in variant.rules:
            stated = Stated(rule.reject, rule.when.describe(), rule.where, link(registry, rule.source), [])
            found.setdefault((rule.reject, rule.where), stated).variants.append(variant.name or "")
    return list(found.values())


def follows(registry: Registry, row: Backend) -> list[Stated]:
    """The known consequences of the choice of a backend."""
    found: dict[tuple[str, Location], Stated] = {}
    for variant in row.variants:
        for known in variant.consequences:
            text = consequence_words(known)
            stated = Stated(text, known.when.describe(), known.where, link(registry, known.source), [])
            found.setdefault((text, known.where), stated).variants.append(variant.name or "")
    return list(found.values())


def _standings(registry: Registry, row: Backend) -> list[Standing]:
    return [
        Standing(order, rank, entry.condition.describe())
        for orders in registry.orders.values()
        for order in orders
        for rank, entry in enumerate(order.entries, 1)
        if entry.row == row.name
    ]


def _places(site: Site, name: str, row: Backend) -> list[tuple[Any, list[str]]]:
    """Each architecture on which some request is accepted, with the variants that accept there."""
    archs = site.registries[name].vocabulary.architectures
    out = []
    for arch, places in site.serving(name).on.items():
        titles = [place.title for place in places if place.row is row]
        if titles:
            out.append((archs[arch], titles))
    return out


def yaml_of(site: Site, where: Location) -> tuple[str, list[tuple[int, Markup]]]:
    """The file of an entry, and the numbered lines of the entry that begins at a place."""
    lines = _file_lines(site.root, where.file)
    first = where.line - 1
    end = first + 1
    while end < len(lines) and _within(lines[end][0], where.column):
        end += 1
    while end > first + 1 and _is_blank_or_comment(lines[end - 1][0]):
        end -= 1
    return where.file, [(number + 1, lines[number][1]) for number in range(first, end)]


def _within(line: str, column: int) -> bool:
    """Whether a line belongs to the entry whose key is in that column."""
    indent = len(line) - len(line.lstrip())
    return not line.strip() or indent >= column or line.lstrip().startswith("#")


def _is_blank_or_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


@cache
def _file_lines(root: Path, file: str) -> list[tuple[str, Markup]]:
    text = Site(root).text(file)
    return list(zip(text.rstrip("\n").split("\n"), yaml_lines(text), strict=True))
