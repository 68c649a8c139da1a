"""Selection, as rows: where, a change to one base request, the backend expected, and the exact reasons of others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.registries import tiny
from support.registries.asking import BASE, at, named
from support.rows import ROWS
from support.rows.words import Row, features

from attnreg import AttentionRequest, NoBackendError, Platform, Registry, RequestError, load_registry, select
from attnreg.selection.refusal import alternatives
from attnreg.selection.selector import evaluate


@pytest.mark.parametrize(
    ("where", "change", "backend", "reasons"), [r[1:] for r in ROWS], ids=[f"{r[1]}: {r[0]}" for r in ROWS]
)
def test_rows(
    default: Registry, where: str, change: dict[str, Any], backend: str | None, reasons: dict[str, str]
) -> None:
    selection = evaluate(AttentionRequest(**{**BASE, **change}), at(where, default), default)
    assert (selection.chosen.title if selection.chosen else None) == backend
    said = {c.name: "; ".join(r.text for r in c.reasons) for c in selection.candidates}
    assert {name: said.get(name) for name in reasons} == reasons
    ranks = [c.rank for c in selection.candidates]
    assert ranks == list(range(1, len(ranks) + 1))
    if selection.chosen:
        assert all(c.reasons for c in selection.candidates if c.rank < selection.chosen.rank)


def test_every_order_is_asked_by_some_row(default: Registry) -> None:
    asked = {evaluate(AttentionRequest(**{**BASE, **r[2]}), at(r[1], default), default).order for r in ROWS}
    left = {o.title for orders in default.orders.values() for o in orders} - {o.title for o in asked if o}
    # one with what its neighbour has, for another head size; and three that repeat cuda/value-width
    assert left == {"cuda/hopper-mla-sparse-512", "rocm/value-width", "xpu/value-width"}


# asking by name ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS[::3], ids=[f"{r[1]}: {r[0]}" for r in ROWS[::3]])
def test_a_backend_asked_for_by_name_goes_through_the_same_evaluation(default: Registry, row: Row) -> None:
    request, platform = AttentionRequest(**{**BASE, **row[2]}), at(row[1], default)
    selection = evaluate(request, platform, default)
    for automatic in selection.candidates:
        asked = evaluate(request, platform, default, named(selection, automatic))
        assert [c.name for c in asked.candidates] == [automatic.name]
        passed_over = [r for r in automatic.reasons if r.kind == "emulated"]
        assert asked.candidates[0].reasons == (() if passed_over else automatic.reasons)
        assert asked.candidates[0].variant == automatic.variant


def test_it_is_never_replaced_and_says_who_would_do(default: Registry) -> None:
    request = AttentionRequest(**BASE, **features("sinks"))
    with pytest.raises(NoBackendError) as caught:
        select(request, at("sm120", default), default, "FLASH_ATTN")
    lines = default.backends["FLASH_ATTN"].variants[0].features_at
    assert str(caught.value) == (
        "FLASH_ATTN does not accept this request on cuda sm120:\n"
        f"  FLASH_ATTN/FA2  sinks is not supported  [backends.yaml:{lines.line}]\n"
        "  help: would accept it: FLASHINFER, TRITON_ATTN, FLEX_ATTENTION"
    )
    assert caught.value.selection.requested == "FLASH_ATTN"
    assert caught.value.selection.backend is None


def test_experimental_rows_are_for_who_asks_for_them(default: Registry) -> None:
    request, platform = AttentionRequest(**BASE), at("sm90", default)
    assert select(request, platform, default, "TREE_ATTN").backend.name == "TREE_ATTN"
    first = load_registry("default", [{"orders": {"cuda": [{"name": "mine", "order": ["TREE_ATTN", "FLASH_ATTN"]}]}}])
    selection = select(request, platform, first)
    assert selection.backend.name == "FLASH_ATTN"
    assert [r.text for r in selection.candidates[0].reasons] == ["experimental: never chosen automatically"]
    assert select(
        request, platform, load_registry("default", [{"choices": [{"prefer": "TREE_ATTN"}]}])
    ).backend.name == ("TREE_ATTN")


def test_emulation_is_taken_where_nothing_is_native_and_warns(default: Registry) -> None:
    warning = "ROCM_ATTN emulates sinks (slow): sinks are a second pass over the output"
    request, platform = AttentionRequest(**BASE, **features("sinks")), at("gfx942", default)
    denied = select(request, platform, load_registry("default", [{"choices": [{"deny": ["TRITON_ATTN"]}]}]))
    assert denied.backend.name == "ROCM_ATTN"
    assert denied.warnings == (warning,)
    assert select(request, platform, default, "ROCM_ATTN").warnings == (warning,)
    assert select(request, platform, default).warnings == ()


# a user's choice -----------------------------------------------------------------------------------------------------

PREFERRED: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("valid", {"dtype": "float16"}, "TRITON_ATTN", None),
    (
        "refused, and saying why",
        {"kv_dtype": "turboquant_k8v4"},
        "TURBOQUANT",
        (
            "TRITON_ATTN is preferred ({}) but not chosen: kv_dtype is turboquant_k8v4; supported: auto, float16, "
            "bfloat16, fp8, fp8_e4m3, fp8_e5m2"
        ),
    ),
]


@pytest.mark.parametrize(("change", "backend", "warning"), [c[1:] for c in PREFERRED], ids=[c[0] for c in PREFERRED])
def test_prefer(default: Registry, change: dict[str, Any], backend: str, warning: str | None) -> None:
    registry = load_registry("default", [{"choices": [{"prefer": "TRITON_ATTN"}]}])
    selection = select(AttentionRequest(**{**BASE, **change}), at("sm90", default), registry)
    assert selection.backend.name == backend
    assert selection.warnings == ((warning.format(registry.choices[0].where.short),) if warning else ())
    assert [c.name for c in selection.candidates] == [
        "TRITON_ATTN",
        "FLASH_ATTN",
        "FLASHINFER",
        "HOPPER_ATTN",
        "FLEX_ATTENTION",
        "TURBOQUANT",
    ]


def test_a_preferred_backend_that_would_emulate_is_passed_over_aloud() -> None:
    registry = load_registry("default", [{"choices": [{"prefer": "ROCM_ATTN"}]}])
    selection = select(AttentionRequest(**BASE, **features("sinks")), at("gfx942", registry), registry)
    assert selection.backend.name == "TRITON_ATTN"
    why = "emulates sinks (slow); TRITON_ATTN serves them natively"
    here = registry.choices[0].where.short
    assert selection.warnings == (f"ROCM_ATTN is preferred ({here}) but not chosen: {why}",)


def test_require_is_this_or_an_error_and_an_argument_speaks_last(default: Registry) -> None:
    registry = load_registry("default", [{"choices": [{"require": "FLASHINFER", "when": {"role": "draft"}}]}])
    draft, platform = AttentionRequest(**BASE, role="draft"), at("sm90", default)
    selection = select(draft, platform, registry)
    assert selection.backend.name == selection.requested == "FLASHINFER"
    with pytest.raises(NoBackendError, match=r"^FLASHINFER does not accept this request on cuda sm90:\n"):
        select(dataclasses.replace(draft, head_size=100), platform, registry)
    assert select(AttentionRequest(**BASE), platform, registry).backend.name == "HOPPER_ATTN"
    assert select(draft, platform, registry, "TRITON_ATTN").backend.name == "TRITON_ATTN"


def test_a_denied_backend_is_refused_by_name_too(default: Registry) -> None:
    registry = load_registry("default", [{"choices": [{"deny": "FLASH_ATTN", "because": "it crashes here"}]}])
    with pytest.raises(NoBackendError, match="denied: it crashes here") as caught:
        select(AttentionRequest(**BASE), at("sm90", default), registry, "FLASH_ATTN")
    assert caught.value.alternatives == (
        "HOPPER_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
        "TORCH_SDPA",
        "TREE_ATTN",
    )


def test_a_later_overlay_speaks_after_an_earlier_one(default: Registry) -> None:
    overlays = [{"choices": [{"require": "TRITON_ATTN"}]}, {"choices": [{"prefer": "FLASHINFER"}]}]
    request, platform = AttentionRequest(**BASE), at("sm90", default)
    assert select(request, platform, load_registry("default", overlays)).backend.name == "FLASHINFER"
    assert select(request, platform, load_registry("default", overlays[::-1])).backend.name == "TRITON_ATTN"


# requests by name ----------------------------------------------------------------------------------------------------

HERE = Platform(platform="gpu", arch="g1")
STRICT = {"when": {"asked": "by_name", "head_size": {"min": 65}}, "reject": "by name it is asked for its layout"}
LAX = {"when": {"asked": "automatic", "head_size": {"min": 257}}, "reject": "the order asks for its layout"}
NAMED = {"A": tiny.row(rules=[STRICT]), "B": tiny.row(rules=[LAX]), "C": tiny.row()}

# overlay, backend asked for, head size, backend chosen, reasons against the first
BY_NAME: list[tuple[str, dict[str, Any], str | None, int, str | None, str]] = [
    ("the order", {}, None, 300, "A", ""),
    ("by name", {}, "A", 64, "A", ""),
    ("by name, refused", {}, "A", 65, None, STRICT["reject"]),
    ("by name, where the order refuses", {}, "B", 300, "B", ""),
    ("required", {"require": "A"}, None, 64, "A", ""),
    ("required, refused", {"require": "A"}, None, 65, None, STRICT["reject"]),
    ("preferred", {"prefer": "B"}, None, 300, "B", ""),
    ("preferred, refused; the others are the order's", {"prefer": "A"}, None, 300, "C", STRICT["reject"]),
    ("denied: the others are the order's", {"deny": "A"}, None, 300, "C", "denied by the overlay"),
]


@pytest.mark.parametrize(("choice", "backend", "size", "chosen", "why"), [c[1:] for c in BY_NAME], ids=lambda c: str(c))
def test_rules_may_be_for_requests_by_name_or_for_the_order(
    choice: dict[str, Any], backend: str | None, size: int, chosen: str | None, why: str
) -> None:
    overlays = [{"choices": [choice]}] if choice else []
    registry = tiny.load(NAMED, vocabulary=tiny.ASKED, overlays=overlays)
    selection = evaluate(AttentionRequest(head_size=size), HERE, registry, backend)
    assert (selection.backend.name if selection.backend else None) == chosen
    assert "; ".join(r.text for r in selection.candidates[0].reasons) == why


def test_alternatives_are_asked_for_by_name() -> None:
    registry = tiny.load(
        {"A": tiny.row(rules=[STRICT]), "B": tiny.row(rules=[LAX]), "D": tiny.row(capabilities={"head_sizes": 1})},
        {"gpu": [{"name": "all", "order": ["D", "B"]}]},
        vocabulary=tiny.ASKED,
    )
    assert alternatives(evaluate(AttentionRequest(head_size=300), HERE, registry)) == ("B",)


def test_derived_facets_know_who_asks() -> None:
    registry = tiny.load({"A": tiny.row()}, vocabulary=tiny.ASKED)
    request = AttentionRequest(head_size=1, kv_dtype="fp8")
    assert evaluate(request, HERE, registry).derived["strict"][0] is None
    assert evaluate(request, HERE, registry, "A").derived["strict"][0] is True
    preferring = tiny.load({"A": tiny.row()}, vocabulary=tiny.ASKED, overlays=[{"choices": [{"prefer": "A"}]}])
    assert evaluate(request, HERE, preferring).derived["strict"][0] is True


def test_nobody_says_in_a_request_who_asks() -> None:
    registry = tiny.load({"A": tiny.row()}, vocabulary=tiny.ASKED)
    with pytest.raises(
        RequestError, match=r"^extra names 'asked', which belongs to the selection and cannot be given$"
    ):
        evaluate(AttentionRequest(head_size=1, extra={"asked": "by_name"}), HERE, registry)
