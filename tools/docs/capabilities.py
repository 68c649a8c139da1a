"""The tables of what backends accept. Rows that compete for the same requests share a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from attnreg.language.conditions import Condition
from attnreg.language.vocabulary import Architecture
from attnreg.registry import Backend, Registry, Rule, Variant
from attnreg.selection.consequences import consequence_words
from docs.markdown import plain, slug, table

NATIVE, EMULATED, UNCHECKED = "✓", "◐", "?"


@dataclass
class Family:
    """Rows that compete for the same requests, and the numbered notes of their tables."""

    name: str
    rows: list[tuple[Backend, Variant]]
    registry: Registry
    # text -> sources
    sources: dict[str, list[str]] = field(default_factory=dict)

    def note(self, text: str, source: str = "") -> str:
        """The number of a note. Equal texts share a number and collect their sources."""
        sources = self.sources.setdefault(text, [])
        if source and source not in sources:
            sources.append(source)
        return str(list(self.sources).index(text) + 1)

    @property
    def notes(self) -> list[str]:
        """The notes in the order of their numbers; complete once both tables are made."""
        return [" · ".join(filter(None, (text, ", ".join(sources)))) for text, sources in self.sources.items()]

    def values(self) -> str:
        """The table of all claims but features."""
        keys = [key for key in self.registry.vocabulary.claims if key not in self.unconstrained]
        columns = [("backend", 7), ("runs on", 7), ("needs", 5), *((f"[{key}]", len(key) + 2) for key in keys)]
        body = []
        seen = set()
        for row, variant in self.rows:
            stated = {c.key: c.matcher.text for c in variant.claims}
            numbers = ", ".join(sorted((self.note(*texts) for texts in _notes(self.registry, row, variant)), key=int))
            values = [plain(stated.get(key, "any")) + self._narrowed(variant, key) for key in keys]
            # an anchor at the end of the line shifts no column
            anchor = "" if row.name in seen else f'<a id="{slug(row.name)}"></a>'
            seen.add(row.name)
            cells = [runs_on(self.registry, row, variant), needs(variant), *values]
            body.append([row.name + suffix(variant), *cells, numbers + anchor])
        return table([*columns, ("notes", 5)], body)

    def _narrowed(self, variant: Variant, key: str) -> str:
        """The numbers of the notes on rules that refuse some values of a claim, in brackets."""
        facet = self.registry.vocabulary.claims[key].name
        numbers = {self.note(*_rule_note(self.registry, rule)) for rule in variant.rules if facet in rule.when.facets}
        return f" ({', '.join(sorted(numbers, key=int))})" if numbers else ""

    @property
    def unconstrained(self) -> list[str]:
        """The claims that no row restricts, neither directly nor by a rule. They get no column."""
        variants = [variant for _, variant in self.rows]
        used = {c.key for v in variants for c in v.claims}
        ruled = {facet for v in variants for rule in v.rules for facet in rule.when.facets}
        return [key for key, f in self.registry.vocabulary.claims.items() if key not in used and f.name not in ruled]

    def features(self) -> str:
        """The matrix of the features that at least one row serves."""
        served = frozenset[str]().union(*(v.served for _, v in self.rows))
        names = [name for name in self.registry.vocabulary.features if name in served]
        body = []
        for row, variant in self.rows:
            marks = dict.fromkeys(variant.unchecked, UNCHECKED) | dict.fromkeys(variant.features, NATIVE)
            for name, (reason, _) in variant.emulated.items():
                marks[name] = f"{EMULATED} {self.note(f'{EMULATED} {name}: {plain(reason)}')}"
            body.append([f"[{row.name}]" + suffix(variant), *(marks.get(name, "") for name in names)])
        return table([("backend", 7), *((f"[{name}]", 5) for name in names)], body)

    @property
    def unserved(self) -> list[str]:
        """The features that no row serves."""
        served = frozenset[str]().union(*(v.served for _, v in self.rows))
        return [name for name in self.registry.vocabulary.features if name not in served]


def families(registry: Registry) -> list[Family]:
    """The families in the order of the vocabulary. Rows that serve prompts only form the last one."""
    rows: dict[str, list[tuple[Backend, Variant]]] = {}
    for name in (*registry.vocabulary.words["attention"], "prefill"):
        for row in registry.backends.values():
            prefill = row.phases == frozenset({"prefill"})
            if prefill if name == "prefill" else name in row.attention and not prefill:
                rows.setdefault(name, []).extend((row, variant) for variant in row.variants)
    return [Family(name, rows, registry) for name, rows in rows.items()]


def suffix(variant: Variant) -> str:
    """``/FA3``; empty for a variant without a name."""
    return f"/{variant.name}" if variant.name else ""


def runs_on(registry: Registry, row: Backend, variant: Variant) -> str:
    """The architectures that a variant can run on: ``cuda sm80–sm90, rocm``. A platform alone means all."""
    parts = []
    for platform in (name for name in registry.vocabulary.words["platforms"] if name in row.platforms):
        every = registry.vocabulary.architectures_of(platform)
        some = [arch for arch in every if serves(row, variant, arch)]
        if some:
            parts.append(platform if len(some) == len(every) else f"{platform} {_ranges(every, some)}")
    return ", ".join(parts) or "by name only"


def _ranges(every: Sequence[Architecture], some: Sequence[Architecture]) -> str:
    """``sm80–sm90, sm110``: three or more neighbours of one series become a range."""
    texts = []
    for (_, inside), group in groupby(every, key=lambda arch: (arch.series, arch in some)):
        names = [arch.name for arch in group]
        if inside:
            texts += [f"{names[0]}–{names[-1]}"] if len(names) > 2 else names
    return ", ".join(texts)


def needs(variant: Variant) -> str:
    """What a variant needs in addition to an architecture: packages, flags, and its other conditions."""
    parts = []
    for condition in (variant.requires, variant.when):
        for clause in condition.clauses:
            if clause.facet in ("packages", "flags") and clause.matcher.form == "all":
                noun = "flag " if clause.facet == "flags" else ""
                parts += [f"{noun}`{word}`" for word in sorted(map(str, clause.matcher.mentions))]
            elif clause.facet not in ("platform", "arch"):
                parts.append(f"`{clause.describe()}`")
        for rest in (Condition(any_of=(g,)) for g in condition.any_of):
            parts += [f"`{rest.describe()}`"] if {*rest.facets} - {"platform", "arch"} else []
        for rest in (Condition(none_of=(c,)) for c in condition.none_of):
            parts += [f"`{rest.describe()}`"] if {*rest.facets} - {"platform", "arch"} else []
    # `triton>=3.7` makes `triton` redundant
    bare = {part for part in parts if any(other.startswith(part.rstrip("`") + c) for other in parts for c in "<>=!~")}
    return ", ".join(part for part in dict.fromkeys(parts) if part not in bare)


def _notes(registry: Registry, row: Backend, variant: Variant) -> Iterator[tuple[str, str]]:
    """(text, source) of each note on a variant: its rules, its remarks and its row's status."""
    for rule in variant.rules:
        yield _rule_note(registry, rule)
    for known in variant.consequences:
        when = known.when.describe()
        text = f"once chosen, it {plain(consequence_words(known))}"
        yield text + (f" · `{when}`" if when != "always" else ""), link(registry, known.source)
    for text in (*row.notes, *variant.notes):
        yield plain(text), ""
    if variant.run_on_request:
        yield f"runs only where it is named: {plain(variant.run_on_request)}", ""
    if row.status != "stable":
        yield row.status + (": never chosen automatically" if row.status == "experimental" else ""), ""
    if row.only_on_request:
        yield f"only on request: {plain(row.only_on_request)}", ""


