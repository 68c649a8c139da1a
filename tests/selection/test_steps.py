"""The steps of an engine's start: what they write, what later ones see, what they refuse, and the backend they name."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support.registries.files import row
from support.registries.starts import ask, load, vocabulary

import attnreg

STEPS = """\
steps:
  - step: cast
    when: {dtype: float32}
    cases:
      - {when: {pooling: true}, sets: {dtype: float16}, because: poolers are small}
      - {when: {arch: g1}, sets: {}}
      - {sets: {dtype: bfloat16}}
  - step: default
    when: {mine: null, asked: automatic}
    cases:
      - {when: {dtype: bfloat16}, sets: {mine: B}}
  - step: too-old
    when: {mine: B, arch: g1}
    refuses: B wants another machine
  - step: phases
    when: {mine: {not: null}}
    sets: {prefill: {from: mine}, page: 64, features: [sinks], without: [alibi]}
  - step: result
    when: {prefill: {not: null}}
    sets: {named: {from: prefill}}
"""


def test_a_registry_without_steps_has_no_start(tmp_path: Path) -> None:
    assert ask(load(tmp_path, "")).start is None


def test_steps_write_and_later_ones_see_it(tmp_path: Path) -> None:
    selection = ask(load(tmp_path, STEPS), dtype="float32", features=["alibi"])
    start = selection.start
    assert start is not None
    assert selection.backend is not None
    assert selection.backend.name == "B"
    assert [(t.name, t.changes) for t in start.changes] == [
        ("cast", {"dtype": ("float32", "bfloat16")}),
        ("default", {"mine": (None, "B")}),
        (
            "phases",
            {"prefill": (None, "B"), "page": (None, 64), "features": (frozenset({"alibi"}), frozenset({"sinks"}))},
        ),
        ("result", {"named": (None, "B")}),
    ]
    assert start.facts["page"] == 64
    request = start.request(selection.request, selection.registry)
    assert (request.dtype, request.features, request.extra) == ("bfloat16", {"sinks"}, (("mine", "B"),))
    assert selection.request.dtype == "float32"
    assert pickle.loads(pickle.dumps(selection)) == selection


def test_the_first_case_that_holds_speaks(tmp_path: Path) -> None:
    registry = load(tmp_path, STEPS)
    pooled = ask(registry, dtype="float32", pooling=True)
    assert pooled.start is not None
    assert pooled.start.facts["dtype"] == "float16"
    assert "→ dtype float32 → float16 (cast): poolers are small (steps.yaml:5)" in str(pooled)
    # a case that sets nothing speaks too
    old = ask(registry, dtype="float32", arch="g1")
    assert old.start is not None
    assert old.start.taken == ()
    assert old.start.facts["dtype"] == "float32"


def test_a_refused_run_has_no_candidates(tmp_path: Path) -> None:
    registry = load(tmp_path, STEPS)
    selection = ask(registry, mine="B", arch="g1")
    assert (selection.backend, selection.order, selection.candidates) == (None, None, ())
    assert selection.start is not None
    assert selection.start.refusal is not None
    assert selection.start.refusal.name == "too-old"
    assert "refused by too-old, steps.yaml:12" in str(selection)
    with pytest.raises(
        attnreg.NoBackendError, match=r"The run is refused on gpu g1: B wants another machine \(too-old"
    ):
        attnreg.select(selection.request, selection.platform, registry)
    assert selection.started == ("B wants another machine (steps.yaml:12)",)


def test_a_name_of_the_users_counts_for_the_steps(tmp_path: Path) -> None:
    selection = ask(load(tmp_path, STEPS), "A", dtype="bfloat16")
    assert selection.start is not None
    assert selection.start.taken == ()
    assert selection.requested == "A"
    assert [r.facets for r in selection.candidates[0].reasons] == [("dtype",)]


def test_a_named_row_is_judged_alone_and_by_model(tmp_path: Path) -> None:
    steps = "steps: [{step: lock, when: {head_size: 64}, sets: {named: A}}]"
    rules = "rules: [{when: {asked: by_model, named: A, num_heads: 3}, reject: odd, facets: [num_heads]}]"
    registry = load(tmp_path, steps, backends=row("capabilities: {dtypes: [float16]}", rules))
    assert [c.name for c in ask(registry).candidates] == ["A"]
    assert "named by lock, steps.yaml:1" in str(ask(registry))
    refused = ask(registry, num_heads=3)
    assert [r.text for r in refused.candidates[0].reasons] == ["odd"]
    assert refused.backend is None
    # the order decides where no step names one
    assert [c.name for c in ask(registry, head_size=32).candidates] == ["A", "B"]
    assert ask(registry, "B").requested is None


def test_derived_facets_are_read_at_the_moment(tmp_path: Path) -> None:
    cases = [{"when": {"prefill": {"not": None}}, "value": {"from": "prefill"}}, {"value": {"from": "mine"}}]
    steps = """\
