"""What `check` finds, each kind on a registry of a few rows."""

from __future__ import annotations

from typing import Any

import pytest
from support.registries import tiny
from support.registries.tiny import row
from support.suite.sentences import Sentences

import attnreg
from attnreg import Registry
from attnreg.analysis.check.finding import Finding
from attnreg.analysis.check.findings import check, notes
from attnreg.analysis.check.unused import unused_words
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model


def found(registry: Registry, code: str) -> list[Finding]:
    return [f for f in check(registry) if f.code == code]


def order(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"name": more.pop("name", "last"), "order": list(entries), **more}


SINKS = {"features": ["sinks"]}
WIDE = {"head_sizes": {"min": 8}}

# of the words of tiny registries: what most of their rows leave out
UNREAD = ["vocabulary.yaml:141 flags, fast", "vocabulary.yaml:144 packages, lib", "vocabulary.yaml:153 arch, n1"]

# a vendor's kernel for values of another width, before all others where nobody emulates it
VENDOR: dict[str, Any] = {
    "sources": {"acme": {"url": "u", "version": "1"}},
    "backends": {
        "ACME_ATTN": {
            "summary": "A vendor's kernel.",
            "platforms": ["cuda"],
            "attention": "mha",
            "requires": {"arch": {"min": "sm90", "below": "sm100"}},
            "capabilities": {
                "kv_dtypes": ["auto", "float16", "bfloat16", "fp8*", "nvfp4*", "*_per_token_head"],
                **dict.fromkeys(("dtypes", "block_sizes", "head_sizes", "head_sizes_v"), "any"),
                **dict.fromkeys(("num_heads", "num_kv_heads", "cache_layouts", "attn_types"), "any"),
                "features": ["sinks", "sliding_window", "softcap", "non_causal"],
            },
            "source": "acme:p#q",
        }
    },
    "place": [
        {"backend": "ACME_ATTN", "before": "FLASH_ATTN", "orders": ["cuda/mha"]},
        {"backend": "ACME_ATTN", "before": "TRITON_ATTN", "orders": ["cuda/value-width"]},
    ],
}


def test_a_vendors_row_passes_although_invariants_name_attnregs_own(default: Registry) -> None:
    vendor = attnreg.load_registry("default", VENDOR)
    assert [str(f) for f in check(vendor)] == []
    # one that the vendor brings binds the vendor's row, and so does one of a user above it
    never = {"name": "mine", "says": "m", "when": {"platform": "cuda", "dtype": "bfloat16"}, "chosen": ["TRITON_ATTN"]}
    for overlays in ([VENDOR | {"invariants": [never]}], [VENDOR, {"invariants": [never]}]):
        registry = attnreg.load_registry("default", overlays)
        assert registry.invariants[-1].chosen == {"TRITON_ATTN"}
    known = {i.name: i.chosen for i in default.invariants}
    assert {i.name for i in vendor.invariants if i.chosen != known[i.name]} == {n for n, c in known.items() if c}
    assert all((i.chosen or set()) - (known[i.name] or set()) <= {"ACME_ATTN"} for i in vendor.invariants)


def test_what_only_an_overlay_puts_before_an_entry_is_no_fault_of_the_entry() -> None:
    rows, order_ = {"A": row(), "B": row(capabilities=WIDE)}, order("B")
    below = tiny.load(rows, {"gpu": [order_]})
    assert found(below, "unreachable-entry") == []
    text = {"place": [{"backend": "A", "before": "B", "orders": ["gpu/last"]}]}
    above = tiny.load(rows, {"gpu": [order_]}, overlays=[text])
    assert [e.backend for e in above.orders["gpu"][0].entries] == ["A", "B"]
    assert found(above, "unreachable-entry") == []
    # nor is an order that an order of the overlay goes before; an entry of the overlay's own is judged
    first = {"orders": {"gpu": [order("A", "B", name="first")]}}
    above = tiny.load(rows, {"gpu": [order_]}, overlays=[first])
    assert found(above, "unreachable-order") == []
    assert len(found(above, "unreachable-entry")) == 1


