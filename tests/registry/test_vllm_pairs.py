"""Pairs of well-known models and drafts, held against what vLLM's own functions settled for their runs."""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from support import DATA
from support.models.recorded_starts import Row
from support.models.whole_starts import compare

RELEASE = "0.33.0"
ARCHITECTURES = ("sm75", "sm80", "sm90", "sm100", "sm120", "gfx942", "gfx950", "gfx1201")
# rows of an architecture whose plan is not known, and those that vLLM stopped for a reason that is not about attention
NOT_KNOWN = {"sm80": 2, "sm90": 2, "sm100": 2, "sm120": 6, "gfx942": 8, "gfx950": 8, "gfx1201": 8}
LEFT_OUT = {"sm75": 12, "sm80": 6, "sm90": 6, "sm100": 6, "sm120": 6}


@functools.cache
def recorded() -> tuple[dict[str, Row], list[Row]]:
    """The configs by name, and the rows."""
    with gzip.open(DATA / f"vllm/pairs-{RELEASE}.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    models = {line["model"]: line["config"] for line in lines if "config" in line}
    return models, [line for line in lines if "out" in line]


@pytest.mark.slow(reason="plans 186 runs")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layout_page_and_graphs_are_vllms(arch: str, tmp_path: Path) -> None:
    models, rows = recorded()
    kinds, wrong = Counter[str](), dict[str, str]()
    mine = [row for row in rows if row["in"]["arch"] == arch]
    for row in mine:
        verdict = compare(row, models, tmp_path, RELEASE)
        kinds[verdict.kind] += 1
        if verdict.kind == "different":
            wrong[json.dumps(row["in"])] = verdict.text
    assert not wrong, "\n".join(f"{asked}: {text}" for asked, text in wrong.items())
    assert (len(mine), kinds["not known"], kinds["left out"]) == (186, NOT_KNOWN.get(arch, 0), LEFT_OUT.get(arch, 0))


def test_the_pairs_are_those_of_each_model_and_draft() -> None:
    models, rows = recorded()
    targets = {row["in"]["model"] for row in rows}
    methods = Counter(row["in"].get("speculative_config", {}).get("method", "none") for row in rows)
    assert len(targets) == 29
    assert methods == {"none": 464, "draft_model": 928, "mtp": 64, "eagle3": 16, "dflash": 16}
    assert {row["in"]["model"] for row in rows} | {row["in"].get("draft") for row in rows} - {None} == models.keys()
