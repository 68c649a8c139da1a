"""Orders, features, architectures and start-up steps of a registry, as text for a terminal and as JSON-ready values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.explain.layout import Column, emit, table, wrapped
from attnreg.explain.tables import condition_words, fits, head
from attnreg.language.computed import Computed, From
from attnreg.registry import Switched
from attnreg.selection.wording import value_words

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.errors import Location
    from attnreg.language.conditions import Condition
    from attnreg.registry import Effect, Order, Registry, Step


@dataclass(frozen=True)
class RegistryEntry:
    """One entry of a registry that is not a backend: its kind, its name, a sentence, its line, and its details.

    details: pairs of a heading and a text, with the line of data or None. data: the entry as JSON-ready values.
    """

    kind: str
    name: str
    summary: str
    where: Location
    details: tuple[tuple[str, str, Location | None], ...]
    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON-ready values."""
        return {"kind": self.kind, "name": self.name, "summary": self.summary, "where": str(self.where), **self.data}


def entries_named(registry: Registry, name: str) -> list[RegistryEntry]:
    """The entries with a name: an order, else a feature, else start-up steps, else an architecture or its product.

    An order is named ``cuda/mha``, or ``mha`` for the orders of all platforms. A step is named by its title, or by the
    engine's function for all steps of that function. Empty if there is none.
    """
    orders = [o for of in registry.orders.values() for o in of if name in (o.title, o.name)]
    if orders:
        return [_order(order) for order in orders]
    if name in registry.vocabulary.features:
        return [_feature(registry, name)]
    steps = [step for step in registry.steps if name in (step.title, step.name)]
    if steps:
        return [_step(step) for step in steps]
    return [_architecture(registry, name)] if registry.vocabulary.architecture(name) is not None else []


def entry_names(registry: Registry) -> Iterator[tuple[str, str]]:
    """The names that `entries_named` finds, each with a description: for completion and for suggestions."""
    yield from ((order.title, "an order") for of in registry.orders.values() for order in of)
    yield from ((word.name, f"a feature: {word.legend}") for word in registry.vocabulary.features.values())
    yield from ((step.title or step.name, "a start-up step") for step in registry.steps)
    yield from ((a.name, f"an architecture: {a.family}") for a in registry.vocabulary.architectures.values())


def print_entries(registry: Registry, entries: Sequence[RegistryEntry], console: Console) -> None:
    """Print entries, each with its kind, its line and its details."""
    from rich.text import Text

    width = console.width
    lines = [Text(f"registry {registry.title}", style="dim")]
    for entry in entries:
        lines += [Text(), *head(entry.name, entry.kind, entry.where.short, width)]
        lines += [Text(part) for part in wrapped(entry.summary, width, "  ", first="  ")]
        # equal headings one below the other are printed once
        before = ["", *(name for name, _, _ in entry.details)]
        rows = [
            [f"  {name if name != last else ''}", text, where.short if where else ""]
            for last, (name, text, where) in zip(before, entry.details, strict=False)
        ]
        columns = [Column(style="bold"), Column(wraps=True), Column(style="blue")]
        lines += table(columns, rows, width) if rows else []
    emit(lines, console)


def _order(order: Order) -> RegistryEntry:
    details: list[tuple[str, str, Location | None]] = [("applies when", order.when.describe(), None)]
    details += [("because", order.because, None)] if order.because else []
    details += [("measured", order.measured.text, order.measured.where)] if order.measured else []
    for rank, entry in enumerate(order.entries, 1):
        details.append((str(rank), f"{entry.backend}{condition_words(entry.condition, ' if ')}", entry.where))
    details += [("source", order.source, None)] if order.source else []
    ranked = [{"backend": e.backend, "when": e.condition.describe(), "where": str(e.where)} for e in order.entries]
    data = {"when": order.when.describe(), "because": order.because, "source": order.source, "entries": ranked}
    return RegistryEntry(
        "order", order.title, "The backends below are tried in turn.", order.where, tuple(details), data
    )