def test_a_place_that_is_dead_in_one_of_its_orders_says_how_to_leave_it_out() -> None:
    rows = {"A": row(requires={"arch": "g1"}), "B": row(capabilities=SINKS)}
    orders = {"gpu": [order("B", name="sinks", when=SINKS), order("B")]}
    registry = tiny.load(rows, orders, overlays=[{"place": [{"backend": "A", "before": "B"}]}])
    (finding,) = [f for f in check(registry) if f.code == "unreachable-entry"]
    assert finding.subject == ("A", "gpu/sinks")
    assert finding.help == "name the other orders beside its place: `orders: [gpu/last]`"


def test_a_place_without_orders_that_joins_several_is_noted() -> None:
    rows = {"A": row(requires=SINKS), "B": row()}
    orders = {"gpu": [order("B", name="first", when=SINKS), order("B")]}
    place = {"backend": "A", "before": "B"}
    (note,) = notes(tiny.load(rows, orders, overlays=[{"place": [place]}]))
    assert (note.title, note.is_note) == ("joined-orders [A]", True)
    assert note.message.endswith(": gpu/first, gpu/last")
    assert note.help == "name those that you mean: `orders: [gpu/first]`"
    named = {**place, "orders": ["gpu/first", "gpu/last"]}
    assert notes(tiny.load(rows, orders, overlays=[{"place": [named]}])) == []
    assert notes(tiny.load(rows, {"gpu": [order("B")]}, overlays=[{"place": [place]}])) == []


