"""Charts of times from small records: error bars where a record has a spread, and words where it has none."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MACHINE = {"device": "A GPU", "attnreg": "0", "torch": "2", "triton": "3", "date": "2026-11-30"}
OLD: dict[str, Any] = {"case": "decode b1", "us": {"HOPPER_ATTN": 10.0, "FLASH_ATTN/FA3": 12.0, "other": "refused: no"}}
NEW: dict[str, Any] = {**OLD, "spread": {"HOPPER_ATTN": [9.5, 11.5], "FLASH_ATTN/FA3": [11.9, 40.0]}}


def recorded(root: Path, benchmark: str, *figures: dict[str, Any]) -> Path:
    """A root with a record of a benchmark, and empty ones of the others."""
    folder = root / "benchmarks/results"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("attention", "mla", "turboquant", "side_by_side", "graphs"):
        content = {"machine": MACHINE, "figures": figures if name == benchmark else []}
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return root


def table(chart: Any) -> list[list[str]]:
    """The rows of a chart's CSV."""
    return [*csv.reader(io.StringIO(chart.file().data.decode()))]


def test_a_record_with_a_spread_has_a_bar_for_each_median(gen_docs: ModuleType, tmp_path: Path) -> None:
    measured = gen_docs.docs_site.measured
    chart = measured.peers_chart(recorded(tmp_path, "side_by_side", NEW))
    assert chart.note.endswith(
        "Medians in µs; a bar goes from the 10th to the 90th percentile of the samples. Less is faster."
    )
    bars = re.findall(r'<g class="spread b(\d)"><line x1="([\d.]+)%" x2="([\d.]+)%"', chart.picture)
    assert {number for number, _, _ in bars} == {"0", "1"}
    own = next((float(low), float(high)) for number, low, high in bars if number == "0")
    (mark,) = re.findall(r'<svg x="([\d.]+)%" y="13" class="s0"', chart.picture)
    assert own[0] < float(mark) < own[1]
    # the axis reaches as far as the longest bar
    assert all(0 <= float(place) <= 100 for _, *ends in bars for place in ends)
    assert "other" not in chart.picture
    assert "HOPPER_ATTN: 10 µs, 10th to 90th percentile 9.5 to 11.5" in chart.picture
    head, row = table(chart)
    assert head[1:4] == [
        "HOPPER_ATTN (µs)",
        "HOPPER_ATTN, 10th percentile (µs)",
        "HOPPER_ATTN, 90th percentile (µs)",
    ]
    assert row == ["decode b1", "10.0", "9.5", "11.5", "12.0", "11.9", "40.0"]


def test_a_record_without_a_spread_has_no_bars_and_says_so(gen_docs: ModuleType, tmp_path: Path) -> None:
    chart = gen_docs.docs_site.measured.peers_chart(recorded(tmp_path, "side_by_side", OLD))
    assert "no error bars" in chart.note
    assert "spread" not in chart.picture
    assert table(chart) == [["case", "HOPPER_ATTN (µs)", "FLASH_ATTN/FA3 (µs)"], ["decode b1", "10.0", "12.0"]]


def test_a_record_of_two_runs_says_which_cases_have_no_bar(gen_docs: ModuleType, tmp_path: Path) -> None:
    chart = gen_docs.docs_site.measured.peers_chart(
        recorded(tmp_path, "side_by_side", NEW, {**OLD, "case": "decode b8"})
    )
    assert "A case without a bar is from a run that recorded no spread." in chart.note
    assert table(chart)[2] == ["decode b8", "10.0", "", "", "12.0", "", ""]


@pytest.mark.parametrize(
    ("benchmark", "case", "backend"),
    [
        ("attention", "decode b64", "TRITON_ATTN"),
        ("attention", "ROCM_ATTN decode b64", "ROCM_ATTN"),
        ("mla", "decode b64 h128", "TRITON_MLA"),
        ("mla", "sparse decode b64", "TRITON_MLA_SPARSE"),
        ("mla", "HOPPER_MLA_SPARSE decode b64", "HOPPER_MLA_SPARSE"),
        ("mla", "prefill 4k b4", "TRITON_PREFILL"),
        ("turboquant", "store turboquant_4bit_nc", "TURBOQUANT"),
    ],
)
def test_a_backend_has_the_chart_of_its_cases_with_the_bars_of_its_peers(
    gen_docs: ModuleType, tmp_path: Path, benchmark: str, case: str, backend: str
) -> None:
    figure = {"case": case, "us": 20.0, "spread": [19.0, 22.0], "floor": 8.0, "peers": {"FlashMLA": 30.0, "x": "no"},
              "peer_spreads": {"FlashMLA": [29.0, 33.0]}}  # fmt: skip
    measured = gen_docs.docs_site.measured
    root = recorded(tmp_path, benchmark, figure, {**figure, "case": "merge 16k"})
    chart = measured.speed_chart(root, backend)
    row = next(row for row in table(chart) if row[0] in case)
    assert row[1:] == ["20.0", "19.0", "22.0", "30.0", "29.0", "33.0", "8.0"]
    assert {f["backend"] for f in measured.figures(root, benchmark)[1]} <= {backend, "TRITON_ATTN", "TURBOQUANT"}
    assert measured.speed_chart(root, "TREE_ATTN") is None


def test_a_row_with_a_timed_variant_has_its_chart(gen_docs: ModuleType, tmp_path: Path) -> None:
    chart = gen_docs.docs_site.measured.speed_chart(recorded(tmp_path, "side_by_side", NEW), "FLASH_ATTN")
    assert table(chart)[0][1] == "FLASH_ATTN/FA3 (µs)"


def test_graphs_have_a_bar_for_each_of_their_two_times(gen_docs: ModuleType, tmp_path: Path) -> None:
    figure = {"case": "1 of 2048", "over": "bfloat16", "backend": "HOPPER_ATTN", "us": 16.0, "known": 14.0}
    spread = {"spread": {"us": [15.0, 18.0], "known": [13.0, 15.0]}}
    charts = gen_docs.docs_site.measured.graphs_charts(recorded(tmp_path, "graphs", figure | spread))
    assert table(charts[0])[1] == ["1 of 2048", "16.0", "15.0", "18.0", "14.0", "13.0", "15.0"]
    charts = gen_docs.docs_site.measured.graphs_charts(recorded(tmp_path, "graphs", figure))
    assert table(charts[0])[1] == ["1 of 2048", "16.0", "14.0"]
