"""What a run of vLLM decides for all its layers and for its draft, held against what vLLM's own code built."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg import AttentionRequest, Platform, load_registry
from attnreg.explain import explain
from attnreg.explain.answers import Explanation
from attnreg.models.questions import MTP, ModelOptions, model_questions
from attnreg.selection.selector import evaluate

FILES = sorted((ROOT / "tests/data/vllm").glob("start-runs-*.jsonl.gz"))


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The configs by name and the rows of a recorded file."""
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    return {line["model"]: line["config"] for line in lines if "config" in line}, [x for x in lines if "out" in x]


def release_of(path: Path) -> str:
    return "vllm-" + path.name.removeprefix("start-runs-").removesuffix(".jsonl.gz")


def said(asked: dict[str, Any], models: dict[str, Any], registry: attnreg.Registry, directory: Path) -> Explanation:
    """What `attnreg explain` says of a row, with the options that the row has in words of attnreg."""
    drafting = asked.get("speculative_config", {})
    model_at, draft_at = directory / asked["model"], directory / f"{asked.get('draft')}-draft"
    for place in (model_at, draft_at) if drafting else (model_at,):
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(models[place.name.removesuffix("-draft")]))
    draft = str(draft_at) if drafting else None
    if drafting.get("method") == "mtp" and asked["draft"] == asked["model"]:
        draft = MTP
    extra = dict(asked.get("attention_config", {}))
    given = {"kv_dtype": asked["kv_cache_dtype"]} if "kv_cache_dtype" in asked else {}
    draft_given = {"kv_dtype": drafting["kv_cache_dtype"]} if "kv_cache_dtype" in drafting else {}
    options = ModelOptions(given=given, draft=draft, draft_given=draft_given, extra=extra)
    model = model_questions(str(model_at), options, registry)
    platform = attnreg.loader.default_registry().vocabulary.architectures[asked["arch"]].platform
    return explain(
        model.questions,
        [attnreg.Platform(platform=platform, arch=asked["arch"])],
        registry,
        backend=asked.get("attention_backend"),
        draft_backend=drafting.get("attention_backend"),
    )


def ours(answer: Explanation) -> tuple[Counter[Any], set[str]]:
    """The layers by draft, backend, version of FlashAttention and KV dtype; the roles of which the answer is not
    known."""
    found: Counter[Any] = Counter()
    unknown: set[str] = set()
    for each in answer.answers:
        request = each.question.request
        if request is None or (request.phase == "prefill" and request.attention != "mha"):
            continue
        (verdict,) = each.verdicts
        selection = verdict.selection
        if selection.unknown:
            unknown.add(request.role)
            continue
        facts = selection.start.facts if selection.start is not None else {}
        stored = next((f.value for f in selection.consequences if f.kind == "stores"), facts["kv_dtype"] or "auto")
        kv_dtype = None if request.role == "vision" else stored
        name = selection.backend.name if selection.backend else None
        key = request.role == "draft", name, facts["head_size"], kv_dtype
        found[key] += len(each.question.members)
    return found, unknown


@pytest.mark.slow(reason="the recorded drafts of a release")
@pytest.mark.parametrize("path", FILES, ids=release_of)
def test_runs_and_drafts_are_as_vllm_builds_them(path: Path, tmp_path: Path) -> None:
    models, rows = read(path)
    registry = attnreg.load_registry(release_of(path), plugins=())
    wrong: list[Any] = []
    for row in rows:
        asked, out = row["in"], row["out"]
        answer = said(asked, models, registry, tmp_path)
        found, unknown = ours(answer)
        if "error" in out:
            if out["error"]["about"] == "attention" and answer.found:
                wrong.append((asked, "attnreg answers", out["error"]["text"]))
            continue
        recorded: Counter[Any] = Counter()
        for layer in out["layers"]:
            draft, tower = layer.get("draft", False), layer["kind"] == "MMEncoderAttention"
            if ("draft" if draft else "vision" if tower else "target") not in unknown:
                key = draft, layer["backend"], layer["head_size"], layer.get("kv_dtype")
                recorded[key] += len(layer["layers"])
        # a tower may be of transformers' own modules, which ask nothing; those of vLLM are counted by their modules
        towers = {key for key in recorded if key[3] is None}
        if not towers or towers == {key for key in found if key[3] is None}:
            found, recorded = (Counter({k: n for k, n in c.items() if k[3]}) for c in (found, recorded))
        if found != recorded:
            wrong.append((asked, dict(found), dict(recorded)))
    assert not wrong, "\n".join(map(str, [len(wrong), *wrong]))


@pytest.mark.parametrize(
    ("run_model", "asked", "arch", "dtype"),
    [
        ("gemma2", "float16", "sm75", "float32"),
        ("gemma2", "float16", "sm80", "bfloat16"),
        ("gemma2", "bfloat16", "sm75", "float32"),
        ("llama", "float16", "sm75", "float16"),
        ("llama", "bfloat16", "sm75", "float16"),
    ],
)
def test_a_draft_has_the_dtype_that_its_target_resolves(run_model: str, asked: str, arch: str, dtype: str) -> None:
    """Models that compute in no float16 decide for their drafts too; the draft's own type, Llama's, does not count."""
    registry = load_registry("vllm-0.33.0")
    request = AttentionRequest(
        head_size=128, num_heads=8, num_kv_heads=8, dtype=asked, kv_dtype="auto", role="draft", model="llama",
        extra=(("auto_dtype", asked), ("run_model", run_model)),
    )  # fmt: skip
    selection = evaluate(request, Platform("cuda", arch), registry)
    assert selection.start is not None
    sets = {name: value for step in selection.start.taken for name, (_, value) in step.sets.items()}
    assert sets.get("dtype", asked) == dtype
