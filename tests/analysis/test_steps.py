"""The exact model of an engine's start: at every configuration it says what the selector says."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.registries.files import row
from support.registries.starts import ask, load, vocabulary
from support.suite.sentences import Sentences

import attnreg
from attnreg.analysis.check.finding import Finding
from attnreg.analysis.check.findings import check
from attnreg.analysis.diff import diff
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.selection.selector import evaluate

DERIVED = {
    "both": [{"when": {"prefill": {"not": None}}, "value": {"from": "prefill"}}, {"value": {"from": "mine"}}],
    "wide": [{"when": {"page": {"min": 64}}, "value": True}, {"value": False}],
}
ROWS = row(
    "capabilities: {dtypes: [float16], features: [sinks]}",
    "rules:",
    "  - {when: {asked: by_model, num_heads: {min: 3}}, reject: odd, facets: [num_heads]}",
    "  - {when: {wide: true, named: A}, reject: wide, facets: [page]}",
)
FALLBACKS = "fallbacks: [{when: {arch: g1}, only: [num_heads, dtype], because: so it is}]\n"


def effect(random_: random.Random) -> dict[str, Any]:
    """A random effect of a step."""
    sets: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"mine": random_.choice(["A", "B", None])},
        {"prefill": {"from": "mine"}, "page": 64},
        {"mine": {"from": "both"}},
        {"features": ["sinks"]},
        {"without": ["sinks"]},
        {"page": {"from": "num_heads"}},
        {"page": {"product": ["num_heads", 24]}},
        {"page": {"remainder": ["num_heads", 3]}},
        {"named": {"from": "both"}},
        {"named": random_.choice(["A", "B"])},
    ]
    return {"refuses": "no"} if random_.random() < 0.1 else {"sets": random_.choice(sets)}


def condition(random_: random.Random) -> dict[str, Any]:
    """A random condition over what steps read."""
    conditions: list[dict[str, Any]] = [
        {"dtype": "float16"},
        {"mine": random_.choice(["A", "B", None])},
        {"both": random_.choice(["A", "B", None])},
        {"wide": True},
        {"page": {"max": 3}},
        {"arch": "g1"},
        {"pooling": True},
        {"features": ["sinks"]},
        {"without": ["sinks"]},
        {"asked": "automatic"},
        {"named": None},
        {"num_heads": {"min": 2}},
    ]
    return {k: v for c in random_.sample(conditions, random_.choice([1, 1, 2])) for k, v in c.items()}


def steps(random_: random.Random) -> str:
    """A steps.yaml of random steps."""
    made = []
    for number in range(random_.randint(1, 6)):
        conditions = [condition(random_) for _ in range(random_.randint(1, 2))]
        # the compiler refuses a case with the condition of an earlier one
        cases = [{"when": c, **effect(random_)} for i, c in enumerate(conditions) if c not in conditions[:i]]
        made.append({"step": f"s{number}", "when": condition(random_), "cases": cases})
    return yaml.safe_dump({"steps": made})


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("choice", [None, "require", "prefer"])
def test_the_model_agrees_with_the_selector_everywhere(seed: int, choice: str | None, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    files = {"backends": FALLBACKS + ROWS, "vocabulary": vocabulary(**DERIVED)}
    registry = load(tmp_path, steps(random_), **files)
    if choice:
        overlay = {"choices": [{choice: random_.choice(["A", "B"]), "when": {"pooling": True}}]}
        registry = attnreg.load_registry(tmp_path, [overlay])
    space = Space([registry])
    titles = Model(space, registry).titles()
    points = itertools.product(*(range(len(v.classes)) for v in space.variables))
    possible = [point for point in points if space.diagrams.evaluate(space.possible, point)]
    for point in random_.sample(possible, min(150, len(possible))):
        selection = evaluate(*space.example(point), registry)
        expected = selection.chosen.title if selection.chosen else None
        assert space.diagrams.evaluate(titles, point) == expected, selection


def test_products_and_remainders_are_exact_for_every_size(tmp_path: Path) -> None:
    """Also for sizes that are no example of their class."""
    text = """\
