"""The CUDA-graph mode that an engine settles for a whole run, or the facts that exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from attnreg.errors import Location
from attnreg.language.engine.runs import LEVELS, GraphLevel, GraphMode, Pieces
from attnreg.planning.run import Agreed, Conflict, ConflictFact, RunGroup
from attnreg.selection.consequences import GRAPH_WORDS
from attnreg.selection.question import UNREAD

if TYPE_CHECKING:
    from attnreg.language.engine.runs import GraphRules

MODES: tuple[GraphMode, ...] = get_args(GraphMode)
_WITHOUT_PIECES: dict[GraphMode, GraphMode] = {"piecewise": "none", "full_and_piecewise": "full_decode_only"}
# modes whose graphs hold a step of decoding whole, and those whose graphs hold every step whole
_FULL_DECODE, _FULL_MIXED = ("full", "full_decode_only", "full_and_piecewise"), ("full",)


class GroupLevel(NamedTuple):
    """The graph level of a group's layers: ``name`` is what has it, a backend or the engine's wrapper of a layer."""

    group: str
    name: str
    level: GraphLevel
    where: Location
    source: str | None = None
    because: str = ""

    @property
    def sentence(self) -> str:
        """``FLASHINFER has graphs of batches with one query token per request``."""
        return f"{self.name} has graphs {GRAPH_WORDS[self.level]}" + (f": {self.because}" if self.because else "")


class _Fall(NamedTuple):
    """One step of the ladder: the mode after it, and why."""

    mode: GraphMode
    because: str
    where: Location | None
    source: str | None


def agree_graphs(
    groups: Sequence[RunGroup],
    rules: GraphRules | None,
    *,
    asked: str | None = None,
    speculative_tokens: int = 0,
    eager: bool = False,
    machine: Any = None,
) -> Agreed:
    """The graph mode that the engine settles for these groups, in capitals: ``FULL_AND_PIECEWISE``.

    groups: the layers of one rank, with a backend each. Towers take no part.
    asked: the mode that the user asks for; None for the engine's default.
    speculative_tokens: the tokens that a draft proposes in a step; 0 without speculation.
    eager: whether the user turns graphs and compilation off.
    machine: the point of the run's machine, which is tested for a run without layers of softmax attention.

    Raises ValueError if ``asked`` names no mode.
    """
    if asked is not None and asked.lower() not in MODES:
        raise ValueError(f"{asked} is no mode of CUDA graphs; known: {', '.join(mode.upper() for mode in MODES)}")
    if rules is None:
        return Agreed(None, "this table has no rules for CUDA graphs", None)
    if eager:
        return Agreed("NONE", "as asked for", rules.where, rules.source)
    groups = [group for group in groups if group.takes_part]
    points = _points(groups)
    points = points or [machine] if machine is not None else points
    mixers = any(group.selection is None for group in groups)
    for unknown in rules.unknown:
        if (mixers or not unknown.mixers) and _some(unknown.when, points):
            return Agreed(None, unknown.because, unknown.where, unknown.source)
    start = _start(points, rules, asked)
    pieces: Pieces = next((p.pieces for p in rules.pieces if _some(p.when, points)), "compiled")
    falls = list(_before(start.mode, points, rules, pieces))
    mode = falls[-1].mode if falls else start.mode
    if mode in ("none", "piecewise"):
        # no graph holds attention, so no backend has a say
        if mode == "piecewise" and pieces == "whole":
            falls.append(_uncaptured(mode, points, rules))
        return _agreed(start, falls, rules)
    silent = next((g for g in groups if g.selection is not None and g.selection.backend is None), None)
    if silent is not None:
        return Agreed(None, f"no backend is known for {silent.label}", rules.where, rules.source)
    levels, heads = list[GroupLevel](), _target_heads(groups)
    for group in groups:
        found = list(_levels(group, points, heads, rules))
        if not found:
            what = group.label if group.kind == UNREAD else group.name or group.label
            return Agreed(None, f"the graph level of {what} is not known", rules.where, rules.source)
        levels += found
    if not levels:
        return Agreed(None, "no layer of the run is known", rules.where, rules.source)
    least = min(levels, key=lambda level: LEVELS.index(level.level))
    ways: tuple[Pieces, ...] = ("compiled", "breaks") if pieces == "unknown" else (pieces,)
    outcomes = [_ladder(start, list(falls), least, way, 1 + speculative_tokens, points, rules) for way in ways]
    if len({(agreed.value, agreed.conflict) for agreed in outcomes}) > 1:
        known = next(p for p in rules.pieces if _some(p.when, points))
        return Agreed(None, known.because, known.where, known.source)
    return outcomes[0]


def levels_of(group: RunGroup, groups: Sequence[RunGroup], rules: GraphRules) -> tuple[GroupLevel, ...]:
    """The graph levels of one of a run's groups, its backend's first; empty if they are not known."""
    some = [each for each in groups if each.takes_part]
    points = _points(some)
    if not group.takes_part or (group.selection is not None and group.selection.backend is None):
        return ()
    return tuple(_levels(group, points, _target_heads(some), rules))


def _points(groups: Iterable[RunGroup]) -> list[Any]:
    """The points of layers of softmax attention. Rules may ask for the model of a layer whose backend is not known."""
    return [group.point for group in groups if group.selection is not None]


def _some(when: Any, points: Sequence[Any]) -> bool:
    """Whether a condition holds for a layer of the run; the empty condition holds without one."""
    return not when.facets or any(when.holds(point) for point in points)


def _start(points: Sequence[Any], rules: GraphRules, asked: str | None) -> _Fall:
    if asked is not None:
        mode = next(mode for mode in MODES if mode == asked.lower())
        return _Fall(mode, "as asked for", rules.where, rules.source)
    default = next(a for a in rules.asked if _some(a.when, points))
    because = default.because or "the default"
    return _Fall(default.mode, because, default.where, default.source or rules.source)


def _before(mode: GraphMode, points: Sequence[Any], rules: GraphRules, pieces: Pieces) -> Iterable[_Fall]:
    """What the engine changes before it looks at backends: it has no pieces, or some runs take no such graphs."""
    for limit in rules.limits:
        if mode not in limit.keeps and mode != limit.mode and _some(limit.when, points):
            mode = limit.mode
            yield _Fall(mode, limit.because, limit.where, limit.source)
    if pieces == "none" and mode in _WITHOUT_PIECES:
        known = next(p for p in rules.pieces if _some(p.when, points))
        yield _Fall(_WITHOUT_PIECES[mode], known.because or "there are no pieces", known.where, known.source)


def _levels(group: RunGroup, points: Sequence[Any], heads: int | None, rules: GraphRules) -> Iterable[GroupLevel]:
    """The levels of a group: of its backend or of what wraps it, and of a second cache beside it."""
    if group.selection is None:
        known = next((m for m in rules.mixers if group.kind in m.kinds and _some(m.when, points)), None)
        if known is not None:
            yield GroupLevel(group.label, group.kind, known.level, known.where, known.source)
        return
    point, variant = group.point, group.selection.variant
    assert variant is not None
    assert group.selection.backend is not None
    name = group.selection.backend.name
    wrapped = next((w for w in rules.wrapped if group.kind in w.kinds and w.when.holds(point)), None)
    if wrapped is not None:
        yield GroupLevel(group.label, name, wrapped.level, wrapped.where, wrapped.source, wrapped.because)
    else:
        entries = (c for c in variant.consequences if c.graphs is not None and c.when.holds(point))
        stated = next((c for c in entries if c.some is None or _some(c.some, points)), None)
        if stated is None or stated.graphs is None:
            return
        level, because = stated.graphs, ""
        if stated.undivided is not None:
            if heads is None or point["num_kv_heads"] is None:
                return
            if heads % point["num_kv_heads"]:
                level = stated.undivided
                because = f"{heads} query heads of the target are no multiple of {point['num_kv_heads']} KV heads"
        yield GroupLevel(group.label, name, level, stated.where, stated.source, because)
    for other in rules.beside:
        if other.graphs is not None and other.when.holds(point):
            yield GroupLevel(group.label, other.name, other.graphs, other.where, other.source)


def _target_heads(groups: Iterable[RunGroup]) -> int | None:
    """The query heads of the target's layers on this rank; None if its layers differ, or do not say."""
    heads = {g.point["num_heads"] for g in groups if g.selection is not None and g.role == "target"}
    return heads.pop() if len(heads) == 1 else None


