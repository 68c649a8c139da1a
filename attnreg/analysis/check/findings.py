"""`attnreg check`: invariants that are violated and data that never have an effect, over every configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from attnreg.analysis.check.evidence import evidence
from attnreg.analysis.check.finding import Finding, titled, told_apart
from attnreg.analysis.check.records import record_findings
from attnreg.analysis.check.starts import refused_choices, unreachable_steps
from attnreg.analysis.check.unused import unused_facets, unused_words
from attnreg.analysis.snapshot import moved_selections
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.compile.inputs.bundled import FILES, bundled_registries
from attnreg.compile.source.quoting import FileKind
from attnreg.compile.source.yaml_source import Document
from attnreg.errors import Location, nearest
from attnreg.files import kind_of
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection

if TYPE_CHECKING:
    from attnreg.analysis.diagram import Node
    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Entry, Invariant, Order, Registry

SNAPSHOT = "selections.yaml"
_SNAPSHOT = FileKind("snapshot of selections", frozenset({"selections"}))


def check(registry: Registry, here: Platform | None = None, *, allow_outside: bool = False) -> list[Finding]:
    """Every fault of a registry, in the order of its files. Exact: no configuration is left out.

    here: this machine, on which the evidence of orders may be stale. allow_outside: the evidence of an order may be a
    file outside the directory of the file that names it.

    Of a registry without orders, whose steps name every backend, the findings are about runs in which no user does.
    Findings that the registry lists as ``known`` are left out. An entry of ``known`` without a finding is one itself.
    """
    findings = _steps_alone(registry) if registry.steps and not registry.orders else _everything(registry)
    findings += _selections(registry, allow_outside)
    findings += evidence(registry, here, allow_outside)
    findings += (f for f in _records(registry, allow_outside) if not f.is_note)
    findings = told_apart(findings)
    accepted = {known.key for known in registry.known}
    findings = [
        *(f for f in findings if (f.code, f.subject) not in accepted),
        *_stale_exceptions(registry, findings),
    ]
    files = {file: i for i, file in enumerate(registry.files)}
    # the files of plugins that are left out come last
    return sorted(findings, key=lambda f: (files.get(f.where.file, len(files)), f.where.line))


def notes(registry: Registry, *, allow_outside: bool = False) -> list[Finding]:
    """Notes on a registry, which are not faults: its records of earlier kernels, and places in several orders.

    allow_outside: as in `check`.
    """
    return [*(f for f in _records(registry, allow_outside) if f.is_note), *_joined_orders(registry)]


def _joined_orders(registry: Registry) -> Iterator[Finding]:
    """A note on each `place` without `orders` by which a backend joined several orders."""
    joined: dict[tuple[str, Location], list[str]] = {}
    for orders in registry.orders.values():
        for order in orders:
            for entry in order.entries:
                if entry.joined:
                    joined.setdefault((entry.backend, entry.where), []).append(order.title)
    for (backend, where), titles in joined.items():
        if len(titles) > 1:
            message = f"{backend} joined {len(titles)} orders, because its place names none: {', '.join(titles)}"
            help_ = f"name those that you mean: `orders: [{titles[0]}]`"
            yield Finding("joined-orders", (backend,), where, message, help_, is_note=True)


def _records(registry: Registry, allow_outside: bool) -> Iterator[Finding]:
    """The findings about the registry's records; empty with an overlay, whose rows have their own files."""
    return iter(()) if _overlaid(registry) else record_findings(registry, allow_outside)


def _steps_alone(registry: Registry) -> list[Finding]:
    """Findings about a registry without orders, whose steps name every backend.

    No row is tried in turn, so no row can be unreachable. Backends that a user names are left out of the space, unless
    there are invariants: a backend for each phase would make the space too large.
    """
    invariants = _invariants(Model(Space([registry]), registry)) if registry.invariants else ()
    return [*_plugins(registry), *invariants, *refused_choices(registry), *unused_facets(registry)]


