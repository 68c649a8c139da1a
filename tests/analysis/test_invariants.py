"""Invariants: what holds, and what `check` shows of a configuration that violates one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.registries import tiny
from support.registries.tiny import row

from attnreg import Registry, load_registry
from attnreg.analysis.check.finding import Finding
from attnreg.analysis.check.findings import check
from attnreg.analysis.check.unused import unused_words
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model


def found(registry: Registry, code: str) -> list[tuple[str, ...]]:
    return [f.subject for f in check(registry) if f.code == code]


SINKS = {"features": ["sinks"]}


ROWS = {
    "A": row(capabilities={"head_sizes": [64, 128], **SINKS}, requires={"flags": ["fast"]}),
    "B": row(capabilities={"head_sizes": {"max": 256}}, emulated={"sinks": "slow"}),
}
HELD: list[tuple[str, dict[str, Any], str | None]] = [
    ("chosen", {"when": {"features": ["sinks"]}, "chosen": ["A", "B", None]}, None),
    ("chosen, or nobody", {"when": {"head_size": {"min": 257}}, "chosen": [None]}, None),
    ("chosen, violated", {"when": {"features": ["sinks"]}, "chosen": ["A", None]}, "B"),
    ("never", {"when": {"head_size": 100}, "never": ["A"]}, None),
    ("never, violated", {"when": {"head_size": 64}, "never": ["A"]}, "A"),
    (
        "finds",
        {"when": {"head_size": {"max": 256}, "features": {"only": ["sinks"]}, "platform": "gpu"}, "finds": True},
        None,
    ),
    ("finds, violated", {"when": {"head_size": {"max": 256}, "features": {"only": ["sinks"]}}, "finds": True}, "none"),
    ("while native", {"when": {"features": ["sinks"]}, "never": ["B"], "while": "native"}, None),
    ("without while, violated", {"when": {"features": ["sinks"]}, "never": ["B"]}, "B"),
]


@pytest.mark.parametrize(("statement", "chosen"), [c[1:] for c in HELD], ids=[c[0] for c in HELD])
def test_invariants(statement: dict[str, Any], chosen: str | None) -> None:
    registry = tiny.load(ROWS, invariants=[{"name": "i", "says": "the statement", **statement}])
    violated = [f for f in check(registry) if f.code == "violated-invariant"]
    if chosen is None:
        assert violated == []
    else:
        (finding,) = violated
        assert re.fullmatch(r"violated: the statement \([\d,]+ of [\d,]+ configurations\)", finding.message)
        assert finding.where == registry.invariants[0].where
        backend = finding.example.backend
        assert (backend.name if backend else "none") == chosen


@pytest.mark.parametrize(
    ("choice", "chosen"), [({}, "A"), ({"require": "A"}, None), ({"prefer": "A"}, "B"), ({"prefer": "B"}, "B")]
)
def test_statements_are_about_the_order_unless_somebody_chose(choice: dict[str, Any], chosen: str | None) -> None:
    rows = {"A": row(rules=[{"when": {"asked": "by_name"}, "reject": "r"}]), "B": row()}
    statement = {"name": "i", "says": "s", "when": {"platform": "gpu", "features": {"only": []}}, "chosen": [chosen]}
    overlays = [{"choices": [choice]}] if choice else []
    registry = tiny.load(rows, invariants=[statement], overlays=overlays, vocabulary=tiny.ASKED)
    assert found(registry, "violated-invariant") == []


def test_a_violation_counts_exactly_the_configurations_that_violate() -> None:
    # 3 classes of head sizes (64 and 128; others up to 256; more), 3 of KV dtypes, 2 of flags, with sinks and without
    when = {"arch": "g1", "features": {"only": ["sinks"]}}
    registry = tiny.load(ROWS, invariants=[{"name": "i", "says": "s", "when": when, "chosen": ["B", None]}])
    (finding,) = [f for f in check(registry) if f.code == "violated-invariant"]
    # A is chosen with the flag, at 64 or 128, for any KV dtype, with sinks and without
    assert finding.message == "violated: s (6 of 36 configurations)"


def plain(finding: Finding) -> str:
    return re.sub(r"[^\s[]*?(\w+\.yaml):\d+(:\d+)?", r"\1", str(finding))


def test_a_violated_invariant_shows_the_most_ordinary_configuration_with_its_trace() -> None:
    overlay = {"backends": {"TRITON_ATTN": {"capabilities": {"add": {"kv_dtypes": ["turboquant_k8v4"]}}}}}
    registry = load_registry("default", [overlay])
    finding = next(f for f in check(registry) if f.subject == ("turboquant-cache",))
    example = finding.example
    # one facet differs from an ordinary request on Hopper, and none can be left out
    assert example.request.to_dict() == {"head_size": 128, "kv_dtype": "turboquant_k8v4"}
    assert (example.platform.arch, example.platform.flags) == ("sm90", frozenset())
    lines = plain(finding).splitlines()
    assert lines[1:3] == ["  for example: cuda sm90 head_size=128 kv_dtype=turboquant_k8v4", "    chosen: TRITON_ATTN"]
    kv_dtypes = "auto, float16, bfloat16"
    assert lines[3].startswith("      accepts kv_dtype turboquant_k8v4 by kv_dtypes: auto, ")
    assert lines[4] == f"    FLASH_ATTN/FA3     kv_dtype is turboquant_k8v4; supported: {kv_dtypes}  [backends.yaml]"
    assert lines[6].startswith("    HOPPER_ATTN        kv_dtype is turboquant_k8v4; ")
    assert lines[7] == "    TRITON_ATTN        4th choice of 6 (order cuda/mha, priorities.yaml)"
    assert lines[-1] == "  help: mend the data that the trace cites, or the statement"


def test_a_violated_invariant_names_the_row_and_the_line_that_claim_it(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("backends:\n  TRITON_ATTN:\n    capabilities: {add: {kv_dtypes: [turboquant_k8v4]}}\n")
    registry = load_registry("default", [overlay])
    (finding,) = [f for f in check(registry) if f.subject == ("turboquant-cache",)]
    claimed = "auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2, turboquant_k8v4"
    at = str(finding).splitlines().index("    chosen: TRITON_ATTN")
    assert str(finding).splitlines()[at + 1] == (
        f"      accepts kv_dtype turboquant_k8v4 by kv_dtypes: {claimed}  [mine.yaml:3]"
    )


@pytest.mark.parametrize(
    ("claim", "found"),
    [("any", True), ('"*"', True), ("{not: fp8}", True), ('["turboquant_*"]', False), ("[turboquant_k8v4]", False)],
)
def test_a_row_takes_a_packed_format_only_if_its_data_names_it(claim: str, found: bool, tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(f"backends:\n  FLEX_ATTENTION:\n    capabilities: {{kv_dtypes: {claim}}}\n")
    registry = load_registry("default", [overlay])
    # of `check` the part that looks at words, a tenth of it
    findings = [f for f in unused_words(Model(Space([registry]), registry)) if f.code == "unnamed-format"]
    assert bool(findings) == found
    for finding in findings:
        assert str(finding.where).endswith("mine.yaml:3:20")
        assert finding.subject[:3] == ("FLEX_ATTENTION", "turboquant_k8v4", "turboquant_4bit_nc")


def test_an_example_names_the_packages_that_are_missing_and_what_is_not_given() -> None:
    rows = {
        "A": row(
            requires={"packages": ["lib>=2"]},
            capabilities={"kv_dtypes": ["auto", "fp8"]},
            rules=[{"when": {"kv_dtype": [None, "fp8"], "eager": True}, "reject": "r"}],
        )
    }
    invariants = [
        {
            "name": "i",
            "says": "s",
            "when": {"kv_dtype": None, "eager": True, "platform": "gpu", "not": {"packages": ["lib"]}},
            "finds": True,
        }
    ]
    (finding,) = [f for f in check(tiny.load(rows, invariants=invariants)) if f.code == "violated-invariant"]
    assert plain(finding).splitlines()[1:5] == [
        "  for example: gpu g1 without packages lib head_size=128 kv_dtype=none extra=eager:True",
        "    chosen: none",
        "    A  package lib is not installed; needs >=2  [backends.yaml]",
        "       r  [backends.yaml]",
    ]
