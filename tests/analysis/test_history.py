"""When a move came: the releases between two tables at which an outcome changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from attnreg.analysis.outcome import decide
from attnreg.cli.commands import main
from attnreg.loader import load_registry
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest

GPT_OSS, DEEPSEEK = (str(ROOT / "examples/configs" / name) for name in ("gpt-oss-120b", "DeepSeek-V3"))


def upgrade(capsys: pytest.CaptureFixture[str], before: str, after: str, *more: str) -> dict[str, Any]:
    main(["upgrade", "--from", before, "--to", after, *more, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_change_names_the_first_table_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Read against a direct question to the two tables of each turn."""
    data = upgrade(capsys, "vllm-0.20", "vllm-0.33", "--arch", "sm120", "--model", GPT_OSS)
    assert data["moves"]
    for move in data["moves"]:
        *_, last = move["turns"]
        assert last["title"] == f"{move['after']['backend']}/{move['after']['variant']}"
        for turn in move["turns"]:
            titles = [titled(name, move) for name in (turn["registry"], turn["earlier"])]
            assert titles[0] == turn["title"] != titles[1]


def titled(registry: str, move: dict[str, Any]) -> str:
    """The outcome of a release's table for the layers of a move."""
    request = AttentionRequest.from_dict(move["request"])
    return decide(request, Platform("cuda", "sm120"), load_registry(registry)).outcome.title


def test_the_way_back_names_the_same_tables(capsys: pytest.CaptureFixture[str]) -> None:
    there = upgrade(capsys, "vllm-0.20", "vllm-0.33", "--arch", "sm120", "--model", GPT_OSS)["moves"][0]["turns"]
    back = upgrade(capsys, "vllm-0.33", "vllm-0.20", "--arch", "sm120", "--model", GPT_OSS)["moves"][0]["turns"]
    assert {(t["earlier"], t["registry"]) for t in there} == {(t["registry"], t["earlier"]) for t in back}


def test_turns_on_intel_gpus_are_those_of_each_release(capsys: pytest.CaptureFixture[str]) -> None:
    """Dense MLA goes to FlashAttention there since 0.32; before that all of it went to Triton."""
    data = upgrade(capsys, "vllm-0.20", "vllm-0.33", "--arch", "xe2", "--model", DEEPSEEK)
    turns = {(turn["earlier"], turn["registry"]) for move in data["moves"] for turn in move["turns"]}
    assert ("vllm-0.31.0", "vllm-0.32.0") in turns
    assert ("vllm-0.20.0", "vllm-0.33.0") not in turns


def test_neighbours_and_own_tables_have_no_turns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = [tmp_path / name for name in ("mine", "vllm-0.33.0")]
    for folder in own:
        folder.mkdir()
        (folder / "release.yaml").write_text("extends: vllm-0.33.0\n")
    for before, after in (("vllm-0.32", "vllm-0.33"), *(("vllm-0.20", str(folder)) for folder in own)):
        data = upgrade(capsys, before, after, "--arch", "sm120", "--model", GPT_OSS)
        assert all(move["turns"] == [] for move in data["moves"])
