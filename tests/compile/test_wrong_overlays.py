"""Wrong overlays: all that is wrong is said at once, with its place and the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.registries.files import brief, refusal, row, write
from support.suite.sentences import Sentences

from attnreg.errors import escaped

WRONG = {
    "an unknown part": ("choises: []\n", "1:1"),
    "a choice of nothing": ("choices:\n  - {when: {}}\n  - {deny: []}\n", "2:5 3:12"),
    "a choice of two things": ("choices: [{prefer: A, deny: B}]\n", "1:11"),
    "choices of unknown backends, under unknown conditions": (
        "choices:\n  - {prefer: AA}\n  - {deny: [B, C], when: {archs: g1}}\n",
        "2:14 3:16 3:27",
    ),
    "a change of an unknown backend": ("backends:\n  AA: {status: stable}\n", "2:3"),
    "a new backend that is not complete": ("backends:\n  C: {platforms: [gpu], attention: mha, summary: s}\n", "2:3"),
    "a new backend without its source, and with wrong words": (
        "backends:\n  C: {platforms: [gpo], attention: mha, summary: s, capabilities: {dtypes: [float17]}}\n",
        "2:3 2:19 2:53 2:77",
    ),
    "orders without names": ("orders: {gpu: [{order: [A], when: {arch: g1}}, {order: [AA]}]}\n", "1:16 1:48 1:57"),
    "a backend that moves": ("backends: {A: {platforms: [npu]}}\n", "1:16"),
    "a change that is none": ("backends: {A: , B: fast}\n", "1:15 1:20"),
    "places that are none": (
        """\
place:
  - {backend: A}
  - {backend: A, before: B, after: B}
  - {backend: A, before: A}
  - {backend: A, before: C}
  - {backend: A, before: B, orders: [gpu/al]}
  - {backend: A, before: B, orders: [npu/all]}
""",
        "2:5 3:5 4:26 5:26 6:38 7:5",
    ),
    "an order of a name that is taken": ("orders:\n  gpu: [{name: all, when: {arch: g1}, order: [B]}]\n", "2:16"),
    "orders that are never reached": (
        "orders:\n  gpu:\n    - {name: x, order: [B]}\n    - {name: y, order: [A]}\n",
        "4:7",
    ),
    "a module of a stranger": ("backends: {A: {module: evil.kernels}}\n", "1:24"),
    "a source that is pinned nowhere": ("backends: {A: {source: 't:p#q'}}\n", "1:24"),
    "no mapping": ("- prefer: A\n", "1:1"),
    "an unknown part beside a known one": ("choices: []\nchoises: []\n", "2:1"),
}


@pytest.mark.parametrize(("text", "places"), WRONG.values(), ids=WRONG)
def test_wrong_overlays(
    text: str, places: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentences: Sentences
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    sentences.check(brief(refusal(write(tmp_path / "base"), ["mine.yaml"])), places)


def test_problems_of_the_registry_and_of_every_overlay_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("choices: [{prefer: C}]\n")
    base = write(tmp_path / "base", backends=row("capabilities: {dtypes: [float61]}"))

    def places(*overlays: Any) -> list[str]:
        return [line.split(" ")[0] for line in brief(refusal(base, overlays)).splitlines() if line[0] != " "]

    assert places("mine.yaml", {"choices": [{"deny": "D"}]}) == [
        "backends.yaml:8:29:",
        "mine.yaml:1:20:",
        "<overlay>:4:15:",
    ]
    # files that cannot be read come first: without them names are unknown that are not
    assert places("mine.yaml", "gone.yaml", {"place": []}, "never.yaml") == ["gone.yaml:1:1:", "never.yaml:1:1:"]


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        (
            {"choices": [{"prefer": "AA"}]},
            (
                "<overlay>:4:17: choices.prefer: unknown backend `AA`\n"
                '    4 |       "prefer": "AA"\n      |                 ^^^^\n'
                "  help: did you mean `A`? (also: B)"
            ),
        ),
        (
            {"backends": {"A": {"notes": [object()]}}},
            "<overlay>:1:1: the overlay is not plain data: a object is neither text nor a number, list or mapping",
        ),
        (
            {("a", "b"): 1},
            "<overlay>:1:1: the overlay is not plain data: keys must be str, int, float, bool or None, not tuple",
        ),
        (
            {"backends": {"A": {"summary": "\x1b[2J"}}},
            (
                '<overlay>:4:18: the control character U+001B is not allowed\n    4 |       "summary": "\\u001b[2J"\n'
                "      |                  ^"
            ),
        ),
    ],
)
def test_wrong_mappings(overlay: Any, message: str, tmp_path: Path) -> None:
    assert refusal(write(tmp_path), [overlay]) == message


@pytest.mark.parametrize("overlay", ["nul\0", "x" * 5000, "."])
def test_overlays_that_are_no_files(overlay: str, tmp_path: Path) -> None:
    assert f"{escaped(str(Path(overlay)))}:1:1: cannot be read: " in refusal(write(tmp_path), [overlay])


def test_a_mapping_that_holds_itself(tmp_path: Path) -> None:
    circle: dict[str, Any] = {}
    circle["backends"] = circle
    assert refusal(write(tmp_path), [circle]).startswith("<overlay>:1:1: the overlay is not plain data: ")