def _ladder(
    start: _Fall,
    falls: list[_Fall],
    least: GroupLevel,
    pieces: Pieces,
    query_tokens: int,
    points: Sequence[Any],
    rules: GraphRules,
) -> Agreed:
    """Take a mode with graphs of whole steps back as far as the weakest level needs.

    pieces: how graphs of pieces are made. Only compiled code has pieces that end at attention.
    query_tokens: the query tokens of a request in a step of decoding.
    """
    mode = falls[-1].mode if falls else start.mode
    split = pieces in ("compiled", "whole")

    def fall(to: GraphMode, because: str) -> None:
        nonlocal mode
        mode = to
        falls.append(_Fall(to, because, least.where, least.source))

    if mode in _FULL_MIXED and least.level != "always":
        if least.level == "never":
            wish = ConflictFact("", f"the mode is {mode.upper()}, {start.because}", start.where)
            sentence = f"the engine stops, for {mode.upper()} needs graphs of every batch"
            conflict = Conflict(sentence, (wish, ConflictFact(least.group, least.sentence, least.where)))
            return Agreed(None, sentence, least.where, least.source, conflict)
        fall("full_and_piecewise" if split else "full_decode_only", least.sentence)
    if mode in _FULL_DECODE and least.level == "never":
        fall("piecewise" if split else "none", least.sentence)
    if mode in _FULL_DECODE and query_tokens > 1 and least.level in ("never", "one_token"):
        fall("piecewise" if split else "none", f"{least.sentence}, and speculation asks for {query_tokens}")
    if pieces == "whole" and mode in _WITHOUT_PIECES:
        falls.append(_uncaptured(mode, points, rules))
    return _agreed(start, falls, rules, least)


def _uncaptured(mode: GraphMode, points: Sequence[Any], rules: GraphRules) -> _Fall:
    known = next(p for p in rules.pieces if _some(p.when, points))
    return _Fall(_WITHOUT_PIECES[mode], known.because or "no part is compiled", known.where, known.source)


def _agreed(start: _Fall, falls: Sequence[_Fall], rules: GraphRules, least: GroupLevel | None = None) -> Agreed:
    """The outcome of the ladder. least: the weakest level of the layers, if it counts."""
    last, mode = (falls[-1], falls[-1].mode) if falls else (start, start.mode)
    dropped, before = list[str](), start.mode
    for step in falls:
        dropped.append(f"{before.upper()} becomes {step.mode.upper()}: {step.because}")
        before = step.mode
    text = last.because
    if not falls and least is not None and mode != "none":
        text += f"; {least.sentence}" if least.level != "always" else "; every layer has graphs of every batch"
    return Agreed(mode.upper(), text, last.where or rules.where, last.source, dropped=tuple(dropped))
