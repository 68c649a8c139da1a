"""A plan against what `explain` says of each layer, and against every combination of an enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.suite.examples import examples

import attnreg
from attnreg import Platform
from attnreg.cli import main
from attnreg.explain.answers import explain
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.planning.ask import run_of
from attnreg.planning.conflicts import smallest
from attnreg.planning.evaluate import evaluate
from attnreg.planning.pages import page_of, sizes_of
from attnreg.planning.plan import Plan
from attnreg.selection.selector import evaluate as select

CONFIGS = ROOT / "examples" / "configs"
MODELS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
ARCHS = ("sm75", "sm80", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "x86_64")
RELEASES = ("default", "vllm-0.33.0", "vllm-0.24.0", "sglang-0.5.23")


def platform(arch: str, registry: attnreg.Registry) -> Platform:
    return Platform(platform=registry.vocabulary.architectures[arch].platform, arch=arch)


@pytest.fixture(scope="module")
def registries() -> dict[str, attnreg.Registry]:
    return {name: attnreg.load_registry(name) for name in RELEASES}


@given(
    model=st.sampled_from(MODELS),
    draft=st.sampled_from([None, "Qwen3-8B", "Llama-3.1-8B"]),
    arch=st.sampled_from(ARCHS),
    release=st.sampled_from(RELEASES),
    kv_dtype=st.sampled_from(["auto", "fp8_e4m3"]),
    ranks=st.sampled_from([1, 2]),
    backend=st.sampled_from([None, "TRITON_ATTN", "FLEX_ATTENTION"]),
)
@examples(60)
def test_each_layer_has_the_backend_that_explain_names(
    registries: dict[str, attnreg.Registry], backend: str | None, draft: str | None, **asked: Any
) -> None:
    registry = registries[asked["release"]]
    if backend is not None and registry.row(backend) is None:
        backend = None
    config = str(CONFIGS / asked["model"])
    options = ModelOptions(
        given={"kv_dtype": asked["kv_dtype"]}, ranks=asked["ranks"], draft=draft and str(CONFIGS / draft)
    )
    where = platform(asked["arch"], registry)
    run = run_of(config, options, registry, where, backend=backend)
    try:
        plan = evaluate(run)
    except attnreg.ConfigError:
        with pytest.raises(attnreg.ConfigError):
            model_questions(config, options, registry)
        return
    model = model_questions(config, options, registry)
    explained = explain(model.questions, [where], registry, backend=backend, memory=model.memory)
    said = [v.selection.title for answer in explained.answers for v in answer.verdicts]
    planned = [s.title for g in plan.groups for s in (g.run.selection, g.prompts) if s is not None]
    assert planned == said
    # a run of which a layer does not start does not start, and one that is not known is not said to
    assert not (plan.starts and not explained.found)
    if explained.pages:
        assert plan.page is not None
        assert plan.page.tokens == explained.pages[0].tokens
    json.dumps(plan.to_dict(), allow_nan=False)
    for conflict in plan.conflicts:
        assert conflict.facts


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
@pytest.mark.parametrize("model", ["gpt-oss-120b", "DeepSeek-V3", "gemma-2-9b", "Llama-3.1-8B"])
def test_the_page_of_attnregs_own_registry_is_the_best_of_all(
    model: str, arch: str, registries: dict[str, attnreg.Registry]
) -> None:
    registry = registries["default"]
    where = platform(arch, registry)
    questions = model_questions(str(CONFIGS / model), ModelOptions(), registry).questions
    requests = [q.request for q in questions if q.request is not None]
    page, conflict = page_of([("", r) for r in requests], registry, lambda request: select(request, where, registry))
    assert conflict is None
    assert page is not None

    def ranks(size: int) -> tuple[int, ...] | None:
        found = [select(dataclasses.replace(r, block_size=size), where, registry).chosen for r in requests]
        return tuple(c.rank for c in found if c) if all(found) else None

    every = [(r, size) for size in range(1, 600) if (r := ranks(size)) is not None]
    assert ranks(page.tokens or 0) == min(every)[0]
    assert {16, 32, 64, 128} <= {*sizes_of(registry)}


@given(st.lists(st.frozensets(st.integers(0, 5)), max_size=8))
def test_a_smallest_set_fails_and_no_part_of_it_does(sets: list[frozenset[int]]) -> None:
    def excluded(some: Any) -> bool:
        return bool(some) and not frozenset.intersection(*some)

    facts = [frozenset(s) for s in sets]
    if not excluded(facts):
        return
    kept = smallest(facts, excluded)
    assert excluded(kept)
    for size in range(len(kept)):
        for part in itertools.combinations(kept, size):
            assert not excluded(part)


def plan(model: str, arch: str, release: str = "vllm-0.33.0", **options: Any) -> Plan:
    registry = attnreg.load_registry(release)
    return attnreg.plan(CONFIGS / model, platform(arch, registry), registry, **options)


def test_the_changes_that_are_named_start() -> None:
    stuck = plan("gemma-2-9b", "sm75", kv_dtype="fp8")
    assert stuck.starts is False
    assert stuck.changes
    for change in stuck.changes:
        [(option, value)] = change.options
        assert option == "--kv-dtype"
        assert plan("gemma-2-9b", "sm75", kv_dtype=value).starts
    named = plan("DeepSeek-V3", "gfx942", backend="FLASHINFER")
    assert [change.sentence for change in named.changes] == [
        "starts without --backend",
        "starts with --backend TRITON_MLA",
    ]
    assert plan("DeepSeek-V3", "gfx942").starts
    assert plan("DeepSeek-V3", "gfx942", backend="TRITON_MLA").starts


def test_what_is_not_known_of_a_run_is_said() -> None:
    run = plan("DeepSeek-V3", "sm100", "sglang-0.5.23", draft="mtp", tp=8)
    assert run.starts is None
    assert {said.group for said in run.unknown} == {"draft · 1 layer (61)", ""}
    assert run.stages[0].bytes_per_token is None
    assert run.to_dict()["stages"][0]["bytes_per_token"] is None
    assert run.to_dict()["stages"][0]["bytes_per_token_at_least"] == 61 * 1152


def test_the_layers_of_each_stage_are_those_of_the_engine() -> None:
    run = plan("DeepSeek-V3", "sm100", tp=8, pp=3, draft="mtp")
    assert [len(stage.layers) for stage in run.stages] == [20, 21, 20]
    assert [stage.draft_layers for stage in run.stages] == [(), (), (61,)]
    sizes = [stage.bytes_per_token for stage in run.stages]
    assert sizes == [20 * 1152, 21 * 1152, 21 * 1152]


def test_the_states_of_a_hybrid_grow_with_the_tokens_that_its_draft_proposes(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "Qwen3-Next-80B-A3B-Instruct" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    registry = attnreg.load_registry("vllm-0.33.0")

    def states(**options: Any) -> int:
        page = attnreg.plan(tmp_path, platform("sm90", registry), registry, draft="mtp", **options).page
        assert page is not None
        assert page.states is not None
        assert page.states.request_bytes is not None
        return page.states.request_bytes

    # a state for each proposed token beside those of the request
    assert states() == states(speculative_tokens=1) < states(speculative_tokens=5)


# the widest heads are in a config's fields of single layers, and FlashAttention's page depends on them
@pytest.mark.parametrize(("wide", "kv_dtype", "tokens"), [(512, "fp8", 64), (512, "auto", 16), (256, "fp8", 16)])
def test_the_page_follows_from_the_widest_heads_of_single_layers(
    registries: dict[str, attnreg.Registry], tmp_path: Path, wide: int, kv_dtype: str, tokens: int
) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = {"model_type": "gemma4_unified_text", "architectures": ["Gemma4UnifiedForCausalLM"], "hidden_size": 2304}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "layer_types": kinds}
    config |= {"head_dim": 72, "sliding_window": 512, "use_bidirectional_attention": "vision"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"dtype": "bfloat16", "per_layer_config": {"1": {"head_dim": wide}}}))
    vllm = registries["vllm-0.33.0"]
    page = evaluate(run_of(str(file), ModelOptions(given={"kv_dtype": kv_dtype}), vllm, platform("sm90", vllm))).page
    assert page is not None
    assert page.tokens == tokens


@pytest.mark.parametrize(("heads", "ranks", "starts"), [(8, 8, True), (8, 16, None), (1, 2, None), (4, 2, True)])
def test_gpt_oss_does_not_repeat_its_kv_heads(
    registries: dict[str, attnreg.Registry], tmp_path: Path, heads: int, ranks: int, starts: bool | None
) -> None:
    config = json.loads((CONFIGS / "gpt-oss-20b" / "config.json").read_text()) | {"num_key_value_heads": heads}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    vllm = registries["vllm-0.33.0"]
    options = ModelOptions(ranks=ranks)
    assert evaluate(run_of(str(file), options, vllm, platform("sm100", vllm))).starts is starts


def test_the_page_that_a_hybrid_gets_decides_the_blocks(tmp_path: Path) -> None:
    hybrid = json.loads((CONFIGS / "Qwen3-Next-80B-A3B-Instruct" / "config.json").read_text())
    (tmp_path / "hybrid.json").write_text(
        json.dumps(hybrid | {"linear_num_value_heads": 12, "linear_num_key_heads": 6})
    )
    draft = json.loads((CONFIGS / "Llama-3.1-8B" / "config.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps(draft | {"num_attention_heads": 16, "num_key_value_heads": 16}))

    def planned(**options: Any) -> Plan:
        return attnreg.plan(tmp_path / "hybrid.json", "sm100", "vllm-0.33.0", **options)

    alone, drafted = planned(), planned(draft=str(tmp_path / "draft.json"), speculative_tokens=2)
    pages = [plan.page and plan.page.tokens for plan in (alone, drafted)]
    assert (pages, alone.groups[1].block, alone.starts) == ([256, 256], 256, True)
    # nobody asked for pages of this size
    assert drafted.starts is False
    assert "in pages of 128 tokens" in drafted.conflicts[0].facts[0].sentence


def test_a_remark_on_blocks_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--engine", "vllm-0.33", "--arch", "sm100", "--model", "Llama-3.1-8B", "--block-size", "256")
    remark = "blocks 256 tokens; of 64 in a model with as many KV heads as query heads (backends.yaml"
    for heads, said in (("null", True), ("4", False)):
        assert main(["plan", *options, "--set", f"run_queries_per_kv_head={heads}"]) == 0
        assert (remark in " ".join(capsys.readouterr().out.split())) is said