steps:
  - {step: all, sets: {page: {product: [num_heads, block_size]}}}
  - {step: refused, when: {page: {min: 40, max: 50}}, refuses: so many}
  - {step: named, when: {page: {multiple_of: 6}}, sets: {named: B}}
  - {step: rest, when: {pooling: true}, sets: {page: {remainder: [24, block_size]}}}
  - {step: odd, when: {pooling: true, page: [1, 3]}, refuses: a rest}
"""
    registry = load(tmp_path, text)
    space = Space([registry])
    titles = Model(space, registry).titles()
    names = set()
    for heads, block, pooling in itertools.product([None, *range(1, 20)], [None, *range(1, 28)], [None, True]):
        selection = ask(registry, num_heads=heads, block_size=block, pooling=pooling)
        names.add(expected := selection.chosen and selection.chosen.title)
        assert space.diagrams.evaluate(titles, space.point(selection.request, selection.platform)) == expected
    assert names == {"A", "B", None}


def found(registry: attnreg.Registry, *codes: str) -> dict[str, Finding]:
    return {finding.title: finding for finding in check(registry) if finding.code in codes}


def test_an_automatic_choice_is_never_refused(tmp_path: Path, sentences: Sentences) -> None:
    text = """\
steps:
  - {step: default, when: {mine: null}, cases: [{when: {arch: g1}, sets: {mine: B}}, {sets: {mine: A}}]}
  - {step: later, when: {mine: B, kv_dtype: fp8}, refuses: B reads no fp8}
  - {step: of-the-user, when: {kv_dtype: fp8, block_size: 3}, refuses: three is odd}
  - {step: lock, when: {pooling: true}, sets: {named: {from: mine}}}
after: [{when: {head_size: 96}, fails: no kernel}]
"""
    registry = load(tmp_path, text)
    refused = found(registry, "refused-start", "refused-row", "failing-choice")
    assert list(refused) == [
        "refused-start [later]",
        "refused-row [A]",
        "refused-row [B]",
        "failing-choice [A]",
        "failing-choice [B]",
    ]
    sentences.check("\n".join(finding.message for finding in refused.values()))
    example = refused["refused-start [later]"].example
    assert example is not None
    # the fewest facets that show it
    assert (example.platform.arch, example.request.to_dict()) == ("g1", {"head_size": 128, "kv_dtype": "fp8"})
    assert ask(registry, mine="B", kv_dtype="fp8").start is not None


def test_a_choice_that_fails_is_found_where_nothing_tells_who_named_it(tmp_path: Path) -> None:
    """Of a registry without the facets of a selection too, whose rows are judged alike for an order and for a user."""
    words = yaml.safe_load(vocabulary())
    for part, name in (("facets", "asked"), ("facets", "named"), ("words", "asked")):
        del words[part][name]
    text = "after: [{when: {head_size: 96}, fails: no kernel}]\nsteps: [{step: one, sets: {page: 64}}]\n"
    registry = load(tmp_path, text, vocabulary=yaml.safe_dump(words, sort_keys=False))
    assert "failing-choice [A]" in found(registry, "failing-choice")


def test_a_step_that_never_speaks(tmp_path: Path) -> None:
    text = """\
steps:
  - {step: one, sets: {mine: B}}
  - {step: two, when: {mine: A}, sets: {page: 3}}
  - {step: three, when: {asked: by_name, named: A}, sets: {page: 4}}
"""
    assert list(found(load(tmp_path, text), "unreachable-step")) == ["unreachable-step [two]"]


def test_a_backend_that_one_registry_alone_has_is_no_word_of_the_other(tmp_path: Path) -> None:
    text = "steps:\n  - {step: lock, when: {mine: {not: null}}, sets: {named: {from: mine}}}\n"
    backends = row("capabilities: {dtypes: [float16]}")
    more = yaml.safe_load(backends)
    more["backends"]["C"] = more["backends"]["A"]
    before = load(tmp_path / "before", text, backends=backends)
    after = load(tmp_path / "after", text, backends=yaml.safe_dump(more, sort_keys=False))
    assert ask(after, mine="C").title == "C"
    difference = diff(before, after)
    assert (difference.count, difference.new["mine"]) == (0, ("C",))
