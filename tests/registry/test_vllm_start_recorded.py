"""The start of vLLM as data, held against what its own code decided for whole models (tests/data/vllm)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.models.recorded_starts import NEWEST, RELEASES, Row, questions, recorded, registry

import attnreg
from attnreg.explain import explain
from attnreg.models.fields import ConfigError
from attnreg.selection.selector import evaluate

# rows of sparse MLA, and of models whose code names the backend of its layers
MLA = "mla-"
# defaults of classes that vLLM has no class for: refused, or run by its Transformers backend
SERVED = "served-"
# attention of vLLM's own, which asks no selector: the answer is that it is not known
NOT_KNOWN = ("deepseek_v4", "family-inkling_mm_model", "hy_v4")
# classes with layers that do not call transformers' attention, and releases that build attention for them all the same
UNCALLED = ("albert", "diffllama", "distilbert", "minimax", "nomic_bert", "recurrent_gemma")
UNCHECKED = ("0.29.0", "0.28.0")
# layers that run several times in each step, with a cache for each: their number is not compared
REPEATED = ("family-zamba2",)


def parts(release: str) -> tuple[str, ...]:
    """The recorded files of a release, by what distinguishes their names."""
    files = {part: ROOT / f"tests/data/vllm/start-{part}{release}.jsonl.gz" for part in ("", MLA, SERVED)}
    return tuple(part for part, file in files.items() if file.exists())


def selections(asked: Row, directory: Path, release: str, part: str) -> list[tuple[attnreg.Selection, int]]:
    """The selections for the layers of a row's model that are none of a tower, each with their number."""
    model, platform = questions(asked, directory, release, part)
    named = asked.get("attention_backend")
    return [
        (evaluate(q.request, platform, registry(release), named), len(q.members))
        for q in model.questions
        if q.request is not None
        and q.request.role == "target"
        and q.request.phase != "prefill"
        # a Q-Former is none of vLLM's layers with a cache
        and not any(part == "projector_config" for _, part, _, _ in q.members)
    ]


def of_a_cache(selection: attnreg.Selection) -> bool:
    return selection.request.attn_type in ("decoder", "encoder_decoder")


def differences(row: Row, directory: Path, release: str, part: str) -> list[str]:
    """Where attnreg says something else than vLLM did."""
    asked, out = row["in"], row["out"]
    try:
        found = selections(asked, directory, release, part)
    except (attnreg.RequestError, ConfigError) as e:
        return [] if out["error"]["stage"] == "config" else [f"is not read: {e}"]
    if asked["model"] in NOT_KNOWN or any(selection.unknown for selection, _ in found):
        return [] if not_known(asked, release) and any(s.unknown for s, _ in found) else ["is known, or should be"]
    error = out.get("error", {})
    if error.get("about") == "architecture":
        return [f"is served: {error['text']}" for s, _ in found if s.title != "no backend"]
    refusal = next((s.start.refusal.text for s, _ in found if s.start and s.start.refusal), None)
    if error.get("about") == "attention" and (refusal or error["stage"] in ("config", "device")):
        return [] if refusal else [f"is not refused: {error['text']}"]
    if refusal or "dtype" not in out:
        return [f"is refused: {refusal}"] if refusal and "dtype" in out else []
    wrong = []
    for key in ("dtype", "flash_attn_version"):
        said = {s.start.facts[key] for s, _ in found if s.start and of_a_cache(s)} or {out[key]}
        wrong += [f"{key}: {said}, not {out[key]}"] if said != {out[key]} else []
    # where a layer's own code names its backend, the config of the run does not know
    by_config = (
        s.start for s, _ in found if s.start and s.start.named and not s.start.named.name.endswith("Attention")
    )
    named = {start.facts["named"] for start in by_config}
    wrong += [f"names {named}, not {out['backend']}"] if named - {out["backend"]} else []
    # what fails once the layers are there was not recorded
    later = ("first forward", "first prompt", "first batch", "prepares the batches", "none divides a page")
    fails = [f.text for s, _ in found for f in s.consequences if f.kind == "fails"]
    fails = [text for text in fails if not any(words in text for words in later)]
    if error:
        chosen = [s.backend and s.backend.name for s, _ in found]
        meant = error["about"] == "attention" and None not in chosen and not fails
        return [*wrong, f"does not fail with {chosen}: {error['text']}"] if meant else wrong
    return wrong + [f"fails: {text}" for text in fails] + _layers(found, asked["model"], out)


