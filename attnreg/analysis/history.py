"""The history of moves: in which of the releases between two tables each layer got another outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from packaging.version import Version

from attnreg.analysis.moves import Turn
from attnreg.analysis.outcome import decide
from attnreg.compile.inputs.bundled import bundled_registries

if TYPE_CHECKING:
    from attnreg.analysis.moves import Move, Moves
    from attnreg.registry import Registry


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
