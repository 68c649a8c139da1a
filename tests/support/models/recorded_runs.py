"""Whole runs that vLLM's own functions settled, as they were recorded (tests/data/vllm), and what attnreg says."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import attnreg
from attnreg.explain import explain
from attnreg.explain.answers import Explanation
from attnreg.explain.block_size import BlockSize
from attnreg.models.kv_memory import Memory
from attnreg.models.questions import MTP, ModelOptions, model_questions
from attnreg.planning.graphs import agree_graphs
from attnreg.planning.layout import agree_layout
from attnreg.planning.run import Agreed, RunGroup
from support import ROOT
from support.models.recorded_starts import Row, registry

RELEASES = tuple(r for r in ("0.33.0", "0.30.0", "0.26.0") if (ROOT / f"tests/data/vllm/runs-{r}.jsonl.gz").exists())


class Settled(NamedTuple):
    """What attnreg says of a run: the groups, the block sizes, the layout, and the graph mode."""

    groups: tuple[RunGroup, ...]
    pages: tuple[BlockSize, ...]
    layout: Agreed
    graphs: Agreed


@functools.cache
def recorded_runs(release: str) -> tuple[dict[str, Row], list[Row]]:
    """The configs by name, and the rows."""
    with gzip.open(ROOT / f"tests/data/vllm/runs-{release}.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    models = {line["model"]: line["config"] for line in lines if "config" in line}
    return models, [line for line in lines if "out" in line]


def memory_of(asked: Row, models: dict[str, Row], directory: Path, release: str) -> Memory:
    """The KV cache of a request that attnreg counts for a row of a release."""
    return _explained(asked, models, directory, release).memory[0]


def settled(asked: Row, models: dict[str, Row], directory: Path, release: str) -> Settled:
    """What attnreg says of a row of a release."""
    answer, of = _explained(asked, models, directory, release), registry(release)
    groups = []
    for each in answer.answers:
        question = each.question
        if question.request is None:
            groups.append(RunGroup(question.label, "target", (), None, None, question.kind))
        elif question.request.phase != "prefill":
            (verdict,) = each.verdicts
            role = question.request.role
            groups.append(RunGroup(question.label, role, (), verdict.selection, question.request, question.kind))
    graphs: dict[str, Any] = {"asked": asked.get("compilation_config", {}).get("cudagraph_mode")}
    drafting = asked.get("speculative_config", {})
    return Settled(
        tuple(groups),
        answer.pages,
        agree_layout(groups, of.layout, asked=asked.get("kv_cache_layout")),
        agree_graphs(groups, of.graphs, speculative_tokens=drafting.get("num_speculative_tokens", 0), **graphs),
    )


def _explained(asked: Row, models: dict[str, Row], directory: Path, release: str) -> Explanation:
    for name in filter(None, (asked["model"], asked.get("draft"))):
        (directory / name).mkdir(exist_ok=True)
        (directory / name / "config.json").write_text(json.dumps(models[name]))
    drafting = asked.get("speculative_config", {})
    draft = MTP if drafting.get("method") == "mtp" else asked.get("draft") and str(directory / asked["draft"])
    given = {"kv_dtype": asked["kv_cache_dtype"]} if "kv_cache_dtype" in asked else {}
    of = registry(release)
    # the recorder's torch has no CUDA
    extra: dict[str, int] = {"cuda_major": 0} if asked["arch"].startswith("sm") else {}
    if "num_speculative_tokens" in drafting:
        extra["speculative_tokens"] = drafting["num_speculative_tokens"]
    extra = {facet: value for facet, value in extra.items() if facet in of.vocabulary.facets}
    options = ModelOptions(given=given, extra=tuple(extra.items()), draft=draft)
    model = model_questions(str(directory / asked["model"]), options, of)
    platform = attnreg.Platform(
        platform=of.vocabulary.architectures[asked["arch"]].platform,
        arch=asked["arch"],
        flags={"aiter", "aiter_mha", "aiter_mla"} if asked.get("aiter") == "on" else set(),
    )
    return explain(
        model.questions,
        [platform],
        of,
        backend=asked.get("attention_backend"),
        draft_backend=drafting.get("attention_backend"),
        memory=model.memory,
    )
