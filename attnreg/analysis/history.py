"""The history of moves: the releases at which layers get another outcome, and the outcomes of several tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import Version

from attnreg.analysis.moves import Turn, refusal_of
from attnreg.analysis.outcome import Decided, decide, same_kernel
from attnreg.compile.inputs.bundled import bundled_registries

if TYPE_CHECKING:
    from attnreg.analysis.moves import AskedGroup, Move, Moves
    from attnreg.platforms import Platform
    from attnreg.registry import Registry


class OutcomeRow(NamedTuple):
    """What a group of layers gets on a platform from each of several registries.

    Each of ``titles`` is a backend, ``none``, ``not known``, or ``refused`` where the engine does not start the run.
    ``changes``: whether the kernel of a registry is another than that of the one before it which has an answer.
    """

    asked: AskedGroup
    platform: Platform
    titles: tuple[str, ...]
    changes: bool

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready values."""
        asked = {name: getattr(self.asked, name) for name in ("model", "layers", "label")}
        return {**asked, "platform": self.platform.to_dict(), "outcomes": list(self.titles), "changes": self.changes}

    def spans(self, names: Sequence[str]) -> list[str]:
        """Successive registries with equal outcomes, as ``FLASH_ATTN: vllm-0.30.0, vllm-0.31.0``."""
        pairs = itertools.groupby(zip(self.titles, names, strict=True), key=lambda pair: pair[0])
        return [f"{title}: {', '.join(name for _, name in some)}" for title, some in pairs]


def outcome_rows(
    asked: Sequence[AskedGroup], platforms: Sequence[Platform], registries: Sequence[Registry]
) -> list[OutcomeRow]:
    """The outcomes of each group of layers on each platform.

    asked: with the requests that the first and the last registry make of the model's layers. The other registries are
    asked the last one's request, or the first one's where the last has none.
    """
    return [_outcome_row(item, platform, registries) for item in asked for platform in platforms]


def _outcome_row(item: AskedGroup, platform: Platform, registries: Sequence[Registry]) -> OutcomeRow:
    titles, changes = list[str](), False
    earlier: Decided | None = None
    first, last = item.requests
    for request, registry in zip((first, *[last or first] * (len(registries) - 2), last), registries, strict=True):
        if request is None:
            titles.append("not known")
            continue
        decided = decide(request, platform, registry)
        titles.append("refused" if refusal_of(decided) else decided.outcome.title)
        if decided.outcome.problem:
            continue
        if earlier is not None:
            known = next(title for title in reversed(titles[:-1]) if title != "not known")
            changes |= titles[-1] != known and same_kernel(earlier, decided) is None
        earlier = decided
    return OutcomeRow(item, platform, tuple(titles), changes)


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
