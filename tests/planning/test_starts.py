"""Conflicts of whole runs: each is as small as it can be, and each change that is named starts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg import Platform
from attnreg.models.questions import ModelOptions
from attnreg.planning.ask import planned, run_of
from attnreg.planning.evaluate import Run, evaluate
from attnreg.planning.graphs import agree_graphs
from attnreg.planning.layout import agree_layout
from attnreg.planning.plan import Plan

CONFIGS = ROOT / "examples" / "configs"
NAMED = ("FLEX_ATTENTION", "ROCM_ATTN", "TRITON_ATTN", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_FA")
GFX942 = Platform(platform="rocm", arch="gfx942", flags=frozenset({"aiter", "aiter_mha"}))


@pytest.fixture(scope="module")
def vllm() -> attnreg.Registry:
    return attnreg.load_registry("vllm-0.30.0")


def run_with(vllm: attnreg.Registry, where: Platform = GFX942, model: str = "Llama-3.1-8B", **more: Any) -> Run:
    draft = more.pop("draft", None)
    options = ModelOptions(draft=draft and str(CONFIGS / draft))
    return run_of(str(CONFIGS / model), options, vllm, where, **more)


@pytest.mark.parametrize(("target", "draft"), list(itertools.product(NAMED, NAMED)))
def test_a_run_starts_if_and_only_if_its_backends_share_a_layout(
    target: str, draft: str, vllm: attnreg.Registry
) -> None:
    plan = evaluate(run_with(vllm, draft="Qwen3-8B", backend=target, draft_backend=draft))
    sets = [
        None if g.layouts is None or g.layouts.text == "any" else {*g.layouts.text.split(", ")} for g in plan.groups
    ]
    chosen = [g.run.selection for g in plan.groups]
    if any(s is None or s.backend is None for s in chosen):
        assert plan.starts is False
        return
    known = [layouts for layouts in sets if layouts is not None]
    assert plan.starts is (not known or bool(set.intersection(*known)))


def layout_conflict(plan: Plan, vllm: attnreg.Registry, without: int | None = None, **asked: Any) -> bool:
    groups = [group.run for number, group in enumerate(plan.groups) if number != without]
    return agree_layout(groups, vllm.layout, **asked).conflict is not None


def test_without_any_fact_of_a_conflict_the_run_starts(vllm: attnreg.Registry) -> None:
    plan = planned(run_with(vllm, draft="Qwen3-8B", backend="FLEX_ATTENTION", draft_backend="ROCM_ATTN"))
    [conflict] = plan.conflicts
    assert [fact.group for fact in conflict.facts] == ["32 layers (0–31)", "draft · 36 layers (0–35)"]
    assert all(fact.where is not None for fact in conflict.facts)
    assert layout_conflict(plan, vllm)
    assert not any(layout_conflict(plan, vllm, without=number) for number in range(2))


def test_a_layout_that_is_asked_for_is_a_fact_of_the_conflict(vllm: attnreg.Registry) -> None:
    plan = planned(run_with(vllm, backend="FLEX_ATTENTION", layout="HND"))
    [conflict] = plan.conflicts
    assert [fact.group for fact in conflict.facts] == ["", "32 layers (0–31)"]
    assert layout_conflict(plan, vllm, asked="HND")
    assert not layout_conflict(plan, vllm)
    assert plan.changes[0].options == (("--layout", None),)


@pytest.mark.parametrize(
    "more",
    [
        {"draft": "Qwen3-8B", "backend": "FLEX_ATTENTION", "draft_backend": "ROCM_ATTN"},
        {"backend": "FLEX_ATTENTION", "layout": "HND"},
        {"draft": "Qwen3-8B", "backend": "FLEX_ATTENTION", "draft_backend": "ROCM_ATTN", "layout": "BLHNC"},
    ],
)
def test_each_change_that_is_named_starts(more: dict[str, Any], vllm: attnreg.Registry) -> None:
    plan = planned(run_with(vllm, **more))
    assert plan.starts is False
    assert plan.changes
    for change in plan.changes:
        fields = {name[2:].replace("-", "_"): value for name, value in change.options}
        assert fields.keys() <= {"layout", "backend", "draft_backend", "kv_dtype", "draft"}
        if "kv_dtype" in fields:
            continue
        changed = {name: value for name, value in {**more, **fields}.items() if value is not None}
        if "draft" not in changed:
            changed.pop("draft_backend", None)
        assert evaluate(run_with(vllm, **changed)).starts, change.sentence


def test_the_mode_of_the_run_is_the_evaluators(vllm: attnreg.Registry) -> None:
    where = Platform(platform="cuda", arch="sm100")
    plan = evaluate(run_with(vllm, where, "DeepSeek-V3", backend="CUTLASS_MLA", graphs="full"))
    again = agree_graphs([group.run for group in plan.groups], vllm.graphs, asked="full")
    assert plan.graphs == again
    assert plan.graphs is not None
    assert plan.graphs.value == "FULL_AND_PIECEWISE"
    assert [group.graphs and group.graphs.text for group in plan.groups] == ["one token"]


def test_what_no_engine_reads_is_refused(vllm: attnreg.Registry) -> None:
    default = attnreg.load_registry("default")
    where = Platform(platform="cuda", arch="sm90")
    for option, value in (("layout", "HND"), ("graphs", "full"), ("connector", "HND")):
        with pytest.raises(attnreg.RequestError):
            run_with(default, where, **{option: value})
        assert getattr(run_with(vllm, where, **{option: value}), option) == value
    with pytest.raises(attnreg.RequestError, match="those of a draft"):
        run_with(vllm, where, speculative_tokens=2)
    with pytest.raises(TypeError, match="no option nonsense"):
        attnreg.plan(CONFIGS / "Llama-3.1-8B", where, "vllm-0.33.0", nonsense=1)  # type: ignore[call-arg]


def test_attnregs_own_registry_says_nothing_of_layouts_and_graphs() -> None:
    plan = attnreg.plan(CONFIGS / "Llama-3.1-8B", Platform(platform="cuda", arch="sm90"))
    assert (plan.layout, plan.graphs, plan.starts) == (None, None, True)
    assert plan.page is not None
    assert plan.page.tokens == 16


BEFORE = ("vllm-0.20.0", "vllm-0.21.0", "vllm-0.24.0", "vllm-0.25.0")


@pytest.mark.parametrize("engine", [*BEFORE, "vllm-0.26.0", "vllm-0.33.0"])
def test_before_0_26_no_layer_of_mla_keeps_a_plain_cache_in_a_packed_run(engine: str, tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "DeepSeek-V3/config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = attnreg.plan(tmp_path, "sm90", engine, kv_dtype="turboquant_4bit_nc")
    assert plan.starts is (engine not in BEFORE)


@pytest.mark.parametrize(
    ("engine", "kv_dtype"), [("vllm-0.30.0", "fp8"), ("vllm-0.31.0", "auto"), ("vllm-0.32.0", "fp8")]
)
def test_in_0_31_a_smaller_model_has_the_kv_dtype_of_its_target(engine: str, kv_dtype: str) -> None:
    models = [str(CONFIGS / name) for name in ("Llama-3.3-70B-Instruct", "Llama-3.1-8B")]
    plan = attnreg.plan(models[0], "sm90", engine, draft=models[1], draft_kv_dtype="fp8")
    (draft,) = (g.run.selection for g in plan.groups if g.run.role == "draft")
    assert draft is not None
    assert draft.point()["kv_dtype"] == kv_dtype


@pytest.mark.parametrize("engine", ["vllm-0.20.0", "vllm-0.22.0", "vllm-0.28.0", "vllm-0.33.0"])
def test_layers_in_chunks_stop_a_packed_run(engine: str) -> None:
    """Recorded for 0.22 to 0.33: vLLM raises 'Unknown TurboQuant cache dtype'."""
    for kv_dtype, stops in (("turboquant_k8v4", True), ("auto", False)):
        plan = attnreg.plan("Llama-4-Scout-17B-16E-Instruct", "sm90", engine, kv_dtype=kv_dtype)
        assert any("Unknown TurboQuant cache dtype" in str(conflict) for conflict in plan.conflicts) is stops


@pytest.mark.parametrize("engine", ["vllm-0.20.0", "vllm-0.25.0", "vllm-0.28.0", "vllm-0.33.0"])
def test_a_layer_that_attends_to_an_encoder_is_packed_in_every_packed_run(engine: str, tmp_path: Path) -> None:
    """Recorded: Whisper's smallest has four layers in its decoder, which all keep a plain cache otherwise."""
    config = json.loads((CONFIGS / "whisper-large-v3/config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"encoder_layers": 4, "decoder_layers": 4}), "utf-8")
    assert attnreg.plan(tmp_path, "sm90", engine).starts is not False
    assert attnreg.plan(tmp_path, "sm90", engine, kv_dtype="turboquant_k8v4").starts is False


@pytest.mark.parametrize("engine", ["vllm-0.25.0", "vllm-0.26.0", "vllm-0.27.0"])
def test_bytes_of_windows_over_four_bits_are_not_known_up_to_0_27(engine: str) -> None:
    """Recorded of 0.25 and 0.26: a layer with windows has eight bits. 0.28 gives every layer four."""
    for kv_dtype, starts in (("int4_per_token_head", None), ("int8_per_token_head", True)):
        assert attnreg.plan("gemma-2-9b", "sm90", engine, kv_dtype=kv_dtype).starts is starts
    assert attnreg.plan("gemma-2-9b", "sm90", "vllm-0.28.0", kv_dtype="int4_per_token_head").starts is True


@pytest.mark.parametrize(("head_dim", "starts"), [({}, False), ({"head_dim": None}, False), ({"head_dim": 128}, True)])
def test_vllm_0_20_cannot_size_the_states_of_a_minimax_without_head_dim(
    tmp_path: Path, head_dim: dict[str, Any], starts: bool
) -> None:
    config = {"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"], "hidden_size": 4096,
              "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2,
              "layer_types": ["full_attention", "linear_attention"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | head_dim), "utf-8")
    assert attnreg.plan(tmp_path, "sm90", "vllm-0.20.0").starts is starts


@pytest.mark.parametrize(
    ("engine", "draft", "backend"),
    [
        ("vllm-0.20.0", "Qwen3-8B-DFlash-b16", "FLEX_ATTENTION"),
        ("vllm-0.20.0", "Llama-3.1-8B", "TRITON_ATTN"),
        ("vllm-0.21.0", "Qwen3-8B-DFlash-b16", "TRITON_ATTN"),
    ],
)
def test_where_a_draft_is_dflash_every_layer_of_0_20_is_not_causal(
    tmp_path: Path, engine: str, draft: str, backend: str
) -> None:
    """Recorded: vLLM 0.20's selector reads the method of the draft for the layers of the model too."""
    for name in ("Qwen3-8B", draft):
        config = json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"vocab_size": 151936}), "utf-8")
    plan = attnreg.plan(tmp_path / "Qwen3-8B", "sm75", engine, dtype="float32", draft=str(tmp_path / draft))
    chosen = plan.groups[0].run.selection.backend
    assert chosen is not None
    assert chosen.name == backend
