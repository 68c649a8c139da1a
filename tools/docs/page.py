"""The generated blocks of attention_backends.md, orders.md and legend.md in docs/. templates/ has their Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2

import docs.glance
from attnreg.analysis.check.finding import titled
from attnreg.compile.inputs.bundled import registry_root
from attnreg.compile.source.yaml_source import Document
from attnreg.language.computed import Computed, From
from attnreg.language.conditions import Condition
from attnreg.language.packed import Packed, packed_formats
from attnreg.language.vocabulary import Architecture, Word
from attnreg.registry import Effect, Entry, Known, Order, Registry, Switched, Variant
from docs.capabilities import families, link, on, serves, suffix, url_of
from docs.markdown import plain, slug, table

TEMPLATES = Path(__file__).parent / "templates"
# what shortcut links lead to -> its page
_HOMES = {"rows": "attention_backends", "words": "legend", "orders": "orders"}


def blocks(registry: Registry) -> dict[str, str]:
    """Name of each generated block -> its Markdown."""
    everywhere = {"table": table, "page": Page(registry), "registry": registry}

    def render(template: str, **values: Any) -> str:
        return _render(template, everywhere | values)

    names = ["registry", "backends", "legend", "invariants", "sources", "links"]
    if registry.steps:
        names.append("steps")
    if not registry.imports:
        names.append("known")
    if registry.orders:
        names += ["by-architecture", "orders"]
    out = {name: render(name.replace("-", "_")) for name in names}
    # without orders the steps choose, and no row claims what it serves
    for family in families(registry) if registry.orders else ():
        out[f"capabilities-{family.name}"] = render("capabilities", family=family)
    return out


# page -> the blocks that it has of `blocks`; the last is the links that these use
_PAGES = {
    "attention_backends": ("registry", "by-architecture", "backends", "capabilities", "invariants"),
    "orders": ("orders",),
    "legend": ("legend", "sources"),
}


def pages(registry: Registry) -> dict[str, dict[str, str]]:
    """Path of each page about attnreg's own registry -> name of each of its generated blocks -> its Markdown."""
    every, page, out = blocks(registry), Page(registry), {}
    for name, parts in _PAGES.items():
        own = {block: text for block, text in every.items() if block in parts or block.partition("-")[0] in parts}
        if name == "attention_backends":
            own["glance"] = docs.glance.glance(registry)
        text = "\n".join(own.values())
        found = page.links({kind: "" if home == name else f"{home}.md" for kind, home in _HOMES.items()})
        own["links"] = "\n".join(f"[{label}]: {target}" for label, target in found.items() if f"[{label}]" in text)
        out[f"docs/{name}.md"] = own
    return out


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


def in_words(condition: Condition, always: str) -> str:
    """A condition as code; the text ``always`` for one that always holds."""
    text = condition.describe()
    return always if text == "always" else f"`{text}`"


@dataclass(frozen=True)
class Line:
    """An order on one architecture: the requests that it ranks, and the candidates that can run there."""

    order: Order
    requests: str
    candidates: str


def lines_of(registry: Registry, arch: Architecture) -> Iterator[Line]:
    """The orders that rank requests on an architecture. An order that never applies after earlier ones is left out."""
    seen = set()
    for order in registry.orders.get(arch.platform, ()):
        applies = order.when.decided(on(arch))
        requests = in_words(order.when.remainder(on(arch)), "everything else")
        if applies is False or requests in seen:
            continue
        seen.add(requests)
        candidates = []
        for entry in order.entries:
            row = registry.row(entry.backend)
            assert row is not None
            variants = [v for v in row.variants if serves(row, v, arch)]
            if variants and entry.condition.decided(on(arch)) is not False:
                candidates.append(_candidate(_linked(entry), variants, entry.condition.remainder(on(arch))))
        yield Line(order, requests, " → ".join(candidates) or "none runs here")
        if applies:
            return


