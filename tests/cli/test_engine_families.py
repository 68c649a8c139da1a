"""Families that engines read and transformers has no class for: MiMo V2.5, Step 5 and DeepSeek V4.1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnreg.models.fields import ConfigError
from attnreg.models.reader import families_of, requests_from_model

MIMO = {
    "model_type": "mimo_v2", "architectures": ["MiMoV2ForCausalLM"], "num_hidden_layers": 3, "hidden_size": 4096,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
    "swa_num_attention_heads": 32, "swa_num_key_value_heads": 8, "swa_head_dim": 96, "swa_v_head_dim": 64,
    "sliding_window_size": 128, "hybrid_layer_pattern": [0, 1, 0], "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": True, "dtype": "bfloat16",
}  # fmt: skip
STEP = {
    "model_type": "step5", "architectures": ["Step5ForCausalLM"], "num_hidden_layers": 3, "hidden_size": 5120,
    "num_attention_heads": 40, "num_attention_groups": 8, "sliding_window": 512, "swa_num_attention_heads": 64,
    "head_dim": 128, "num_nextn_predict_layers": 1, "dtype": "bfloat16",
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "attention_other_setting": {"attention_type": "full_attention", "num_attention_heads": 48,
                                "num_attention_groups": 4, "head_dim": 96},
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v41_text", "num_hidden_layers": 4, "hidden_size": 4096, "num_attention_heads": 64,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "sliding_window": 128, "index_topk": 512,
    "index_n_heads": 64, "index_head_dim": 128, "compress_ratios": [0, 1, 2, 2],
}  # fmt: skip
OUTER = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "dtype": "bfloat16"}


def layers(config: dict[str, Any], registry: str) -> list[tuple[Any, ...]]:
    """Kind, query heads, KV heads, sizes of keys and values, window and sinks of each layer."""
    read = requests_from_model(config, families=families_of(registry)).layers
    return [(f.kind, f.num_heads, f.num_kv_heads, f.head_size, f.head_size_v, f.sliding_window, f.sinks) for f in read]


@pytest.mark.parametrize("model_type", ["mimo_v2", "mimo_v2_flash"])
def test_mimo_is_read_as_each_engine_reads_it(model_type: str) -> None:
    config = MIMO | {"model_type": model_type}
    # vLLM's class gives its full layers no sinks; SGLang's window does not count the query's own key
    full = ("full", 64, 4, 192, 128, None, False)
    assert layers(config, "vllm-0.33.0") == [full, ("sliding", 32, 8, 96, 64, 128, True), full]
    full = (*full[:-1], True)
    assert layers(config, "sglang-0.5.23") == [full, ("sliding", 32, 8, 96, 64, 129, True), full]


@pytest.mark.parametrize("field", ["swa_head_dim", "num_key_value_heads", "hybrid_layer_pattern"])
def test_a_field_that_the_checkpoints_class_may_default_is_not_guessed(field: str) -> None:
    config = {name: value for name, value in MIMO.items() if name != field}
    with pytest.raises(ConfigError, match="the class of this config comes with the checkpoint"):
        layers(config, "vllm-0.33.0")


def test_step_has_other_heads_by_the_kind_of_its_layers() -> None:
    full, sliding = ("full", 48, 4, 96, 96, None, False), ("sliding", 64, 8, 128, 128, 512, False)
    assert layers(STEP, "vllm-0.33.0") == [sliding, full, full]
    whole = {"model_type": "step5_vl", "text_config": STEP, "dtype": "bfloat16"}
    assert layers(whole, "vllm-0.33.0") == [sliding, full, full]
    no_window = STEP | {"sliding_window": None}
    assert layers(no_window, "vllm-0.33.0")[0] == ("full", 40, 8, 128, 128, None, False)


@pytest.fixture
def asked(run: Callable[..., Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The answer about a config, by an engine's release."""

    def ask(config: dict[str, Any], *words: str) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        done = run("explain", *words, "--arch", "sm90", "--model", str(tmp_path), "--json")
        answer: dict[str, Any] = json.loads(done.out)
        return answer | {"status": done.status, "text": " ".join(done.out.split())}

    return ask


@pytest.mark.parametrize("config", [OUTER | {"text_config": DEEPSEEK}, DEEPSEEK | OUTER, OUTER | {"text_config": {
    name: value for name, value in DEEPSEEK.items() if name != "compress_ratios"}}, STEP])  # fmt: skip
def test_attention_of_an_engines_own_is_not_known(asked: Callable[..., dict[str, Any]], config: dict[str, Any]) -> None:
    assert asked(config, "--engine", "vllm-0.33")["status"] == 3
    own = asked(config, "--engine", "vllm-0.33")["text"]
    assert "attention of its own" in own
    # a release that has no class for it
    older = asked(config, "--engine", "vllm-0.22")
    assert (older["status"], f"has no class for {config['architectures'][0]}" in older["text"]) == (3, True)
    assert asked(config, "--engine", "sglang-0.5.23")["status"] == 3


def test_layers_of_deepseek_v4_with_windows_alone_are_not_those_of_a_selector(
    asked: Callable[..., dict[str, Any]],
) -> None:
    config = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "dtype": "bfloat16"}
    config |= {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
    for engine in ("vllm-0.20", "vllm-0.26", "vllm-0.33"):
        answer = asked(config, "--engine", engine)
        assert answer["status"] == 3
        assert "FLASH_ATTN/" not in answer["text"]


@pytest.mark.parametrize("config", [OUTER | {"text_config": DEEPSEEK}, DEEPSEEK | OUTER])
def test_sglang_names_the_class_that_runs_deepseek_v41(
    asked: Callable[..., dict[str, Any]], config: dict[str, Any]
) -> None:
    answer = asked(config, "--engine", "sglang-0.5.23")
    assert answer["status"] == 3
    assert "as DeepseekV4ForCausalLM, for which it has steps of its own" in answer["text"]
    assert "is not a known family" not in answer["text"]
    # a release before the class
    assert "has no class for DeepseekV41ForCausalLM" in asked(config, "--engine", "sglang-0.5.20")["text"]