def _everything(registry: Registry) -> list[Finding]:
    space = Space([registry])
    model = Model(space, registry)
    return [
        *_plugins(registry),
        # invariants are about the selector's choice, if the engine has a start before it
        *_invariants(Model(space, registry.selector) if registry.steps else model),
        *_choices(model),
        *_waivers(model),
        # without choices: data that only a choice makes unreachable is no fault
        *_orders(Model(space, dataclasses.replace(registry, choices=())) if registry.choices else model),
        *unreachable_steps(model),
        *refused_choices(registry),
        *_cases(model),
        *_rows(model),
        *unused_words(model),
        *unused_facets(registry),
    ]


def _stale_exceptions(registry: Registry, findings: list[Finding]) -> Iterator[Finding]:
    overlaid = _overlaid(registry)
    accepted, found = {known.key for known in registry.known}, {(f.code, f.subject) for f in findings}
    for known in registry.known:
        # an overlay may remove the fault that the entry below it accepts
        if overlaid and _is_own(known.where.file):
            continue
        if known.key not in found:
            title = titled(known.code, known.subject)
            near = nearest(title, (titled(*key) for key in found if key not in accepted), cutoff=0.8)
            help_ = "remove it from `known`" + (f", or write `{near}`, which is found" if near else "")
            yield Finding("stale-exception", (known.code, *known.subject), known.where, f"nothing finds {title}", help_)


def _plugins(registry: Registry) -> Iterator[Finding]:
    for plugin in registry.left_out:
        for problem in plugin.problems:
            message = f"plugin {plugin.plugin} is left out: {problem.message}"
            yield Finding("broken-plugin", (plugin.plugin,), problem.where, message, problem.help)


def _invariants(model: Model) -> Iterator[Finding]:
    for invariant in model.registry.invariants:
        applies, violated = violation(model, invariant)
        if applies == model.d.false:
            message = f"the invariant `{invariant.name}` says nothing: no configuration satisfies its `when`"
            yield Finding(
                "vacuous-invariant", (invariant.name,), invariant.where, message, "mend its `when`, or remove it"
            )
        elif violated != model.d.false:
            count = model.d.count(violated)
            message = f"violated: {invariant.says} ({count:,} of {model.d.count(applies):,} configurations)"
            help_ = "mend the data that the trace cites, or the statement"
            if model.registry.choices:
                help_ += "; what an overlay's choices are meant to take away is listed in its `known`"
            example = _example(model, violated)
            subject, about = (invariant.name,), invariant.when.facets
            yield Finding("violated-invariant", subject, invariant.where, message, help_, example, about)


def violation(model: Model, invariant: Invariant) -> tuple[Node, Node]:
    """Where an invariant applies, and where it is violated."""
    d = model.d
    applies = d.conjoin([model.space.possible, model.condition(invariant.when)])
    if invariant.native:
        applies = d.conjoin([applies, model.native()])
    return applies, d.where(applies, lambda name: not _allows(invariant, name), model.chosen())


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
    return evaluate(*model.space.example(point), model.registry)


def _choices(model: Model) -> Iterator[Finding]:
    for choice in model.registry.choices:
        if model.d.conjoin([model.space.possible, model.condition(choice.when)]) == model.d.false:
            names = ", ".join(choice.backends)
            message = f"the choice to {choice.strength} {names} says nothing: no configuration satisfies its `when`"
            yield Finding(
                "vacuous-choice",
                (choice.strength, *choice.backends),
                choice.where,
                message,
                "mend its `when`, or remove it",
            )


def _waivers(model: Model) -> Iterator[Finding]:
    for waiver in model.registry.waivers:
        if all(model.d.conjoin([m.space.possible, m.condition(waiver.when)]) == model.d.false for m in model.both):
            message = "the waiver says nothing: no configuration satisfies its `when`"
            subject = tuple(sorted(waiver.facets))
            yield Finding("vacuous-waiver", subject, waiver.where, message, "mend its `when`, or remove it")


