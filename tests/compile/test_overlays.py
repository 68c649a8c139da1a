"""Overlays: small files, mappings and plugins that change a registry without a copy of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.registries import tiny
from support.registries.files import row
from support.registries.overlays import NEW, ask, chosen

from attnreg import NoBackendError, Registry, load_registry

# choices, orders and places ------------------------------------------------------------------------------------------

RANKS: list[tuple[str, dict[str, Any], str | None]] = [
    ("choices: []", {}, "A"),
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
    registry = load(f"backends:\n  C: {json.dumps(tiny.row())}\nplace:\n  - {place}\n")
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
    assert chosen(load(backends=rows), features={"sinks"}) == "B"
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


def test_a_facet_says_whether_two_others_are_equal() -> None:
    derived = {
        "same": {"legend": "l", "cases": [{"when": {"arch": "sm90"}, "value": {"equal": ["dtype", "kv_dtype"]}}]}
    }
    cases = load_registry("default", [{"vocabulary": {"derived": derived}}]).derived["same"].cases

    def value(arch: str, dtype: str | None, kv_dtype: str | None) -> Any:
        point = {"arch": arch, "dtype": dtype, "kv_dtype": kv_dtype}
        return next((value for when, value, _ in cases if when.holds(point)), None)

    assert value("sm90", "float16", "float16") is value("sm90", None, None) is True
    assert (
        value("sm90", "float16", "bfloat16")
        is value("sm90", "float16", None)
        is value("sm90", "float16", "fp8")
        is False
    )
    assert value("sm80", "float16", "float16") is None
