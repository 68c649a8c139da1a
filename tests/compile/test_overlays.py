"""Overlays: small files, mappings and plugins that change a registry without a copy of it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support import asking
from support.files import brief, refusal, row, write

import attnreg
from attnreg import AttentionRequest, NoBackendError, Platform, Registry, Selection
from attnreg.selection.selector import evaluate

# A is first and serves float16; B serves bfloat16 and sinks too
ROWS = row("capabilities: {dtypes: [float16]}")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Loads the small registry with overlays, each a text that becomes a file, or a mapping; the last is mine.yaml."""
    write(tmp_path / "base")
    monkeypatch.chdir(tmp_path)

    def load(*overlays: Any, **files: str) -> Registry:
        names = [f"other{i}.yaml" for i in range(len(overlays) - 1)] + ["mine.yaml"]
        for name, text in zip(names, overlays, strict=False):
            if isinstance(text, str):
                Path(name).write_text(text)
        laid = [name if isinstance(o, str) else o for name, o in zip(names, overlays, strict=False)]
        return attnreg.load_registry(write(tmp_path / "base", **files), laid)

    return load


def ask(registry: Registry, arch: str = "g2", backend: str | None = None, **request: Any) -> Selection:
    platform = Platform(platform=registry.vocabulary.architectures[arch].platform, arch=arch)
    fields = {"head_size": 64, "dtype": "float16", **request}
    return attnreg.select(AttentionRequest(**fields), platform, registry, backend)


def chosen(registry: Registry, arch: str = "g2", backend: str | None = None, **request: Any) -> str | None:
    """The backend that is selected, or None."""
    try:
        selected = ask(registry, arch, backend, **request).backend
    except NoBackendError:
        return None
    assert selected is not None
    return selected.name


# choices, orders and places ------------------------------------------------------------------------------------------

RANKS: list[tuple[str, dict[str, Any], str | None]] = [
    ("", {}, "A"),
    # choices
    ("choices: [{prefer: B}]", {}, "B"),
    ("choices: [{prefer: A}]", {"dtype": "bfloat16"}, "B"),
    ("choices: [{prefer: B, when: {role: draft}}]", {"role": "draft"}, "B"),
    ("choices: [{prefer: B, when: {role: draft}}]", {}, "A"),
    ("choices: [{require: B}]", {}, "B"),
    ("choices: [{require: A}]", {"dtype": "bfloat16"}, None),
    ("choices: [{require: A, when: {arch: g1}}]", {"dtype": "bfloat16"}, "B"),
    ("choices: [{deny: A}]", {}, "B"),
    ("choices: [{deny: [A, B]}]", {}, None),
    ("choices: [{deny: A, when: {arch: g1}}]", {}, "A"),
    ("choices: [{deny: A, when: {arch: g1}}]", {"arch": "g1"}, "B"),
    # the last that applies speaks, and every denial counts
    ("choices: [{prefer: A}, {prefer: B}]", {}, "B"),
    ("choices: [{prefer: B}, {prefer: A, when: {role: draft}}]", {}, "B"),
    ("choices: [{deny: B}, {prefer: B}]", {}, "A"),
    ("choices: [{require: B}, {deny: B}]", {}, None),
    # whole orders are asked first
    ("orders: {gpu: [{name: mine, order: [B, A]}]}", {}, "B"),
    ("orders: {gpu: [{name: mine, when: {role: draft}, order: [B, A]}]}", {"role": "draft"}, "B"),
    ("orders: {gpu: [{name: mine, when: {role: draft}, order: [B, A]}]}", {}, "A"),
    ("orders: {gpu: [{name: mine, order: [{backend: B, if: {arch: g1}}, A]}]}", {}, "A"),
    # places
    ("place: [{backend: B, before: A}]", {}, "B"),
    ("place: [{backend: A, after: B}]", {}, "B"),
    ("place: [{backend: A, after: B}]", {"backend": "A"}, "A"),
    ("place: [{backend: B, before: A, if: {arch: g1}}]", {"arch": "g1"}, "B"),
    ("place: [{backend: B, before: A, if: {arch: g1}}]", {}, "A"),
    ("place: [{backend: B, before: A, orders: [gpu/all]}]", {}, "B"),
]


