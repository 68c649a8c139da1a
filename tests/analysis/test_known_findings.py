"""Findings that are accepted: each by its code and its subject, and no other with it."""

from __future__ import annotations

from typing import Any

import pytest
from support.registries import tiny
from support.registries.tiny import row

import attnreg
from attnreg import Registry
from attnreg.analysis.check.finding import Finding
from attnreg.analysis.check.findings import check


def found(registry: Registry, code: str) -> list[Finding]:
    return [f for f in check(registry) if f.code == code]


def order(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"name": more.pop("name", "last"), "order": list(entries), **more}


def test_what_an_overlay_is_meant_to_take_away_is_listed_in_its_known() -> None:
    denied = {"choices": [{"when": {"arch": "sm120"}, "deny": "FLASHINFER"}]}
    [finding] = check(attnreg.load_registry("default", [denied]))
    assert finding.title == "violated-invariant [fp8-found]"
    assert finding.help.endswith("what an overlay's choices are meant to take away is listed in its `known`")
    meant = {"code": "violated-invariant", "of": "fp8-found", "because": "no such caches here"}
    assert check(attnreg.load_registry("default", [denied | {"known": [meant]}])) == []
    # what the overlay lists for nothing is a finding of its own; what the registry below lists is not
    [stale] = check(attnreg.load_registry("default", [{"known": [meant]}]))
    assert stale.title == "stale-exception [violated-invariant, fp8-found]"


@pytest.mark.parametrize(
    "subject",
    [
        {},
        {"of": []},
        {"of": "A", "each": ["A"]},
        {"of": 5},
        {"of": [["A"]]},
        {"code": ""},
        {"code": "a b  c", "of": "A"},
    ],
)
def test_an_exception_names_one_code_and_its_subjects(subject: dict[str, Any]) -> None:
    known = {"code": "unused-word", "because": "b", **subject}
    with pytest.raises(attnreg.RegistryError, match="known"):
        tiny.load({"A": row()}, known=[known])


def test_an_exception_accepts_the_finding_of_its_subject_and_no_other() -> None:
    """The order gpu/all-wide has a name that begins as another's does, and a finding of its own."""
    orders = [order("A", "B", name="all-wide", when={"head_size": {"min": 8}}), order("A", "B", name="all")]
    known = {"code": "unreachable-entry", "of": ["B", "gpu/all"], "because": "b"}
    registry = tiny.load({"A": row(), "B": row()}, {"gpu": orders}, known=[known])
    assert [f.subject for f in found(registry, "unreachable-entry")] == [("B", "gpu/all-wide")]
    both = {"code": "unreachable-entry", "each": [["B", "gpu/all"], ["B", "gpu/all-wide"]], "because": "b"}
    registry = tiny.load({"A": row(), "B": row()}, {"gpu": orders}, known=[both])
    assert found(registry, "unreachable-entry") == []
    first, second = (known.where.line for known in registry.known)
    assert first < second


def test_a_subject_that_is_nearly_right_is_told_the_right_one() -> None:
    known = {"code": "unreachable-entry", "of": ["B", "gpu/al"], "because": "b"}
    registry = tiny.load({"A": row(), "B": row()}, known=[known])
    (stale,) = found(registry, "stale-exception")
    assert stale.help == "remove it from `known`, or write `unreachable-entry [B, gpu/all]`, which is found"


def test_two_findings_of_one_subject_are_told_apart() -> None:
    choice = {"when": {"arch": "g1", "platform": "npu"}, "deny": "A"}
    registry = tiny.load({"A": row(), "B": row()}, overlays=[{"choices": [choice, choice]}])
    assert [f.subject for f in found(registry, "vacuous-choice")] == [("deny", "A"), ("deny", "A", "2")]
