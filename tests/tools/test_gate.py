"""The gate for pull requests of an engine: its questions, its table, and the files that run it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import support
import yaml
from support.stand_ins import small_vllm

FILE = support.ROOT / "tools" / "record" / "gate.py"


@pytest.fixture(scope="module")
def gate():
    spec = importlib.util.spec_from_file_location("gate", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decision(model, arch, chosen, **reasons):
    candidates = [{"backend": name, "reasons": why} for name, why in reasons.items()]
    return {"in": {"id": model, "arch": arch}, "out": {"chosen": chosen, "candidates": candidates}}


def test_the_layers_of_common_models_come_first(gate):
    rows = list(gate.questions())
    assert rows[0]["id"] == "Llama-3.1-8B · 32 layers (0–31)"
    assert {row["arch"] for row in rows} == {arch for _, arch, _ in gate.MACHINES}
    sinks = [row for row in rows if row["id"].startswith("gpt-oss-120b")]
    assert all(row["has_sink"] for row in sinks)
    assert {row["has_sliding_window"] for row in sinks} == {True, False}
    latent = next(row for row in rows if row["id"].startswith("DeepSeek-V3 "))
    assert (latent["use_mla"], latent["head_size"], latent["model"]["hf"]["kv_lora_rank"]) == (True, 576, 512)


def test_the_table_has_what_moves_and_why(gate):
    before = [
        decision("A", "sm90", "X"),
        decision("A", "sm100", "X"),
        decision("B", "sm90", "X"),
        decision("C", "sm90", None),
    ]
    after = [
        decision("A", "sm90", "X"),
        decision("A", "sm100", "Y", X=["sinks not supported"], Y=[]),
        decision("B", "sm90", "Y", Y=[], X=[]),
        decision("C", "sm90", "Y", Y=[]),
    ]
    assert gate.report(before, after)[2:] == [
        "| A | sm100 | X | Y | sinks not supported |",
        "| B | sm90 | X | Y | it is tried before |",
        "| C | sm90 | none | Y | it is tried before |",
    ]
    assert gate.report(before, before) == []


def test_what_is_no_vllm_is_refused(gate, tmp_path, capfd):
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(SystemExit, match="its selector could not be recorded"):
        gate.recorded(tmp_path, tmp_path / "rows.jsonl")
    assert "no vLLM: neither a wheel nor a directory with vllm/platforms" in capfd.readouterr().err


def test_the_action_and_the_hook_run_what_is_there():
    action = yaml.safe_load((support.ROOT / "action.yml").read_text())
    script = action["runs"]["steps"][1]["run"]
    assert "tools/record/gate.py" in script
    assert all(f"--{name}" in script for name in action["inputs"])
    [hook] = yaml.safe_load((support.ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "attnreg check"
    workflow = yaml.safe_load((support.ROOT / "examples" / "gate" / "attention-backends.yml").read_text())
    [*_, step] = workflow["jobs"]["gate"]["steps"]
    assert step["with"].keys() == action["inputs"].keys()


FLASH_ATTN = "vllm/v1/attention/backends/flash_attn.py"
REFUSES = 'return ["MLA not supported"] if asked["use_mla"] else []'


def run_action(before, after, tmp_path):
    """The last step of the action as a runner's shell runs it, and what it adds to the summary of the job."""
    script = yaml.safe_load((support.ROOT / "action.yml").read_text())["runs"]["steps"][-1]["run"]
    (tmp_path / "bin").mkdir(exist_ok=True)
    python = tmp_path / "bin" / "python"
    python.unlink(missing_ok=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    summary = tmp_path / "summary.md"
    summary.unlink(missing_ok=True)
    given = {"BEFORE": str(before), "AFTER": str(after), "GITHUB_ACTION_PATH": str(support.ROOT)}
    path = f"{python.parent}:{os.environ['PATH']}"
    environment = {**os.environ, **given, "GITHUB_STEP_SUMMARY": str(summary), "PATH": path}
    # as GitHub's runners run `shell: bash`
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done, summary.read_text()


def test_a_wheel_that_an_edit_changes_fails_the_job_with_a_table(tmp_path):
    before = small_vllm.wheel(tmp_path / "vllm-1-py3-none-any.whl")
    edit = (FLASH_ATTN, REFUSES, REFUSES.replace("else []", 'else ["no sinks"] if asked["has_sink"] else []'))
    after = small_vllm.edited(before, tmp_path / "vllm-2-py3-none-any.whl", *edit)
    done, summary = run_action(before, after, tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout == summary
    lines = summary.splitlines()
    assert lines[:2] == ["| layers | GPU | before | after | why |", "| --- | --- | --- | --- | --- |"]
    moved = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]
    # the models with sinks, on every machine, the most common first
    assert moved[0] == ("gpt-oss-120b · 18 layers (0, 2, … 34)", "sm80", "FLASH_ATTN", "TRITON_ATTN", "no sinks")
    assert {row[0].partition(" ")[0] for row in moved} == {"gpt-oss-120b", "gpt-oss-20b"}
    assert {row[1] for row in moved} == {"sm80", "sm90", "sm100", "sm120", "gfx942"}
    assert {row[2:] for row in moved} == {("FLASH_ATTN", "TRITON_ATTN", "no sinks")}
    # what was not asked of this release is said, and what was simulated
    assert "this release has no feature use_mm_prefix" in done.stderr
    assert "simulated: the device" in done.stderr


def test_an_edit_that_changes_nothing_passes(tmp_path):
    before = small_vllm.wheel(tmp_path / "vllm-1-py3-none-any.whl")
    after = small_vllm.edited(before, tmp_path / "vllm-2-py3-none-any.whl", FLASH_ATTN, "MLA not", "latents not")
    done, summary = run_action(before, after, tmp_path)
    assert done.returncode == 0, done.stderr
    assert summary == "No layer of a known model gets another backend.\n"


def test_a_release_whose_code_moved_fails_the_job_and_is_named(tmp_path):
    before = small_vllm.wheel(tmp_path / "vllm-1-py3-none-any.whl")
    edit = ("vllm/config/cache.py", "CacheDType", "KvDType")
    after = small_vllm.edited(before, tmp_path / "vllm-2-py3-none-any.whl", *edit)
    done, summary = run_action(before, after, tmp_path)
    assert done.returncode != 0
    assert "this release has no vllm.config.cache:CacheDType" in done.stderr
    assert not summary