def _feature(registry: Registry, name: str) -> RegistryEntry:
    word = registry.vocabulary.features[name]
    served: dict[str, dict[str, Location]] = {"supported by": {}, "emulated by": {}, "not checked by": {}}
    lacking = []
    for row in registry.backends.values():
        before = [len(titles) for titles in served.values()]
        for v in row.variants:
            title = f"{row.name}/{v.name}" if v.name else row.name
            emulated = {feature: where for feature, (_, where) in v.emulated.items()}
            for kind, holds in zip(served, (v.features, emulated, v.unchecked), strict=True):
                if name in holds:
                    served[kind][title] = holds[name]
        lacking += [row.name] if before == [len(titles) for titles in served.values()] else []
    named = [o for of in registry.orders.values() for o in of if _names_feature(o, name)]
    details: list[tuple[str, str, Location | None]] = [
        (kind, title, where) for kind, titles in served.items() for title, where in titles.items()
    ]
    details += [("refused by", ", ".join(lacking), None)] if lacking else []
    details += [("named in", f"the order {order.title}", order.where) for order in named]
    data = {kind.replace(" ", "_"): list(titles) for kind, titles in served.items()}
    data |= {"refused_by": lacking, "orders": [order.title for order in named]}
    return RegistryEntry("feature", name, word.legend, word.where, tuple(details), data)


def _names_feature(order: Order, name: str) -> bool:
    conditions: list[Condition] = [order.when, *(entry.condition for entry in order.entries)]
    clauses = [clause for condition in conditions for clause in condition.walk()]
    return any(clause.facet == "features" and name in clause.matcher.mentions for clause in clauses)


def _step(step: Step) -> RegistryEntry:
    details: list[tuple[str, str, Location | None]] = [("takes place when", step.when.describe(), None)]
    effects = []
    for effect in step.effects:
        sets = ", ".join(_written(facet, value) for facet, value in effect.sets.items())
        does = "; ".join(filter(None, [sets and f"sets {sets}", effect.refuses and _refusal(effect)])) or "nothing"
        text = f"{does}{condition_words(effect.when, ' when ')}"
        details.append(("effect", text + (f", because {effect.because}" if effect.because else ""), effect.where))
        effects.append({"when": effect.when.describe(), "does": does, "where": str(effect.where)})
    details += [("source", step.source, None)] if step.source else []
    data = {"when": step.when.describe(), "source": step.source, "effects": effects}
    summary = "The engine takes the first effect whose condition holds."
    return RegistryEntry("start-up step", step.title or step.name, summary, step.where, tuple(details), data)


def _written(facet: str, value: object) -> str:
    """What an effect writes to a facet, in words."""
    if isinstance(value, From):
        return f"{facet} = the value of {value.facet}"
    if isinstance(value, Computed):
        return f"{facet} = {value.text}"
    if isinstance(value, Switched):
        changes = [*(f"{word} on" for word in sorted(value.on)), *(f"{word} off" for word in sorted(value.off))]
        return ", ".join(changes)
    return f"{facet} = {value_words(value)}"


def _refusal(effect: Effect) -> str:
    return f"{'not known' if effect.unknown else 'refuses the run'}: {effect.refuses}"


def _architecture(registry: Registry, name: str) -> RegistryEntry:
    vocabulary = registry.vocabulary
    arch = vocabulary.architecture(name)
    assert arch is not None, name
    device = vocabulary.device(name)
    facts = {"platform": arch.platform, "arch": arch.name} | ({"device": device} if device else {})
    unread = arch.name in registry.vocabulary.unread
    fit = [
        f"{row.name}/{v.name}" if v.name else row.name
        for row in registry.backends.values()
        for v in row.variants
        if arch.platform in row.platforms and fits(v, facts)
    ]
    ordered = () if unread else registry.orders.get(arch.platform, ())
    orders = [o for o in ordered if o.when.decided(facts) is not False]
    details: list[tuple[str, str, Location | None]] = [
        ("products", ", ".join(arch.products) or "none named", None),
        ("other names", ", ".join(arch.aliases), None),
        ("fp8", "OCP" if arch.fp8 == "ocp" else "FNUZ, without infinities and -0", None),
        ("may run", "not known: no table was read for it" if unread else ", ".join(fit) or "no backend", None),
        *(("may use", f"the order {order.title}", order.where) for order in orders),
    ]
    asked = f"{name} is {arch.name}: " if name != arch.name else ""
    data = {
        "platform": arch.platform,
        "family": arch.family,
        "products": list(arch.products),
        "fp8": arch.fp8,
        "backends": None if unread else fit,
        "orders": [order.title for order in orders],
    }
    shown = tuple(detail for detail in details if detail[1])
    return RegistryEntry("architecture", arch.name, f"{asked}{arch.platform}, {arch.family}", arch.where, shown, data)
