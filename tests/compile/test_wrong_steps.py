"""Wrong steps: each is refused at its line, with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.files import brief, refusal, write
from support.starts import ask, load, vocabulary

import attnreg

PAGE = {
    "no size where nothing holds": (
        "{agree: first, default: [{when: {dtype: float16}, tokens: 16}]}",
        "steps.yaml:1:32: page.default: no size is left where no `when` holds",
    ),
    "a default that is never reached": (
        "{agree: first, default: [{tokens: 16}, {tokens: 32}]}",
        "page.default: unreachable size: number 1 of the list has no `when`",
    ),
    "another way to agree": ("{agree: all, default: [{tokens: 16}]}", "page.agree"),
    "no size": ("{agree: first, default: []}", "page.default"),
    "a size of nothing": ("{agree: first, default: [{tokens: 0}]}", "page.default.tokens"),
    "an unknown facet": (
        "{agree: first, default: [{tokens: 16}], unknown: [{when: {dtyp: float16}, because: b}]}",
        "page.unknown.when.dtyp: unknown facet `dtyp`",
    ),
    "every run": (
        "{agree: first, default: [{tokens: 16}], unknown: [{because: b}]}",
        "page.unknown: is of every run",
    ),
    "blocks of no size": (
        "{agree: first, default: [{tokens: 16}], beside: [{when: {dtype: float16}, name: n, kernel_blocks: x}]}",
        "page.beside.kernel_blocks: expected tokens",
    ),
    "a kind of layers that has no blocks": (
        "{agree: first, default: [{tokens: 16}], apart: [mamba]}",
        "page.apart",
    ),
    "a source of nowhere": (
        "{agree: first, default: [{tokens: 16, source: here}]}",
        "page.default.source: `here` is not <source>:<path>#<symbol>",
    ),
}


def step(text: str) -> str:
    return f"steps:\n  - {text}\n"


WRONG = {
    "no effect": (
        "{step: s}",
        "steps.yaml:2:5: steps: does nothing\n  help: a step has `cases`, or one effect of its own",
    ),
    "two effects": (
        "{step: s, sets: {}, cases: [{sets: {}}]}",
        "steps.yaml:2:5: steps: states `cases` and an effect\n  help: a step has `cases`, or one effect of its own",
    ),
    "sets and refuses": (
        "{step: s, sets: {pooling: true}, refuses: r}",
        "steps.yaml:2:5: steps: states `sets` and `refuses`\n  help: a step has one effect: keep one",
    ),
    "an unknown facet": (
        "{step: s, sets: {dtyp: float16}}",
        "steps.yaml:2:22: steps.sets.dtyp: unknown facet `dtyp`\n  help: did you mean `dtype`?",
    ),
    "a facet of the platform": (
        "{step: s, sets: {arch: g1}}",
        "steps.yaml:2:22: steps.sets.arch: `arch` belongs to the platform",
    ),
    "an unknown word": (
        "{step: s, sets: {dtype: float17}}",
        "steps.yaml:2:29: steps.sets.dtype: unknown dtype 'float17'",
    ),
    "a pattern": ("{step: s, sets: {dtype: 'float*'}}", "steps.yaml:2:29: steps.sets.dtype: `float*` is a pattern"),
    "several values": ("{step: s, sets: {dtype: [float16]}}", "expected one value, got"),
    "a required facet": ("{step: s, sets: {dtype: null}}", "steps.sets.dtype: every request has a dtype"),
    "an integer that is too small": ("{step: s, sets: {block_size: 0}}", "steps.sets.block_size: "),
    "a copy of nothing": ("{step: s, sets: {mine: {from: yours}}}", "steps.sets.mine.from: unknown facet `yours`"),
    "a copy of another kind": (
        "{step: s, sets: {mine: {from: dtype}}}",
        "steps.sets.mine.from: `dtype` has values that `mine` cannot have",
    ),
    "a copy that may be absent": (
        "{step: s, sets: {head_size: {from: num_heads}}}",
        "steps.sets.head_size.from: `num_heads` has values that `head_size` cannot have",
    ),
    "a copy of a set": ("{step: s, sets: {mine: {from: features}}}", "`features` cannot be copied"),
    "an unknown form": (
        "{step: s, sets: {page: {sum: [num_heads, 2]}}}",
        "steps.sets.page: expected a value, {from: FACET}, {product: [A, B]} or {remainder: [A, B]}, got",
    ),
    "three operands": ("{step: s, sets: {page: {product: [num_heads, 2, 3]}}}", "steps.sets.page: expected a value, "),
    "two numbers": (
        "{step: s, sets: {page: {product: [2, 3]}}}",
        "steps.yaml:2:38: steps.sets.page.product: both are numbers\n  help: write the product",
    ),
    "a remainder of two facets": (
        "{step: s, sets: {page: {remainder: [num_heads, block_size]}}}",
        "steps.sets.page.remainder: the remainder of two facets\n  help: one of the two is a number",
    ),
    "an operand that is no size": (
        "{step: s, sets: {page: {product: [dtype, 2]}}}",
        "steps.yaml:2:39: steps.sets.page.product: `dtype` holds no integer",
    ),
    "an unknown operand": (
        "{step: s, sets: {page: {product: [num_head, 2]}}}",
        "unknown facet `num_head`\n  help: did you mean `num_heads`?",
    ),
    "a divisor of 0": (
        "{step: s, sets: {page: {remainder: [num_heads, 0]}}}",
        "steps.sets.page.remainder: expected a facet, or an integer of at least 1, got `0`",
    ),
    "a product that is no size": (
        "{step: s, sets: {dtype: {product: [num_heads, 2]}}}",
        "steps.sets.dtype.product: `dtype` holds no integer",
    ),
    "a product that may be absent": (
        "{step: s, sets: {head_size: {product: [num_heads, 2]}}}",
        "steps.sets.head_size.product: every request has a head_size",
    ),
    "a remainder of 0": (
        "{step: s, sets: {block_size: {remainder: [num_heads, 2]}}}",
        "steps.sets.block_size.remainder: `block_size` is at least 1, and a remainder may be 0",
    ),
    "an unknown feature": ("{step: s, sets: {features: [sink]}}", "steps.sets.features: unknown feature `sink`"),
    "a feature in and out": ("{step: s, sets: {features: [sinks], without: [sinks]}}", "adds sinks and takes it out"),
    "an unreachable case": ("{step: s, cases: [{sets: {}}, {refuses: r}]}", "unreachable case: number 1 of the list"),
    "an unknown key": ("{step: s, set: {}}", "steps: unknown key `set`\n  help: did you mean `sets`?"),
    "a wrong condition": ("{step: s, when: {archs: g1}, refuses: r}", "steps.when.archs: unknown facet `archs`"),
    "a wrong source": ("{step: s, refuses: r, source: x}", "`x` is not <source>:<path>#<symbol>"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_wrong_steps(text: str, message: str, tmp_path: Path) -> None:
    assert message in brief(refusal(write(tmp_path, vocabulary=vocabulary(), steps=step(text))))


def test_naming_needs_its_word(tmp_path: Path) -> None:
    text = vocabulary({"automatic": "l", "by_name": "l"})
    said = refusal(write(tmp_path, vocabulary=text, steps=step("{step: s, sets: {named: A}}")))
    assert "`asked` has no word `by_model`" in said


def test_a_start_facet_cannot_be_given(tmp_path: Path) -> None:
    with pytest.raises(attnreg.RequestError, match="'prefill', which is set by steps alone"):
        ask(load(tmp_path, ""), prefill="A")


@pytest.mark.parametrize(("text", "message"), PAGE.values(), ids=PAGE)
def test_wrong_rules_for_a_page(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(attnreg.RegistryError) as error:
        load(tmp_path, f"page: {text}\n")
    assert message in str(error.value)
