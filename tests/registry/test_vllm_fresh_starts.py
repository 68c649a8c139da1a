"""Whole starts that were drawn by a seed after the tables were written, held against the plans of the same runs."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from support import DATA
from support.models.whole_starts import compare

FILES = sorted(DATA.glob("vllm/fresh-*.jsonl.gz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_no_plan_says_something_else_than_vllm_did(path: Path, tmp_path: Path) -> None:
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    models = {line["model"]: line["config"] for line in lines if "config" in line}
    # fresh-0.33.0, and fresh-0.33.0-beside for Intel GPUs and processors
    release = path.name.removesuffix(".jsonl.gz").split("-")[1]
    kinds, wrong = Counter[str](), dict[str, str]()
    for row in (line for line in lines if "out" in line):
        verdict = compare(row, models, tmp_path, release)
        kinds[verdict.kind] += 1
        if verdict.kind == "different":
            wrong[json.dumps(row["in"])] = verdict.text
    assert not wrong, "\n".join(f"{asked}: {text}" for asked, text in wrong.items())
    assert kinds["equal"] > 25


def test_the_samples_add_up() -> None:
    for sample in yaml.safe_load((DATA / "fresh_starts.yaml").read_text()):
        parts = (sample[kind] for kind in ("equal", "different", "not known", "left out"))
        assert sum(parts) == sample["rows"], sample
