"""The history of moves: the releases at which layers get another outcome, and the outcomes of several tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import Version

from attnreg.analysis.moves import NO_LAYERS, Turn, moved, refusal_of
from attnreg.analysis.outcome import Decided, Outcome, changes, decide, same_kernel, unknown_notes
from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.analysis.moves import AskedGroup, Move, Moves
    from attnreg.platforms import Platform
    from attnreg.registry import Registry


class OutcomeRow(NamedTuple):
    """What a group of layers gets on a platform from each of several registries.

    Each of ``titles`` is a backend, ``none``, ``not known``, or ``refused`` where the engine does not start the run.
    Each of ``differs`` says what else is new beside the registry before it, "" if nothing is. ``changes``: whether a
    registry's outcome is another than that of the one before it which has an answer.
    """

    asked: AskedGroup
    platform: Platform
    titles: tuple[str, ...]
    differs: tuple[str, ...]
    changes: bool

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready values."""
        row = {name: getattr(self.asked, name) for name in ("model", "layers", "label")}
        row |= {"platform": self.platform.to_dict(), "outcomes": list(self.titles), "differs": list(self.differs)}
        return {**row, "changes": self.changes}


def outcome_rows(
    asked: Sequence[AskedGroup], platforms: Sequence[Platform], registries: Sequence[Registry], notes: list[str]
) -> list[OutcomeRow]:
    """The outcomes of each group of layers on each platform.

    asked: with the requests that the first and the last registry make of the model's layers. The other registries are
    asked the last one's request, or the first one's where the last has none. notes: a list that gets what is not known.

    Raises `RequestError` for a word of a request that no registry knows.
    """
    found, unknown = dict[str, None](), dict[tuple[str, str], dict[str, None]]()
    rows = [_outcome_row(item, platform, registries, found, unknown) for item in asked for platform in platforms]
    notes += [*found, *unknown_notes(unknown)]
    return rows


def _outcome_row(
    item: AskedGroup,
    platform: Platform,
    registries: Sequence[Registry],
    notes: dict[str, None],
    unknown: dict[tuple[str, str], dict[str, None]],
) -> OutcomeRow:
    titles, differs, moves = list[str](), list[str](), False
    earlier: Decided | None = None
    first, last = item.requests
    requests = (first, *[last or first] * (len(registries) - 2), last)
    for request, registry in zip(requests, registries, strict=True):
        decided = Decided(Outcome(problem=NO_LAYERS), None) if request is None else decide(request, platform, registry)
        outcome, words = decided.outcome, ""
        notes |= dict.fromkeys(f"{registry.name} has no {word}: compared without it" for word in decided.ignored)
        if outcome.problem:
            unknown.setdefault((registry.name, outcome.problem), {})[item.model or "the request"] = None
        else:
            if earlier is not None and same_kernel(earlier, decided) is None:
                words = "; ".join(changes(earlier.outcome, outcome))
                moves |= moved(earlier.outcome, outcome)
            earlier = decided
        titles.append("refused" if refusal_of(decided) else outcome.title)
        differs.append(words)
    if earlier is None:
        # no registry knows a word: raise the error of a selection
        for request, registry in zip(requests, registries, strict=True):
            if request is not None:
                evaluate(request, platform, registry)
    return OutcomeRow(item, platform, tuple(titles), tuple(differs), moves)


def with_turns(moves: Moves, before: Registry, after: Registry) -> Moves:
    """The moves with the releases at which each outcome changes, where tables of releases between the two are bundled.

    Releases without a table are passed over. So a turn names two tables: the first that has the outcome, and its
    predecessor.
    """
    # a directory may have the name of a bundled release, and its base is a path then
    names = _between(before.name, after.name) if {before.name, after.name} == {before.base, after.base} else []
    if not names or not moves.moves:
        return moves
    path = [before.name, *names, after.name]
    return replace(moves, moves=tuple(replace(move, turns=tuple(_turns(move, path))) for move in moves.moves))


def _turns(move: Move, path: Sequence[str]) -> Iterator[Turn]:
    """The releases at which the outcome of a move is another than in the table before. Empty if it cannot be asked.

    path: the names of the tables from the first to the last.
    """
    old, new = move.asked.requests
    request = new or old
    if request is None or old is None or new is None:
        return
    title, earlier = move.before.title, path[0]
    for name in path[1:]:
        outcome = move.after if name == path[-1] else decide(request, move.platform, _loaded(name)).outcome
        # a table that does not know tells nothing of its release
        if outcome.problem and name != path[-1]:
            continue
        if outcome.title != title:
            yield Turn(outcome.title, name, earlier)
        title, earlier = outcome.title, name


@cache
def _loaded(name: str) -> Registry:
    from attnreg.loader import load_registry

    return load_registry(name, plugins=())


def _between(before: str, after: str) -> list[str]:
    """The bundled releases of one engine between two of its releases, the oldest first; empty for other registries."""
    engine, _, first = before.rpartition("-")
    other, _, last = after.rpartition("-")
    bundled = bundled_registries()
    if not engine or engine != other or not {before, after} <= bundled.keys():
        return []
    ends = sorted((Version(first), Version(last)))
    found = [(Version(name.rpartition("-")[2]), name) for name in bundled if name.rpartition("-")[0] == engine]
    inside = sorted((version, name) for version, name in found if ends[0] < version < ends[1])
    names = [name for _, name in inside]
    return names if Version(first) <= Version(last) else names[::-1]
