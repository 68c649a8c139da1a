"""Mistakes in the rules of a run, and in what rows state for it: each has its place and its cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.registries.files import brief, refusal, row, write
from support.registries.starts import vocabulary
from support.suite.sentences import Sentences

LAYOUT = "layout: {agree: common, layouts: [LBHNC, LBNHC], default: [LBNHC]"
GRAPHS = "graphs: {asked: [{mode: full}]"
# a name -> steps.yaml, or a row's keys, and the places
RULES = {
    "an unknown way to agree": ("layout: {agree: most, layouts: [LBHNC], default: [LBHNC]}", "1:17"),
    "no layout": ("layout: {agree: common, layouts: [LHBCN], default: [LBHNC]}", "1:35"),
    "a default that is none": (f"{LAYOUT}, block_compact: [BLHNC]}}", "1:84"),
    "a layout twice": ("layout: {agree: common, layouts: [LBHNC, LBHNC], default: [LBHNC]}", "1:42"),
    "an alias of none": (f"{LAYOUT}, aliases: {{HND: BLHNC}}}}", "1:83"),
    "a second cache without layouts": (f"{LAYOUT}, beside: [{{when: {{arch: g1}}, name: I}}]}}", "1:77"),
    "not known of every run": (f"{LAYOUT}, unknown: [{{because: b}}]}}", "1:78"),
    "an unknown mode": ("graphs: {asked: [{mode: half}]}", "1:25"),
    "no mode for the rest": ("graphs: {asked: [{when: {arch: g1}, mode: full}]}", "1:18"),
    "an unreachable mode": ("graphs: {asked: [{mode: full}, {mode: none}]}", "1:32"),
    "no pieces for the rest": (f"{GRAPHS}, pieces: [{{when: {{arch: g1}}, pieces: whole}}]}}", "1:42"),
    "a second cache without a level": (f"{GRAPHS}, beside: [{{when: {{arch: g1}}, name: I}}]}}", "1:42"),
    "an unknown level": (f"{GRAPHS}, mixers: [{{kinds: [conv], level: some}}]}}", "1:65"),
}
ROWS = {
    "a layout that the run has not": ("layouts: BLHNC", "8:14"),
    "an entry with such a layout": ("layouts: [{layouts: [LBHNC, BLHNC]}]", "8:33"),
    "a level that is none": ("graphs: most", "8:13"),
    "a condition on nothing": ("graphs: [{some: {archs: g1}, level: always}]", "8:22"),
}


@pytest.mark.parametrize(("text", "places"), RULES.values(), ids=RULES)
def test_wrong_rules_for_a_run(text: str, places: str, tmp_path: Path, sentences: Sentences) -> None:
    files = {"vocabulary": vocabulary(), "backends": row("capabilities: {dtypes: [float16]}")}
    sentences.check(brief(refusal(write(tmp_path, **files, steps=f"{text}\n"))), places)


@pytest.mark.parametrize(("text", "places"), ROWS.values(), ids=ROWS)
def test_wrong_statements_of_a_row(text: str, places: str, tmp_path: Path, sentences: Sentences) -> None:
    files = {"vocabulary": vocabulary(), "backends": row(text, "capabilities: {dtypes: [float16]}")}
    sentences.check(brief(refusal(write(tmp_path, **files, steps=f"{LAYOUT}}}\n"))), places)