@pytest.mark.parametrize(("overlay", "asked", "expected"), RANKS)
def test_re_ranking(overlay: str, asked: dict[str, Any], expected: str | None, load: Callable[..., Registry]) -> None:
    assert chosen(load(overlay), **asked) == expected


@pytest.mark.parametrize(
    ("place", "order"),
    [
        ("{backend: C, before: A}", "C A B"),
        ("{backend: C, after: A}", "A C B"),
        # a backend that stands there moves, unless it stands in both places by condition
        ("{backend: B, before: A}", "B A"),
        ("{backend: A, after: B}", "B A"),
        ("{backend: B, before: A, if: {arch: g1}}", "B A B"),
    ],
)
def test_a_place_in_the_order(place: str, order: str, load: Callable[..., Registry]) -> None:
    row_c = "C: {summary: s, platforms: [gpu], attention: mha, capabilities: {}, source: 's:p#q'}"
    registry = load(f"backends:\n  {row_c}\nplace:\n  - {place}\n")
    assert [e.backend for e in registry.orders["gpu"][0].entries] == order.split()
    # C does not run on npu, where B has no neighbour A
    assert [e.backend for e in registry.orders["npu"][0].entries] == ["B"]


def test_a_place_only_in_the_orders_named(load: Callable[..., Registry]) -> None:
    orders = "gpu:\n  - {name: drafts, when: {role: draft}, order: [A, B]}\n  - {name: all, order: [A, B]}\n"
    registry = load("place: [{backend: B, before: A, orders: [gpu/drafts]}]", priorities=orders)
    assert chosen(registry, role="draft") == "B"
    assert chosen(registry) == "A"


def test_a_later_overlay_speaks_before_an_earlier_one(load: Callable[..., Registry]) -> None:
    prefer = ["choices: [{prefer: A}]", "choices: [{prefer: B}]"]
    assert chosen(load(*prefer)) == "B"
    assert chosen(load(*reversed(prefer))) == "A"
    orders = [f"orders: {{gpu: [{{name: only-{name}, order: [{name}]}}]}}" for name in ("A", "B")]
    assert ask(load(*orders)).order.title == "gpu/only-B"  # type: ignore[union-attr]
    assert ask(load(*reversed(orders))).order.title == "gpu/only-A"  # type: ignore[union-attr]


def test_an_argument_speaks_before_any_choice_but_a_denial(load: Callable[..., Registry]) -> None:
    assert chosen(load("choices: [{require: B}]"), backend="A") == "A"
    denied = load("choices: [{deny: A, because: it is slow here}]")
    with pytest.raises(NoBackendError) as e:
        ask(denied, backend="A")
    assert str(e.value).splitlines() == [
        "A does not accept this request on gpu g2:",
        "  A  denied: it is slow here  [mine.yaml:1]",
        "  help: would accept it: B",
    ]


def test_what_a_choice_could_not_do_is_said(load: Callable[..., Registry]) -> None:
    preferred = ask(load("choices:\n  - {prefer: A}\n"), dtype="bfloat16")
    assert preferred.backend is not None
    assert preferred.backend.name == "B"
    (warning,) = preferred.warnings
    assert warning.startswith("A is preferred (mine.yaml:2) but not")
    assert "dtype is bfloat16; supported: float16" in warning
    with pytest.raises(NoBackendError, match=r"dtype is bfloat16; supported: float16  \[backends.yaml:8\]"):
        ask(load("choices: [{require: A}]"), dtype="bfloat16")


# claims --------------------------------------------------------------------------------------------------------------

