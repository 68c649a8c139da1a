"""Findings about an engine's start: steps that never have an effect, and automatic choices that then fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attnreg.analysis.check.finding import Finding
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.analysis.symbolic.start import start
from attnreg.language.vocabulary import NAMED
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.analysis.diagram import Node
    from attnreg.errors import Location
    from attnreg.language.conditions import Condition
    from attnreg.language.consequence import Consequence
    from attnreg.registry import Registry, Variant


def unreachable_steps(model: Model) -> Iterator[Finding]:
    """The cases of steps without an effect in any request, whatever backend a user names.

    Steps on runs with a draft are left out.
    """
    d, facets = model.d, model.registry.vocabulary.facets
    of_run = {name for name, facet in facets.items() if facet.of_run}
    spoken: dict[tuple[Location, tuple[str, ...], str], bool] = {}
    for begun in {id(m.begun): m.begun for m in model.both}.values():
        for stage in begun.stages:
            if of_run & {*stage.step.when.facets, *stage.effect.when.facets}:
                continue
            key = stage.effect.where, stage.step.subject(stage.effect), stage.step.name
            reached = d.conjoin([model.space.possible, stage.where]) != d.false
            spoken[key] = spoken.get(key, False) or reached
    for (where, subject, name), reached in spoken.items():
        if not reached:
            message = f"the step {name} never speaks here"
            yield Finding("unreachable-step", subject, where, message, "remove it, or mend its `when`")


def refused_choices(registry: Registry) -> Iterator[Finding]:
    """The automatic choices that the engine then refuses: by a row's failure, a rule or a step; and those with a fault.

    Each finding has a configuration with the fewest unusual facets.
    """
    registry = dataclasses.replace(registry, choices=())
    failing = {
        name: found
        for name, row in registry.backends.items()
        if (found := [c.when for v in row.variants for c in _faults(registry, v)])
    }
    if not failing and not registry.steps:
        return
    space = Space([registry], more=[when for some in failing.values() for when in some])
    model = Model(space, registry, begun=start(space, registry, unnamed=True))
    d, automatic = space.diagrams, space.possible
    for stage in model.begun.stages:
        if (
            stage.effect.refuses
            and not stage.effect.unknown
            and _asks_for_a_backend(registry, stage.step.when, stage.effect.when)
        ):
            message = f"a run is refused by {stage.step.name} although nobody names a backend: {stage.effect.refuses}"
            region, subject = d.conjoin([automatic, stage.where]), stage.step.subject(stage.effect)
            yield from _finding(model, region, "refused-start", subject, stage.effect.where, message)
    yield from _refused_rows(model, automatic)
    titles = d.ite(automatic, model.titles_of(failing), d.terminal(None))
    # what a variant emulates makes no difference here
    chosen: dict[str, list[Node]] = {}
    for title in sorted(d.terminals(titles)):
        chosen.setdefault(title.partition(" (")[0], []).append(d.equals(titles, title))
    for title, regions in chosen.items():
        yield from _failures(model, d.unite(regions), title)


def _failures(model: Model, chosen: Node, title: str) -> Iterator[Finding]:
    """A finding for each failure and each fault of the backend with this title. chosen: the configurations with it."""
    d = model.d
    name, _, variant = title.partition("/")
    row = model.registry.backends[name]
    for consequence in _faults(model.registry, next(v for v in row.variants if (v.name or "") == variant)):
        holds = d.unite(m.condition(consequence.when) for m in model.automatic(name))
        code, message = "failing-choice", f"{title} is chosen automatically and then fails: {consequence.fails}"
        if consequence.drops:
            code, message = "wrong-choice", f"{title} is chosen automatically and is wrong: {consequence.drops}"
        region, subject = d.conjoin([chosen, holds]), (title, *([consequence.id] if consequence.id else []))
        yield from _finding(model, region, code, subject, consequence.where, message)


def _faults(registry: Registry, variant: Variant) -> list[Consequence]:
    """The failures and the faults of a variant, without those that a quotient of two facets decides."""
    divides = registry.vocabulary.divides
    return [c for c in variant.consequences if (c.fails or c.drops) and not divides(c.when.facets)]


def _refused_rows(model: Model, automatic: Node) -> Iterator[Finding]:
    """A finding for each backend that a step names and that refuses."""
    d, after = model.d, model.begun.after
    kept = d.conjoin([automatic, d.negate(model.begun.refused)])
    none = d.conjoin([kept, d.equals(model.chosen(), None)])
    stages = [s for s in model.begun.stages if NAMED in s.effect.sets]
    for name in sorted(d.terminals(after.value(NAMED))):
        named = d.equals(after.value(NAMED), name)
        message = f"{name} is named by a step and refuses"
        yield from _finding(model, d.conjoin([none, named]), "refused-row", (name,), stages[-1].effect.where, message)


def _finding(
    model: Model, region: Node, code: str, subject: tuple[str, ...], where: Location, message: str
) -> Iterator[Finding]:
    point = model.space.cheapest(region)
    if point is not None:
        example = evaluate(*model.space.example(point), model.registry)
        yield Finding(code, subject, where, message, "mend the data, or list it as `known`", example)


def _asks_for_a_backend(registry: Registry, *conditions: Condition) -> bool:
    """Whether a condition asks for a facet that names backends, or for one that is derived from such a facet."""
    facets, derived = registry.vocabulary.facets, registry.derived

    def asks(name: str) -> bool:
        if name in derived:
            return any(asks(f) for condition, _, _ in derived[name].cases for f in condition.facets)
        return facets[name].names_backends

    return any(asks(name) for condition in conditions for name in condition.facets)
