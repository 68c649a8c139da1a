"""`attnreg explain` of a model on SGLang's registry: both phases, and the steps with their lines."""

from __future__ import annotations

import json
import re

import pytest
from support import ROOT

from attnreg.cli import main
from attnreg.loader import load_registry

CONFIGS = ROOT / "examples/configs"


@pytest.fixture
def explained(capsys):
    """What `attnreg explain` prints of a model, on sm90 unless another is given, in one line."""

    def explain(model, *options):
        arch = () if "--arch" in options else ("--arch", "sm90")
        command = ["explain", "--registry", "sglang-0.5.23", "--model", str(CONFIGS / model), *arch, *options]
        assert main(command) in (0, 1, 3)
        return " ".join(capsys.readouterr().out.split())

    return explain


def test_phases_that_agree_have_one_answer(explained):
    text = explained("Llama-3.1-8B")
    assert re.search(r"128 · decode 32 layers .* 128 · prefill ▸ fa3 named by phases, steps.yaml:\d+", text)
    assert re.search(r"attention_backend not given → fa3 \(_attention_backend_default\) \(steps.yaml:\d+\)", text)
    assert text.count("▸") == 1


def test_phases_that_differ_have_two(explained):
    text = explained("Llama-3.1-8B", "--set", "prefill_attention_backend=triton")
    assert re.findall(r"· (decode|prefill) ▸ (\w+)", text) == [("decode", "fa3"), ("prefill", "triton")]


def test_one_phase_may_be_asked_for(explained):
    text = explained("Llama-3.1-8B", "--phase", "prefill", "--set", "prefill_attention_backend=triton")
    assert re.findall(r"▸ (\w+)", text) == ["triton"]


def test_a_refusal_has_its_step_and_line(explained):
    text = explained("Llama-3.1-8B", "--set", "attention_backend=cutedsl_mla")
    assert re.search(r"refused by _cutedsl_prefill_backend_fill, steps.yaml:\d+", text)
    assert re.search(r"block_size not given → 64 \(_mla_backend_page_constraints\)", text)


def test_a_vision_tower_is_not_answered(explained):
    text = explained("gemma-3-27b-it")
    assert "which this table does not hold" in text
    assert text.count("▸ fa3") == 2


def test_json_has_the_steps(capsys):
    command = ["explain", "--registry", "sglang-0.5.23", "--arch", "sm90", "--model", str(CONFIGS / "Llama-3.1-8B")]
    assert main([*command, "--json"]) == 0
    text = capsys.readouterr().out
    assert "_attention_backend_default" in text
    json.loads(text)


@pytest.mark.parametrize(
    ("model", "arch", "backend", "step"),
    [
        ("gpt-oss-20b", "sm100", "trtllm_mha", "_gpt_oss_overrides"),
        ("DeepSeek-V3", "sm100", "trtllm_mla", "_deepseek_family_overrides"),
        ("DeepSeek-V3.2-Exp", "sm90", "dsa", "_deepseek_family_overrides"),
        ("Qwen3-Next-80B-A3B-Instruct", "sm100", "triton", "_qwen3_5_hybrid_overrides"),
        ("Llama-4-Scout-17B-16E-Instruct", "gfx942", "aiter", "_llama4_overrides"),
        ("Qwen3-8B", "sm100", "trtllm_mha", "_attention_backend_default"),
        ("whisper-large-v3", "sm90", "flashinfer", "_attention_backend_default"),
    ],
)
def test_the_architecture_is_read_from_the_config(explained, model, arch, backend, step):
    text = explained(model, "--arch", arch)
    assert re.search(rf"attention_backend not given → {backend}(, [^()]+)? \({step}\)", text)
    assert f"▸ {backend}" in text


def test_a_config_without_an_architecture_is_refused(explained, tmp_path):
    """SGLang cannot read it, and an answer for some other model would be wrong."""
    config = json.loads((CONFIGS / "Llama-3.1-8B" / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = explained(tmp_path)
    assert "SGLang reads the model's class in `architectures` of its config.json, and there is none" in text
    assert "▸" not in text
    assert "▸ fa3" in explained(tmp_path, "--set", "architecture=LlamaForCausalLM")


@pytest.mark.parametrize(("release", "refused"), [("0.5.21", False), ("0.5.22", True), ("0.5.23", True)])
def test_a_gemma_4_of_text_alone_with_two_widths_is_not_read(tmp_path, capsys, release, refused):
    """Recorded: transformers 5.19, which 0.5.22 and 0.5.23 pin, raises where SGLang reads `head_dim`."""
    config = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 256,
              "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}  # fmt: skip
    for widths, stops in (({"global_head_dim": 512}, refused), ({"global_head_dim": 256}, False)):
        (tmp_path / "config.json").write_text(json.dumps(config | widths))
        main(["explain", "--engine", f"sglang-{release}", "--arch", "sm90", "--model", str(tmp_path), "--json"])
        start = json.loads(capsys.readouterr().out)["answers"][0]["selections"][0]["start"]
        assert (start["refused"] is not None) == stops


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("0.5.14", "auto bf16 bfloat16 fp4_e2m1 fp8_e4m3 fp8_e5m2"),
        ("0.5.23", "auto bf16 bfloat16 fp4_e2m1 fp4_mx_block16 fp8_e4m3 fp8_e5m2 mxfp8 nvfp4"),
    ],
)
def test_the_words_for_a_cache_are_those_that_the_parser_takes(release, words):
    """The choices of --kv-cache-dtype in python/sglang/srt/server_args.py of each release."""
    known = load_registry(f"sglang-{release}", plugins=()).vocabulary.words["kv_dtypes"].values()
    assert sorted(str(word.facts.get("written", word.name)) for word in known) == words.split()


def test_a_word_of_another_engine_for_a_cache_is_refused(capsys):
    command = ["explain", "--registry", "sglang-0.5", "--arch", "sm100", "--model", str(CONFIGS / "Llama-3.1-8B")]
    for word, help_ in (("fp8", "fp8 is `fp8_e4m3` here"), ("float16", "did you mean `bfloat16`?")):
        assert main([*command, "--kv-dtype", word]) == 2
        assert help_ in capsys.readouterr().err


def test_a_cache_of_the_models_own_float16_is_counted(capsys):
    command = ["explain", "--registry", "sglang-0.5", "--arch", "sm90", "--model", str(CONFIGS / "Llama-3.1-8B")]
    counted = []
    for dtype in ("float16", "bfloat16", "float32"):
        main([*command, "--dtype", dtype, "--json"])
        counted.append(json.loads(capsys.readouterr().out)["kv_cache"]["bytes_per_token"])
    assert counted == [131072, 131072, 262144]