def unreachable(registry: Registry) -> Iterator[Location]:
    """The lines of the orders' entries that are never chosen."""
    findings = _orders(Model(Space([registry]), dataclasses.replace(registry, choices=())))
    yield from (finding.where for finding in findings if finding.code == "unreachable-entry")


def _orders(model: Model) -> Iterator[Finding]:
    """Orders and entries that are never reached. A file is checked without entries that a later overlay adds."""
    registry = model.registry
    every = [order for orders in registry.orders.values() for order in orders]
    files = {order.where.file for order in every} | {entry.where.file for order in every for entry in order.entries}
    for file in (f for f in dict.fromkeys(registry.files) if f in files):
        until = registry.files[: registry.files.index(file) + 1]
        orders = {
            platform: tuple(
                dataclasses.replace(order, entries=tuple(e for e in order.entries if e.where.file in until))
                for order in orders
                if order.where.file in until
            )
            for platform, orders in registry.orders.items()
        }
        known = Model(model.space, dataclasses.replace(registry, orders=orders)) if len(files) > 1 else model
        yield from (f for f in _unreachable(known) if f.where.file == file)


def _unreachable(model: Model) -> Iterator[Finding]:
    d = model.d
    dead: list[tuple[Entry, Order, str]] = []
    # an entry that a place puts into several orders has one line, and may be dead in some of them
    alive: dict[Location, list[str]] = {}
    for order, everywhere in model.regions():
        region = d.conjoin([model.space.possible, everywhere, model.ordered])
        if region == d.false:
            message = f"the order {order.title} is never used: the orders before it take every request"
            yield Finding("unreachable-order", (order.title,), order.where, message, "remove it, or move it up")
            continue
        winners = _winners(model, order, region)
        for i, entry in enumerate(order.entries):
            if i in winners:
                alive.setdefault(entry.where, []).append(order.title)
            else:
                dead.append((entry, order, _why_never(model, entry, region)))
    for entry, order, why in dead:
        titles = ", ".join(alive.get(entry.where, ()))
        help_ = f"name the other orders beside its place: `orders: [{titles}]`" if titles else ""
        subject, message = (entry.backend, order.title), f"{entry.backend} is never chosen by the order {order.title}"
        help_ = help_ or "remove it from the order, or move it up"
        yield Finding("unreachable-entry", subject, entry.where, f"{message}: {why}", help_)


def _winners(model: Model, order: Order, region: Node) -> set[int]:
    """The entries of an order that are chosen somewhere in a region, as `Model.pick` chooses."""
    d, left, winners = model.d, region, set[int]()
    entries = model.entries(order)
    natives, others = ([parts[i] for parts in entries] for i in (1, 0))
    for index, where in (*enumerate(natives), *enumerate(others)):
        if d.conjoin([left, where]) != d.false:
            winners.add(index)
            left = d.ite(where, d.false, left)
    return winners


def _why_never(model: Model, entry: Entry, region: Node) -> str:
    d = model.d
    accepts = d.conjoin([region, model.row(entry.backend)[0]])
    if model.registry.backends[entry.row].status == "experimental":
        return "it is experimental"
    if accepts == d.false:
        return "it accepts no request that comes this way"
    if d.conjoin([accepts, model.condition(entry.condition)]) == d.false:
        return "its `if` holds for none of the requests that it accepts"
    return "a candidate before it takes every request that it accepts"


def _cases(model: Model) -> Iterator[Finding]:
    d = model.d
    # steps may read a facet before others write what it is derived from
    moments = dict.fromkeys((*model.both, *(stage.before for m in model.both for stage in m.begun.stages)))
    facets = model.registry.vocabulary.facets
    for derived in model.registry.derived.values():
        # nothing is known of runs with a draft
        if any(facets[name].of_run for condition, _, _ in derived.cases for name in condition.facets):
            continue
        left = [model.space.possible for _ in moments]
        for condition, value, where in derived.cases:
            holds = [m.condition(condition) for m in moments]
            if all(d.conjoin(parts) == d.false for parts in zip(left, holds, strict=True)):
                message = f"the case `{value}` of {derived.name} is never reached"
                yield Finding(
                    "unreachable-case", (derived.name, str(value)), where, message, "remove it, or move it up"
                )
            left = [d.ite(case, d.false, rest) for case, rest in zip(holds, left, strict=True)]


