"""The gate for pull requests of an engine: its questions, its table, and the files that run it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import support
import yaml

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


def test_what_is_no_vllm_is_refused(tmp_path):
    command = [sys.executable, str(FILE), "--before", str(tmp_path), "--after", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no vLLM: neither a wheel nor a directory with vllm/platforms" in done.stderr
    assert not done.stdout


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
