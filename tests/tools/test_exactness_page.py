"""docs/exactness.md: every bundled table of an engine, with the decisions that hold it."""

from __future__ import annotations

import gzip
import json

import support
import yaml

from attnreg import bundled_registries

RECORDED = yaml.safe_load((support.DATA / "recorded.yaml").read_text())


def test_every_engines_registry_says_how_exact_it_is():
    assert {name.partition(", ")[0] for name in RECORDED} == bundled_registries().keys() - {"default"}


def test_the_page_has_the_number_of_decisions_of_each():
    page = (support.ROOT / "docs" / "exactness.md").read_text()
    for name, about in RECORDED.items():
        count = 0
        for file in about["files"]:
            with gzip.open(support.DATA / file, "rt") as lines:
                count += sum(1 for row in map(json.loads, lines) if "in" in row and "out" in row)
        registry, _, part = name.partition(", ")
        begin = f"| `{registry}`, {part} " if part else f"| `{registry}` "
        [line] = [line for line in page.splitlines() if line.startswith(begin)]
        assert f"| {count:,} " in line
        assert (support.ROOT / about["test"]).is_file()
