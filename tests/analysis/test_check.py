"""What `check` finds, each kind on a registry of a few rows."""

from __future__ import annotations

from typing import Any

import pytest
from support import tiny
from support.tiny import row

import attnreg
from attnreg import Registry
from attnreg.analysis.check.findings import check
from attnreg.analysis.check.unused import unused_words
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model


def found(registry: Registry, kind: str) -> list[str]:
    return [f.message for f in check(registry) if f.kind == kind]


def order(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"name": more.pop("name", "last"), "order": list(entries), **more}


SINKS = {"features": ["sinks"]}
WIDE = {"head_sizes": {"min": 8}}

# of the words of tiny registries: what most of their rows leave out
UNREAD = ["no backend accepts arch n1", "nothing asks for the flag fast", "nothing asks for the package lib"]

# name, the registry, the kind of finding, the messages
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
    assert found(below, "unreachable entry") == []
    text = {"place": [{"backend": "A", "before": "B", "orders": ["gpu/last"]}]}
    above = tiny.load(rows, {"gpu": [order_]}, overlays=[text])
    assert [e.backend for e in above.orders["gpu"][0].entries] == ["A", "B"]
    assert found(above, "unreachable entry") == []
    # nor is an order that an order of the overlay goes before; an entry of the overlay's own is judged
    first = {"orders": {"gpu": [order("A", "B", name="first")]}}
    above = tiny.load(rows, {"gpu": [order_]}, overlays=[first])
    assert found(above, "unreachable order") == []
    assert len(found(above, "unreachable entry")) == 1


def test_a_place_that_is_dead_in_one_of_its_orders_says_how_to_leave_it_out() -> None:
    rows = {"A": row(requires={"arch": "g1"}), "B": row(capabilities=SINKS)}
    orders = {"gpu": [order("B", name="sinks", when=SINKS), order("B")]}
    registry = tiny.load(rows, orders, overlays=[{"place": [{"backend": "A", "before": "B"}]}])
    (finding,) = [f for f in check(registry) if f.kind == "unreachable entry"]
    assert finding.message == ("A is never chosen by the order gpu/sinks: it accepts no request that comes this way")
    assert finding.help == "name the other orders beside its place: `orders: [gpu/last]`"


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
        ["no backend serves alibi", "no backend accepts kv_dtype fp8", *UNREAD],
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
        UNREAD,
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
        "unused word",
        ["no backend accepts kv_dtype fp8", "no backend serves sinks", *UNREAD],
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
        "unused word",
        ["no backend accepts kv_dtype fp8", "no backend accepts arch n1"],
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
        ["no backend serves alibi", *UNREAD],
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
        unused = {f.message for f in unused_words(Model(Space([registry]), registry)) if f.kind == "unused word"}
        # in vLLM Falcon's layers keep a plain cache whatever the word, so that one request with it is served
        refused = {"no backend accepts kv_dtype fp8_foo"} if base == "default" else set()
        assert {m for m in unused if not any(m.startswith(known.finding) for known in registry.known)} == refused | {
            "no backend serves cascade",
            "nothing asks for the flag turbo",
            "nothing asks for the package turbolib",
        }


def test_what_an_overlay_is_meant_to_take_away_is_listed_in_its_known() -> None:
    denied = {"choices": [{"when": {"arch": "sm120"}, "deny": "FLASHINFER"}]}
    [finding] = check(attnreg.load_registry("default", [denied]))
    assert finding.message.startswith("violated: an fp8 cache is served by some backend on every NVIDIA GPU")
    assert finding.help.endswith("what an overlay's choices are meant to take away is listed in its `known`")
    meant = {"finding": "violated: an fp8 cache is served", "because": "no such caches here"}
    assert check(attnreg.load_registry("default", [denied | {"known": [meant]}])) == []
    # what the overlay lists for nothing is a finding of its own; what the registry below lists is not
    [stale] = check(attnreg.load_registry("default", [{"known": [meant]}]))
    assert (stale.kind, stale.message) == ("stale exception", "found no longer: violated: an fp8 cache is served")
    for empty in ("", " "):
        with pytest.raises(attnreg.RegistryError, match=r"known.finding"):
            attnreg.load_registry("default", [{"known": [{"finding": empty, "because": "b"}]}])
