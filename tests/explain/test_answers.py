"""What is answered: platforms that agree share a verdict, and the JSON form is the whole trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.registries import tiny
from support.registries.asking import at

from attnreg import AttentionRequest, Platform, Registry, load_registry
from attnreg.explain import Question, explain
from attnreg.explain.answers import title_of
from attnreg.explain.grouping import blocks
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import how_chosen, trace_lines

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


@pytest.mark.parametrize("when", [{"arch": "g2"}, {"head_size": 96}, {"flags": ["fast"]}])
def test_what_one_alone_would_fail_at_is_said_of_it_alone(when: dict[str, Any]) -> None:
    """Platforms share a verdict, layers a block, and a flag is idle, only where no candidate fails for one of them."""
    broken = tiny.row(consequences=[{"when": when, "fails": "no kernel was built"}])
    registry = tiny.load({"A": tiny.row(), "B": broken})
    questions = [Question(AttentionRequest(head_size=n), f"heads of {n}") for n in (64, 96)]
    platforms = [Platform(platform="gpu", arch=arch, flags={"fast"}) for arch in ("g1", "g2")]
    explanation = explain(questions, platforms, registry)
    assert len(explanation.answers[0].verdicts) == (2 if "arch" in when else 1)
    assert len(blocks(explanation.answers)) == (2 if "head_size" in when else 1)
    assert len(explanation.notes) == (0 if "flags" in when else 1)


def test_a_layer_without_a_request_has_no_verdict(default: Registry) -> None:
    explanation = explain([Question(None, "Mamba"), GPT_OSS], [at("sm90", default)], default)
    assert [len(a.verdicts) for a in explanation.answers] == [0, 1]
    assert explanation.found
    refused = explain([GPT_OSS], [at("sm90", default)], default, backend="ROCM_ATTN")
    assert not refused.found


TITLES: list[tuple[list[str], str, dict[str, Any], str]] = [
    (["gfx942"], "", {}, "ROCm gfx942 (MI300X, …) · every package assumed"),
    (["gfx942", "gfx950"], "", {}, "ROCm gfx942 (MI300X, …), gfx950 (MI350X, …) · every package assumed"),
    (["sm90"], "gpt-oss · 36 layers", {}, "gpt-oss · 36 layers · CUDA sm90 (H100, …) · every package assumed"),
    (["sm90"], "q", {"choices": ["deny A"]}, "q · deny A · CUDA sm90 (H100, …) · every package assumed"),
    (
        ["sm90 +aiter"],
        "q",
        {"here": True},
        "q · this machine, CUDA sm90 (H100, …) · flag aiter · every package assumed",
    ),
]


@pytest.mark.parametrize(("archs", "what", "options", "title"), TITLES, ids=[t[3] for t in TITLES])
def test_the_title_is_the_question(
    default: Registry, archs: list[str], what: str, options: dict[str, Any], title: str
) -> None:
    platforms = [at(arch, default) for arch in archs]
    assert (
        title_of(platforms, default, what, **options) == f"{title} · attnreg's own kernels (data {default.fingerprint})"
    )


def test_a_platform_that_nobody_named_is_titled_by_its_word() -> None:
    registry = tiny.load({"A": tiny.row()})
    platform = Platform(platform="gpu", arch="g1")
    assert title_of([platform], registry) == f"gpu g1 · every package assumed · registry {registry.title}"


def test_a_flag_without_an_effect_is_noted(default: Registry) -> None:
    """The answers of sm90 know no flag of AMD's; on gfx942 the flag for MLA alone does nothing for gpt-oss."""
    idle = "changes nothing here: without it, every answer and every reason is the same"
    assert explain([GPT_OSS], [at("sm90 +aiter", default)], default).notes == (f"flag aiter {idle}",)
    assert explain([GPT_OSS], [at("gfx942 +aiter", default)], default).notes == ()
    both = explain([GPT_OSS], [at("gfx942 +aiter +aiter_mla", default)], default, notes=["n"])
    assert both.notes == ("n", f"flag aiter_mla {idle}")
    # one platform that it changes is enough, and without layers there is nothing to say
    assert explain([GPT_OSS], [at("sm90 +aiter", default), at("gfx942 +aiter", default)], default).notes == ()
    assert explain([Question(None, "Mamba")], [at("sm90 +aiter", default)], default).notes == ()


def test_a_winner_is_no_loser_for_its_other_places_in_the_order() -> None:
    """vLLM 0.33.0 tries ROCM_AITER_UNIFIED_ATTN at several places, under conditions that exclude each other."""
    registry = load_registry("vllm-0.33.0")
    platform = at("gfx1201 +aiter +aiter_mha +aiter_mla", registry)
    question = Question(AttentionRequest(head_size=96, dtype="float16"), "q")
    (answer,) = explain([question], [platform], registry).answers
    (verdict,) = answer.verdicts
    chosen = verdict.selection.chosen
    assert chosen is not None
    again = [c for c in verdict.selection.candidates if c.name == chosen.name and c is not chosen]
    assert again
    assert not any(c.rank in verdict.remedies for c in again)
    (block,) = blocks([answer])
    assert chosen.name not in {c.name for c in block.candidates(verdict)}
    assert [line for line in trace_lines(verdict.selection) if line.startswith(chosen.name)] == [
        f"{chosen.title}  {how_chosen(verdict.selection)}"
    ]


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
    assert rocm["would_win"] == {
        "text": "with --backend ROCM_ATTN",
        "changes": [],
        "by_name": "ROCM_ATTN",
        "leads_to": None,
        "of_model": False,
    }
    assert [c["value"] for c in opt_in["would_win"]["changes"]] == ["aiter", "aiter_mha"]
    assert here["candidates"][3]["would_win"] is None
    assert rocm["reasons"][0]["where"].startswith("registry/backends.yaml:")
