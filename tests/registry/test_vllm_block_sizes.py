"""The block size of the KV cache that vLLM settles for a model, held against what its own code recorded."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.models.recorded_starts import NEWEST, RELEASES, Row, questions, recorded, registry

import attnreg
from attnreg.explain import explain
from attnreg.explain.block_size import BlockSize
from attnreg.language.engine.pages import PageRules

# rows that were recorded for what settles the size, after the rules were written
BLOCKS = "blocks-"
# vLLM has attention of its own for it, for which attnreg finds no backend
NOT_HELD = {"family-inkling_mm_model"}
# release -> how many of its rows are not known: their runs stop after what was recorded
STOPS = {"0.33.0": 12, "0.32.0": 3, "0.31.0": 2, "0.30.0": 2, "0.29.0": 1, "0.28.0": 1, "0.26.0": 1, "0.24.0": 6}

# release -> how many more are not known: their layers take a backend without asking it about their cache or dtype
UNASKED = {"0.33.0": 2}


def rows_of(release: str) -> Iterator[tuple[Row, str]]:
    """The rows for which vLLM settled a size, each with the part of the recording that it is of."""
    for part in ("", BLOCKS):
        if (ROOT / f"tests/data/vllm/start-{part}{release}.jsonl.gz").exists():
            for row in recorded(release, part)[1]:
                if "block_size" in row["out"] and row["in"]["model"] not in NOT_HELD:
                    yield row, part


def said(row: Row, part: str, directory: Path, release: str, altered: attnreg.Registry | None = None) -> BlockSize:
    """What `explain` says of a row. altered: the registry with other rules."""
    model, platform = questions(row["in"], directory, release, part)
    of = altered or registry(release)
    answer = explain(model.questions, [platform], of, backend=row["in"].get("attention_backend"), memory=model.memory)
    (page,) = answer.pages
    return page


@functools.cache
def rules(release: str) -> PageRules:
    found = registry(release).page
    assert found is not None
    return found


@pytest.mark.slow(reason="the recorded starts of a release")
@pytest.mark.parametrize("release", RELEASES)
def test_a_size_is_vllms_or_is_said_not_to_be_known(release: str, tmp_path: Path) -> None:
    wrong: dict[str, Any] = {}
    unknown, stops, unasked, count = [], 0, 0, 0
    for row, part in rows_of(release):
        page, settled = said(row, part, tmp_path, release), row["out"]["block_size"]
        count += 1
        if page.text == "the engine is known to stop with a backend that it chose":
            stops += 1
        elif page.tokens is None and "without asking whether it" in page.text:
            unasked += 1
        elif page.tokens is None:
            unknown.append(page)
        elif page.tokens != settled:
            wrong[json.dumps(row["in"])] = (page.tokens, page.text, settled)
    assert wrong == {}
    assert (unknown, stops, unasked) == ([], STOPS[release], UNASKED.get(release, 0))
    assert count >= 23


def test_the_rows_show_what_there_is_to_show() -> None:
    sizes = {release: [row["out"]["block_size"] for row, _ in rows_of(release)] for release in RELEASES}
    assert sum(map(len, sizes.values())) > 600
    assert {16, 32, 48, 64, 128, 256} < set(sizes[NEWEST])
    # and not by the user alone
    free = {row["out"]["block_size"] for row, _ in rows_of(NEWEST) if row["in"].get("block_size") is None}
    assert {16, 32, 64, 128} < free


def without_preferences(whole: attnreg.Registry) -> attnreg.Registry:
    """The registry whose backends prefer no block size."""
    rows = {}
    for name, row in whole.backends.items():
        plain = [
            dataclasses.replace(v, consequences=tuple(dataclasses.replace(c, prefers=None) for c in v.consequences))
            for v in row.variants
        ]
        rows[name] = dataclasses.replace(row, variants=tuple(plain))
    return dataclasses.replace(whole, backends=rows)


def other_rules(**changes: Any) -> Callable[[attnreg.Registry], attnreg.Registry]:
    def altered(whole: attnreg.Registry) -> attnreg.Registry:
        assert whole.page is not None
        return dataclasses.replace(whole, page=dataclasses.replace(whole.page, **changes))

    return altered


ALTERED: dict[str, tuple[str, Callable[[attnreg.Registry], attnreg.Registry]]] = {
    "0.33 asks the first layer alone": (NEWEST, other_rules(agree="first")),
    "the default of GPUs is that of processors": (NEWEST, other_rules(default=rules(NEWEST).default[:1])),
    "the default of processors is that of GPUs": (NEWEST, other_rules(default=rules(NEWEST).default[1:])),
    "hybrids are like others": (NEWEST, other_rules(unknown=(), states=None)),
    "indexers have no blocks": (NEWEST, other_rules(beside=())),
    "layers that keep a plain cache raise nothing": (NEWEST, other_rules(raised=())),
    "float32 raises no further": (NEWEST, other_rules(raised=rules(NEWEST).raised[1:])),
    "cross-attention is like other attention": (NEWEST, other_rules(apart=frozenset())),
    "no backend prefers a size": (NEWEST, without_preferences),
    "0.32 asks the first layer alone, and nothing is raised": ("0.32.0", other_rules(agree="first", raised=())),
    "0.24 knows no hybrids": ("0.24.0", other_rules(unknown=(), states=None)),
}


@pytest.mark.slow(reason="the recorded starts again for each rule")
@pytest.mark.parametrize(("release", "change"), ALTERED.values(), ids=ALTERED)
def test_each_rule_decides_some_row(
    release: str, change: Callable[[attnreg.Registry], attnreg.Registry], tmp_path: Path
) -> None:
    altered = change(registry(release))
    pages = ((said(row, part, tmp_path, release, altered), row["out"]["block_size"]) for row, part in rows_of(release))
    assert any(page.tokens not in (None, settled) for page, settled in pages)
