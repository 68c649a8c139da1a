"""One variant of a backend by its name: required, preferred and denied, and names that no variant has."""

from __future__ import annotations

from typing import Any

import pytest
from support.registries import tiny

from attnreg import AttentionRequest, NoBackendError, Platform, Registry, RegistryError, RequestError, select
from attnreg.analysis.check.findings import check
from attnreg.selection.remedies import remedy
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import trace_lines

# ONE is the first choice of A and takes heads of up to 64, TWO takes sinks and any head; B takes everything
ROWS = {
    "A": tiny.row(
        variants=[
            {"name": "ONE", "when": {"arch": "g1"}, "capabilities": {"head_sizes": {"max": 64}}},
            {"name": "TWO", "capabilities": {"features": ["sinks"]}},
        ]
    ),
    "B": tiny.row(capabilities={"features": ["sinks"]}),
}
G1 = Platform(platform="gpu", arch="g1")


def registry(*choices: dict[str, Any]) -> Registry:
    return tiny.load(ROWS, overlays=[{"choices": list(choices)}] if choices else [])


def chosen(registry: Registry, backend: str | None = None, **fields: Any) -> str:
    found = select(AttentionRequest(**{"head_size": 64, **fields}), G1, registry, backend).chosen
    assert found is not None
    return found.title


def test_a_variant_that_is_named_is_the_only_one_judged() -> None:
    plain = registry()
    assert (chosen(plain), chosen(plain, "A"), chosen(plain, "A/ONE"), chosen(plain, "A/TWO")) == (
        "A/ONE",
        "A/ONE",
        "A/ONE",
        "A/TWO",
    )
    selection = select(AttentionRequest(head_size=64), G1, plain, "A/TWO")
    assert selection.backend is not None
    assert (selection.backend.name, selection.backend.variant, selection.requested) == ("A", "TWO", "A/TWO")
    assert [c.title for c in selection.candidates] == ["A/TWO"]
    assert selection.to_dict()["requested"] == "A/TWO"


@pytest.mark.parametrize(
    ("request_", "platform", "reason"),
    [
        (AttentionRequest(head_size=128), G1, "head_size is 128; supported: up to 64"),
        (AttentionRequest(head_size=64), Platform(platform="gpu", arch="g2"), "arch is g2; needs g1"),
    ],
)
def test_a_variant_is_refused_with_its_own_reasons_and_the_others_are_offered(
    request_: AttentionRequest, platform: Platform, reason: str
) -> None:
    with pytest.raises(NoBackendError) as caught:
        select(request_, platform, registry(), "A/ONE")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"A/ONE does not accept this request on gpu {platform.arch}:"
    assert lines[1].startswith(f"  A/ONE  {reason}  [backends.yaml:")
    assert lines[2:] == ["  help: would accept it: A/TWO, B"]
    (candidate,) = caught.value.selection.candidates
    assert (candidate.name, candidate.variant) == ("A", "ONE")


CHOICES: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([{"require": "A/TWO"}], {}, "A/TWO"),
    ([{"prefer": "A/TWO"}], {}, "A/TWO"),
    # the order's own candidates follow the variant that is preferred, its backend among them
    ([{"prefer": "A/ONE"}], {"head_size": 128}, "A/TWO"),
    ([{"deny": "A/ONE"}], {}, "A/TWO"),
    ([{"deny": ["A/ONE", "A/TWO"]}], {}, "B"),
    ([{"deny": "A"}, {"prefer": "A/TWO"}], {}, "B"),
    ([{"prefer": "A/TWO"}, {"deny": "A/TWO"}], {}, "A/ONE"),
]


@pytest.mark.parametrize(("choices", "fields", "title"), CHOICES, ids=[str(case[:2]) for case in CHOICES])
def test_choices_name_variants(choices: list[dict[str, Any]], fields: dict[str, Any], title: str) -> None:
    assert chosen(registry(*choices), **fields) == title


def test_a_denied_variant_is_refused_by_name_with_the_choice() -> None:
    with pytest.raises(NoBackendError, match="A/ONE  denied: we measured") as caught:
        select(AttentionRequest(head_size=64), G1, registry({"deny": "A/ONE", "because": "we measured"}), "A/ONE")
    assert caught.value.alternatives == ("A/TWO", "B")


def test_a_preferred_variant_that_is_not_valid_is_said() -> None:
    selection = select(AttentionRequest(head_size=128), G1, registry({"prefer": "A/ONE"}))
    assert [w.partition(" (")[0] for w in selection.warnings] == ["A/ONE is preferred"]
    assert "but not chosen: head_size is 128; supported: up to 64" in selection.warnings[0]
    # its backend is chosen already, by another variant
    assert remedy(selection, selection.candidates[0]) is None


