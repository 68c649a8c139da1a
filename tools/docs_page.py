"""The generated blocks of docs/attention_backends.md: what they show of a registry; templates/ lays them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from attnreg.analysis.boxes import facets_text
from attnreg.analysis.diff import diff
from attnreg.compile.bundled import registry_root
from attnreg.compile.yaml_source import Document
from attnreg.language.conditions import Condition
from attnreg.language.vocabulary import Architecture
from attnreg.loader import load_registry
from attnreg.registry import Backend, Order, Registry, Variant

TEMPLATES = Path(__file__).parent / "templates"
NATIVE, EMULATED, UNCHECKED = "✓", "◐", "?"
# where the page of what changed between two versions looks
CHANGES_ON = ("sm80", "sm90", "sm100", "sm120", "gfx942", "gfx1100")
# claims that say who a row is, not what it accepts
_IDENTITY = ("platforms", "attention", "phase")
Known = Mapping[str, Any]


def blocks(registry: Registry) -> dict[str, str]:
    """Name of each generated block -> its Markdown."""
    everywhere = {"table": table, "page": Page(registry), "registry": registry}

    def render(template: str, **values: Any) -> str:
        return _render(template, everywhere | values)

    names: tuple[str, ...] = (
        "registry",
        "by-architecture",
        "orders",
        "backends",
        "legend",
        "invariants",
        "sources",
        "links",
    )
    if not registry.imports:
        names = (*names, "known")
    out = {name: render(name.replace("-", "_")) for name in names}
    for family in families(registry):
        out[f"capabilities-{family.name}"] = render("capabilities", family=family)
    return out


@cache
def change_blocks(before: str, after: str) -> dict[str, str]:
    """What changes between two bundled registries, for some well-known architectures."""
    old, new = load_registry(before), load_registry(after)
    archs = [new.vocabulary.architectures[name] for name in CHANGES_ON]
    differences = [
        (arch, diff(old, new, within={"arch": arch.name, "role": "target", "phase": "any"}, limit=4)) for arch in archs
    ]
    first = differences[0][1]
    words = [("only before", first.gone), ("only after", first.new)]
    rows = [
        ("gone", sorted(set(old.backends) - set(new.backends))),
        ("new", sorted(set(new.backends) - set(old.backends))),
    ]
    lines = [f"- backends {which}: {', '.join(names)}" for which, names in rows if names]
    lines += [f"- {facet}, {which}: {', '.join(names)}" for which, found in words for facet, names in found.items()]
    return {
        "words": "\n".join(lines),
        "changes": _render("changes", {"differences": differences, "facets_text": facets_text}),
    }


def _render(template: str, values: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        extensions=["jinja2.ext.do"],
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain, "slug": slug}
    lines = environment.get_template(f"{template}.md.j2").render(values).strip("\n").split("\n")
    return "\n".join(line.rstrip() for line in lines)


# text ----------------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Text as Markdown that shows exactly it."""
    for character in "\\*|<[":
        text = text.replace(character, f"\\{character}")
    return text


