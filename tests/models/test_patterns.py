"""Patterns: which word each layer has."""

from __future__ import annotations

from typing import Any

import pytest
from support.registries.small_families import letters, read


@pytest.mark.parametrize(
    ("pattern", "config", "kinds"),
    [
        ("full", {}, "ffffff"),
        ("{list: types}", {"types": ["sliding", "full"] * 3, "window": 4}, "sfsfsf"),
        ("{list: types, means: {A: full, L: linear}}", {"types": "ALLALL"}, "fllfll"),
        ('{list: flags, means: {"0": full, "1": linear}}', {"flags": [0, 1, 1, 0, True, False]}, "fllflf"),
        ("{list: types, means: {others: linear, A: full}}", {"types": "ABCABC"}, "fllfll"),
        ("{list: types, means: {A: full, M: none}, decides_count: true}", {"types": "AMA"}, "ff"),
        ("{list: types, longer_is_cut: true}", {"types": ["linear"] * 9}, "llllll"),
        ("[{list: types}, linear]", {}, "llllll"),
        ("[{list: types}, linear]", {"types": None}, "llllll"),
        ("[{list: types}, linear]", {"types": []}, "llllll"),
        ("{runs: runs, means: {g: full, l: linear}}", {"runs": [[["g", "l"], 2], [["l"], 2]]}, "flflll"),
        ("{repeat: [linear, linear, full]}", {}, "llfllf"),
        ("{repeat: cycle}", {"cycle": ["linear", "full"]}, "lflflf"),
        ("{every: 3, is: full, others: linear}", {}, "llfllf"),
        ("{every: 3, at: 0, is: full, others: linear}", {}, "fllfll"),
        ("{every: [period, 2], at: offset, is: full, others: linear}", {"offset": 1}, "lflflf"),
        ("{every: period, is: full, others: linear}", {"period": 2}, "lflflf"),
        ("[{every: period, is: full, others: linear}, linear]", {}, "llllll"),
        ("{layers: [0, -1], is: full, others: linear}", {}, "fllllf"),
        ("{layers: [0, 40], is: full, others: linear}", {}, "flllll"),
        ("{layers: which, is: full, others: linear}", {"which": [1, 2]}, "lfflll"),
        ("{layers: which, from: 1, is: full, others: linear}", {"which": [1, 6]}, "fllllf"),
        ("{below: 2, is: full, others: linear}", {}, "ffllll"),
        ("{below: n, is: full, others: {every: 2, is: full, others: linear}}", {"n": 1}, "fflflf"),
        ("{below: {difference: [n, 3]}, is: full, others: linear}", {"n": 1}, "llllll"),
        ("[{when: {on: true}, repeat: [linear]}, full]", {"on": True}, "llllll"),
        ("[{when: {on: true}, repeat: [linear]}, full]", {"on": False}, "ffffff"),
        ("[{when: {on: true}, list: types}, full]", {"on": True}, "ffffff"),
    ],
)
def test_patterns(pattern: str, config: dict[str, Any], kinds: str) -> None:
    assert letters(f"m:\n  pattern: {pattern}\n", layers=6, **config) == kinds


def test_further_patterns_add_to_the_first() -> None:
    text = """\
    m:
      pattern: {repeat: [full, sliding]}
      also:
        wide: {pattern: {list: wide, means: {"1": wide, others: narrow}}, words: {wide: {head_size: 128}, narrow: {}}}
    """
    model = read(text, layers=4, window=3, wide=[0, 1, 1, 0])
    assert [(x.kind, x.head_size) for x in model.layers] == [
        ("full", 64),
        ("sliding", 128),
        ("full", 128),
        ("sliding", 64),
    ]
