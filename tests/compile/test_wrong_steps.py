"""Wrong steps: each is refused at its line, with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.registries.files import brief, refusal, row, write
from support.registries.starts import ask, load, vocabulary
from support.suite.sentences import Sentences

import attnreg

PAGE = {
    "no size where nothing holds": ("{agree: first, default: [{when: {dtype: float16}, tokens: 16}]}", "1:32"),
    "a default that is never reached": ("{agree: first, default: [{tokens: 16}, {tokens: 32}]}", "1:46"),
    "another way to agree": ("{agree: all, default: [{tokens: 16}]}", "1:15"),
    "no size": ("{agree: first, default: []}", "1:31"),
    "a size of nothing": ("{agree: first, default: [{tokens: 0}]}", "1:41"),
    "an unknown facet": (
        "{agree: first, default: [{tokens: 16}], unknown: [{when: {dtyp: float16}, because: b}]}",
        "1:65",
    ),
    "every run": ("{agree: first, default: [{tokens: 16}], unknown: [{because: b}]}", "1:57"),
    "blocks of no size": (
        "{agree: first, default: [{tokens: 16}], beside: [{when: {dtype: float16}, name: n, kernel_blocks: x}]}",
        "1:105",
    ),
    "a kind of layers that has no blocks": ("{agree: first, default: [{tokens: 16}], apart: [mamba]}", "1:55"),
    "a source of nowhere": ("{agree: first, default: [{tokens: 16, source: here}]}", "1:53"),
}


def step(text: str) -> str:
    return f"steps:\n  - {text}\n"


WRONG = {
    "no effect": ("{step: s}", "2:5"),
    "two effects": ("{step: s, sets: {}, cases: [{sets: {}}]}", "2:5"),
    "sets and refuses": ("{step: s, sets: {pooling: true}, refuses: r}", "2:5"),
    "an unknown facet": ("{step: s, sets: {dtyp: float16}}", "2:22"),
    "a facet of the platform": ("{step: s, sets: {arch: g1}}", "2:22"),
    "an unknown word": ("{step: s, sets: {dtype: float17}}", "2:29"),
    "a pattern": ("{step: s, sets: {dtype: 'float*'}}", "2:29"),
    "several values": ("{step: s, sets: {dtype: [float16]}}", "2:29"),
    "a required facet": ("{step: s, sets: {dtype: null}}", "2:29"),
    "an integer that is too small": ("{step: s, sets: {block_size: 0}}", "2:34 2:34"),
    "a copy of nothing": ("{step: s, sets: {mine: {from: yours}}}", "2:35"),
    "a copy of another kind": ("{step: s, sets: {mine: {from: dtype}}}", "2:35"),
    "a copy that may be absent": ("{step: s, sets: {head_size: {from: num_heads}}}", "2:40"),
    "a copy of a set": ("{step: s, sets: {mine: {from: features}}}", "2:35"),
    "an unknown form": ("{step: s, sets: {page: {sum: [num_heads, 2]}}}", "2:28"),
    "three operands": ("{step: s, sets: {page: {product: [num_heads, 2, 3]}}}", "2:28"),
    "two numbers": ("{step: s, sets: {page: {product: [2, 3]}}}", "2:38"),
    "a remainder of two facets": ("{step: s, sets: {page: {remainder: [num_heads, block_size]}}}", "2:40"),
    "an operand that is no size": ("{step: s, sets: {page: {product: [dtype, 2]}}}", "2:39"),
    "an unknown operand": ("{step: s, sets: {page: {product: [num_head, 2]}}}", "2:39"),
    "a divisor of 0": ("{step: s, sets: {page: {remainder: [num_heads, 0]}}}", "2:52"),
    "a product that is no size": ("{step: s, sets: {dtype: {product: [num_heads, 2]}}}", "2:39"),
    "a product that may be absent": ("{step: s, sets: {head_size: {product: [num_heads, 2]}}}", "2:43"),
    "a remainder of 0": ("{step: s, sets: {block_size: {remainder: [num_heads, 2]}}}", "2:46"),
    "an unknown feature": ("{step: s, sets: {features: [sink]}}", "2:33"),
    "a feature in and out": ("{step: s, sets: {features: [sinks], without: [sinks]}}", "2:21"),
    "an unreachable case": ("{step: s, cases: [{sets: {}}, {refuses: r}]}", "2:35"),
    "an unknown key": ("{step: s, set: {}}", "2:5 2:15"),
    "a wrong condition": ("{step: s, when: {archs: g1}, refuses: r}", "2:22"),
    "a wrong source": ("{step: s, refuses: r, source: x}", "2:35"),
}


@pytest.mark.parametrize(("text", "places"), WRONG.values(), ids=WRONG)
def test_wrong_steps(text: str, places: str, tmp_path: Path, sentences: Sentences) -> None:
    sentences.check(brief(refusal(write(tmp_path, vocabulary=vocabulary(), steps=step(text)))), places)


def test_naming_needs_its_word(tmp_path: Path) -> None:
    text = vocabulary({"automatic": "l", "by_name": "l"})
    said = refusal(write(tmp_path, vocabulary=text, steps=step("{step: s, sets: {named: A}}")))
    assert "`asked` has no word `by_model`" in said


def test_a_start_facet_cannot_be_given(tmp_path: Path) -> None:
    with pytest.raises(attnreg.RequestError, match="'prefill', which is set by steps alone"):
        ask(load(tmp_path, ""), prefill="A")


@pytest.mark.parametrize(("text", "places"), PAGE.values(), ids=PAGE)
def test_wrong_rules_for_a_page(text: str, places: str, tmp_path: Path, sentences: Sentences) -> None:
    files = {"vocabulary": vocabulary(), "backends": row("capabilities: {dtypes: [float16]}")}
    sentences.check(brief(refusal(write(tmp_path, **files, steps=f"page: {text}\n"))), places)
