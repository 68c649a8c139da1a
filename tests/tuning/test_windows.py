"""Windows of layers: each cell has its model's, and layers that no condition tells apart are ranked as they agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support import ROOT

import attnreg
from attnreg import AttentionRequest, Platform
from attnreg.analysis.timings.ranking import compared, rankable, ranked
from attnreg.analysis.timings.rules import rules_of
from attnreg.analysis.timings.samples import Cell, Samples, read_samples
from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.loader import unloadable
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.selection.question import Question
from attnreg.selection.selector import evaluate
from attnreg.tuning.bench import Bench
from attnreg.tuning.grid import WORKLOADS, grid

LAYER = AttentionRequest(
    head_size=64, num_heads=4, num_kv_heads=2, block_size=16, dtype="float32", features={"sliding_window"}
)
H200 = Platform(platform="cuda", arch="sm90", packages={"torch": "2.11", "triton": "3.6"}, device="H200")


def planned(registry: attnreg.Registry, *configs: str) -> list[Cell]:
    asked = [q for config in configs for q in model_questions(config, ModelOptions(), registry).questions]
    return [each.cell for each in grid(asked, WORKLOADS["gpu"], registry, H200, {})]


@pytest.mark.parametrize(
    ("model", "numbers", "words"),
    [
        ("gpt-oss-20b", {"sliding_window": 128}, "sliding window 128"),
        ("gemma-2-27b", {"sliding_window": 4096, "softcap": 50.0}, "sliding window 4096"),
        ("gemma-3-27b", {"sliding_window": 1024}, "sliding window 1024"),
        # a query of an encoder sees 64 keys on either side, and its own
        ("ModernBERT-base", {"sliding_window": 65}, "sliding window ±64"),
    ],
)
def test_each_cell_has_the_window_of_its_model(
    default: attnreg.Registry, model: str, numbers: dict[str, Any], words: str
) -> None:
    (config,) = [str(path) for name, path in bundled_configs().items() if model in str(name)]
    cells = planned(default, config)
    sliding = [cell for cell in cells if "sliding_window" in cell.request.features]
    assert sliding
    assert all(dict(cell.numbers) == numbers and words in cell.layer for cell in sliding)
    others = [cell for cell in cells if cell not in sliding]
    assert all("sliding_window" not in dict(cell.numbers) for cell in others)


def test_windows_of_one_request_are_cells_of_their_own(tmp_path: Path, default: attnreg.Registry) -> None:
    config = json.loads(Path(bundled_configs()["Mistral-7B-v0.1"]).read_text())
    files = []
    for window in (512, 4096):
        files.append(tmp_path / str(window) / "config.json")
        files[-1].parent.mkdir()
        files[-1].write_text(json.dumps({**config, "sliding_window": window}))
    cells = planned(default, *map(str, files))
    assert {dict(cell.numbers)["sliding_window"] for cell in cells} == {512, 4096}
    assert len({cell.request for cell in cells}) == 1
    # the second window is timed when every kind of layer was
    assert [dict(cell.numbers)["sliding_window"] for cell in cells] == [512] * 4 + [4096] * 4


def test_features_without_a_model_have_usual_numbers(default: attnreg.Registry) -> None:
    request = replace(LAYER, features=frozenset({"sliding_window", "softcap"}), dtype="bfloat16")
    cells = [each.cell for each in grid([Question(request)], WORKLOADS["gpu"], default, H200, {})]
    assert {cell.numbers for cell in cells} == {(("sliding_window", 1024), ("softcap", 50.0))}


@pytest.mark.parametrize(
    ("features", "numbers"),
    [
        ({"sliding_window"}, (("sliding_window", 77),)),
        ({"asymmetric_window"}, (("asymmetric_window", (77, 9)),)),
        ({"chunk"}, (("chunk", 77),)),
        ({"softcap"}, (("softcap", 30.0),)),
    ],
)
def test_a_bench_runs_the_layer_with_its_numbers(default: attnreg.Registry, features: Any, numbers: Any) -> None:
    here = attnreg.detect(default.vocabulary)
    cell = Cell(replace(LAYER, features=frozenset(features)), 2, 20, 100, numbers)
    bench = Bench(cell, evaluate(cell.request, here, default, "CPU_ATTN", unloadable=unloadable), torch.device("cpu"))
    ((name, number),) = numbers
    assert getattr(bench.layer.spec, name) == number
    assert bench.wrong() == ""


def timed(times: dict[int | None, dict[str, float]], request: AttentionRequest = LAYER) -> Samples:
    """Samples of one decode each of layers with some windows."""
    out, random = Samples({}, "", {}, ""), Random(1)
    for index, (window, each) in enumerate(times.items()):
        numbers = () if window is None else (("sliding_window", window),)
        out.cells.append(Cell(request, 1, 1, 5000, numbers))
        for name, us in each.items():
            out.turns[index, name] = [[us * random.uniform(0.99, 1.01) for _ in range(5)] for _ in range(8)]
    return out


def test_layers_are_ranked_where_their_windows_agree() -> None:
    agree = timed({128: {"A": 100, "B": 90}, 4096: {"A": 1000, "B": 700}})
    assert ranked(agree, [0, 1], ["A", "B"]) == ["B", "A"]
    # one that does not tell them apart says nothing against the other
    tie = timed({128: {"A": 100, "B": 100.3}, 4096: {"A": 1000, "B": 700}})
    assert ranked(tie, [0, 1], ["A", "B"]) == ["B", "A"]
    against = timed({128: {"A": 90, "B": 100}, 4096: {"A": 1000, "B": 700}})
    for names in (["A", "B"], ["B", "A"]):
        assert ranked(against, [0, 1], names) == names
    found = compared(against, [0, 1], "B", "A")
    assert found.ratio == pytest.approx(1.134, rel=0.02)
    assert not found.differs
    # each alone is as clear as ever
    assert ranked(against, [0], ["B", "A"]) == ["A", "B"]
    assert ranked(against, [1], ["A", "B"]) == ["B", "A"]


def test_cells_of_an_unknown_window_rank_nothing(default: attnreg.Registry) -> None:
    """Those of files that were written before the window was recorded: it was one of the proofs, which no model has."""
    samples = timed({None: {"A": 100, "B": 50}, 128: {"A": 100, "B": 50}})
    assert rankable(samples, [0], ["A", "B"]) == []
    assert rankable(samples, [1], ["A", "B"]) == ["A", "B"]
    request = replace(LAYER, dtype="bfloat16", head_size=128, num_heads=32, num_kv_heads=8)
    for window, rules in ((None, 0), (128, 1)):
        times = {"TRITON_ATTN": 100.0, "FLASH_ATTN/FA3": 50.0}
        assert len(rules_of(timed({window: times}, request), default, H200)) == rules


def test_files_of_before_are_read() -> None:
    found = read_samples(ROOT / "tests/data/samples_without_numbers.jsonl")
    assert any("sliding_window" in cell.request.features for cell in found.cells)
    assert {cell.bounded for cell in found.cells if "sliding_window" in cell.request.features} == {False}


def test_a_cell_is_read_as_it_was_written() -> None:
    for features, numbers in (
        ({"sliding_window"}, (("sliding_window", 128),)),
        ({"asymmetric_window", "softcap"}, (("asymmetric_window", (3, -1)), ("softcap", 30.5))),
        (set(), ()),
    ):
        cell = Cell(replace(LAYER, features=frozenset(features)), 2, 1, 64, numbers)
        assert Cell.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell


@pytest.mark.parametrize(
    "numbers",
    [
        *({"sliding_window": n} for n in (0, -1, True, 1.5, "128", None, [1, 2])),
        {"chunk": 128},
        {"softcap": 30.0},
        {"block_size": 16},
    ],
)
def test_numbers_that_no_such_layer_has_are_refused(numbers: dict[str, Any]) -> None:
    data = {**Cell(LAYER, 2, 1, 64).to_dict(), "numbers": numbers}
    with pytest.raises(ValueError, match="the numbers of a cell are those of its request's features"):
        Cell.from_dict(data)


def test_the_least_time_counts_the_keys_of_the_window() -> None:
    whole = Cell(replace(LAYER, features=frozenset()), 2048, 1, 8191).least_us()
    sliding = Cell(LAYER, 2048, 1, 8191, (("sliding_window", 128),)).least_us()
    # 8,192 or 128 keys and values of 2 heads, and a query and an output of 4
    assert whole / sliding == pytest.approx((2 * 8192 + 4) / (2 * 128 + 4))
    # whatever it sees, it reads queries and writes outputs
    assert Cell(LAYER, 1 << 20, 1, 8191).least_us() == pytest.approx((1 << 20) * 4 * 128 * 4 / 50_000e3)
    assert Cell(LAYER, 64, 1, 8191).least_us() == 1
    # a window that is longer than all keys bounds none
    long = (("sliding_window", 1 << 20),)
    assert Cell(LAYER, 4, 2048, 0, long).least_us() == Cell(replace(LAYER, features=frozenset()), 4, 2048, 0).least_us()
