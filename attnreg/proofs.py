"""What must hold of a registry, decided for every configuration: its invariants, and that none of its data is dead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnreg.errors import Location, NoBackendError
from attnreg.selector import Selection, select
from attnreg.space import Model, Space

if TYPE_CHECKING:
    from attnreg.diagram import Node
    from attnreg.registry import Backend, Invariant, Registry


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong in a registry that loads: what, where, how to mend it, and a configuration that shows it."""

    kind: str
    where: Location
    message: str
    help: str = ""
    example: Selection | None = None

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.message}"]
        if self.example is not None:
            lines += [f"  {line}" for line in example_lines(self.example)]
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


def example_lines(selection: Selection) -> list[str]:
    """A configuration and its trace, in plain text."""
    platform, request = selection.platform, selection.request
    given = {k: v for k, v in request.to_dict().items() if v not in (None, [])}
    flags = f" flags={','.join(sorted(platform.flags))}" if platform.flags else ""
    shown = " ".join(f"{k}={','.join(v) if isinstance(v, list) else v}" for k, v in given.items())
    missing = ""
    if platform.packages is not None:
        known = {name for name, _ in platform.packages}
        absent = sorted(set(selection.registry.vocabulary.packages) & _asked_packages(selection) - known)
        missing = f" without packages {', '.join(absent)}" if absent else ""
    lines = [f"for example: {platform.platform} {platform.arch}{flags}{missing} {shown}"]
    lines.append(f"  chosen: {selection.backend.name if selection.backend else 'none'}")
    for c in selection.candidates:
        verdict = "; ".join(f"{r.text} [{r.where.short}]" for r in c.reasons) or "accepts"
        lines.append(f"  {c.rank} {c.title}: {verdict}")
    return lines


def _asked_packages(selection: Selection) -> set[str]:
    return {str(r.asked) for c in selection.candidates for r in c.reasons if "packages" in r.facets}


def check(registry: Registry) -> list[Finding]:
    """Every finding about a registry, in the order of its files. Exact: no configuration is left out."""
    space = Space([registry])
    model = Model(space, registry)
    findings = [
        *_invariants(model),
        *_orders(model),
        *_cases(model),
        *_rows(model),
        *_words(model),
    ]
    return sorted(findings, key=lambda f: (registry.files.index(f.where.file), f.where.line))


# invariants ----------------------------------------------------------------------------------------------------------


def _invariants(model: Model) -> Iterator[Finding]:
    for invariant in model.registry.invariants:
        applies, violated = violation(model, invariant)
        if applies == model.d.false:
            message = f"the invariant `{invariant.name}` says nothing: no configuration satisfies its `when`"
            yield Finding("vacuous invariant", invariant.where, message, "mend its `when`, or remove it")
        elif violated != model.d.false:
            count = model.d.count(violated)
            message = f"violated: {invariant.says} ({count:,} of {model.d.count(applies):,} configurations)"
            help_ = "mend the data that the trace cites, or the statement"
            yield Finding("violated invariant", invariant.where, message, help_, _example(model, violated))


def violation(model: Model, invariant: Invariant) -> tuple[Node, Node]:
    """Where an invariant applies, and where it is violated."""
    d = model.d
    applies = model.condition(invariant.when)
    if invariant.native:
        applies = d.conjoin([applies, model.native()])
    holds = d.apply(lambda name: _allows(invariant, name), model.chosen())
    return applies, d.conjoin([applies, d.negate(holds)])


def _allows(invariant: Invariant, name: str | None) -> bool:
    if invariant.finds:
        return name is not None
    if invariant.chosen is not None:
        return name in invariant.chosen
    return name not in invariant.never


def _example(model: Model, region: Node) -> Selection | None:
    point = model.space.cheapest(region)
    if point is None:
        return None
    request, platform = model.space.example(point)
    try:
        return select(request, platform, model.registry)
    except NoBackendError as e:
        return e.selection


# data that is never reached ------------------------------------------------------------------------------------------