# name, the registry, the code of a finding, the place and the subject of each
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
        "unreachable-order",
        ["priorities.yaml:14 gpu/last"],
    ),
    (
        "a candidate after one that takes all that it accepts",
        {"backends": {"A": row(), "B": row(capabilities=WIDE)}},
        "unreachable-entry",
        ["priorities.yaml:5 B, gpu/all"],
    ),
    (
        "two that take it together",
        {"backends": {"A": row(requires={"arch": "g1"}), "B": row(requires={"arch": "g2"}), "C": row()}},
        "unreachable-entry",
        ["priorities.yaml:6 C, gpu/all"],
    ),
    (
        "a candidate that this order's requests do not suit",
        {
            "backends": {"A": row(), "B": row(capabilities=WIDE)},
            "priorities": {"gpu": [order("B", "A", name="narrow", when={"head_size": 4}), order("B", "A")]},
        },
        "unreachable-entry",
        ["priorities.yaml:4 B, gpu/narrow"],
    ),
    (
        "a candidate whose condition never holds there",
        {
            "backends": {"A": row(), "B": row(capabilities=WIDE)},
            "priorities": {"gpu": [order({"backend": "B", "if": {"head_size": {"max": 4}}}, "A")]},
        },
        "unreachable-entry",
        ["priorities.yaml:4 B, gpu/last"],
    ),
    (
        "one of two entries of a candidate",
        {
            "backends": {"A": row(), "B": row(capabilities=SINKS)},
            "priorities": {"gpu": [order("A", *({"backend": "B", "if": {"arch": arch}} for arch in ("g*", "g1")))]},
        },
        "unreachable-entry",
        ["priorities.yaml:8 B, gpu/last"],
    ),
    (
        "an experimental candidate",
        {"backends": {"A": row(), "B": row(status="experimental", capabilities=SINKS)}},
        "unreachable-entry",
        ["priorities.yaml:5 B, gpu/all"],
    ),
    (
        "emulation before a candidate that serves natively leaves it reachable",
        {"backends": {"A": row(emulated={"sinks": "slow"}), "B": row(capabilities=SINKS)}},
        "unreachable-entry",
        [],
    ),
    (
        "emulation after one that serves natively",
        {"backends": {"A": row(capabilities=SINKS), "B": row(emulated={"sinks": "slow"})}},
        "unreachable-entry",
        ["priorities.yaml:5 B, gpu/all"],
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
        "unreachable-variant",
        ["backends.yaml:27 A/TWO"],
    ),
    (
        "a variant that accepts nothing",
        {
            "backends": {
                "A": row(requires={"arch": "g1"}, variants=[{"name": "ONE", "when": {"arch": "g2"}}, {"name": "TWO"}])
            }
        },
        "unreachable-variant",
        ["backends.yaml:25 A/ONE"],
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
        "unreachable-variant",
        ["backends.yaml:29 A/TWO"],
    ),
    (
        "a row that accepts nothing",
        {"backends": {"A": row(requires={"platform": "npu"}), "B": row()}},
        "unreachable-variant",
        ["backends.yaml:8 A"],
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
        "unreachable-rule",
        ["backends.yaml:24 A, head_size"],
    ),
    (
        "a rule on what no request can be",
        {"backends": {"A": row(rules=[{"when": {"head_size": 4, "head_size_v": 4}, "reject": "as wide"}])}},
        "unreachable-rule",
        ["backends.yaml:23 A, head_size, head_size_v"],
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
        "unreachable-case",
        ["vocabulary.yaml:163 wide, very"],
    ),
    (
        "words that no row accepts or serves",
        {"backends": {"A": row(capabilities={"kv_dtypes": "auto", "features": ["sinks"]})}},
        "unused-word",
        ["vocabulary.yaml:120 features, alibi", "vocabulary.yaml:139 kv_dtype, fp8", *UNREAD],
    ),
    (
        "a row that makes no claim accepts every word",
        {
            "backends": {
                "A": row(capabilities={"kv_dtypes": "auto"}),
                "B": row(capabilities={"features": ["alibi", "sinks"]}),
            }
        },
        "unused-word",
        [*UNREAD],
    ),
    (
        "words that a claim accepts and a rule refuses",
        {
            "backends": {
                "A": row(
                    capabilities={"kv_dtypes": ["auto", "fp8"], "features": ["sinks", "alibi"]},
                    rules=[{"when": {"kv_dtype": "fp8"}, "reject": "no"}, {"when": SINKS, "reject": "no"}],
                )
            }
        },
        "unused-word",
        ["vocabulary.yaml:119 features, sinks", "vocabulary.yaml:139 kv_dtype, fp8", *UNREAD],
    ),
    (
        "a word that rows of different architectures accept, and one that needs what its row refuses",
        {
            "backends": {
                "A": row(requires={"arch": "g1"}, capabilities={"features": ["sinks"], "kv_dtypes": "auto"}),
                "B": row(
                    requires={"arch": "g2", "flags": ["fast"], "packages": ["lib"]},
                    capabilities={"features": ["alibi"], "kv_dtypes": ["auto", "fp8"]},
                    rules=[{"when": {"kv_dtype": "fp8", "flags": ["fast"]}, "reject": "no"}],
                ),
            }
        },
        "unused-word",
        ["vocabulary.yaml:139 kv_dtype, fp8", "vocabulary.yaml:153 arch, n1"],
    ),
    (
        "a derived facet that nothing reads",
        {"backends": {"A": row()}},
        "unused-facet",
        ["vocabulary.yaml:156 quantized"],
    ),
    (
        "a row that stands in no order",
        {"backends": {"A": row(), "B": row()}, "priorities": {"gpu": [order("A")]}},
        "unplaced-row",
        ["backends.yaml:22 B"],
    ),
    (
        "a row that says so and stands in one",
        {"backends": {"A": row(only_on_request="it is slow")}},
        "ordered-on-request",
        ["backends.yaml:8 A"],
    ),
    (
        "a row that says so",
        {"backends": {"A": row(), "B": row(only_on_request="it is slow")}, "priorities": {"gpu": [order("A")]}},
        "unplaced-row",
        [],
    ),
    (
        "a row that would run anywhere",
        {"backends": {"A": row(), "B": row(requires={"packages": ["lib"]}), "C": row(requires={"arch": "g1"})}},
        "unguarded-row",
        ["backends.yaml:8 A"],
    ),
    (
        "a choice for nobody",
        {
            "backends": {"A": row()},
            "overlays": [{"choices": [{"deny": ["A"], "when": {"arch": "g1", "platform": "npu"}}]}],
        },
        "vacuous-choice",
        ["<overlay>:3 deny, A"],
    ),
    (
        "an overlay's choices make no data dead",
        {"backends": {"A": row(), "B": row(capabilities=SINKS)}, "overlays": [{"choices": [{"deny": "B"}]}]},
        "unreachable-entry",
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
        "vacuous-invariant",
        ["invariants.yaml:2 i"],
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
            ("a rule by name", "unreachable-rule"),
            ("a variant by name", "unreachable-variant"),
            ("a case by name", "unreachable-case"),
            ("a waiver by name", "vacuous-waiver"),
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
        "unreachable-rule",
        ["backends.yaml:24 A, asked, head_size"],
    ),
    (
        "an entry that is only for requests by name",
        {"backends": {"A": row(requires={"asked": "by_name"}), "B": row()}, "vocabulary": tiny.ASKED},
        "unreachable-entry",
        ["priorities.yaml:4 A, gpu/all"],
    ),
    (
        "an exception that is one no longer",
        {"backends": {"A": row()}, "known": [{"code": "unused-word", "of": ["features", "dcp"], "because": "b"}]},
        "stale-exception",
        ["invariants.yaml:5 unused-word, features, dcp"],
    ),
    (
        "an exception",
        {"backends": {"A": row()}, "known": [{"code": "unused-word", "of": ["features", "sinks"], "because": "b"}]},
        "unused-word",
        ["vocabulary.yaml:120 features, alibi", *UNREAD],
    ),
]


