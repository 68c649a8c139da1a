"""What a config leaves open is assumed, and said."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.models.configs import LLAMA, MLA, UNKNOWN

from attnreg.models.reader import ConfigError, requests_from_model


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"model_type": "gpt_oss", "layer_types": ["sliding_attention"] * 4, "sliding_window": None},
            "sliding_window is None; a sliding layer needs a window",
        ),
        ({"model_type": "gemma2", "sliding_window": None}, "sliding_window is None; a sliding layer needs a window"),
        # the switch is off, so the window does not hold, whatever the words say
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4},
            "sliding_window is 4096 and use_sliding_window is False; a sliding layer needs a window",
        ),
    ],
)
def test_layers_that_slide_without_a_window_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        requests_from_model(LLAMA | {"head_dim": 64, "num_key_value_heads": 8} | config)


DTYPE = (
    "The config has no dtype. Engines then use the dtype of the weights, which attnreg does not read. "
    "bfloat16 is assumed."
)
STRANGER = (
    "model_type 'newest' is not a known family; its layers are read as those of a Llama-like decoder: of one geometry, "
    "without attention sinks or score bias, and causal unless is_causal is false."
)
KV_HEADS = "num_key_value_heads is not in the config; as many KV heads as query heads are assumed."


@pytest.mark.parametrize(
    ("config", "assumptions"),
    [
        (LLAMA | {"dtype": "bfloat16"}, []),
        (LLAMA | {"torch_dtype": "float32"}, []),
        (LLAMA, [DTYPE]),
        (LLAMA | {"dtype": "auto"}, [DTYPE]),
        (
            LLAMA | {"dtype": "float8_e4m3fn"},
            ["dtype 'float8_e4m3fn' is no dtype that attention computes in; bfloat16 is assumed."],
        ),
        (
            {
                "model_type": "gemma3",
                "dtype": "bfloat16",
                "text_config": {"hidden_size": 2560, "num_hidden_layers": 34},
            },
            [
                "vision_config is not in the config, so it is that of its class, with every default.",
                (
                    "Not in the config, so the defaults of siglip_vision_model hold: num_hidden_layers 12, "
                    "num_attention_heads 12, hidden_size 768."
                ),
                (
                    "Not in the config, so the defaults of gemma3_text hold: sliding_window_pattern 6, "
                    "num_attention_heads 8, head_dim 256, num_key_value_heads 4, sliding_window 4096, "
                    "query_pre_attn_scalar 256."
                ),
            ],
        ),
        (UNKNOWN | {"num_key_value_heads": 8, "dtype": "bfloat16"}, [STRANGER]),
        (
            UNKNOWN | {"sliding_window": 64, "dtype": "bfloat16"},
            [STRANGER, "layer_types is not in the config; sliding_window is taken to hold for every layer.", KV_HEADS],
        ),
        (UNKNOWN | {"sliding_window": 64, "use_sliding_window": False, "dtype": "bfloat16"}, [STRANGER, KV_HEADS]),
        (
            UNKNOWN
            | {"sliding_window": 64, "sliding_window_pattern": 4, "num_key_value_heads": 8, "dtype": "bfloat16"},
            [
                STRANGER,
                (
                    "layer_types is not in the config; sliding_window is taken to hold for every layer but the last of "
                    "each sliding_window_pattern."
                ),
            ],
        ),
        (
            UNKNOWN | MLA | {"dtype": "bfloat16"},
            [STRANGER, "kv_lora_rank is in the config; its attention is read as MLA, in DeepSeek-V3's form."],
        ),
        (
            {key: value for key, value in UNKNOWN.items() if key != "model_type"} | {"dtype": "half"},
            [STRANGER.replace("model_type 'newest' is not a known family", "the config has no model_type"), KV_HEADS],
        ),
        (
            {"model_type": "newest", "vision_config": {}, "text_config": LLAMA | {"torch_dtype": "float16"}},
            [
                "model_type 'newest' is not a known family; its text model (text_config) is read as llama.",
                "vision_config is not read, because its model_type is not a known family.",
            ],
        ),
        # a renamed model_type: its class is known
        (
            UNKNOWN
            | {"architectures": ["MistralForCausalLM"], "sliding_window": 64, "dtype": "float16"}
            | {"num_key_value_heads": 8},
            [
                (
                    "model_type 'newest' is not a known family; its architecture is MistralForCausalLM, so it is read "
                    "as mistral."
                )
            ],
        ),
        (
            UNKNOWN | {"architectures": ["NewestForCausalLM"], "num_key_value_heads": 8, "dtype": "float16"},
            [STRANGER],
        ),
        (UNKNOWN | {"architectures": [3], "num_key_value_heads": 8, "dtype": "float16"}, [STRANGER]),
        (
            UNKNOWN | {"is_encoder_decoder": True, "num_key_value_heads": 8, "dtype": "float16"},
            [STRANGER, "is_encoder_decoder is True; only the decoder's self-attention is given."],
        ),
        (
            LLAMA | {"use_bidirectional_attention": "vision", "dtype": "float16"},
            ["use_bidirectional_attention is 'vision'; llama does not look at it."],
        ),
        # present and unused: the commonest misreading of a config
        (
            LLAMA
            | {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 4096}
            | {"use_sliding_window": False, "dtype": "float16"},
            [],
        ),
        (LLAMA | {"sliding_window": 4096, "dtype": "float16"}, ["sliding_window is 4096; llama does not look at it."]),
    ],
)
def test_assumptions(config: dict[str, Any], assumptions: list[str]) -> None:
    assert list(requests_from_model(config).assumptions) == assumptions


@pytest.mark.parametrize("field", ["q_lora_rank", "o_lora_rank", "qk_rope_head_dim", "index_n_heads"])
def test_fields_of_latents_beside_no_latent_leave_the_layers_unknown(field: str) -> None:
    # DeepSeek V4.1 has them, and one head of keys
    alone = requests_from_model(UNKNOWN | {field: 64})
    assert {layer.kind for layer in alone.layers} == {"unread"}
    assert f"and {field} is in the config: what that means for the attention" in alone.assumptions[0]
    beside = requests_from_model(UNKNOWN | MLA | {field: 64})
    assert "unread" not in {layer.kind for layer in beside.layers}