CLAIMS: list[tuple[str, dict[str, Any], str | None]] = [
    ("A: {capabilities: {dtypes: [bfloat16]}}", {"dtype": "bfloat16"}, "A"),
    ("A: {capabilities: {dtypes: [bfloat16]}}", {}, "B"),
    ("A: {capabilities: {add: {dtypes: [bfloat16]}}}", {"dtype": "bfloat16"}, "A"),
    ("A: {capabilities: {add: {dtypes: [bfloat16]}}}", {}, "A"),
    ("A: {capabilities: {add: {features: [sinks]}}}", {"features": {"sinks"}}, "A"),
    ("A: {capabilities: {features: [alibi]}}", {"features": {"alibi"}}, "A"),
    ("A: {capabilities: {features: [alibi]}}", {"features": {"sinks"}}, "B"),
    ("B: {capabilities: {remove: {features: [sinks]}}}", {"features": {"sinks"}}, None),
    ("B: {capabilities: {remove: {dtypes: [bfloat16]}}}", {"dtype": "bfloat16"}, None),
    ("A: {capabilities: {head_sizes: {max: 32}}}", {}, "B"),
    # emulated: taken where nobody later serves it natively
    ("A: {emulated: {sinks: a detour}}", {"features": {"sinks"}}, "B"),
    ("A: {emulated: {alibi: a detour}}", {"features": {"alibi"}}, "A"),
    ("A: {unchecked: [alibi]}", {"features": {"alibi"}}, "A"),
    # requirements and rules come on top
    ("A: {requires: {arch: g1}}", {}, "B"),
    ("A: {requires: {arch: g1}}", {"arch": "g1"}, "A"),
    ("A: {rules: [{when: {head_size: 64}, reject: no}]}", {}, "B"),
    ("A: {status: experimental}", {}, "B"),
    ("A: {status: experimental}", {"backend": "A"}, "A"),
]


@pytest.mark.parametrize(("patch", "asked", "expected"), CLAIMS)
def test_changing_claims(
    patch: str, asked: dict[str, Any], expected: str | None, load: Callable[..., Registry]
) -> None:
    assert chosen(load(f"backends:\n  {patch}\n"), **asked) == expected


def test_a_changed_claim_cites_the_overlay_and_says_what_is_left(load: Callable[..., Registry]) -> None:
    overlay = """\
backends:
  A:
    capabilities:
      head_sizes: [32, 64, {min: 128, max: 256}]
  B:
    capabilities:
      remove: {dtypes: [bfloat16]}
"""
    narrower = "backends:\n  A:\n    capabilities: {remove: {head_sizes: [64, 256]}}\n"
    with pytest.raises(NoBackendError) as e:
        ask(load(overlay, narrower), dtype="bfloat16")
    assert [line.strip() for line in str(e.value).splitlines()[1:4]] == [
        "A  dtype is bfloat16; supported: float16  [backends.yaml:8]",
        "head_size is 64; supported: 32, 64, 128 to 256 except 64, 256  [mine.yaml:3]",
        "B  dtype is bfloat16; supported: float16  [other0.yaml:7]",
    ]


def test_what_was_emulated_is_native_once_it_is_added(load: Callable[..., Registry]) -> None:
    rows = row("capabilities: {}", "emulated: {sinks: a detour}")
    add = "backends: {A: {capabilities: {add: {features: [sinks]}}}}"
    assert chosen(load("", backends=rows), features={"sinks"}) == "B"
    assert chosen(load(add, backends=rows), features={"sinks"}) == "A"
    remove = "backends: {A: {capabilities: {remove: {features: [sinks]}}}}"
    assert chosen(load(remove, backends=rows), backend="A", features={"sinks"}) is None


