"""Why a run does not start: the layers without a backend, and the smallest set of facts that exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from attnreg.planning.plan import layers_of
from attnreg.planning.run import Conflict, ConflictFact
from attnreg.selection.trace import how_chosen

if TYPE_CHECKING:
    from attnreg.planning.plan import PlanGroup
    from attnreg.selection.consequences import Following
    from attnreg.selection.trace import Selection

Fact = TypeVar("Fact")


def smallest(facts: Sequence[Fact], fails: Callable[[Sequence[Fact]], bool]) -> tuple[Fact, ...]:
    """A smallest set of facts for which ``fails`` holds: without any one of them it does not.

    ``fails`` must hold for ``facts``. It is asked once for each fact.
    """
    kept = list(facts)
    for fact in facts:
        without = [other for other in kept if other is not fact]
        if fails(without):
            kept = without
    return tuple(kept)


def without_backend(groups: Iterable[PlanGroup]) -> list[Conflict]:
    """The conflicts of layers that no backend serves, and of those with whose backend the engine stops.

    Layers with the same conflict share one.
    """
    alike: dict[tuple[str, tuple[ConflictFact, ...], bool, str], list[PlanGroup]] = {}
    for group in groups:
        for selection in (group.run.selection, group.prompts):
            stops = group.stops if selection is group.run.selection else None
            found = None if selection is None else _refused(selection, stops)
            if found is not None:
                same = alike.setdefault((*found, group.cache.draft, group.run.role), [])
                same += [group] if group not in same else []
    return [_conflict(sentence, facts, layers_of(same)) for (sentence, facts, *_), same in alike.items()]


def refused_run(selection: Selection, name: str) -> Conflict | None:
    """The conflict of a model that the engine refuses, though no layer asks; ``selection`` asks about the run."""
    refusal = selection.start.refusal if selection.start is not None else None
    if refusal is None or selection.unknown:
        return None
    return Conflict(f"{refusal.name} refuses {name}", (ConflictFact("", refusal.text, refusal.where),))


def _conflict(sentence: str, facts: Iterable[ConflictFact], layers: str) -> Conflict:
    named = tuple(fact._replace(group=layers) if fact.group else fact for fact in facts)
    return Conflict(sentence.format(layers), named)


def _refused(selection: Selection, stops: Following | None) -> tuple[str, tuple[ConflictFact, ...]] | None:
    """A sentence with a place for the layers, and the facts; None for a selection with which the run starts.

    stops: a failure that follows from the size of the run's pages.
    """
    refusal = selection.start.refusal if selection.start is not None else None
    if selection.unknown:
        return None
    if refusal is not None:
        return f"{refusal.name} refuses {{}}", (ConflictFact("layers", refusal.text, refusal.where),)
    fails = [f for f in (*selection.consequences, stops) if f is not None and f.kind == "fails"]
    if fails:
        facts = tuple(ConflictFact("layers", f.text, f.where) for f in fails[:1])
        return f"{selection.title} is chosen for {{}}, and the engine then stops", facts
    if selection.backend is not None:
        return None
    # one reason excludes a candidate: with the first of each none is left
    tried = [(c.title, c.reasons[0]) for c in selection.candidates if c.reasons]
    named = (ConflictFact("", f"{selection.requested} is asked for", None),) if selection.requested else ()
    facts = tuple(ConflictFact("layers", f"{title}: {reason.text}", reason.where) for title, reason in tried)
    return f"no backend serves {{}}: {how_chosen(selection).strip('()')}", (*named, *facts)
