"""Wrong overlays: all that is wrong is said at once, with its place and the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.files import brief, refusal, row, write

from attnreg.errors import escaped

WRONG = {
    "an unknown part": (
        "choises: []\n",
        """\
mine.yaml:1:1: the file is no overlay: it has no key of one
  help: did you mean `choices`? (also: backends, extends, invariants, known, orders, place, sources, vocabulary)""",
    ),
    "a choice of nothing": (
        "choices:\n  - {when: {}}\n  - {deny: []}\n",
        """\
mine.yaml:2:5: choices: a choice needs exactly one of `require`, `prefer` and `deny`
mine.yaml:3:12: choices.deny: names no backend""",
    ),
    "a choice of two things": (
        "choices: [{prefer: A, deny: B}]\n",
        "mine.yaml:1:11: choices: a choice needs exactly one of `require`, `prefer` and `deny`",
    ),
    "choices of unknown backends, under unknown conditions": (
        "choices:\n  - {prefer: AA}\n  - {deny: [B, C], when: {archs: g1}}\n",
        """\
mine.yaml:2:14: choices.prefer: unknown backend `AA`
  help: did you mean `A`? (also: B)
mine.yaml:3:16: choices.deny: unknown backend `C`
  help: known: A, B
mine.yaml:3:27: choices.when.archs: unknown facet `archs`
  help: did you mean `arch`? (also: any, attention, attn_type, block_size, dtype, eager, features, flags, \
head_size, head_size_v, index_topk, kv_dtype, …)""",
    ),
    "a change of an unknown backend": (
        "backends:\n  AA: {status: stable}\n",
        """\
mine.yaml:2:3: backends.AA: unknown backend `AA`
  help: did you mean `A`? (also: B)""",
    ),
    "a new backend that is not complete": (
        "backends:\n  C: {platforms: [gpu], attention: mha, summary: s}\n",
        """\
mine.yaml:2:3: backends.C: `capabilities`, `source` are missing
  help: `capabilities`: what it accepts; every row states every claim; \
`source`: where its facts can be checked: SOURCE:PATH#SYMBOL""",
    ),
    "a new backend without its source, and with wrong words": (
        "backends:\n  C: {platforms: [gpo], attention: mha, summary: s, capabilities: {dtypes: [float17]}}\n",
        """\
mine.yaml:2:3: backends.C: `source` is missing
  help: `source`: where its facts can be checked: SOURCE:PATH#SYMBOL
mine.yaml:2:19: backends.C.platforms: unknown platform 'gpo'
  help: did you mean `gpu`? (also: npu)
mine.yaml:2:53: backends.C.capabilities: `kv_dtypes`, `head_sizes`, `head_sizes_v`, `block_sizes`, `num_heads`, \
`num_kv_heads` are missing
  help: every row states every claim: `kv_dtypes: [auto, fp8]` (a list or a matcher of values), `any` (every value) or \
`head_sizes_v: same` (as wide as head_size)
mine.yaml:2:77: backends.C.capabilities.dtypes: unknown dtype 'float17'
  help: did you mean `float16`? (also: bfloat16)""",
    ),
    "orders without names": (
        "orders: {gpu: [{order: [A], when: {arch: g1}}, {order: [AA]}]}\n",
        """\
mine.yaml:1:16: orders.gpu: `name` is missing
  help: `name`: what follows the platform in its title: cuda/mha
mine.yaml:1:48: orders.gpu: `name` is missing
  help: `name`: what follows the platform in its title: cuda/mha
mine.yaml:1:57: orders.gpu.order: unknown backend `AA`
  help: did you mean `A`? (also: B)""",
    ),
    "a backend that moves": (
        "backends: {A: {platforms: [npu]}}\n",
        """\
mine.yaml:1:16: backends.A: unknown key `platforms`
  help: known: capabilities, consequences, contract, emulated, module, notes, options, requires, rules, source, \
status, summary, …""",
    ),
    "a change that is none": (
        "backends: {A: , B: fast}\n",
        """\
mine.yaml:1:15: backends.A: expected a mapping, got `null`
mine.yaml:1:20: backends.B: expected a mapping, got `fast`""",
    ),
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
        """\
mine.yaml:2:5: place: a place needs one of `before` and `after`
mine.yaml:3:5: place: a place needs one of `before` and `after`
mine.yaml:4:26: place.before: A cannot stand before itself
mine.yaml:5:26: place.before: unknown backend `C`
  help: known: A, B
mine.yaml:6:38: place.orders: unknown order `gpu/al`
  help: did you mean `gpu/all`? (also: npu/all)
mine.yaml:7:5: place: no order takes A before B
  help: B stands in gpu/all, npu/all; A runs on gpu""",
    ),
    "an order of a name that is taken": (
        "orders:\n  gpu: [{name: all, when: {arch: g1}, order: [B]}]\n",
        """\
mine.yaml:2:16: orders.gpu.name: gpu has an order all already
  help: give it a name of its own""",
    ),
    "orders that are never reached": (
        "orders:\n  gpu:\n    - {name: x, order: [B]}\n    - {name: y, order: [A]}\n",
        """\
mine.yaml:4:7: orders.gpu: unreachable order: number 1 of the list has no `when`, so it takes everything
  help: remove or move one""",
    ),
    "a module of a stranger": (
        "backends: {A: {module: evil.kernels}}\n",
        """\
mine.yaml:1:24: backends.A.module: the package evil is not trusted to be imported
  help: trust it explicitly: load_registry(..., trust=['evil']), --trust evil, or an entry point""",
    ),
    "a source that is pinned nowhere": (
        "backends: {A: {source: 't:p#q'}}\n",
        "mine.yaml:1:24: backends.A.source: unknown source `t`\n  help: known: s",
    ),
    "no mapping": (
        "- prefer: A\n",
        """\
mine.yaml:1:1: the file is no overlay: it has no key of one
  help: its keys are backends, choices, extends, invariants, known, orders, place, sources, vocabulary""",
    ),
    "an unknown part beside a known one": (
        "choices: []\nchoises: []\n",
        """\
mine.yaml:2:1: unknown key `choises`
  help: did you mean `choices`? (also: backends, extends, invariants, known, orders, place, sources, vocabulary)""",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_wrong_overlays(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    assert brief(refusal(write(tmp_path / "base"), ["mine.yaml"])) == message


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