@pytest.mark.parametrize(
    ("files", "code", "subjects"), [c[1:] for c in FINDINGS], ids=[f"{c[2]}: {c[0]}" for c in FINDINGS]
)
def test_findings(files: dict[str, Any], code: str, subjects: list[str], sentences: Sentences) -> None:
    findings = found(tiny.load(**files), code)
    assert [f"{f.where.short} {', '.join(f.subject)}" for f in findings] == subjects
    if findings:
        sentences.check("\n".join(f.message for f in findings))


def test_every_finding_has_its_place_and_its_cure_in_the_order_of_the_files() -> None:
    rules = [{"when": {"head_size": {"min": 65}}, "reject": "too wide"}]
    registry = tiny.load(
        {"A": row(capabilities={"head_sizes": {"max": 64}}, rules=rules), "B": row()}, {"gpu": [order("A")]}
    )
    findings = check(registry)
    assert all(f.help and f.where.line > 1 for f in findings)
    places = [(registry.files.index(f.where.file), f.where.line) for f in findings]
    assert places == sorted(places)
    rule = next(f for f in findings if f.code == "unreachable-rule")
    assert (
        str(rule)
        == f"{rule.where}: unreachable-rule [A, head_size]: {rule.message}\n  help: remove the rule, or mend its `when`"
    )


def test_words_of_an_overlay_that_no_row_accepts() -> None:
    """Of the words that a registry's own vocabulary extends, none is its fault; of an overlay's words each is."""
    words = {
        "words": {"kv_dtypes": {"fp8_foo": {"bits": 8, "legend": "l"}}, "roles": {"critic": "l"}},
        "features": {"cascade": "l"},
        "flags": {"turbo": "l"},
        "packages": {"turbolib": "l"},
    }
    for base in ("default", "vllm-0.33.0"):
        registry = attnreg.load_registry(base, [{"vocabulary": words}])
        # of `check` the part that looks at words, a tenth of it
        unused = {(f.code, f.subject) for f in unused_words(Model(Space([registry]), registry))}
        # in vLLM Falcon's layers keep a plain cache whatever the word, so that one request with it is served
        refused = {("kv_dtype", "fp8_foo")} if base == "default" else set()
        new = {("features", "cascade"), ("flags", "turbo"), ("packages", "turbolib")} | refused
        assert unused - {known.key for known in registry.known} == {("unused-word", subject) for subject in new}