def test_a_variant_is_changed_by_its_name(load: Callable[..., Registry]) -> None:
    rows = row(
        "capabilities: {dtypes: [float16]}",
        "variants:",
        "  - {name: old, when: {arch: g1}, capabilities: {add: {features: [sinks]}}, notes: [one]}",
        "  - {name: new, when: {arch: g2}}",
    )
    overlay = """\
backends:
  A:
    variants:
      - name: old
        capabilities: {add: {dtypes: [bfloat16]}}
        rules: [{when: {head_size: 96}, reject: no}]
        notes: [two]
      - {name: newer, when: {arch: g2}, capabilities: {add: {features: [alibi]}}}
"""
    registry = load(overlay, backends=rows)
    old, new, newer = registry.backends["A"].variants
    # only what it names differs: the condition and the feature stay
    assert (old.name, old.when.describe(), sorted(old.features), old.notes) == (
        "old",
        "arch g1",
        ["sinks"],
        ("one", "two"),
    )
    assert ask(registry, "g1", dtype="bfloat16", features={"sinks"}).candidates[0].title == "A/old"
    assert chosen(registry, "g1", head_size=96) == "B"
    assert (new.name, newer.name) == ("new", "newer")
    assert ask(registry, features={"alibi"}).candidates[0].title == "A/newer"
    moved = load("backends: {A: {variants: [{name: old, when: {arch: g2}}]}}", backends=rows)
    assert ask(moved, features={"sinks"}).candidates[0].title == "A/old"


def test_summaries_notes_and_sources_change_too(load: Callable[..., Registry]) -> None:
    overlay = """\
sources: {t: {url: u, version: "2"}}
backends: {A: {summary: Mine., notes: [new], source: "t:p#q"}}
"""
    registry = load(overlay, backends=row("capabilities: {}", "notes: [old]"))
    a = registry.backends["A"]
    assert (a.summary, a.notes, a.source, registry.sources["t"].version) == ("Mine.", ("old", "new"), "t:p#q", "2")


# new rows and words --------------------------------------------------------------------------------------------------

NEW = """\
vocabulary:
  features: {cascade: A prefix is attended to once.}
  flags: {turbo: l}
  packages: {pkg: l}
  words: {kv_dtypes: {int8: {bits: 8, legend: l}}}
  architectures: {gpu: {g3: {family: f}, g1: {family: renamed}}}
  facets: {mode: {of: request, kind: boolean, legend: l, claim: modes}}
  derived: {late: {legend: l, cases: [{when: {arch: {min: g3}}, value: true}, {value: false}]}}
  retired_environment: {OLD_NAME: {engine: x, use: y}}
backends:
  C:
    summary: A third.
    platforms: [gpu]
    attention: mha
    requires: {late: true}
    capabilities: {kv_dtypes: [int8], modes: true, features: [cascade]}
    source: "s:p#q"
place:
  - {backend: C, before: A}
"""


def test_a_new_row_in_new_words(load: Callable[..., Registry]) -> None:
    registry = load(NEW)
    assert chosen(registry, "g3", kv_dtype="int8", features={"cascade"}, extra={"mode": True}) == "C"
    assert chosen(registry, "g3", kv_dtype="int8", features={"cascade"}, extra={"mode": False}) is None
    assert chosen(registry, "g2", kv_dtype="int8") == "A"
    assert registry.vocabulary.words["kv_dtypes"]["int8"].facts == {"bits": 8}
    assert registry.vocabulary.retired_environment["OLD_NAME"].legend == "y"


def test_an_architecture_that_is_described_again_keeps_its_rank(load: Callable[..., Registry]) -> None:
    archs = load(NEW).vocabulary.architectures
    assert [a.name for a in sorted(archs.values(), key=lambda a: a.rank) if a.platform == "gpu"] == ["g1", "g2", "g3"]
    assert archs["g1"].family == "renamed"
    assert len({a.rank for a in archs.values()}) == len(archs)


def test_a_later_overlay_changes_what_an_earlier_one_added(load: Callable[..., Registry]) -> None:
    registry = load(NEW, "backends: {C: {capabilities: {kv_dtypes: any, remove: {features: [cascade]}}}}")
    assert chosen(registry, "g3", kv_dtype="fp8") == "C"
    assert chosen(registry, "g3", kv_dtype="fp8", features={"cascade"}) is None


# errors --------------------------------------------------------------------------------------------------------------

