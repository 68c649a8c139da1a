"""What is answered: platforms that agree share a verdict, and the JSON form is the whole trace."""

from __future__ import annotations

import json

import pytest
from support.asking import at

from attnreg import AttentionRequest, Platform, Registry
from attnreg.explain import Question, explain
from attnreg.explain.answers import title_of
from attnreg.selection.selector import evaluate

SINKS = AttentionRequest(head_size=64, num_heads=64, num_kv_heads=8, features={"sinks", "sliding_window"})
GPT_OSS = Question(SINKS, "64/8 heads of 64 · sliding window 128 · sinks", "18 layers (0, 2, … 34)")


def test_platforms_share_a_verdict_for_the_same_reasons_with_other_values(default: Registry) -> None:
    platforms = [at(arch, default) for arch in ("gfx90a", "gfx942", "gfx1100", "gfx950")]
    (answer,) = explain([GPT_OSS], platforms, default).answers
    assert [[s.platform.arch for s in v.selections] for v in answer.verdicts] == [
        ["gfx90a", "gfx1100"],
        ["gfx942", "gfx950"],
    ]
    old = answer.verdicts[0]
    assert all(s == evaluate(SINKS, s.platform, default) for s in old.selections)
    rank = next(c.rank for c in old.selection.candidates if c.name == "ROCM_AITER_FA")
    assert old.reason(rank, 0).asked == "gfx90a, gfx1100"
    # what both platforms say alike is said once
    assert old.reason(3, 0) == old.selection.candidates[2].reasons[0]
    assert old.remedies[rank].text == "on gfx942, with --flag aiter --flag aiter_mha"


def test_a_layer_without_a_request_has_no_verdict(default: Registry) -> None:
    explanation = explain([Question(None, "Mamba"), GPT_OSS], [at("sm90", default)], default)
    assert [len(a.verdicts) for a in explanation.answers] == [0, 1]
    assert explanation.found
    refused = explain([GPT_OSS], [at("sm90", default)], default, backend="ROCM_ATTN")
    assert not refused.found


TITLES = [
    (["gfx942"], "", "ROCm gfx942 (MI300X) · registry "),
    (["gfx942", "gfx950"], "", "ROCm · registry "),
    (["sm90"], "gpt-oss · 36 layers", "gpt-oss · 36 layers · CUDA sm90 (H100) · registry "),
]


@pytest.mark.parametrize(("archs", "what", "title"), TITLES, ids=[t[2] for t in TITLES])
def test_the_title_names_what_where_and_by_which_registry(
    default: Registry, archs: list[str], what: str, title: str
) -> None:
    assert title_of([at(arch, default) for arch in archs], default, what) == title + default.title


def test_a_platform_that_nobody_named_is_titled_by_its_word() -> None:
    from support import tiny

    registry = tiny.load({"A": tiny.row()})
    assert title_of([Platform(platform="gpu", arch="g1")], registry) == f"gpu g1 · registry {registry.title}"


def test_the_json_form_is_the_whole_trace(default: Registry) -> None:
    platforms = [at("gfx942", default), at("gfx1201 +aiter", default)]
    explanation = explain([GPT_OSS], platforms, default, title="t", notes=["n"])
    data = explanation.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert (data["registry"], data["title"], data["notes"]) == (default.title, "t", ["n"])
    (answer,) = data["answers"]
    assert (answer["label"], answer["layers"]) == (GPT_OSS.label, GPT_OSS.layers)
    here, there = answer["selections"]
    assert here["platform"]["arch"] == "gfx942"
    assert here["backend"] == {"name": "TRITON_ATTN", "variant": None}
    assert there["backend"] == {"name": "ROCM_AITER_UNIFIED_ATTN", "variant": None}
    opt_in, _, rocm = here["candidates"][:3]
    assert rocm["would_win"] == {"text": "with --backend ROCM_ATTN", "changes": [], "by_name": "ROCM_ATTN"}
    assert [c["value"] for c in opt_in["would_win"]["changes"]] == ["aiter", "aiter_mha"]
    assert here["candidates"][3]["would_win"] is None
    assert rocm["reasons"][0]["where"].startswith("registry/backends.yaml:")