def _rows(model: Model) -> Iterator[Finding]:
    ordered = {e.row for orders in model.registry.orders.values() for o in orders for e in o.entries}
    for row in model.registry.backends.values():
        yield from _variants(model, row)
        yield from _rules(model, row)
        if not all(
            {"arch", "packages"} & {c.facet for c in (*v.when.walk(), *v.requires.walk())} for v in row.variants
        ):
            message = f"{row.name} asks for no package and no architecture"
            yield Finding(
                "unguarded-row", (row.name,), row.where, message, "say under `requires` what it cannot run without"
            )
        if row.name not in ordered and row.only_on_request is None:
            message = f"{row.name} stands in no order"
            yield Finding(
                "unplaced-row", (row.name,), row.where, message, "add it to one, or say why in `only_on_request`"
            )
        elif row.name in ordered and row.only_on_request is not None:
            message = f"{row.name} says `only_on_request`, but an order names it"
            yield Finding("ordered-on-request", (row.name,), row.where, message, "remove one of the two")


def _variants(model: Model, row: Backend) -> Iterator[Finding]:
    d = model.d
    answers = [[m.variant(row, i) for i in range(len(row.variants))] for m in model.ways(row.name)]
    used = {i for of_model in answers for i in d.terminals(model.pick(enumerate(of_model), d.true))}
    for i, variant in enumerate(row.variants):
        if i not in used:
            title = f"{row.name}/{variant.name}" if variant.name else row.name
            nothing = all(of_model[i][0] == d.false for of_model in answers)
            why = "it accepts nothing" if nothing else "the variants before it accept all that it does"
            message = f"{title} is never used: {why}"
            yield Finding("unreachable-variant", (title,), variant.where, message, "remove it, or mend its conditions")


def _rules(model: Model, row: Backend) -> Iterator[Finding]:
    d = model.d
    rules = {rule.where: rule for variant in row.variants for rule in variant.rules}
    for rule in rules.values():
        users = [v for v in row.variants if rule in v.rules]
        ways = model.ways(row.name)
        if all(d.conjoin([m.without_rules(v), m.condition(rule.when)]) == d.false for m in ways for v in users):
            message = f"the rule of {row.name} never decides: the row refuses all of it already ({rule.reject})"
            subject = (row.name, *rule.facets)
            yield Finding("unreachable-rule", subject, rule.where, message, "remove the rule, or mend its `when`")


def _selections(registry: Registry, allow_outside: bool = False) -> Iterator[Finding]:
    """The moves since the registry's snapshot of selections; empty with an overlay, which may change selections."""
    directory = bundled_registries().get(registry.base) or Path(registry.base)
    if _overlaid(registry) or not kind_of(directory / SNAPSHOT):
        return
    rows = next(PurePath(file) for file in registry.files if PurePath(file).name == "backends.yaml")
    below = None if allow_outside or registry.base in bundled_registries() else directory
    document = Document.load(directory / SNAPSHOT, str(rows.with_name(SNAPSHOT)), _SNAPSHOT, below)
    for move, where, message in moved_selections(document, registry):
        yield Finding("moved-selection", move, where, message, "mend the data, or the snapshot where the move is meant")


def _overlaid(registry: Registry) -> bool:
    """Whether an overlay, of a user or of a plugin, is part of a registry."""
    return not all(map(_is_own, registry.files))


def _is_own(file: str) -> bool:
    """Whether a file is one of a registry's own, not an overlay."""
    return PurePath(file).stem in FILES