WRONG = {
    "an unknown part": (
        "choises: []\n",
        """\
mine.yaml:1:1: unknown key `choises`
  help: did you mean `choices`? (also: backends, extends, invariants, orders, place, sources, vocabulary)""",
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
mine.yaml:2:3: backends.C: `capabilities` is missing
  help: every entry of this kind must have it
mine.yaml:2:3: backends.C: `source` is missing
  help: every entry of this kind must have it""",
    ),
    "a backend that moves": (
        "backends: {A: {platforms: [npu]}}\n",
        """\
mine.yaml:1:16: backends.A: unknown key `platforms`
  help: known: capabilities, emulated, module, notes, requires, rules, source, status, summary, unchecked, variants""",
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
    "no mapping": ("- prefer: A\n", "mine.yaml:1:1: the file: expected a mapping, got a list"),
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


# files that extend ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base registry, and a directory of overlays beside it."""
    write(tmp_path / "base")
    (tmp_path / "over").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_overlay_is_a_registry_and_finds_what_it_extends_beside_itself(tree: Path) -> None:
    (tree / "over/team.yaml").write_text("extends: ../base\nchoices: [{prefer: B}]\n")
    (tree / "over/mine.yaml").write_text("extends: team.yaml\nchoices: [{deny: B, when: {arch: g1}}]\n")
    registry = attnreg.load_registry("over/mine.yaml")
    assert registry.name == "base+team+mine"
    assert registry.files[-2:] == ("over/team.yaml", "over/mine.yaml")
    assert chosen(registry) == "B"
    assert chosen(registry, "g1") == "A"


def test_an_overlay_extends_the_default_registry_by_default(tree: Path, default: Registry) -> None:
    (tree / "mine.yaml").write_text("choices: [{deny: FLASH_ATTN}]\n")
    registry = attnreg.load_registry("mine.yaml")
    assert registry.name == "default+mine"
    assert registry.backends.keys() == default.backends.keys()
    assert registry.fingerprint != default.fingerprint


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a": "extends: a.yaml\n"},
            "over/a.yaml:1:10: registries extend each other in a circle: over/a.yaml -> over/a.yaml",
        ),
        (
            {"a": "extends: ./b.yaml\n", "b": "choices: []\nextends: ../over/a.yaml\n"},
            (
                "over/b.yaml:2:10: registries extend each other in a circle: "
                "over/a.yaml -> over/b.yaml -> over/../over/a.yaml"
            ),
        ),
        (
            {"a": "choices: []\nextends: defualt\n"},
            (
                "over/a.yaml:2:10: `defualt` is neither a bundled registry nor a directory nor a file\n"
                "  help: did you mean `default`?"
            ),
        ),
        (
            {"a": "extends: b.yaml\n", "b": "extends: ../base\nchoices: [{prefer: C}]\n"},
            "over/b.yaml:2:20: choices.prefer: unknown backend `C`\n  help: known: A, B",
        ),
    ],
)
def test_what_extends_wrongly(files: dict[str, str], message: str, tree: Path) -> None:
    for name, text in files.items():
        (tree / f"over/{name}.yaml").write_text(text)
    said = brief(refusal("over/a.yaml"))
    assert said.startswith(message)
    assert said.count("\n") <= 1


# mappings ------------------------------------------------------------------------------------------------------------


def test_a_mapping_says_the_same_as_a_file(load: Callable[..., Registry]) -> None:
    mapping = yaml.safe_load(NEW)
    assert load(mapping).fingerprint == load(NEW).fingerprint
    assert load(mapping).name == "base+overlay"
    # any kind of mapping, and sets, in which order does not matter
    patch = types.MappingProxyType({"A": {"capabilities": {"dtypes": {"float16", "bfloat16"}}}})
    assert chosen(load({"backends": patch, "choices": ({"deny": ("B",)},)}), dtype="bfloat16") == "A"


@pytest.mark.parametrize(
    "text", ["1", "09", "9.10", "1e5", "0x10", "no", "null", "~", "", "a: b", "- x", "#", "é\n😀", "\ud7ff"]
)
def test_text_stays_text_in_a_mapping(text: str, load: Callable[..., Registry]) -> None:
    registry = load({"backends": {"A": {"notes": [text], "summary": "s"}}})
    assert registry.backends["A"].notes == (text,)


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
    assert f"{Path(overlay)}:1:1: cannot be read: " in refusal(write(tmp_path), [overlay])