steps:
  - {step: one, when: {both: A}, sets: {prefill: B}}
  - {step: two, when: {both: B}, sets: {page: 2}}
  - {step: three, when: {both: A}, sets: {page: 3}}
"""
    selection = ask(load(tmp_path, steps, vocabulary=vocabulary(both=cases)), mine="A")
    assert selection.start is not None
    assert selection.start.facts["page"] == 2
    assert selection.derived["both"][0] == "B"
    decided = selection.start.decided_by("page")
    assert decided is not None
    assert decided.name == "two"


def test_phases_share_an_answer_and_see_each_other(tmp_path: Path) -> None:
    """A phase without a backend of its own takes the other's, and a condition reads what the other got."""
    cases = [
        {"when": {"phase": "prefill", "prefill": {"not": None}}, "value": {"from": "prefill"}},
        {"value": {"from": "mine"}},
    ]
    steps = """\
steps:
  - {step: prompts, when: {mine: B, arch: g2}, sets: {prefill: A}}
  - {step: pages, when: {prefill: A}, sets: {page: 64}, because: the kernel for prompts reads pages of 64}
  - {step: result, sets: {named: {from: both}}}
"""
    words = vocabulary(both=cases).replace("any: l", "{any: l, prefill: l, decode: l}", 1)
    registry = load(tmp_path, steps, vocabulary=words)

    def chosen(arch: str, phase: str) -> tuple[str | None, int | None]:
        selection = ask(registry, mine="B", arch=arch, phase=phase)
        assert selection.start is not None
        return selection.backend and selection.backend.name, selection.start.facts.get("page")

    assert [chosen("g1", phase) for phase in ("prefill", "decode")] == [("B", None), ("B", None)]
    # decoding has the page that the backend for prompts asks for
    assert [chosen("g2", phase) for phase in ("prefill", "decode")] == [("A", 64), ("B", 64)]


def test_products_and_remainders(tmp_path: Path) -> None:
    steps = """\
steps:
  - {step: all, sets: {page: {product: [num_heads, block_size]}}}
  - {step: rest, when: {pooling: true}, sets: {page: {remainder: [24, block_size]}}}
  - {step: odd, when: {pooling: true, page: {min: 1}}, refuses: the pages do not divide 24}
"""
    registry = load(tmp_path, steps)
    selection = ask(registry, num_heads=8, block_size=5)
    assert selection.start is not None
    assert selection.start.facts["page"] == 40
    assert "page not given → 40 (all)" in str(selection)
    assert ask(registry, num_heads=8).start.facts["page"] is None
    assert ask(registry, num_heads=8, block_size=8, pooling=True).start.facts["page"] == 0
    assert ask(registry, num_heads=8, block_size=5, pooling=True).start.refusal.name == "odd"


def test_the_selector_alone_stays_reachable(tmp_path: Path) -> None:
    registry = load(tmp_path, STEPS)
    assert registry.selector is registry.selector
    assert registry.selector.steps == ()
    assert ask(registry.selector, dtype="float32").start is None
    plain = load(tmp_path / "plain", "")
    assert plain.selector is plain


def test_what_follows_for_every_row(tmp_path: Path) -> None:
    registry = load(tmp_path, "after: [{when: {page: null, head_size: 96}, fails: no page}]")
    assert ask(registry, head_size=96).fails
    assert not ask(registry).fails
