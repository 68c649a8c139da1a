"""A whole start of vLLM, as `tools/record/vllm_runs.py` records it, held against the plan of the same run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attnreg
from attnreg.errors import RequestError
from attnreg.models.fields import ConfigError
from attnreg.models.questions import MTP, ModelOptions
from attnreg.planning.ask import run_of
from attnreg.planning.evaluate import evaluate
from attnreg.planning.plan import Plan, PlanGroup
from support.models.recorded_starts import Row, registry
from support.platform_parity import PACKAGES

# words of vLLM's arguments -> fields of a request
_GIVEN = {"dtype": "dtype", "kv_cache_dtype": "kv_dtype", "block_size": "block_size"}
# what stops an engine once its layers are built is not in the recording; two of these are asked of some models when
# their layers are built, and of others when their caches are
_LATER = ("first forward", "first prompt", "first batch", "prepares the batches", "none divides a page", "loads",
          "is batch-invariant", "named by MiMoV2Attention")  # fmt: skip
_TOWERS = ("MMEncoderAttention", "WhisperEncoderAttention")


class Verdict(NamedTuple):
    """How a plan compares with a start: ``equal``, ``different``, ``not known`` or ``left out``, and why.

    A start is left out if vLLM stopped for a reason that is not about attention.
    """

    kind: str
    text: str = ""


def plan_of(asked: Row, models: dict[str, Row], directory: Path, release: str) -> Plan:
    """What `attnreg plan` says of a row. Raises `ConfigError` and `RequestError` for a row that it refuses."""
    of = registry(release)
    drafting = asked.get("speculative_config", {})
    folders = {asked["model"]: models[asked["model"]]}
    draft = asked.get("draft")
    if drafting.get("method", "").endswith("mtp") and draft in (None, asked["model"]):
        draft = MTP
    elif draft is not None:
        # the method of a draft is read of its name, if its class does not tell
        folders[f"{drafting['method']}-{draft}"] = models[draft]
        draft = str(directory / f"{drafting['method']}-{draft}")
    for name, config in folders.items():
        (directory / name).mkdir(exist_ok=True, parents=True)
        (directory / name / "config.json").write_text(json.dumps(config))
    # the recorder's torch is built for no CUDA
    built = {"cuda_major": asked.get("cuda_major", 0)} if asked["arch"].startswith("sm") else {}
    extra = {k: v for k, v in (built | asked.get("attention_config", {})).items() if k in of.vocabulary.facets}
    options = ModelOptions(
        given={ours: asked[theirs] for theirs, ours in _GIVEN.items() if theirs in asked},
        features=frozenset({"batch_invariant"} if asked.get("batch_invariant") else ()),
        extra=tuple(extra.items()),
        ranks=asked.get("tensor_parallel_size", 1),
        draft=draft,
        draft_given={"kv_dtype": drafting["kv_cache_dtype"]} if "kv_cache_dtype" in drafting else {},
    )
    name = of.vocabulary.architectures[asked["arch"]].platform
    platform = attnreg.Platform(
        platform=name,
        arch=asked["arch"],
        # elsewhere every package counts as installed; AMD's package for processors does not
        packages=PACKAGES if name in ("xpu", "cpu") else None,
        flags=frozenset({"aiter", "aiter_mha", "aiter_mla"} if asked.get("aiter") == "on" else ()),
    )
    more = {
        "backend": asked.get("attention_backend"),
        "draft_backend": drafting.get("attention_backend"),
        "layout": asked.get("kv_cache_layout"),
        "graphs": asked.get("compilation_config", {}).get("cudagraph_mode"),
        "speculative_tokens": drafting.get("num_speculative_tokens"),
    }
    named = {name: value for name, value in more.items() if value is not None}
    return evaluate(run_of(str(directory / asked["model"]), options, of, platform, **named))


def compare(row: Row, models: dict[str, Row], directory: Path, release: str) -> Verdict:
    """How the plan of a row compares with what vLLM's own code did."""
    asked, out = row["in"], row["out"]
    error = out.get("error", {})
    # an assertion has no text
    stops = (error["text"] or error["by"]) if error.get("about") in ("attention", "architecture") else None
    stops = stops or next((out[k]["error"] for k in ("layout", "graphs") if isinstance(out.get(k), dict)), None)
    try:
        plan = plan_of(asked, models, directory, release)
    except (ConfigError, RequestError) as e:
        if error:
            return Verdict("equal" if stops else "left out", f"{e} | {error['text']}")
        # vLLM finds out in its first step, and attnreg says of some drafts that it does not know them
        not_known = re.search("describes none|has no rules for", str(e))
        kind = "left out" if "hidden states" in str(e) else "not known" if not_known else "different"
        return Verdict(kind, f"is refused: {e}")
    conflicts = [c.sentence for c in plan.conflicts if not _later(c)]
    if stops:
        kind = {True: "different", False: "equal", None: "not known"}[plan.starts]
        return Verdict(kind, f"vLLM stops: {stops} | {conflicts or [u.text for u in plan.unknown]}")
    if error:
        return Verdict("left out", error["text"])
    if conflicts:
        return Verdict("different", f"does not start: {conflicts}")
    if any(group.run.selection is not None and not _known(group) for group in plan.groups) and plan.conflicts:
        return Verdict("left out", f"stops later: {plan.conflicts[0].sentence}")
    if wrong := list(_differences(plan, asked, out)):
        return Verdict("different", "; ".join(wrong))
    return Verdict("not known", "; ".join(u.text for u in plan.unknown)) if plan.unknown else Verdict("equal")


