"""Drafts that do not fit their model: `explain`, `plan` and `check` refuse each alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnreg.cli.commands import main

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = LLAMA | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
DFLASH = LLAMA | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}, "block_size": 8}
LAGUNA = DFLASH | {"architectures": ["DFlashLagunaForCausalLM"], "hidden_size": 1024}
# its count is that of the layers that it reads
K3_DSPARK = DFLASH | {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "target_layer_ids": [1, 2],
    "num_target_layers": 2,
}
SMALL = LLAMA | {"num_hidden_layers": 2}


@pytest.fixture
def statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The exit statuses of explain, plan and check about a draft, and what check finds."""

    def ask(draft: dict[str, Any], engine: str = "vllm-0.33.0", more: str = "") -> Any:
        for name, config in (("target", LLAMA), ("draft", draft)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        target, own = str(tmp_path / "target"), str(tmp_path / "draft")
        words = ["--engine", engine, "--arch", "sm90", "--model", target, "--draft", own]
        told = [main([command, *words]) for command in ("explain", "plan")]
        script = tmp_path / "serve.sh"
        if engine.startswith("vllm"):
            config = {"method": "draft_model", "model": own, "num_speculative_tokens": 1, **json.loads(more or "{}")}
            script.write_text(f"vllm serve {target} --speculative-config '{json.dumps(config)}'\n")
        else:
            options = f"--speculative-algorithm STANDALONE --speculative-draft-model-path {own}"
            script.write_text(f"python -m sglang.launch_server --model-path {target} {options}\n")
        capsys.readouterr()
        told.append(main(["check", str(script), "--arch", "sm90", "--registry", engine, "--json"]))
        answer = json.loads(capsys.readouterr().out)
        return told, [finding["code"] for finding in answer["findings"]], answer["notes"]

    return ask


@pytest.mark.parametrize(
    ("draft", "refused"),
    [
        (SMALL, False),
        (SMALL | {"vocab_size": 32000}, True),
        (SMALL | {"num_hidden_layers": None}, True),
        (SMALL | {"model_type": "bert", "architectures": ["BertModel"]}, True),
        (DFLASH, False),
        (DFLASH | {"hidden_size": 1024}, True),
        (K3_DSPARK, False),
        (K3_DSPARK | {"num_target_layers": 4}, True),
        (DFLASH | {"target_hidden_size": 4096}, True),
        # its model's width counts
        (LAGUNA, False),
    ],
)
def test_the_three_commands_agree_on_a_draft(draft: dict[str, Any], refused: bool, statuses: Any) -> None:
    (explained, planned, checked), found, _ = statuses(draft)
    assert (explained == 2, planned == 2, checked == 1) == (refused,) * 3
    assert ("refused-draft" in found) is refused


def test_another_vocabulary_is_no_finding_if_the_launch_says_so(statuses: Any) -> None:
    (*_, checked), found, notes = statuses(SMALL | {"vocab_size": 32000}, more='{"use_heterogeneous_vocab": true}')
    assert (checked, found) == (0, [])
    assert any("use_heterogeneous_vocab" in note for note in notes)


@pytest.mark.parametrize(
    ("engine", "what"),
    [("sglang-0.5.23", "the engine warns"), ("vllm-0.22.0", "vLLM does"), ("vllm-0.33.0", "vLLM does")],
)
def test_engines_go_on_with_a_draft_for_another_number_of_layers(engine: str, what: str, statuses: Any) -> None:
    (explained, planned, _), found, notes = statuses(DFLASH | {"num_target_layers": 36}, engine)
    assert 2 not in (explained, planned)
    assert "refused-draft" not in found
    assert any(f"36 layers, the model has 4: {what}" in note for note in notes)


def test_sglang_refuses_a_draft_of_another_vocabulary(statuses: Any) -> None:
    (*_, checked), found, _ = statuses(SMALL | {"vocab_size": 32000}, "sglang-0.5.23")
    assert (checked, found) == (1, ["refused-draft"])


@pytest.mark.parametrize(("engine", "status"), [("vllm-0.24.0", 3), ("vllm-0.25.0", 0)])
def test_what_flashinfer_computes_with_other_heads_is_not_known(engine: str, status: int, statuses: Any) -> None:
    other = SMALL | {"num_attention_heads": 8, "hidden_size": 1024}
    (*_, checked), found, _ = statuses(other, engine, '{"attention_backend": "FLASHINFER"}')
    assert (checked, found) == (status, [])


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        # attnreg describes none of this family: it may have some
        (LLAMA, 3, None),
        # its family's field says that it has none
        (DEEPSEEK | {"num_nextn_predict_layers": 0}, 2, "refused-draft"),
        # vLLM's class may take one layer where the field is missing
        (DEEPSEEK, 3, None),
    ],
)
def test_the_three_commands_agree_on_mtp_layers(
    model: dict[str, Any], status: int, code: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    words = ["--engine", "vllm-0.33.0", "--arch", "sm90", "--model", str(tmp_path), "--draft", "mtp", "--json"]
    assert main(["explain", *words]) == status
    capsys.readouterr()
    assert main(["plan", *words]) == status
    planned = capsys.readouterr().out
    if status == 3:
        [stage] = json.loads(planned)["stages"]
        latent = model["model_type"] == "deepseek_v3"
        least = 4 * 2 * (512 + 64 if latent else 2 * 8 * 128)
        assert (stage["bytes_per_token"], stage["bytes_per_token_at_least"]) == (None, least)
    script = tmp_path / "serve.sh"
    script.write_text(f"vllm serve {tmp_path} --speculative-config.method mtp\n", encoding="utf-8")
    checked = main(["check", str(script), "--arch", "sm90", "--registry", "vllm-0.33.0", "--json"])
    found = [finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert (checked, found) == ((1, [code]) if code else (3, []))


WINDOWED = DFLASH | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 512,
    "use_sliding_window": True,
    "draft_vocab_size": 128256,
}
ONE = WINDOWED | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("draft", "engine", "kept"),
    [
        (WINDOWED, "vllm-0.33.0", [512, None]),
        (WINDOWED, "vllm-0.25.0", [512, None]),
        # its layers read no window
        (WINDOWED, "vllm-0.24.0", [None, None]),
        (WINDOWED, "vllm-0.22.0", [None, None]),
        # it stores at any place, and attends inside the window
        (ONE | {"model_type": "laguna", "architectures": ["DFlashLagunaForCausalLM"]}, "vllm-0.33.0", [None]),
        (ONE | {"dflash_config": {"use_swa": True}}, "vllm-0.33.0", "not known"),
    ],
)
def test_what_a_draft_by_diffusion_keeps_of_a_window(
    draft: dict[str, Any], engine: str, kept: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (("target", LLAMA), ("draft", draft)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = ["--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--json"]
    main(["plan", "--engine", engine, "--arch", "sm90", *words])
    groups = [group for group in json.loads(capsys.readouterr().out)["groups"] if group["role"] == "draft"]
    keeps = {index: group["keeps_tokens"] for group in groups for index in group["layers"]}
    if kept == "not known":
        assert [group["bytes_per_token"] for group in groups] == [None]
    else:
        assert [keeps[index] for index in sorted(keeps)] == kept