def test_a_mapping_that_holds_itself(tmp_path: Path) -> None:
    circle: dict[str, Any] = {}
    circle["backends"] = circle
    assert refusal(write(tmp_path), [circle]).startswith("<overlay>:1:1: the overlay is not plain data: ")


def test_one_overlay_needs_no_list(tree: Path) -> None:
    (tree / "mine.yaml").write_text("choices: [{prefer: B}]\n")
    one: list[Any] = ["mine.yaml", Path("mine.yaml"), {"choices": [{"prefer": "B"}]}]
    assert [chosen(attnreg.load_registry("base", overlay)) for overlay in one] == ["B", "B", "B"]


# nothing -------------------------------------------------------------------------------------------------------------

NOTHING: list[Any] = [
    *({}, {"extends": "default"}, {"choices": [], "backends": {}, "vocabulary": {}}),
    *("", "# nothing\n", "extends: default\n", "choices: []\n"),
]


@pytest.mark.parametrize("overlay", NOTHING)
def test_an_overlay_of_nothing_is_not_there(overlay: Any, load: Callable[..., Registry]) -> None:
    registry, base = load(overlay), load()
    assert (registry.title, registry.files) == (base.title, base.files)


def test_an_overlay_file_of_nothing_is_what_it_extends(tree: Path) -> None:
    (tree / "mine.yaml").write_text("extends: base\n")
    assert attnreg.load_registry("mine.yaml").title == attnreg.load_registry("base").title


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_overlay_of_nothing_changes_no_selection(default: Registry, empty: Registry, data: st.DataObject) -> None:
    request, platform = data.draw(asking.requests(default)), data.draw(asking.platforms(default))
    answers = [evaluate(request, platform, registry) for registry in (default, empty)]
    assert answers[0].to_dict() == answers[1].to_dict()


@pytest.fixture(scope="module")
def empty() -> Registry:
    return attnreg.load_registry("default", [{}, {"extends": "default", "choices": []}])


# plugins -------------------------------------------------------------------------------------------------------------

PLUGIN = """\
sources: {acme: {url: u, version: "1"}}
backends:
  ACME_ATTN:
    summary: A third party's kernel.
    module: acme_attn.kernels
    platforms: [cuda]
    attention: mha
    capabilities: {dtypes: any, kv_dtypes: any, block_sizes: any, head_sizes: any, attn_types: any}
    source: "acme:p#q"
place:
  - {backend: ACME_ATTN, before: FLASH_ATTN, orders: [cuda/mha]}
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a distribution with an entry point and some files: their paths and their texts."""
    site = tmp_path / "site"

    def install(name: str, value: str, files: dict[str, str]) -> None:
        info = f"{name}-1.0.dist-info"
        meta = {
            "METADATA": f"Name: {name}\nVersion: 1.0\n",
            "entry_points.txt": f"[attnreg.registries]\n{name} = {value}\n",
        }
        for file, text in {**{f"{info}/{file}": text for file, text in meta.items()}, **files}.items():
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_text(text)
        monkeypatch.syspath_prepend(str(site))
        for module in [m for m in sys.modules if m.partition(".")[0] == value.partition(".")[0]]:
            monkeypatch.delitem(sys.modules, module)

    return install


ACME = {
    "acme_attn/__init__.py": "",
    "acme_attn/kernels.py": "name = __name__\n",
    "acme_attn/attnreg.yaml": PLUGIN,
}
HOPPER = Platform(platform="cuda", arch="sm90")


