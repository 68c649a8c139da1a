"""What `check` finds, each kind on a registry of a few rows, word for word; and the configuration that it shows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support import tiny
from support.tiny import row

from attnreg import Registry, load_registry
from attnreg.analysis.check import Finding, check


def found(registry: Registry, kind: str) -> list[str]:
    return [f.message for f in check(registry) if f.kind == kind]


def order(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"name": more.pop("name", "last"), "order": list(entries), **more}


SINKS = {"features": ["sinks"]}
WIDE = {"head_sizes": {"min": 8}}

# name, the registry, the kind of finding, the messages
FINDINGS: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (
        "an order after one that takes every request",
        {
            "backends": {"A": row()},
            "priorities": {
                "gpu": [
                    order("A", name="wide", when={"head_size": {"min": 8}}),
                    order("A", name="narrow", when={"head_size": {"max": 7}}),
                    order("A"),
                ]
            },
        },
        "unreachable order",
        ["the order gpu/last is never used: the orders before it take every request"],
    ),
    (
        "a candidate after one that takes all that it accepts",
        {"backends": {"A": row(), "B": row(capabilities=WIDE)}},
        "unreachable entry",
        ["B is never chosen by the order gpu/all: a candidate before it takes every request that it accepts"],
    ),
    (
        "two that take it together",
        {"backends": {"A": row(requires={"arch": "g1"}), "B": row(requires={"arch": "g2"}), "C": row()}},
        "unreachable entry",
        ["C is never chosen by the order gpu/all: a candidate before it takes every request that it accepts"],
    ),
    (
        "a candidate that this order's requests do not suit",
        {
            "backends": {"A": row(), "B": row(capabilities=WIDE)},
            "priorities": {"gpu": [order("B", "A", name="narrow", when={"head_size": 4}), order("B", "A")]},
        },
        "unreachable entry",
        ["B is never chosen by the order gpu/narrow: it accepts no request that comes this way"],
    ),
    (
        "a candidate whose condition never holds there",
        {
            "backends": {"A": row(), "B": row(capabilities=WIDE)},
            "priorities": {"gpu": [order({"backend": "B", "if": {"head_size": {"max": 4}}}, "A")]},
        },
        "unreachable entry",
        ["B is never chosen by the order gpu/last: its `if` holds for none of the requests that it accepts"],
    ),
    (
        "one of two entries of a candidate",
        {
            "backends": {"A": row(), "B": row(capabilities=SINKS)},
            "priorities": {"gpu": [order("A", *({"backend": "B", "if": {"arch": arch}} for arch in ("g*", "g1")))]},
        },
        "unreachable entry",
        ["B is never chosen by the order gpu/last: a candidate before it takes every request that it accepts"],
    ),
    (
        "an experimental candidate",
        {"backends": {"A": row(), "B": row(status="experimental", capabilities=SINKS)}},
        "unreachable entry",
        ["B is never chosen by the order gpu/all: it is experimental"],
    ),
    (
        "emulation before a candidate that serves natively leaves it reachable",
        {"backends": {"A": row(emulated={"sinks": "slow"}), "B": row(capabilities=SINKS)}},
        "unreachable entry",
        [],
    ),
    (
        "emulation after one that serves natively",
        {"backends": {"A": row(capabilities=SINKS), "B": row(emulated={"sinks": "slow"})}},
        "unreachable entry",
        ["B is never chosen by the order gpu/all: a candidate before it takes every request that it accepts"],
    ),
    (
        "a variant after one that accepts as much",
        {
            "backends": {
                "A": row(
                    variants=[
                        {"name": "ONE", "when": {"arch": {"min": "g1"}}},
                        {"name": "TWO", "when": {"arch": "g2"}},
                    ]
                )
            }
        },
        "unreachable variant",
        ["A/TWO is never used: the variants before it accept all that it does"],
    ),
    (
        "a variant that accepts nothing",
        {
            "backends": {
                "A": row(requires={"arch": "g1"}, variants=[{"name": "ONE", "when": {"arch": "g2"}}, {"name": "TWO"}])
            }
        },
        "unreachable variant",
        ["A/ONE is never used: it accepts nothing"],
    ),
    (
        "a variant that emulates what one before it emulates too",
        {
            "backends": {
                "A": row(
                    variants=[
                        {"name": "ONE", "when": {"features": ["sinks"]}, "emulated": {"sinks": "slow"}},
                        {"name": "TWO", "when": {"features": ["sinks"], "arch": "g1"}, "emulated": {"sinks": "slower"}},
                        {"name": "REST"},
                    ]
                )
            }
        },
        "unreachable variant",
        ["A/TWO is never used: the variants before it accept all that it does"],
    ),
    (
        "a row that accepts nothing",
        {"backends": {"A": row(requires={"platform": "npu"}), "B": row()}},
        "unreachable variant",
        ["A is never used: it accepts nothing"],
    ),
    (
        "a rule on what the row refuses anyway",
        {
            "backends": {
                "A": row(
                    capabilities={"head_sizes": {"max": 64}},
                    rules=[
                        {"when": {"head_size": {"min": 65}}, "reject": "too wide"},
                        {"when": {"head_size": 64}, "reject": "wide"},
                    ],
                )
            }
        },
        "unreachable rule",
        ["the rule of A never decides: the row refuses all of it already (too wide)"],
    ),
    (
        "a rule on what no request can be",
        {"backends": {"A": row(rules=[{"when": {"head_size": 4, "head_size_v": 4}, "reject": "as wide"}])}},
        "unreachable rule",
        ["the rule of A never decides: the row refuses all of it already (as wide)"],
    ),
    (
        "a case after others that hold wherever it does",
        {
            "backends": {"A": row(requires={"wide": "yes"})},
            "vocabulary": {
                "derived": {
                    "wide": {
                        "legend": "l",
                        "cases": [
                            {"when": {"head_size": {"min": 8}}, "value": "yes"},
                            {"when": {"head_size": {"min": 16}}, "value": "very"},
                            {"value": "no"},
                        ],
                    }
                }
            },
        },
        "unreachable case",
        ["the case `very` of wide is never reached"],
    ),
    (
        "words that no row accepts or serves",
        {"backends": {"A": row(capabilities={"kv_dtypes": "auto", "features": ["sinks"]})}},
        "unused word",
        ["no backend serves alibi", "no backend accepts kv_dtype fp8"],
    ),
    (
        "a row that makes no claim accepts every word",
        {
            "backends": {
                "A": row(capabilities={"kv_dtypes": "auto"}),
                "B": row(capabilities={"features": ["alibi", "sinks"]}),
            }
        },
        "unused word",
        [],
    ),
    ("a derived facet that nothing reads", {"backends": {"A": row()}}, "unused facet", ["nothing reads quantized"]),
    (
        "a row that stands in no order",
        {"backends": {"A": row(), "B": row()}, "priorities": {"gpu": [order("A")]}},
        "unplaced row",
        ["B stands in no order"],
    ),
    (
        "a row that says so and stands in one",
        {"backends": {"A": row(only_on_request="it is slow")}},
        "unplaced row",
        ["A says `only_on_request`, but an order names it"],
    ),
    (
        "a row that says so",
        {"backends": {"A": row(), "B": row(only_on_request="it is slow")}, "priorities": {"gpu": [order("A")]}},
        "unplaced row",
        [],
    ),
    (
        "a row that would run anywhere",
        {"backends": {"A": row(), "B": row(requires={"packages": ["lib"]}), "C": row(requires={"arch": "g1"})}},
        "unguarded row",
        ["A asks for no package and no architecture"],
    ),
    (
        "a choice for nobody",
        {
            "backends": {"A": row()},
            "overlays": [{"choices": [{"deny": ["A"], "when": {"arch": "g1", "platform": "npu"}}]}],
        },
        "vacuous choice",
        ["the choice to deny A says nothing: no configuration satisfies its `when`"],
    ),
    (
        "an overlay's choices make no data dead",
        {"backends": {"A": row(), "B": row(capabilities=SINKS)}, "overlays": [{"choices": [{"deny": "B"}]}]},
        "unreachable entry",
        [],
    ),
    (
        "an invariant that speaks of nothing",
        {
            "backends": {"A": row()},
            "invariants": [
                {"name": "i", "says": "s", "when": {"head_size": 4, "any": [{"head_size": 5}]}, "finds": True}
            ],
        },
        "vacuous invariant",
        ["the invariant `i` says nothing: no configuration satisfies its `when`"],
    ),
    *(
        (
            f"what is only {how}",
            {
                "backends": {
                    "A": row(
                        requires={"arch": "g1"},
                        rules=[{"when": {"asked": "by_name", "head_size": 4}, "reject": "r"}],
                        variants=[
                            {"name": "V", "when": {"asked": "by_name"}, "capabilities": {"features": ["sinks"]}},
                            {"name": "W"},
                        ],
                    )
                },
                "vocabulary": tiny.ASKED,
                "waivers": [{"when": {"asked": "by_name", "arch": "n1"}, "unchecked": ["platform"], "because": "b"}],
            },
            kind,
            [],
        )
        for how, kind in [
            ("a rule by name", "unreachable rule"),
            ("a variant by name", "unreachable variant"),
            ("a case by name", "unreachable case"),
            ("a waiver by name", "vacuous waiver"),
        ]
    ),
    (
        "a rule by name of what nobody gets",
        {
            "backends": {
                "A": row(capabilities=WIDE, rules=[{"when": {"asked": "by_name", "head_size": 4}, "reject": "r"}])
            },
            "vocabulary": tiny.ASKED,
        },
        "unreachable rule",
        ["the rule of A never decides: the row refuses all of it already (r)"],
    ),
    (
        "an entry that is only for requests by name",
        {"backends": {"A": row(requires={"asked": "by_name"}), "B": row()}, "vocabulary": tiny.ASKED},
        "unreachable entry",
        ["A is never chosen by the order gpu/all: it accepts no request that comes this way"],
    ),
    (
        "an exception that is one no longer",
        {"backends": {"A": row()}, "known": [{"finding": "no backend serves dcp", "because": "b"}]},
        "stale exception",
        ["found no longer: no backend serves dcp"],
    ),
    (
        "an exception",
        {"backends": {"A": row()}, "known": [{"finding": "no backend serves sinks", "because": "b"}]},
        "unused word",
        ["no backend serves alibi"],
    ),
]


@pytest.mark.parametrize(
    ("files", "kind", "messages"), [c[1:] for c in FINDINGS], ids=[f"{c[2]}: {c[0]}" for c in FINDINGS]
)
def test_findings(files: dict[str, Any], kind: str, messages: list[str]) -> None:
    assert sorted(found(tiny.load(**files), kind)) == sorted(messages)


def test_every_finding_has_its_place_and_its_cure_in_the_order_of_the_files() -> None:
    rules = [{"when": {"head_size": {"min": 65}}, "reject": "too wide"}]
    registry = tiny.load(
        {"A": row(capabilities={"head_sizes": {"max": 64}}, rules=rules), "B": row()}, {"gpu": [order("A")]}
    )
    findings = check(registry)
    assert all(f.help and f.where.line > 1 for f in findings)
    places = [(registry.files.index(f.where.file), f.where.line) for f in findings]
    assert places == sorted(places)
    rule = next(f for f in findings if f.kind == "unreachable rule")
    assert str(rule) == f"{rule.where}: {rule.message}\n  help: remove the rule, or mend its `when`"


# invariants ----------------------------------------------------------------------------------------------------------

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
    violated = [f for f in check(registry) if f.kind == "violated invariant"]
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
    assert found(registry, "violated invariant") == []


def test_a_violation_counts_exactly_the_configurations_that_violate() -> None:
    # 3 classes of head sizes (64 and 128; others up to 256; more), 3 of KV dtypes, 2 of flags, with sinks and without
    when = {"arch": "g1", "features": {"only": ["sinks"]}}
    registry = tiny.load(ROWS, invariants=[{"name": "i", "says": "s", "when": when, "chosen": ["B", None]}])
    (finding,) = [f for f in check(registry) if f.kind == "violated invariant"]
    # A is chosen with the flag, at 64 or 128, for any KV dtype, with sinks and without
    assert finding.message == "violated: s (6 of 36 configurations)"


def plain(finding: Finding) -> str:
    return re.sub(r"[^\s[]*?(\w+\.yaml):\d+(:\d+)?", r"\1", str(finding))


def test_a_violated_invariant_shows_the_most_ordinary_configuration_with_its_trace() -> None:
    overlay = {"backends": {"TRITON_ATTN": {"capabilities": {"add": {"kv_dtypes": ["turboquant_k8v4"]}}}}}
    registry = load_registry("default", [overlay])
    finding = next(f for f in check(registry) if "a turboquant_* cache goes to" in f.message)
    example = finding.example
    # one facet differs from an ordinary request on Hopper, and none can be left out
    assert example.request.to_dict() == {"head_size": 128, "kv_dtype": "turboquant_k8v4"}
    assert (example.platform.arch, example.platform.flags) == ("sm90", frozenset())
    lines = plain(finding).splitlines()
    assert lines[1:3] == ["  for example: cuda sm90 head_size=128 kv_dtype=turboquant_k8v4", "    chosen: TRITON_ATTN"]
    kv_dtypes = "auto, float16, bfloat16, fp8, fp8_e4m3"
    assert lines[3] == f"    1 FLASH_ATTN/FA3: kv_dtype is turboquant_k8v4; supported: {kv_dtypes} [backends.yaml]"
    assert lines[5] == "    3 TRITON_ATTN: accepts"
    assert lines[-1] == "  help: mend the data that the trace cites, or the statement"


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
    (finding,) = [f for f in check(tiny.load(rows, invariants=invariants)) if f.kind == "violated invariant"]
    assert plain(finding).splitlines()[1:4] == [
        "  for example: gpu g1 without packages lib head_size=128 kv_dtype=none extra=eager:True",
        "    chosen: none",
        "    1 A: package lib is not installed; needs >=2 [backends.yaml]; r [backends.yaml]",
    ]