def _orders(model: Model) -> Iterator[Finding]:
    d = model.d
    for order, region in model.regions():
        if region == d.false:
            message = f"the order {order.title} is never used: the orders before it take every request"
            yield Finding("unreachable order", order.where, message, "remove it, or move it up")
            continue
        wins = d.conjoin([region, d.apply(lambda name: name is not None, model.chosen())])
        for entry in order.entries:
            name = entry.backend
            mine = d.conjoin([region, d.apply(lambda chosen, n=name: chosen == n, model.chosen())])
            if mine == d.false and wins != d.false:
                why = _why_never(model, name, region)
                message = f"{name} is never chosen by the order {order.title}: {why}"
                yield Finding("unreachable entry", entry.where, message, "remove it from the order, or move it up")


def _why_never(model: Model, name: str, region: Node) -> str:
    accepts, _ = model.row(name)
    if model.registry.backends[name].status == "experimental":
        return "it is experimental"
    if model.d.conjoin([region, accepts]) == model.d.false:
        return "it accepts no request that comes this way"
    return "a candidate before it takes every request that it accepts"


def _cases(model: Model) -> Iterator[Finding]:
    d = model.d
    for derived in model.registry.derived.values():
        left = d.true
        for condition, value, where in derived.cases:
            here = d.conjoin([left, model.condition(condition)])
            if here == d.false:
                message = f"the case `{value}` of {derived.name} is never reached"
                yield Finding("unreachable case", where, message, "remove it, or move it up")
            left = d.ite(model.condition(condition), d.false, left)


def _rows(model: Model) -> Iterator[Finding]:
    ordered = {e.backend for orders in model.registry.orders.values() for o in orders for e in o.entries}
    for row in model.registry.backends.values():
        yield from _variants(model, row)
        yield from _rules(model, row)
        if row.name not in ordered and row.only_on_request is None:
            message = f"{row.name} stands in no order"
            yield Finding("unplaced row", row.where, message, "add it to one, or say why in `only_on_request`")
        elif row.name in ordered and row.only_on_request is not None:
            message = f"{row.name} says `only_on_request`, but an order names it"
            yield Finding("unplaced row", row.where, message, "remove one of the two")


def _variants(model: Model, row: Backend) -> Iterator[Finding]:
    d = model.d
    taken = d.false
    for i, variant in enumerate(row.variants):
        accepts, native = model.variant(row, i)
        if d.ite(taken, d.false, accepts) == d.false:
            title = f"{row.name}/{variant.name}" if variant.name else row.name
            why = "the variants before it accept all that it does" if accepts != d.false else "it accepts nothing"
            message = f"{title} is never used: {why}"
            yield Finding("unreachable variant", variant.where, message, "remove it, or mend its conditions")
        taken = d.unite([taken, native])


def _rules(model: Model, row: Backend) -> Iterator[Finding]:
    d = model.d
    rules = {rule.where: rule for variant in row.variants for rule in variant.rules}
    for rule in rules.values():
        users = [v for v in row.variants if rule in v.rules]
        if all(d.conjoin([model.without_rules(v), model.condition(rule.when)]) == d.false for v in users):
            message = f"the rule of {row.name} never decides: the row refuses all of it already ({rule.reject})"
            yield Finding("unreachable rule", rule.where, message, "remove the rule, or mend its `when`")


def _words(model: Model) -> Iterator[Finding]:
    """Values that a request may name and that no backend accepts anywhere."""
    vocabulary = model.registry.vocabulary
    for key, facet in vocabulary.claims.items():
        if facet.kind != "word":
            continue
        matchers = [
            c.matcher for r in model.registry.backends.values() for v in r.variants for c in v.claims if c.key == key
        ]
        group = next((g for g in vocabulary.words.values() if frozenset(g) == facet.words), {})
        for word in group.values():
            if not any(m.matches(word.name) for m in matchers):
                message = f"no backend accepts {facet.name} {word.name}"
                yield Finding("unused word", word.where, message, "remove the word, or claim it")
    served = {f for r in model.registry.backends.values() for v in r.variants for f in v.served}
    for word in vocabulary.features.values():
        if word.name not in served:
            yield Finding("unused word", word.where, f"no backend serves {word.name}", "remove the word, or claim it")