UNKNOWN = [
    ("A/THREE", "unknown variant 'THREE' of A", "known: ONE, TWO"),
    ("A/TWOO", "unknown variant 'TWOO' of A", "did you mean `TWO`? (also: ONE)"),
    ("A/", "unknown variant '' of A", "known: ONE, TWO"),
    ("B/ONE", "unknown variant 'ONE' of B", "it has no variants; name the backend alone"),
    ("one", "unknown backend 'one'", "it is a variant: A/ONE"),
    ("a/one", "unknown backend 'a/one'", "did you mean `A/ONE`? (also: A/TWO)"),
    ("C", "unknown backend 'C'", "known: A, B"),
]


@pytest.mark.parametrize(("name", "message", "hint"), UNKNOWN, ids=[case[0] for case in UNKNOWN])
def test_a_name_that_there_is_not(name: str, message: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        select(AttentionRequest(head_size=64), G1, registry(), name)
    assert (caught.value.message, caught.value.help) == (message, hint)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A/TWOO", "choices.deny: unknown variant of A `TWOO`\n"),
        ("B/ONE", "choices.deny: unknown variant of B `ONE`\n"),
        ("D/ONE", "choices.deny: unknown backend `D/ONE`\n"),
    ],
)
def test_a_choice_of_a_name_that_there_is_not(name: str, message: str) -> None:
    with pytest.raises(RegistryError, match="<overlay>:") as caught:
        registry({"deny": name})
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def ordered(*entries: Any, **more: Any) -> Registry:
    return tiny.load(ROWS, {"gpu": [{"name": "all", "order": list(entries)}]}, **more)


def test_an_order_ranks_variants_one_by_one() -> None:
    ranked = ordered("A/TWO", "B", "A/ONE")
    assert chosen(ranked) == "A/TWO"
    selection = select(AttentionRequest(head_size=64), G1, ordered("A/ONE", "B", "A/TWO"))
    assert [c.title for c in selection.candidates] == ["A/ONE", "B", "A/TWO"]
    # what won is not listed again, another variant of its backend is
    lines = trace_lines(selection)
    assert [line.split("  ")[0] for line in lines] == ["A/ONE", "B", "A/TWO"]
    wide = select(AttentionRequest(head_size=128), G1, ordered("A/ONE", "B", "A/TWO"))
    assert wide.backend is not None
    assert wide.backend.name == "B"
    assert wide.candidates[0].reasons[0].text == "head_size is 128; supported: up to 64"
    assert [c.name for c in selection.candidates if c.accepted] == ["A", "B", "A"]


def test_choices_and_orders_name_the_same_variants() -> None:
    laid = [{"choices": [{"deny": "A/TWO"}]}]
    assert chosen(ordered("A/TWO", "B", overlays=laid)) == "B"
    assert chosen(ordered("B", "A/TWO", overlays=[{"choices": [{"prefer": "A/TWO"}]}])) == "A/TWO"


def test_a_remedy_is_for_the_variant_that_stands_in_the_order() -> None:
    rows = {**ROWS, "B": tiny.row(capabilities={"head_sizes": 128})}
    selection = evaluate(AttentionRequest(head_size=128), G1, tiny.load(rows, {"gpu": [
        {"name": "all", "order": ["A/ONE", "B"]}]}))  # fmt: skip
    found = remedy(selection, selection.candidates[0])
    assert found is not None
    assert found.text == "for head_size 64"


PLACES = [
    ({"backend": "A/TWO", "before": "B"}, "A/ONE A/TWO B"),
    ({"backend": "B", "before": "A"}, "B A/ONE"),
    ({"backend": "B", "after": "A/ONE"}, "A/ONE B"),
]


@pytest.mark.parametrize(("place", "order"), PLACES)
def test_a_place_names_variants(place: dict[str, Any], order: str) -> None:
    registry = ordered("A/ONE", "B", overlays=[{"place": [place]}])
    assert " ".join(e.backend for e in registry.orders["gpu"][0].entries) == order


def test_a_place_after_a_backend_is_after_the_last_of_its_variants() -> None:
    rows = {**ROWS, "C": tiny.row()}
    orders = {"gpu": [{"name": "all", "order": ["A/ONE", "B", "A/TWO"]}]}
    registry = tiny.load(rows, orders, overlays=[{"place": [{"backend": "C", "after": "A"}]}])
    assert " ".join(e.backend for e in registry.orders["gpu"][0].entries) == "A/ONE B A/TWO C"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("A/TWOO", "gpu.order: unknown variant of A `TWOO`"),
        ("B/ONE", "gpu.order: unknown variant of B `ONE`"),
        ("D/ONE", "gpu.order: unknown backend `D/ONE`"),
    ],
)
def test_an_entry_of_a_variant_that_there_is_not(entry: str, message: str) -> None:
    with pytest.raises(RegistryError) as caught:
        ordered(entry)
    assert message in str(caught.value)


def test_an_entry_behind_its_whole_backend_is_never_chosen() -> None:
    messages = [finding.message for finding in check(ordered("A", "A/ONE", "B"))]
    why = "a candidate before it takes every request that it accepts"
    assert f"A/ONE is never chosen by the order gpu/all: {why}" in messages
    assert not [m for m in messages if "stands in no order" in m]
