"""Start: the steps of an engine as functions over a space, from the user's request to the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attnreg.analysis.symbolic.conditions import Conditions
from attnreg.language.vocabulary import ASKED, AUTOMATIC, BY_MODEL, NAMED
from attnreg.registry import Switched

if TYPE_CHECKING:
    from attnreg.analysis.diagram import Node
    from attnreg.analysis.space import Space
    from attnreg.registry import Effect, Registry, Step


class Stage(NamedTuple):
    """One effect of a step: where it happens, and the conditions before it."""

    step: Step
    effect: Effect
    where: Node
    before: Conditions


class SymbolicStart(NamedTuple):
    """The steps of a registry, run at every point: the conditions after them, where they refuse, and each effect."""

    after: Conditions
    refused: Node
    stages: tuple[Stage, ...]


def start(
    space: Space, registry: Registry, asked: str = AUTOMATIC, name: str | None = None, *, unnamed: bool = False
) -> SymbolicStart:
    """The start for requests that an order answers, or in which a user names a backend.

    unnamed: no facet of the request names a backend either, which makes the diagrams far smaller.
    """
    d = space.diagrams
    facets = registry.vocabulary.facets.values()
    state: dict[tuple[str, str | None], Node] = {}
    state |= {(facet.name, None): d.terminal(None) for facet in facets if facet.of == "start" or facet.of_run}
    if unnamed:
        state |= {(facet.name, None): d.terminal(None) for facet in facets if facet.names_backends}
    state |= {(ASKED, None): d.terminal(asked), (NAMED, None): d.terminal(name)}
    now, refused, stages = Conditions(space, registry, state), d.false, list[Stage]()
    ended = d.false
    for step in registry.steps:
        rest = d.conjoin([now.condition(step.when), d.negate(refused), d.negate(ended)])
        changes: dict[tuple[str, str | None], Node] = {}
        for effect in step.effects:
            where = d.conjoin([rest, now.condition(effect.when)])
            rest = d.ite(where, d.false, rest)
            stages.append(Stage(step, effect, where, now))
            if effect.refuses:
                refused = d.unite([refused, where])
            else:
                _write(now, effect, where, changes)
            if effect.ends:
                ended = d.unite([ended, where])
        now = now.changed(changes) if changes else now
    return SymbolicStart(now, refused, tuple(stages))


def _write(now: Conditions, effect: Effect, where: Node, changes: dict[tuple[str, str | None], Node]) -> None:
    """Add the facets that an effect writes to the changes of its step."""
    d = now.d
    for facet, value in effect.sets.items():
        if type(value) is Switched:
            for word, on in (*((w, d.true) for w in sorted(value.on)), *((w, d.false) for w in sorted(value.off))):
                if (facet, word) in now.space.level:
                    before = changes.get((facet, word))
                    changes[facet, word] = d.ite(where, on, now.has(facet, word) if before is None else before)
            continue
        known = now.taken(value)
        before = changes.get((facet, None))
        changes[facet, None] = d.ite(where, known, now.value(facet) if before is None else before)
        if facet == NAMED:
            asked = d.apply(lambda named: AUTOMATIC if named is None else BY_MODEL, known)
            before = changes.get((ASKED, None))
            changes[ASKED, None] = d.ite(where, asked, now.value(ASKED) if before is None else before)
