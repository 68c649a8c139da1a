"""The commands that say whether something holds: what they print, and with which exit status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.registries.forged import file_of, record

from attnreg import Registry

CONFIGS = ROOT / "examples" / "configs"
HOPPER = ("--arch", "sm90")


def test_check_finds_nothing_in_the_default_registry(run: Callable[..., Any], default: Registry) -> None:
    result = run("check")
    assert result.status == 0, result.out
    assert f" 0 findings ({len(default.known)} known)\n" in result.out


def test_check_fails_on_a_record_that_was_changed_and_notes_one_of_an_earlier_kernel(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    copied = tmp_path / "mine"
    shutil.copytree(ROOT / "registry", copied, ignore=shutil.ignore_patterns("engines", "evidence"))
    (copied / "evidence").mkdir()
    file = copied / "evidence/gpu.json"
    data = file_of("NVIDIA H200", "cuda", record("TRITON_ATTN", "0123456789abcdef"))
    file.write_text(json.dumps(data))
    result = run("check", "--registry", str(copied))
    assert result.status == 0, result.out
    text = " ".join(result.out.split())
    assert f"note: {file}:1:75: earlier-record [TRITON_ATTN, NVIDIA H200]: the record of TRITON_ATTN" in text
    data["backends"]["TRITON_ATTN"]["cases"] = 10**9
    file.write_text(json.dumps(data))
    result = run("check", "--registry", str(copied), "--json")
    assert result.status == 1
    [finding] = json.loads(result.out)["findings"]
    assert (finding["code"], finding["where"]) == ("broken-record", f"{file}:1:75")
    assert finding["subject"] == ["gpu.json"]
    assert finding["help"] == "remove it, and record it again with `attnreg verify --record`"


def test_check_fails_on_a_violated_invariant_and_shows_a_configuration_in_any_width(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text("backends:\n  TRITON_ATTN:\n    capabilities: {add: {kv_dtypes: [turboquant_k8v4]}}\n")
    monkeypatch.setenv("COLUMNS", "40")
    result = run("check", "--overlay", str(overlay))
    assert result.status == 1
    text, lines = " ".join(result.out.split()), result.out.splitlines()
    assert "violated-invariant [turboquant-cache]: violated: a turboquant_* cache goes" in text
    assert "kv_dtype=turboquant_k8v4" in text
    assert "chosen: TRITON_ATTN" in text
    assert [line for line in lines if len(line) > 40 and " " in line.strip()] == []
    # what is wrapped stands behind the first character of its line
    at = next(i for i, line in enumerate(lines) if line.startswith("  for example: "))
    assert lines[at + 1].startswith("    ")


def test_check_reports_every_problem_of_a_broken_registry(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "backends.yaml").write_text("backends: {A: {summry: x}}\n")
    (tmp_path / "priorities.yaml").write_text("cuda: [{name: a, order: []}]\n")
    result = run("check", "--registry", str(tmp_path))
    assert result.status == 2
    assert f"{tmp_path}/backends.yaml:1:16: backends.A: unknown key `summry`" in result.err
    assert "did you mean `summary`?" in result.err
    assert f"{tmp_path}/priorities.yaml:1:" in result.err


def test_check_reports_what_is_wrong_in_the_families_of_a_directory(run: Callable[..., Any], tmp_path: Path) -> None:
    copied = tmp_path / "mine"
    shutil.copytree(ROOT / "registry", copied, ignore=shutil.ignore_patterns("engines", "evidence"))
    (copied / "models/odd.yaml").write_text("model_type: odd\n", encoding="utf-8")
    result = run("check", "--registry", str(copied))
    assert result.status == 2
    assert f"{copied}/models/odd.yaml:1:1: `source` is missing" in result.err


def test_a_lock_holds_a_models_ranks_and_leaves_mixers_out(run: Callable[..., Any]) -> None:
    model = str(CONFIGS / "Qwen3-Next-80B-A3B-Instruct")
    status, out, _ = run("lock", *HOPPER, "--model", model, "--tp", "2")
    assert status == 0
    (entry,) = json.loads(out)["selections"]
    assert (entry["layers"], entry["request"]["num_heads"]) == ("12 layers (3, 7, … 47)", 8)


def test_a_lock_is_compared_for_other_packages(run: Callable[..., Any], tmp_path: Path) -> None:
    file = str(tmp_path / "a.lock")
    assert run("lock", *HOPPER, "--head-size", "128", "--dtype", "float16", "-o", file).status == 0
    assert run("check", "--lock", file, "--package", "flash-attn-3").status == 0
    result = run("check", "--lock", file, "--package", "torch")
    assert (result.status, result.err) == (1, "")
    assert "needs package flash-attn-3 or package vllm" in result.out
    assert run("check", "--lock", file, "--package", "flash-atn").err.startswith(
        "attnreg: unknown package 'flash-atn'\n  help: did you mean `flash-attn`?"
    )
    message = "--package says something of a lock: a registry is checked for all packages"
    assert run("check", "--package", "torch") == (2, "", f"attnreg: {message}\n  help: give --lock too\n")


@pytest.mark.parametrize(
    ("engine", "given", "help_"),
    [
        ("vllm", "sglang-0.5.23", "there are vllm-0.20.0, "),
        ("sglang", "vllm-0.33", "there are sglang-0.5.14, "),
        ("vllm", "default", "there are vllm-0.20.0, "),
        ("vllm", "vllm-0.33.0+attnreg", "the nearest is `vllm-0.33.0`"),
        ("vllm", ".", "there are vllm-0.20.0, "),
    ],
)
def test_a_recipe_is_checked_with_a_release_of_its_engine_alone(
    run: Callable[..., Any], tmp_path: Path, engine: str, given: str, help_: str
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"engine: {engine}\n")
    status, _, err = run("check", str(recipe), "--registry", given)
    assert (status, err.splitlines()[0]) == (2, f"attnreg: {given} is no release of {engine}")
    assert help_ in err


@pytest.mark.parametrize("option", ["--package", "--lock", "--overlay", "--trust"])
def test_a_recipe_takes_no_options_of_registries_and_locks(
    run: Callable[..., Any], tmp_path: Path, option: str
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("engine: vllm\n")
    status, _, err = run("check", str(recipe), option, "bogus")
    message = "a launch is checked with the tables of its engine alone"
    help_ = "leave --lock, --overlay, --trust and --package out"
    assert (status, err) == (2, f"attnreg: {message}\n  help: {help_}\n")