def _linked(entry: Entry) -> str:
    """``[FLASH_ATTN]/FA3``: the name of an entry, with a link to its row."""
    return f"[{entry.row}]{entry.backend.removeprefix(entry.row)}"


def _candidate(linked: str, variants: Sequence[Variant], condition: Condition) -> str:
    """A candidate with the flags that all its variants need, and its condition."""
    flags = [{str(w) for c in v.requires.clauses if c.facet == "flags" for w in c.matcher.mentions} for v in variants]
    needed = sorted(set.intersection(*flags))
    notes = [f"flag{'s' * (len(needed) > 1)} " + ", ".join(f"`{flag}`" for flag in needed)] if needed else []
    notes += [f"if {in_words(condition, '')}"] if condition.describe() != "always" else []
    return linked + (f" ({'; '.join(notes)})" if notes else "")


def effect_words(effect: Effect) -> str:
    """``sets attention_backend to fa3``, ``refuses: …``, ``is not known: …``, with the reason."""
    if effect.refuses:
        return f"{'is not known' if effect.unknown else 'refuses'}: {effect.refuses}"
    sets = [f"`{facet}` to {_value(value)}" for facet, value in effect.sets.items()]
    because = f", because {effect.because}" if effect.because else ""
    return f"sets {', '.join(sets)}{because}" if sets else "leaves everything"


def _value(value: Any) -> str:
    if isinstance(value, From):
        return f"that of `{value.facet}`"
    if isinstance(value, Computed):
        return f"`{value.text}`"
    if isinstance(value, Switched):
        return ", ".join([*(f"with {w}" for w in sorted(value.on)), *(f"without {w}" for w in sorted(value.off))])
    return "nothing" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


