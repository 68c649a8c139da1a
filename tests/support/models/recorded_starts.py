"""Whole models that vLLM's own code started, as they were recorded (tests/data/vllm), and what attnreg is asked."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import attnreg
from attnreg.models.questions import ModelOptions, ModelQuestions, model_questions
from support import ROOT

NEWEST = "0.33.0"
RELEASES = (NEWEST, "0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.26.0", "0.24.0")
Row = dict[str, Any]


@functools.cache
def registry(release: str) -> attnreg.Registry:
    return attnreg.load_registry(f"vllm-{release}", plugins=())


@functools.cache
def recorded(release: str = NEWEST, part: str = "") -> tuple[dict[str, Row], list[Row]]:
    """The configs by name, and the rows. part: that of other rows, such as ``blocks-``."""
    with gzip.open(ROOT / f"tests/data/vllm/start-{part}{release}.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    models = {line["model"]: line["config"] for line in lines if "config" in line}
    return models, [line for line in lines if "out" in line]


def questions(asked: Row, directory: Path, release: str, part: str = "") -> tuple[ModelQuestions, attnreg.Platform]:
    """What a row asks, and where."""
    folder = directory / asked["model"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(recorded(release, part)[0][asked["model"]]))
    names = {"dtype": "dtype", "kv_cache_dtype": "kv_dtype", "block_size": "block_size"}
    # the recorder's PyTorch is built for no CUDA
    built = {"cuda_major": 0} if asked["arch"].startswith("sm") else {}
    options = ModelOptions(
        given={ours: asked[theirs] for theirs, ours in names.items() if theirs in asked},
        features=frozenset({"batch_invariant"} if asked.get("batch_invariant") else ()),
        extra=tuple((asked.get("attention_config", {}) | built).items()),
    )
    platform = attnreg.Platform(
        platform=registry(release).vocabulary.architectures[asked["arch"]].platform,
        arch=asked["arch"],
        flags={"aiter", "aiter_mha", "aiter_mla"} if asked.get("aiter") == "on" else set(),
    )
    return model_questions(str(folder), options, registry(release)), platform
