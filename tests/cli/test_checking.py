"""The commands that say whether something holds: what they print, and with which exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from attnreg import Registry

CONFIGS = ROOT / "examples" / "configs"
HOPPER = ("--arch", "sm90")


def test_check_finds_nothing_in_the_default_registry(run: Callable[..., Any], default: Registry) -> None:
    result = run("check")
    assert result.status == 0, result.out
    assert f" 0 findings ({len(default.known)} known)\n" in result.out


def test_check_fails_on_a_violated_invariant_and_shows_a_configuration(run: Callable[..., Any], tmp_path: Path) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text("backends:\n  TRITON_ATTN:\n    capabilities: {add: {kv_dtypes: [turboquant_k8v4]}}\n")
    result = run("check", "--overlay", str(overlay))
    assert result.status == 1
    assert "violated: a turboquant_* cache goes to TURBOQUANT or to nobody" in result.out
    assert "kv_dtype=turboquant_k8v4" in result.out
    assert "chosen: TRITON_ATTN" in result.out


def test_check_reports_every_problem_of_a_broken_registry(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "backends.yaml").write_text("backends: {A: {summry: x}}\n")
    (tmp_path / "priorities.yaml").write_text("cuda: [{name: a, order: []}]\n")
    result = run("check", "--registry", str(tmp_path))
    assert result.status == 2
    assert f"{tmp_path}/backends.yaml:1:16: backends.A: unknown key `summry`" in result.err
    assert "did you mean `summary`?" in result.err
    assert f"{tmp_path}/priorities.yaml:1:" in result.err


def test_diff_of_a_registry_with_itself_is_empty(run: Callable[..., Any]) -> None:
    result = run("diff", "default", "default")
    assert result.status == 0
    assert "0 of " in result.out


def test_diff_shows_boxes_and_counts(run: Callable[..., Any], tmp_path: Path) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text("choices: [{deny: [FLASHINFER], when: {arch: sm120}}]\n")
    result = run("diff", "default", str(overlay), "--arch", "sm120")
    assert result.status == 1
    assert "FLASHINFER → TRITON_ATTN" in result.out
    assert re.search(r"[\d,]+ of [\d,]+ distinguishable configurations change", result.out)
    data = json.loads(run("diff", "default", str(overlay), "--json", "--limit", "2").out)
    assert data["changed"] == sum(change["count"] for change in data["changes"])
    narrowed = run("diff", "default", str(overlay), "--arch", "sm90")
    assert narrowed.status == 0
    unknown = run("diff", "default", str(overlay), "--facet", "colour=red")
    assert unknown.status == 2
    assert "the facet colour makes no difference in either registry" in unknown.err


def test_diff_of_two_revisions(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    for name in ("vocabulary", "backends", "priorities"):
        (registry / f"{name}.yaml").write_text((ROOT / f"registry/{name}.yaml").read_text())

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "one")
    file = registry / "priorities.yaml"
    file.write_text(
        file.read_text().replace(
            "order: [FLASH_ATTN, FLASHINFER, TRITON_ATTN", "order: [FLASHINFER, FLASH_ATTN, TRITON_ATTN"
        )
    )
    monkeypatch.chdir(tmp_path)
    result = run("diff", "main:registry", "registry", "--limit", "1")
    assert result.status == 1
    assert "FLASH_ATTN → FLASHINFER" in result.out
    assert "model families" not in result.out
    assert "git ls-tree" in run("diff", "nowhere:registry", "registry").err


def test_diff_tells_the_families_that_change_in_a_revision(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "registry", tmp_path / "registry")
    for command in (("init", "-q", "-b", "main"), ("add", "."), ("commit", "-qm", "one")):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    assert run("diff", "main:registry", "registry", "--arch", "sm90").status == 0
    with (tmp_path / "registry/models/granite_swa.yaml").open("a") as file:
        file.write("softcap: 30\n")
    result = run("diff", "main:registry", "registry", "--arch", "sm90")
    assert result.status == 1
    assert "granite_swa: softcap; and 1 like it: granitemoe_swa" in result.out
    data = json.loads(run("diff", "main:registry", "registry", "--arch", "sm90", "--json").out)["models"]
    assert [(c["file"], c["what"], c["families"]) for c in data["changes"]] == [
        ("granite_swa", ["softcap"], ["granite_swa", "granitemoe_swa"])
    ]


def test_a_lock_holds_a_models_ranks_and_leaves_mixers_out(run: Callable[..., Any]) -> None:
    model = str(CONFIGS / "Qwen3-Next-80B-A3B-Instruct")
    status, out, _ = run("lock", *HOPPER, "--model", model, "--tp", "2")
    assert status == 0
    (entry,) = json.loads(out)["selections"]
    assert (entry["layers"], entry["request"]["num_heads"]) == ("12 layers (3, 7, … 47)", 8)