def _later(conflict: Any) -> bool:
    """Whether a conflict stops the engine after what was recorded."""
    said = (conflict.sentence, *(fact.sentence for fact in conflict.facts))
    # vLLM asks such a backend about batch invariance only when it groups the layers
    if "named by" in conflict.sentence and all("batch_invariant is not" in sentence for sentence in said[1:]):
        return True
    return any(words in sentence for sentence in said for words in _LATER)


def _by_transformers(group: Any) -> bool:
    """Whether vLLM builds the layers of a group by its Transformers backend."""
    request = group.run.selection.request if group.run.selection is not None else None
    return request is not None and dict(request.extra).get("served") == "transformers"


def _differences(plan: Plan, asked: Row, out: Row) -> Iterator[str]:
    """Where a plan says something else than vLLM did."""
    built = asked.get("built", 8)
    silent = {g.run.role for g in plan.groups if g.run.selection is None or g.run.selection.unknown}
    ours: dict[Any, set[float]] = {}
    for group in plan.groups:
        selection = group.run.selection
        # the first layers of a target are built, all by the Transformers backend; its draft's have other numbers
        outside = (
            group.run.role == "target" and min(group.run.layers, default=0) >= built and not _by_transformers(group)
        )
        if selection is None or selection.unknown or selection.backend is None or outside:
            continue
        if group.run.role in ("target", "draft"):
            ours.setdefault(_key(group), set()).add(_token_bytes(group))
        start = selection.start
        if start is not None and group.run.role == "target" and start.facts["dtype"] != out["dtype"]:
            yield f"dtype {start.facts['dtype']}, not {out['dtype']}"
    theirs: dict[Any, set[float]] = {}
    for layer in out["layers"]:
        if layer["kind"] not in _TOWERS and layer.get("attn_type") != "encoder" and "head_size" in layer:
            stored = layer.get("kv_dtype") if layer.get("attn_type") != "encoder_only" else None
            key = layer.get("draft", False), layer["backend"], layer["head_size"], stored
            counted = -1 if layer["kind"] == "CrossAttention" else layer.get("token_bytes") or 0
            theirs.setdefault(key, set()).add(counted)
    unknown = {key for key in theirs if ("draft" if key[0] else "target") in silent}
    if ours.keys() - theirs.keys() or theirs.keys() - ours.keys() - unknown:
        yield f"layers {sorted(map(str, ours))}, not {sorted(map(str, theirs))}"
    for key in ours.keys() & theirs.keys():
        # other layers of which nothing is said may have the key too
        if ("draft" if key[0] else "target") in silent and ours[key] < theirs[key]:
            continue
        # layers may share the cache of another one, and a cache of what is attended to is not counted
        if not (free := {-1, 0} & (ours[key] | theirs[key])) and ours[key] != theirs[key]:
            yield f"{key}: {ours[key]} bytes, not {theirs[key]}"
        elif free and (differ := ours[key] - theirs[key] - {-1, 0}) and -1 not in theirs[key]:
            yield f"{key}: {differ} bytes, not {theirs[key]}"
    towers = {layer["backend"] for layer in out["layers"] if layer["kind"] in _TOWERS}
    vision = {_name(group) for group in plan.groups if group.run.role in ("vision", "encoder") and _known(group)}
    if vision and towers - vision:
        yield f"towers {sorted(vision)}, not {sorted(towers)}"
    said = {
        "block_size": plan.page.tokens if plan.page is not None else None,
        "layout": plan.layout.value if plan.layout is not None else None,
        "graphs": plan.graphs.value if plan.graphs is not None else None,
    }
    yield from (f"{k} {value}, not {out[k]}" for k, value in said.items() if value not in (None, out[k]))


def _known(group: PlanGroup) -> bool:
    return _name(group) != ""


def _name(group: PlanGroup) -> str:
    """The backend of a group's layers; "" without one."""
    selection = group.run.selection
    return "" if selection is None or selection.backend is None else selection.backend.name


def _token_bytes(group: PlanGroup) -> float:
    """The bytes of a token in one layer, without its indexer's keys; -1 if they are not known."""
    if group.run.shapes:
        return sum(shape.page_bytes / shape.states for shape in group.run.shapes)
    with_keys = group.run.selection is not None and group.run.selection.request.attention == "mla_sparse"
    return -1 if group.cache.first is None or with_keys else group.cache.first


def _key(group: PlanGroup) -> Any:
    """Whether layers are a draft's, their backend, head size and the KV dtype that they store."""
    selection = group.run.selection
    assert selection is not None
    assert selection.backend is not None
    facts = selection.start.facts if selection.start is not None else {}
    request = selection.request
    cached = request.attn_type in ("decoder", "encoder_decoder")
    stored = next((f.value for f in selection.consequences if f.kind == "stores"), facts.get("kv_dtype") or "auto")
    size = facts.get("head_size", request.head_size)
    return request.role == "draft", selection.backend.name, size, stored if cached else None