def not_known(asked: Row, release: str) -> bool:
    """Whether the answer is not known: of attention of vLLM's own, and of caches that it asks nobody about."""
    on_amd = asked["arch"].startswith("gfx") and release in ("0.33.0", "0.32.0", "0.31.0")
    dsa = on_amd and asked["model"].startswith(("DeepSeek-V3.2", "family-deepseek_v32", "family-glm_moe_dsa"))
    readable = (None, "auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
    unasked = asked.get("kv_cache_dtype") not in readable or asked.get("dtype") == "float32"
    # up to 0.27 the bytes of a packed cache are not in the table where a layer has a window
    packed = release == "0.24.0" and str(asked.get("kv_cache_dtype")).startswith("turboquant_")
    windows = packed and asked["model"].startswith("gemma-3")
    unchecked = release in UNCHECKED and asked["model"] in UNCALLED
    return asked["model"] in NOT_KNOWN or (dsa and unasked) or windows or unchecked


def stored_as(selection: attnreg.Selection) -> str:
    """The KV dtype in which a layer keeps its cache."""
    assert selection.start is not None
    stored = (follows.value for follows in selection.consequences if follows.kind == "stores")
    return str(next(stored, selection.start.facts["kv_dtype"]))


def token_bytes(asked: Row, directory: Path, part: str) -> int:
    """The bytes that a token of a row's model takes in the KV cache, once vLLM has started."""
    model, platform = questions(asked, directory, NEWEST, part)
    named = asked.get("attention_backend")
    said = explain(model.questions, [platform], registry(NEWEST), backend=named, memory=model.memory)
    # the recording has no keys of indexers
    return sum(group.token_bytes or 0 for group in said.memory[0].models[0].groups)


def _layers(found: list[tuple[attnreg.Selection, int]], model: str, out: Row) -> list[str]:
    """Where the layers run on other backends than vLLM's."""
    ours: Counter[Any] = Counter()
    for selection, count in found:
        assert selection.start is not None
        if selection.backend is None:
            return [f"chooses nothing for {selection.request.head_size}"]
        if of_a_cache(selection) or selection.request.attn_type == "encoder_only":
            stored = stored_as(selection) if of_a_cache(selection) else None
            ours[selection.backend.name, stored, selection.start.facts["head_size"]] += count
    theirs: Counter[Any] = Counter()
    for layer in out["layers"]:
        if layer["kind"] not in ("MMEncoderAttention", "WhisperEncoderAttention"):
            stored = layer.get("kv_dtype") if layer.get("attn_type") != "encoder_only" else None
            theirs[layer["backend"], stored, layer["head_size"]] += len(layer["layers"])
    same = ours.keys() == theirs.keys() if model in REPEATED else ours == theirs
    return [] if same else [f"{dict(ours)}, not {dict(theirs)}"]


@pytest.mark.parametrize(
    ("release", "part", "arch"),
    sorted(
        {(of, part, row["in"]["arch"]) for of in RELEASES for part in parts(of) for row in recorded(of, part)[1]},
    ),
)
def test_whole_models_start_as_vllm_starts_them(release: str, part: str, arch: str, tmp_path: Path) -> None:
    rows = [row for row in recorded(release, part)[1] if row["in"]["arch"] == arch]
    wrong = {json.dumps(row["in"]): found for row in rows if (found := differences(row, tmp_path, release, part))}
    assert not wrong, "\n".join(f"{asked}: {found}" for asked, found in wrong.items())
    assert rows


@pytest.mark.slow(reason="the recorded starts of a release")
def test_the_kv_cache_has_the_bytes_of_vllms(tmp_path: Path) -> None:
    rows = [(row, part) for part in parts(NEWEST) for row in recorded(NEWEST, part)[1] if "layers" in row["out"]]
    # each model once as it is, and once with each format of the cache
    asked = {
        (row["in"]["model"], row["in"].get("kv_cache_dtype"), row["in"].get("dtype"), part and row["in"]["arch"]): (
            row,
            part,
        )
        for row, part in rows
    }
    counted, theirs = {}, {}
    for row, part in asked.values():
        given, layers = row["in"], row["out"]["layers"]
        if given["model"] in REPEATED or not_known(given, NEWEST):
            continue
        # what a decoder attends to is not counted, which is said
        stored = [layer for layer in layers if layer["kind"] != "CrossAttention"]
        theirs[json.dumps(given)] = sum(len(at["layers"]) * (at.get("token_bytes") or 0) for at in stored)
        counted[json.dumps(given)] = token_bytes(given, tmp_path, part)
    assert counted == theirs
    assert len(counted) > 180


def test_the_rows_show_what_there_is_to_show() -> None:
    models, rows = recorded()
    assert len(rows) > 400
    assert len(models) > 80
    errors = Counter(row["out"].get("error", {}).get("about", "none") for row in rows)
    assert errors["none"] > 180
    assert errors["attention"] > 100
    backends = {layer["backend"] for row in rows for layer in row["out"].get("layers", ())}
    assert len(backends) > 8
    served = [recorded(of, SERVED)[1] for of in RELEASES if SERVED in parts(of)]
    assert [len(rows) for rows in served] == [95] * 6
