"""How differences between two registries are printed."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from support.registries import tiny
from support.registries.tiny import row

from attnreg import AttentionRequest, Platform, Registry
from attnreg.analysis.diff import diff
from attnreg.analysis.moves import AskedGroup, Moves, compare
from attnreg.explain.changes import print_changes

SMALL = {"gpu": [{"name": "all", "when": {"head_size": {"max": 64}}, "order": ["C"]}, {"name": "rest", "order": ["B"]}]}
ON = [Platform(platform="gpu", arch=arch) for arch in ("g1", "g2")]


def asked(model: str, layers: str, **facets: Any) -> AskedGroup:
    request = AttentionRequest(**facets)
    return AskedGroup(model, layers, f"head size {request.head_size}", (request, request))


def lines_of(before: Registry, after: Registry, moves: Moves, everywhere: Any, **options: Any) -> list[str]:
    console = Console(width=60, file=io.StringIO(), color_system=None, highlight=False, _environ={})
    print_changes("one → two", moves, everywhere, console, **options)
    return [line.rstrip() for line in console.file.getvalue().split("\n")][:-1]  # type: ignore[attr-defined]


def changed() -> tuple[Registry, Registry]:
    return tiny.load({"B": row()}), tiny.load({"B": row(), "C": row()}, SMALL)


def test_a_model_is_named_with_its_layers_where_others_of_it_stay() -> None:
    before, after = changed()
    questions = [
        asked("a", "2 layers (0–1)", head_size=64),
        asked("a", "1 layer (2)", head_size=128),
        asked("b", "3 layers (0–2)", head_size=32),
        asked("c", "4 layers (0–3)", head_size=65),
    ]
    moves = compare(questions, ON, before, after)
    assert lines_of(before, after, moves, None) == [
        "one → two",
        "2 of 3 models move on g1, g2 (2 architectures compared)",
        "",
        "B → C",
        "  after: the order gpu/all does not name B",
        "    [priorities.yaml:2]",
        "  g1, g2: a (2 layers (0–1)), b",
    ]


def test_all_configurations_come_after_the_models() -> None:
    before, after = changed()
    moves = compare([asked("a", "", head_size=128)], ON, before, after)
    difference = diff(before, after, limit=0)
    assert lines_of(before, after, moves, difference) == [
        "one → two",
        "a does not move (2 architectures compared); other",
        "configurations change on g1, g2",
        "",
        "all configurations: 1 pair of backends changes; --boxes",
        "                    lists the values of what changes",
        "  B → C",
        "    on g1, g2 · head_size 1 to 64 · without alibi, sinks",
    ]
    boxes = lines_of(before, after, moves, diff(before, after), boxes=True)
    assert boxes[4].startswith(f"all configurations: {difference.count} of {difference.size} distinguishable")
    assert boxes[-4:] == [
        "",
        f"B → C   changes · {difference.count} configurations",
        "  where arch every gpu architecture · head_size 1 to 64 ·",
        "        without alibi, sinks",
    ]


def test_where_nothing_changes() -> None:
    before, _ = changed()
    moves = compare([asked("a", "", head_size=8)], ON[:1], before, before)
    assert lines_of(before, before, moves, diff(before, before, limit=0))[1:] == [
        "nothing changes: a does not move (1 architecture compared)",
        "",
        "all configurations: none gets another backend",
    ]


def test_what_fails_by_now_is_a_move_but_no_other_backend() -> None:
    before, after = tiny.load({"A": row()}), tiny.load({"A": row(consequences=[{"fails": "no kernel was built"}])})
    moves = compare([asked("a", "", head_size=8)], ON[:1], before, after)
    lines = lines_of(before, after, moves, diff(before, after, limit=0))
    assert "  is chosen, and then fails: no kernel was built" in lines
    assert lines[-1] == "all configurations: none gets another backend"


def test_an_arrow_of_the_same_name_is_the_name() -> None:
    before = tiny.load({"A": row(emulated={"sinks": "slow"})})
    after = tiny.load({"A": row(capabilities={"features": ["sinks"]})})
    moves = compare([asked("a", "", head_size=8, features={"sinks"})], ON[:1], before, after)
    lines = lines_of(before, after, moves, None)
    assert lines[3:5] == ["A", "  no longer emulates sinks"]
    assert lines[-1] == "  g1: a"
