"""Drafts and ranks of vLLM 0.33.0 as data, held against the models that its own code built (tests/data/vllm)."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg.explain import explain
from attnreg.explain.answers import Explanation
from attnreg.models.questions import MTP, ModelOptions, model_questions

REGISTRY = attnreg.load_registry("vllm-0.33.0", plugins=())
FILE = ROOT / "tests/data/vllm/start-drafts-0.33.0.jsonl.gz"
with gzip.open(FILE, "rt") as _file:
    LINES = [json.loads(line) for line in _file]
MODELS = {line["model"]: line["config"] for line in LINES if "config" in line}
ROWS = [line for line in LINES if "out" in line]


def said(asked: dict[str, Any], directory: Path) -> Explanation:
    """What `attnreg explain` says of a row; a draft's backend is that of its own configuration."""
    for name in filter(None, (asked["model"], asked.get("draft"))):
        (directory / name).mkdir(exist_ok=True)
        (directory / name / "config.json").write_text(json.dumps(MODELS[name]))
    drafting = asked.get("speculative_config", {})
    draft = MTP if drafting.get("method") == "mtp" else asked.get("draft") and str(directory / asked["draft"])
    given = {"kv_dtype": asked["kv_cache_dtype"]} if "kv_cache_dtype" in asked else {}
    options = ModelOptions(given=given, ranks=asked.get("tensor_parallel_size", 1), draft=draft)
    model = model_questions(str(directory / asked["model"]), options, REGISTRY)
    return explain(
        model.questions,
        [attnreg.Platform(platform="cuda", arch=asked["arch"])],
        REGISTRY,
        backend=asked.get("attention_backend"),
        draft_backend=drafting.get("attention_backend"),
        memory=model.memory,
    )


@pytest.mark.parametrize("arch", sorted({row["in"]["arch"] for row in ROWS}))
def test_drafts_and_ranks_are_as_vllm_builds_them(arch: str, tmp_path: Path) -> None:
    for row in ROWS:
        if row["in"]["arch"] != arch:
            continue
        answer = said(row["in"], tmp_path)
        ours: Counter[Any] = Counter()
        for each in answer.answers:
            request = each.question.request
            assert request is not None
            if request.phase != "prefill":
                (verdict,) = each.verdicts
                assert verdict.selection.backend is not None, row["in"]
                name = verdict.selection.backend.name
                ours[request.role == "draft", name, request.num_heads] += len(each.question.members)
        theirs: Counter[Any] = Counter()
        for layer in row["out"]["layers"]:
            theirs[layer.get("draft", False), layer["backend"], layer["num_heads"]] += len(layer["layers"])
        assert ours == theirs, row["in"]
        counted = [model.first.counted for model in answer.memory[0].models]
        stored = Counter[bool]()
        for layer in row["out"]["layers"]:
            stored[layer.get("draft", False)] += len(layer["layers"]) * layer["token_bytes"]
        assert counted == [stored[draft] for draft in (False, True)[: len(counted)]], row["in"]
        assert [page.tokens for page in answer.pages] == [row["out"]["block_size"]], row["in"]


def test_the_rows_have_drafts_of_each_kind_and_ranks() -> None:
    methods = {row["in"].get("speculative_config", {}).get("method") for row in ROWS}
    assert methods == {None, "eagle", "eagle3", "draft_model", "mtp", "dflash"}
    assert {row["in"].get("tensor_parallel_size", 1) for row in ROWS} > {1, 2, 8, 16}
    assert len(ROWS) > 30


@pytest.mark.parametrize(("scheme", "refused"), [({}, False), ({"type": "int"}, True), ({"num_bits": 4}, True)])
def test_a_scheme_that_vllm_does_not_read_is_refused(scheme: dict[str, Any], refused: bool, tmp_path: Path) -> None:
    # vLLM raises when it builds the layers, asked on 2026-11-23 by the recorder
    scheme = {"num_bits": 8, "type": "float", "dynamic": False, **scheme}
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    config = {"model_type": "llama", "num_hidden_layers": 2, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = model_questions(str(tmp_path), ModelOptions(), REGISTRY)
    answer = explain(asked.questions, [attnreg.Platform(platform="cuda", arch="sm90")], REGISTRY)
    assert answer.found != refused