def _rule_note(registry: Registry, rule: Rule) -> tuple[str, str]:
    """(text, source) of the note on a rule."""
    return f"{plain(rule.reject)} · `{rule.when.describe()}`", link(registry, rule.source)


def on(arch: Architecture) -> Mapping[str, Any]:
    """The facets that follow from an architecture."""
    return {"platform": arch.platform, "arch": arch.name}


def serves(row: Backend, variant: Variant, arch: Architecture) -> bool:
    """Whether a variant can serve some request on an architecture."""
    facets = on(arch)
    if arch.platform not in row.platforms or any(rule.when.decided(facets) for rule in variant.rules):
        return False
    return variant.when.decided(facets) is not False and variant.requires.decided(facets) is not False


def link(registry: Registry, source: str | None) -> str:
    """A source as Markdown: a link to its file, if the file is on GitHub or in this tree."""
    if not source:
        return ""
    return f"[`{source}`]" if url_of(registry, source) else f"`{source}`"


def url_of(registry: Registry, source: str) -> str | None:
    """The address of a source's file at the cited version; None for a source that has no page."""
    name, _, place = source.partition(":")
    # words of the registry that a vocabulary extends have that registry's sources
    ref = registry.sources.get(name)
    if ref is None:
        return None
    path = place.partition("#")[0]
    if ref.url == ".":
        # attnreg's own modules are beside docs/
        return f"../{path}"
    return f"{ref.url}/blob/v{ref.version}/{path}" if ref.url.startswith("https://github.com/") else None
