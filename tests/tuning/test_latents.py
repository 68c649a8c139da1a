"""Layers of MLA in both of their forms: latents are decoded, and prompts attend to packed keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import ROOT

import attnreg
from attnreg import Platform
from attnreg.analysis.timings.rules import rules_of
from attnreg.analysis.timings.samples import Cell, Samples
from attnreg.loader import load_registry, unloadable
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.selection.question import Question
from attnreg.selection.selector import evaluate
from attnreg.tuning.bench import Bench
from attnreg.tuning.grid import WORKLOADS, PlannedCell, grid
from attnreg.tuning.overlay import overlay_text

PACKAGES = {"torch": "2.11", "triton": "3.6", "vllm": "0.33.0"}
H200 = Platform(platform="cuda", arch="sm90", packages=tuple(PACKAGES.items()), device="H200")
MODELS = ROOT / "examples/configs"


def planned(registry: attnreg.Registry, model: str = "DeepSeek-V3", **given: str) -> list[PlannedCell]:
    asked = model_questions(str(MODELS / model), ModelOptions(given=given), registry).questions
    return grid(asked, WORKLOADS["gpu"], registry, H200, {})


def words(cells: list[PlannedCell]) -> dict[str, list[str]]:
    """The workloads of each phase."""
    found: dict[str, list[str]] = {}
    for each in cells:
        found.setdefault(each.cell.request.phase, []).append(each.cell.words)
    return found


def test_each_form_has_its_workloads_and_backends(default: attnreg.Registry) -> None:
    forms: dict[str, list[PlannedCell]] = {}
    for each in planned(default):
        forms.setdefault(each.cell.request.phase, []).append(each)
    prompts = ["prefill 4 x 2048", "prefill 1 x 512 after 7680"]
    assert words(planned(default)) == {"any": ["decode 32 x 4096", "decode 1 x 8192"], "prefill": prompts}
    # one of them alone
    assert words(planned(default, phase="prefill")) == {"prefill": prompts}
    assert words(planned(default, phase="decode")) == {"decode": ["decode 32 x 4096", "decode 1 x 8192"]}
    for each in forms["prefill"]:
        request = each.cell.request
        assert (request.head_size, request.head_size_v, request.num_kv_heads) == (192, 128, 128)
        assert request.block_size is None
        assert {"HOPPER_PREFILL", "TRITON_PREFILL"} <= {*each.backends}
        assert dict(each.refused)["HOPPER_MLA"].startswith("phase is prefill")
        # 128 heads of 192 and 128, half of the pairs of a causal prompt
        assert each.cell.least_us(4e3, 1e3) > 20
    assert {"HOPPER_MLA", "TRITON_MLA"} <= {*forms["any"][0].backends}


def test_orders_of_prompts_stand_beside_those_of_latents(default: attnreg.Registry, tmp_path: Path) -> None:
    machine = {"platform": "cuda", "arch": "sm90", "device": "NVIDIA H200", "packages": PACKAGES}
    times = {"HOPPER_MLA": 100.0, "TRITON_MLA": 150.0, "TRITON_PREFILL": 5000.0, "HOPPER_PREFILL": 7000.0}
    samples = Samples(machine, default.title, dict.fromkeys(times, "0" * 16), "2026-11-27")
    samples.cells = [each.cell for each in planned(default)]
    for i, each in enumerate(planned(default)):
        for name in times.keys() & {*each.backends}:
            samples.turns[i, name] = [[times[name] + turn % 3] for turn in range(8)]
    latents, prompts = rules_of(samples, default, H200)
    assert (latents.order, latents.when["phase"]) == (("HOPPER_MLA", "TRITON_MLA"), ["any", "decode"])
    assert (prompts.order, prompts.when["phase"]) == (("TRITON_PREFILL", "HOPPER_PREFILL"), "prefill")
    overlay = tmp_path / "tuned.yaml"
    overlay.write_text(overlay_text(samples, default, "tuned.samples.jsonl"))
    tuned = load_registry(overlay)
    request = next(each.cell.request for each in planned(default) if each.cell.request.phase == "prefill")
    assert request.phase == "prefill"
    for registry, expected in ((default, "HOPPER_PREFILL"), (tuned, "TRITON_PREFILL")):
        bare = Platform(platform="cuda", arch="sm90", packages={"torch": "2.11", "triton": "3.6"}, device="H200")
        chosen = evaluate(request, bare, registry, unloadable=unloadable).chosen
        assert chosen is not None
        assert chosen.name == expected


def test_heads_share_the_latents_where_nobody_says_how_many_have_keys(default: attnreg.Registry) -> None:
    request = attnreg.AttentionRequest(attention="mla", head_size=576, num_heads=16)
    cells = grid([Question(request)], WORKLOADS["gpu"], default, H200, {})
    assert {each.cell.request.num_kv_heads for each in cells} == {1}
    assert all("HOPPER_MLA" in each.backends for each in cells)


@pytest.mark.parametrize("context", [0, 50])
def test_a_bench_runs_prompts_over_packed_keys(default: attnreg.Registry, context: int) -> None:
    here = attnreg.detect(default.vocabulary)
    (request,) = {each.cell.request for each in planned(default) if each.cell.request.phase == "prefill"}
    cell = Cell(attnreg.AttentionRequest(**{**request.to_dict(), "num_heads": 2, "num_kv_heads": 2}), 2, 40, context)
    bench = Bench(
        cell, evaluate(cell.request, here, default, "TORCH_PREFILL", unloadable=unloadable), torch.device("cpu")
    )
    assert bench.trial.cache is None
    assert bench.wrong() == ""
    assert len(bench.turn()) > 2


def test_a_phase_has_its_own_workloads(default: attnreg.Registry) -> None:
    prompts = {"prefill": ["prefill 4 x 2048", "prefill 1 x 512 after 7680"]}
    assert words(planned(default, "Llama-3.1-8B", phase="prefill")) == prompts
    assert words(planned(default, "Llama-3.1-8B", phase="decode")) == {
        "decode": ["decode 32 x 4096", "decode 1 x 8192"]
    }


def test_where_tokens_are_chosen_prompts_attend_to_latents_too(default: attnreg.Registry) -> None:
    cells = planned(default, "DeepSeek-V3.2-Exp")
    prompts = ["prefill 4 x 2048", "prefill 1 x 512 after 7680"]
    every = ["decode 32 x 4096", "prefill 4 x 2048", "decode 1 x 8192", "prefill 1 x 512 after 7680"]
    assert words(cells) == {"any": every, "prefill": prompts}
    assert {"TRITON_MLA_SPARSE", "TORCH_MLA_SPARSE"} <= {*cells[0].backends}


@pytest.mark.parametrize(("queries", "context"), [(1, 20), (1, 90), (40, 0), (40, 60)])
def test_a_bench_chooses_as_many_tokens_as_an_indexer_keeps(
    default: attnreg.Registry, queries: int, context: int
) -> None:
    here = attnreg.detect(default.vocabulary)
    request = attnreg.AttentionRequest(
        attention="mla_sparse", head_size=576, head_size_v=512, num_heads=2, num_kv_heads=1, block_size=64,
        dtype="float16", index_topk=30,
    )  # fmt: skip
    selection = evaluate(request, here, default, "TORCH_MLA_SPARSE", unloadable=unloadable)
    bench = Bench(Cell(request, 2, queries, context), selection, torch.device("cpu"))
    indices = bench.trial.indices
    assert indices is not None
    seen = torch.arange(context, context + queries).repeat(2) + 1
    kept = indices[: len(seen)]
    assert (kept >= 0).sum(-1).tolist() == seen.clamp(max=30).tolist()
    assert (kept < seen[:, None]).all()
    assert all(len({*row.tolist()} - {-1}) == n for row, n in zip(kept, seen.clamp(max=30).tolist(), strict=True))
    assert bench.wrong() == ""
    assert len(bench.turn()) > 2