@dataclass(frozen=True)
class Page:
    """The functions of a registry that the templates call."""

    registry: Registry

    def platforms(self) -> list[tuple[str, str]]:
        """Name and legend of each platform that has orders."""
        words = self.registry.vocabulary.words["platforms"].values()
        return [(word.name, word.legend.rstrip(".")) for word in words if word.name in self.registry.orders]

    def packed_formats(self, words: Mapping[str, Word]) -> dict[str, Packed]:
        """The packed formats among the words of a set."""
        return packed_formats(words)

    def skip_lines(self, words: Mapping[str, Word]) -> list[str]:
        """A line for each rule about layers that need another cache, with the words that have the rule."""
        rules: dict[str, list[str]] = {}
        for word in words.values():
            for rule in word.facts.get("skip_layers", ()):
                rules.setdefault(_skip_words(rule), []).append(f"`{word.name}`")
        return [f"{', '.join(names)}: {text}" for text, names in rules.items()]

    def titled(self, known: Known) -> str:
        """``unreachable-entry [FLASHINFER, cuda/vision]``."""
        return titled(known.code, known.subject)

    def failure(self, known: Known) -> str:
        """What an accepted finding is about in words, behind a comma: a statement or a failure; "" for all others."""
        name, *more = known.subject
        sentences: list[str] = []
        if known.code == "violated-invariant":
            sentences = [i.says for i in self.registry.invariants if i.name == name]
        elif known.code == "failing-choice":
            row, _, variant = name.partition("/")
            variants = [v for v in self.registry.backends[row].variants if (v.name or "") == variant]
            sentences = [c.fails for v in variants for c in v.consequences if c.fails and c.id == "".join(more)]
        elif known.code == "refused-start":
            effects = [(step, effect) for step in self.registry.steps for effect in step.effects if effect.refuses]
            sentences = [effect.refuses for step, effect in effects if step.subject(effect) == known.subject]
        return f", {sentences[0]}" if sentences else ""

    def groups(self, platform: str) -> list[tuple[list[Architecture], list[Line]]]:
        """Groups of architectures that share their orders and candidates, each with these orders."""
        by_lines: dict[Any, tuple[list[Architecture], list[Line]]] = {}
        for arch in self.registry.vocabulary.architectures_of(platform):
            lines = list(lines_of(self.registry, arch))
            key = tuple((line.order.name, line.requests, line.candidates) for line in lines)
            by_lines.setdefault(key, ([], lines))[0].append(arch)
        return list(by_lines.values())

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
            texts.append(f"{rank} {_linked(entry)}" + ("" if condition == "always" else f" (if `{condition}`)"))
        return " → ".join(texts)

    def steps(self) -> Iterator[tuple[str, str, str, str]]:
        """Name, condition, effect and source of each effect of each step of the engine's start."""
        for step in self.registry.steps:
            for effect in step.effects:
                conditions = [text for c in (step.when, effect.when) if (text := in_words(c, ""))]
                yield f"`{step.name}`", " and ".join(conditions) or "always", effect_words(effect), step.source or ""

    def cases(self, name: str, data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """The cases of a derived facet: condition, value and reason. data: its YAML; one case there may be two here."""
        cases = self.registry.derived[name].cases
        written = list(dict.fromkeys(where for *_, where in cases))
        reasons = [case.get("because", "") for case in data["cases"]]
        return [(when.describe(), _value(value), reasons[written.index(where)]) for when, value, where in cases]

    def link(self, source: str | None) -> str:
        return link(self.registry, source)

    def sources(self) -> list[tuple[str, str]]:
        """(label, source) of every row, and of every variant that has a source of its own."""
        labelled = []
        for row in self.registry.backends.values():
            labelled.append((f"[{row.name}]", row.source))
            labelled += [(f"[{row.name}]{suffix(v)}", v.source) for v in row.variants if v.name and v.source]
        return labelled

    def links(self, homes: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Label -> target of every shortcut link. homes: the files of rows, words and orders, where not on the page."""
        registry = self.registry
        rows, words, ranks = (homes.get(kind, "") for kind in _HOMES)
        targets = {name: f"{rows}#{slug(name)}" for name in registry.backends}
        targets |= {name: f"{words}#feature-{slug(name)}" for name in registry.vocabulary.features}
        targets |= {key: f"{words}#facet-{slug(facet.name)}" for key, facet in registry.vocabulary.claims.items()}
        targets |= {o.title: f"{ranks}#order-{slug(o.title)}" for orders in registry.orders.values() for o in orders}
        cited = {source for _, source in self.sources()}
        cited |= {o.source for orders in registry.orders.values() for o in orders if o.source}
        cited |= {r.source for row in registry.backends.values() for v in row.variants for r in v.rules if r.source}
        cited |= {step.source for step in registry.steps if step.source}
        cited |= {raw["source"] for raw in self.raw("derived").values() if raw.get("source")}
        return targets | {f"`{source}`": url for source in sorted(cited) if (url := url_of(registry, source))}

    def raw(self, key: str) -> dict[str, Any]:
        """A part of the vocabulary's YAML, with reasons, versions and sources, which a `Registry` leaves out."""
        out: dict[str, Any] = {}
        for file in self.registry.files:
            if file.endswith("vocabulary.yaml"):
                part = Document.load(registry_root().parent / file).data.get(key, {})
                for name, value in part.items():
                    nested = isinstance(value, dict) and isinstance(out.get(name), dict) and key == "architectures"
                    out[name] = {**out[name], **value} if nested else value
        return out


def _skip_words(rule: Mapping[str, Any]) -> str:
    """A rule for layers that need another cache, in words: the layers, the facets that they need, and why."""
    indices = ", ".join(map(str, rule.get("layers", ())))
    which = f"layers {indices}" if indices else f"layers with a window of up to {rule.get('window')} tokens"
    which = f"the first {rule['ends']} and the last {rule['ends']} layers" if "ends" in rule else which
    models = f" of {', '.join(rule['models'])}" if "models" in rule else ""
    asked = " and ".join(f"`{facet} {value}`" for facet, value in rule["ask"].items())
    return f"{which}{models} ask for {asked}" + (f"; {rule['because']}" if "because" in rule else "")
