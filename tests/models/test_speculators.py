"""Drafts in the speculators format: read as vLLM reads them, release by release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg.cli.commands import main
from attnreg.models.fields import of_speculators

CONFIGS = ROOT / "examples" / "configs"
LAYERS = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 128256,
}


def config(method: str | None = "eagle3", layers: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 32000,
        "dtype": "bfloat16",
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 3}],
            "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
        },
        "speculators_model_type": method,
        "transformer_layer_config": {**LAYERS, **(layers or {})},
        **more,
    }


def plan(tmp_path: Path, data: dict[str, Any], engine: str = "vllm-0.33.0", **more: Any) -> attnreg.Plan:
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    where = attnreg.Platform(platform="cuda", arch="sm90")
    return attnreg.plan(CONFIGS / "Llama-3.1-8B", where, engine, draft=str(tmp_path), speculative_tokens=3, **more)


def draft(found: attnreg.Plan) -> Any:
    [group] = [group for group in found.groups if group.run.role == "draft"]
    return group.run.selection


def test_the_layers_are_those_inside() -> None:
    read = of_speculators(config(target_hidden_size=None, quantization_config={"quant_method": "fp8"}))
    assert {name: read[name] for name in LAYERS} == LAYERS
    assert (read["draft_vocab_size"], read["architectures"], read["dtype"]) == (32000, ["eagle3"], "bfloat16")
    assert "quantization_config" not in read


@pytest.mark.parametrize(
    ("method", "engine", "starts"),
    [
        *(("eagle3", f"vllm-0.{n}.0", True) for n in (21, 24, 28, 33)),
        *(("dflash", f"vllm-0.{n}.0", True) for n in (24, 33)),
        # no recorded start has one
        *(("peagle", f"vllm-0.{n}.0", None) for n in (22, 33)),
        ("peagle", "vllm-0.21.0", False),
        ("dspark", "vllm-0.24.0", False),
        ("dspark", "vllm-0.25.0", True),
        ("dflash2", "vllm-0.28.0", False),
        ("dflash2", "vllm-0.29.0", None),
        ("mtp", "vllm-0.33.0", False),
        (None, "vllm-0.33.0", False),
    ],
)
def test_a_release_reads_its_own_types(method: str | None, engine: str, starts: bool | None, tmp_path: Path) -> None:
    assert plan(tmp_path, config(method), engine).starts is starts


@pytest.mark.parametrize(("engine", "starts"), [("vllm-0.23.0", True), ("vllm-0.24.0", False), ("vllm-0.33.0", False)])
def test_eagle_3_has_layers_of_llama_or_qwen3(engine: str, starts: bool, tmp_path: Path) -> None:
    assert plan(tmp_path, config(layers={"model_type": "mistral"}), engine).starts is starts
    assert plan(tmp_path, config(layers={"model_type": "qwen3", "head_dim": 128}), engine).starts is True


@pytest.mark.parametrize(
    ("engine", "asked", "causal"),
    [
        ("vllm-0.33.0", None, False),
        ("vllm-0.33.0", True, False),
        ("vllm-0.33.0", False, True),
        ("vllm-0.26.0", False, True),
        # it did not read the field yet
        ("vllm-0.25.0", False, False),
    ],
)
def test_dflash_is_causal_if_its_windows_are(engine: str, asked: bool | None, causal: bool, tmp_path: Path) -> None:
    more = {} if asked is None else {"sliding_window_non_causal": asked}
    selection = draft(plan(tmp_path, config("dflash", **more), engine))
    assert ("non_causal" not in selection.point()["features"]) is causal


def test_a_draft_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()), encoding="utf-8")
    for command in ("explain", "plan"):
        assert main([command, "--engine", "vllm", "--arch", "sm90", "--model", str(tmp_path)]) == 2
        assert "draft for meta-llama/Llama-3.1-8B-Instruct" in capsys.readouterr().err


def test_a_draft_for_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(attnreg.RequestError, match="reads hidden states of 2,048 elements"):
        plan(tmp_path, config(target_hidden_size=2048))
    with pytest.raises(attnreg.ConfigError, match="num_hidden_layers is missing"):
        plan(tmp_path, {**config(), "transformer_layer_config": None})