def test_an_installed_package_adds_its_backends(install: Callable[..., None]) -> None:
    install("acme", "acme_attn", ACME)
    registry = attnreg.load_registry("default")
    assert registry.name == "default+acme"
    assert registry.files[-1] == "<entry point acme = acme_attn>/attnreg.yaml"
    selected = attnreg.select(AttentionRequest(head_size=128), HOPPER, registry).backend
    assert selected is not None
    assert selected.name == "ACME_ATTN"
    # looking for the file imported nothing
    assert "acme_attn" not in sys.modules
    assert selected.load().name == "acme_attn.kernels"


def test_plugins_come_by_name_and_before_the_overlays_of_the_user(install: Callable[..., None]) -> None:
    install("zeta", "zeta_attn", {"zeta_attn/attnreg.yaml": "choices: [{prefer: ACME_ATTN}]\n"})
    install("acme", "acme_attn", ACME)
    registry = attnreg.load_registry("default", {"choices": [{"prefer": "TRITON_ATTN"}]})
    assert registry.name == "default+acme+zeta+overlay"
    assert [choice.backends for choice in registry.choices] == [("ACME_ATTN",), ("TRITON_ATTN",)]


def test_a_plugin_may_keep_its_file_in_a_subpackage(install: Callable[..., None]) -> None:
    files = {"acme_attn/__init__.py": "raise RuntimeError\n", "acme_attn/data/attnreg.yaml": PLUGIN}
    install("acme", "acme_attn.data", files)
    assert attnreg.load_registry("default").name == "default+acme"


def test_plugins_add_to_what_extends_the_default_registry_and_to_nothing_else(
    install: Callable[..., None], tree: Path
) -> None:
    install("acme", "acme_attn", ACME)
    (tree / "mine.yaml").write_text("choices: [{deny: FLASH_ATTN}]\n")
    assert attnreg.load_registry("mine.yaml").name == "default+acme+mine"
    assert attnreg.load_registry("base").name == "base"
    engine = next(name for name in attnreg.bundled_registries() if name != "default")
    assert attnreg.load_registry(engine).name == engine


def test_a_plugin_is_trusted_with_its_own_modules_only(install: Callable[..., None]) -> None:
    text = PLUGIN.replace("acme_attn.kernels", "other.kernels")
    install("acme", "acme_attn", ACME | {"acme_attn/attnreg.yaml": text})
    assert brief(refusal("default")).splitlines()[0] == (
        "<entry point acme = acme_attn>/attnreg.yaml:5:13: backends.ACME_ATTN.module: "
        "the package other is not trusted to be imported"
    )


BROKEN_PLUGINS = {
    "an unknown backend": (
        ("acme_attn", {"acme_attn/attnreg.yaml": "choices: [{deny: FLASH_ATTENTION}]\n"}),
        "<entry point acme = acme_attn>/attnreg.yaml:1:18: choices.deny: unknown backend `FLASH_ATTENTION`",
    ),
    "a file that is no YAML": (
        ("acme_attn", {"acme_attn/attnreg.yaml": "choices: [\n"}),
        (
            "<entry point acme = acme_attn>/attnreg.yaml:1:11: not valid YAML: "
            "while parsing a flow node did not find expected node content"
        ),
    ),
    "a package without the file": (
        ("acme_attn", {"acme_attn/__init__.py": ""}),
        "<entry point acme = acme_attn>/attnreg.yaml:1:1: there is no package acme_attn with a file attnreg.yaml",
    ),
    "a package that is not there": (
        ("acme_attn.data:FILE", {}),
        (
            "<entry point acme = acme_attn.data:FILE>/attnreg.yaml:1:1: "
            "there is no package acme_attn.data with a file attnreg.yaml"
        ),
    ),
    "an entry point of nothing": (
        (".", {}),
        "<entry point acme = .>/attnreg.yaml:1:1: there is no package . with a file attnreg.yaml",
    ),
}


@pytest.mark.parametrize(("plugin", "message"), BROKEN_PLUGINS.values(), ids=BROKEN_PLUGINS)
def test_a_broken_plugin_is_named(
    plugin: tuple[str, dict[str, str]], message: str, install: Callable[..., None]
) -> None:
    install("acme", *plugin)
    assert brief(refusal("default")).splitlines()[0] == message