def slug(text: str) -> str:
    """An anchor: letters, digits and hyphens."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def table(columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Widths are given, not measured, so that a change of one row is a change of one line."""
    lines = [[title for title, _ in columns], ["-" * width for _, width in columns], *rows]
    padded = ([cell.ljust(width) for cell, (_, width) in zip(line, columns, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def in_words(condition: Condition, always: str) -> str:
    text = condition.describe()
    return always if text == "always" else f"`{text}`"


def on(arch: Architecture) -> Known:
    return {"platform": arch.platform, "arch": arch.name}


def serves(row: Backend, variant: Variant, arch: Architecture) -> bool:
    """Whether a variant can serve anything at all on an architecture."""
    known = on(arch)
    if arch.platform not in row.platforms or any(rule.when.decided(known) for rule in variant.rules):
        return False
    return variant.when.decided(known) is not False and variant.requires.decided(known) is not False


# orders by architecture ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """An order as one architecture sees it: which requests come to it, and the candidates that can run there."""

    order: Order
    requests: str
    candidates: str


def lines_of(registry: Registry, arch: Architecture) -> Iterator[Line]:
    """The orders that requests on an architecture can come to; one that asks what an earlier one asked gets none."""
    seen = set()
    for order in registry.orders.get(arch.platform, ()):
        applies = order.when.decided(on(arch))
        requests = in_words(order.when.remainder(on(arch)), "everything else")
        if applies is False or requests in seen:
            continue
        seen.add(requests)
        found = []
        for entry in order.entries:
            row = registry.backends[entry.backend]
            variants = [v for v in row.variants if serves(row, v, arch)]
            if variants and entry.condition.decided(on(arch)) is not False:
                found.append(_candidate(entry.backend, variants, entry.condition.remainder(on(arch))))
        yield Line(order, requests, " → ".join(found) or "none runs here")
        if applies:
            return


def _candidate(name: str, variants: Sequence[Variant], condition: Condition) -> str:
    flags = [{str(w) for c in v.requires.clauses if c.facet == "flags" for w in c.matcher.mentions} for v in variants]
    asked = sorted(set.intersection(*flags))
    notes = [f"flag{'s' * (len(asked) > 1)} " + ", ".join(f"`{flag}`" for flag in asked)] if asked else []
    notes += [f"if {in_words(condition, '')}"] if condition.describe() != "always" else []
    return f"[{name}]" + (f" ({'; '.join(notes)})" if notes else "")


# capabilities --------------------------------------------------------------------------------------------------------


@dataclass
class Family:
    """Rows that compete for the same requests, with the notes that their tables number."""

    name: str
    rows: list[tuple[Backend, Variant]]
    registry: Registry
    found: dict[str, list[str]] = field(default_factory=dict)

    def note(self, text: str, source: str = "") -> str:
        """The number of a note; the same text has the same number, and all sources of those that say it."""
        sources = self.found.setdefault(text, [])
        if source and source not in sources:
            sources.append(source)
        return str(list(self.found).index(text) + 1)

    @property
    def notes(self) -> list[str]:
        """The notes in the order of their numbers; ask after the tables."""
        return [" · ".join(filter(None, (text, ", ".join(sources)))) for text, sources in self.found.items()]

    def values(self) -> str:
        """The table of everything but features."""
        claims = self.registry.vocabulary.claims
        used = {c.key for _, v in self.rows for c in v.claims}
        keys = [key for key, facet in claims.items() if facet.stated or key in used]
        columns = [("backend", 32), ("runs on", 28), ("needs", 32), *((f"[{key}]", 28) for key in keys)]
        body = []
        seen = set()
        for row, variant in self.rows:
            stated = {c.key: c.matcher.text for c in variant.claims}
            numbers = ", ".join(sorted((self.note(*texts) for texts in _notes(self.registry, row, variant)), key=int))
            # at the end of the line, where it moves no column
            anchor = "" if row.name in seen else f'<a id="{slug(row.name)}"></a>'
            seen.add(row.name)
            cells = [runs_on(self.registry, row, variant), needs(variant), *(plain(stated.get(k, "any")) for k in keys)]
            body.append([row.name + _suffix(variant), *cells, numbers + anchor])
        return table([*columns, ("notes", 10)], body)

    def features(self) -> str:
        """The matrix of features: the columns that some row here serves."""
        served = frozenset[str]().union(*(v.served for _, v in self.rows))
        names = [name for name in self.registry.vocabulary.features if name in served]
        body = []
        for row, variant in self.rows:
            marks = dict.fromkeys(variant.unchecked, UNCHECKED) | dict.fromkeys(variant.features, NATIVE)
            for name, (reason, _) in variant.emulated.items():
                marks[name] = f"{EMULATED} {self.note(f'{EMULATED} {name}: {plain(reason)}')}"
            body.append([f"[{row.name}]" + _suffix(variant), *(marks.get(name, "") for name in names)])
        return table([("backend", 32), *((f"[{name}]", len(name) + 2) for name in names)], body)

    @property
    def unserved(self) -> list[str]:
        served = frozenset[str]().union(*(v.served for _, v in self.rows))
        return [name for name in self.registry.vocabulary.features if name not in served]


def families(registry: Registry) -> list[Family]:
    """The families in the order of the vocabulary; rows that serve prompts only are one of their own, the last."""
    found: dict[str, list[tuple[Backend, Variant]]] = {}
    for name in (*registry.vocabulary.words["attention"], "prefill"):
        for row in registry.backends.values():
            prefill = row.phases == frozenset({"prefill"})
            if prefill if name == "prefill" else name in row.attention and not prefill:
                found.setdefault(name, []).extend((row, variant) for variant in row.variants)
    return [Family(name, rows, registry) for name, rows in found.items()]


def _suffix(variant: Variant) -> str:
    return f"/{variant.name}" if variant.name else ""


def runs_on(registry: Registry, row: Backend, variant: Variant) -> str:
    """The architectures on which a variant can serve anything, by platform; a platform's name alone stands for all."""
    parts = []
    for platform in (name for name in registry.vocabulary.words["platforms"] if name in row.platforms):
        every = registry.vocabulary.architectures_of(platform)
        some = [arch for arch in every if serves(row, variant, arch)]
        if some:
            parts.append(platform if len(some) == len(every) else f"{platform} {_ranges(every, some)}")
    return ", ".join(parts) or "by name only"


def _ranges(every: Sequence[Architecture], some: Sequence[Architecture]) -> str:
    """``sm80–sm90, sm110``: three or more neighbours of one series are a range."""
    texts = []
    for (_, inside), group in groupby(every, key=lambda arch: (arch.series, arch in some)):
        names = [arch.name for arch in group]
        if inside:
            texts += [f"{names[0]}–{names[-1]}"] if len(names) > 2 else names
    return ", ".join(texts)


def needs(variant: Variant) -> str:
    """What a variant asks for beside the architecture: packages, flags, and the requests it is for."""
    parts = []
    for condition in (variant.requires, variant.when):
        for clause in condition.clauses:
            if clause.facet in ("packages", "flags"):
                noun = "flag " if clause.facet == "flags" else ""
                parts += [f"{noun}`{word}`" for word in sorted(map(str, clause.matcher.mentions))]
            elif clause.facet not in ("platform", "arch"):
                parts.append(f"`{clause.describe()}`")
        for rest in (Condition(any_of=(g,)) for g in condition.any_of):
            parts += [f"`{rest.describe()}`"] if {*rest.facets} - {"platform", "arch"} else []
        for rest in (Condition(none_of=(c,)) for c in condition.none_of):
            parts += [f"`{rest.describe()}`"] if {*rest.facets} - {"platform", "arch"} else []
    # a version says that the package is needed, too
    bare = {part for part in parts if any(other.startswith(part.rstrip("`") + c) for other in parts for c in "<>=!~")}
    return ", ".join(part for part in dict.fromkeys(parts) if part not in bare)


def _notes(registry: Registry, row: Backend, variant: Variant) -> Iterator[tuple[str, str]]:
    """What is to be said of a variant beside its values: each text with its source."""
    for rule in variant.rules:
        yield f"{plain(rule.reject)} · `{rule.when.describe()}`", link(registry, rule.source)
    for text in (*row.notes, *variant.notes):
        yield plain(text), ""
    if row.status != "stable":
        yield row.status + (": never chosen automatically" if row.status == "experimental" else ""), ""
    if row.only_on_request:
        yield f"only on request: {plain(row.only_on_request)}", ""


# sources -------------------------------------------------------------------------------------------------------------


def link(registry: Registry, source: str | None) -> str:
    """A source as a link to its file, where that is in a repository on GitHub."""
    if not source:
        return ""
    return f"[`{source}`]" if url_of(registry, source) else f"`{source}`"


def url_of(registry: Registry, source: str) -> str | None:
    """Where the file of a source can be read, at the version that was."""
    name, _, place = source.partition(":")
    ref = registry.sources[name]
    path = place.partition("#")[0]
    return f"{ref.url}/blob/v{ref.version}/{path}" if ref.url.startswith("https://github.com/") else None


# the page ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """What the templates ask of a registry."""

    registry: Registry

    def platforms(self) -> list[tuple[str, str]]:
        """Name and legend of each platform that has orders."""
        words = self.registry.vocabulary.words["platforms"].values()
        return [(word.name, word.legend.rstrip(".")) for word in words if word.name in self.registry.orders]

    def groups(self, platform: str) -> list[tuple[list[Architecture], list[Line]]]:
        """Architectures that see the same orders with the same candidates, and what they see."""
        found: dict[Any, tuple[list[Architecture], list[Line]]] = {}
        for arch in self.registry.vocabulary.architectures_of(platform):
            lines = list(lines_of(self.registry, arch))
            key = tuple((line.order.name, line.requests, line.candidates) for line in lines)
            found.setdefault(key, ([], lines))[0].append(arch)
        return list(found.values())

    def sold_as(self, archs: Iterable[Architecture]) -> str:
        """``Ampere (A100, A30), Ada (L4)``."""
        products: dict[str, list[str]] = {}
        for arch in archs:
            products.setdefault(arch.family, []).extend(arch.products)
        return ", ".join(f"{family} ({', '.join(names)})" if names else family for family, names in products.items())

    def candidates(self, order: Order) -> str:
        """The numbered candidates of an order, each with its condition."""
        texts = []
        for rank, entry in enumerate(order.entries, 1):
            condition = entry.condition.describe()
            texts.append(f"{rank} [{entry.backend}]" + ("" if condition == "always" else f" (if `{condition}`)"))
        return " → ".join(texts)

    def link(self, source: str | None) -> str:
        return link(self.registry, source)

    def sources(self) -> list[tuple[str, str]]:
        """Every row and variant that names a source, and the source."""
        found = []
        for row in self.registry.backends.values():
            found.append((f"[{row.name}]", row.source))
            found += [(f"[{row.name}]{_suffix(v)}", v.source) for v in row.variants if v.name and v.source]
        return found

    def links(self) -> dict[str, str]:
        """Label -> target of every shortcut link of the page."""
        registry = self.registry
        found = {name: f"#{slug(name)}" for name in registry.backends}
        found |= {name: f"#feature-{slug(name)}" for name in registry.vocabulary.features}
        found |= {key: f"#facet-{slug(facet.name)}" for key, facet in registry.vocabulary.claims.items()}
        found |= {o.title: f"#order-{slug(o.title)}" for orders in registry.orders.values() for o in orders}
        cited = {source for _, source in self.sources()}
        cited |= {o.source for orders in registry.orders.values() for o in orders if o.source}
        cited |= {r.source for row in registry.backends.values() for v in row.variants for r in v.rules if r.source}
        cited |= {raw["source"] for raw in self.raw("derived").values() if raw.get("source")}
        return found | {f"`{source}`": url for source in sorted(cited) if (url := url_of(registry, source))}

    def raw(self, key: str) -> dict[str, Any]:
        """A part of the vocabulary as it is written, for what selection does not need: reasons, versions, sources."""
        out: dict[str, Any] = {}
        for file in self.registry.files:
            if file.endswith("vocabulary.yaml"):
                part = Document.load(registry_root().parent / file).data.get(key, {})
                for name, value in part.items():
                    nested = isinstance(value, dict) and isinstance(out.get(name), dict) and key == "architectures"
                    out[name] = {**out[name], **value} if nested else value
        return out
