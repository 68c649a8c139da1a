"""requests_from_model: equal to what transformers computes, and a typed error for every config that cannot be read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import ROOT

from attnreg.models.reader import ConfigError, bundled_families, describe_indices, requests_from_model
from attnreg.request import RequestError

EXAMPLES = ROOT / "examples" / "configs"
ACCEPTED = "give a config.json, a directory that holds one, a dict or a config object (nothing is downloaded)"
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
UNKNOWN = {"model_type": "newest", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def described(config: object) -> list[tuple[str, str]]:
    return [(describe_indices(g.layers), g.label) for g in requests_from_model(config).groups]


@pytest.mark.parametrize(
    ("name", "dtype", "groups"),
    [
        (
            "gpt-oss-120b",
            "bfloat16",
            [
                ("0, 2, … 34", "64/8 heads of 64 · sliding window 128 · sinks"),
                ("1, 3, … 35", "64/8 heads of 64 · sinks"),
            ],
        ),
        ("Llama-3.1-8B", "bfloat16", [("0–31", "32/8 heads of 128")]),
        ("Qwen3-8B", "bfloat16", [("0–35", "32/8 heads of 128")]),
        (
            "gemma-2-9b",
            "float32",
            [
                ("0, 2, … 40", "16/8 heads of 256 · sliding window 4096 · softcap 50"),
                ("1, 3, … 41", "16/8 heads of 256 · softcap 50"),
            ],
        ),
        (
            "gemma-3-27b-it",
            "bfloat16",
            [
                ("0–26", "16 heads of 72 · bidirectional · vision tower"),
                ("0–4, 6–10, … 60–61", "32/16 heads of 128 · sliding window 1024 · multimodal prefix"),
                ("5, 11, … 59", "32/16 heads of 128 · multimodal prefix"),
            ],
        ),
        ("Mistral-7B-v0.1", "bfloat16", [("0–31", "32/8 heads of 128 · sliding window 4096")]),
        ("DeepSeek-V3", "bfloat16", [("0–60", "128 heads · MLA latent 576 (512 + 64)")]),
        (
            "ModernBERT-base",
            "float32",
            [
                ("0, 3, … 21", "12 heads of 64 · bidirectional"),
                ("1–2, 4–5, … 19–20", "12 heads of 64 · sliding window ±64 · bidirectional"),
            ],
        ),
        ("bert-base-uncased", "bfloat16", [("0–11", "12 heads of 64 · bidirectional")]),
    ],
)
def test_example_configs(name: str, dtype: str, groups: list[tuple[str, str]]) -> None:
    model = requests_from_model(EXAMPLES / name)
    assert (model.name, model.dtype) == (name, dtype)
    assert described(EXAMPLES / name) == groups
    assert sorted(i for group in model.groups for i in group.layers) == sorted(x.layer_idx for x in model.layers)
    for group in model.groups:
        assert [
            x
            for x in model.layers
            if (x.layer_idx, x.part, x.kind) == (group.layers[0], group.facts.part, group.facts.kind)
        ] == [group.facts]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/config.json")), ids=lambda path: path.parent.name)
def test_every_example_is_of_a_known_family_and_says_what_it_needs(path: Path) -> None:
    model = requests_from_model(path)
    assert model.name == path.parent.name
    assert [note for note in model.assumptions if "is not a known family" in note] == []


WINDOWED = {"head_size": 64, "num_heads": 8, "num_kv_heads": 8, "features": ["sliding_window"]}


@pytest.mark.parametrize(
    ("config", "request_"),
    [
        (LLAMA, {"head_size": 64, "num_heads": 8, "num_kv_heads": 8, "model": "llama"}),
        (LLAMA | {"head_dim": 80}, {"head_size": 80, "num_heads": 8, "num_kv_heads": 8, "model": "llama"}),
        (
            LLAMA | {"num_key_value_heads": 2, "dtype": "float16"},
            {"head_size": 64, "num_heads": 8, "num_kv_heads": 2, "dtype": "float16", "model": "llama"},
        ),
        # a decoder that its config opens keeps its attention type; an encoder has one of its own
        (
            LLAMA | {"is_causal": False},
            {"head_size": 64, "num_heads": 8, "num_kv_heads": 8, "features": ["non_causal"], "model": "llama"},
        ),
        (
            LLAMA | {"model_type": "bert"},
            {"head_size": 64, "num_heads": 8, "num_kv_heads": 8, "attn_type": "encoder_only", "model": "bert"},
        ),
        (
            LLAMA | {"model_type": "bert", "is_decoder": True},
            {"head_size": 64, "num_heads": 8, "num_kv_heads": 8, "model": "bert"},
        ),
        (
            LLAMA | {"model_type": "modernbert", "layer_types": ["sliding_attention"] * 4},
            WINDOWED | {"attn_type": "encoder_only", "model": "modernbert"},
        ),
        (LLAMA | {"model_type": "mistral", "num_key_value_heads": None}, WINDOWED | {"model": "mistral"}),
        (
            LLAMA | {"model_type": "gpt_oss", "head_dim": 64, "layer_types": ["full_attention"] * 4},
            {"head_size": 64, "num_heads": 8, "num_kv_heads": 8, "features": ["sinks"], "model": "gpt_oss"},
        ),
        (
            UNKNOWN | {"alibi": True, "attn_logit_softcapping": 30},
            {"head_size": 64, "num_heads": 8, "num_kv_heads": 8, "features": ["alibi", "softcap"], "model": "newest"},
        ),
        (
            LLAMA | MLA | {"model_type": "deepseek_v3", "num_key_value_heads": 8, "head_dim": 64},
            {"head_size": 576, "head_size_v": 512, "num_heads": 8, "num_kv_heads": 1, "attention": "mla"}
            | MLA
            | {"model": "deepseek_v3"},
        ),
        (
            LLAMA | MLA | {"model_type": "deepseek_v32"},
            {"head_size": 576, "head_size_v": 512, "num_heads": 8, "num_kv_heads": 1, "attention": "mla_sparse"}
            | MLA
            | {"index_topk": 2048, "model": "deepseek_v32"},
        ),
    ],
)
def test_requests(config: dict[str, Any], request_: dict[str, Any]) -> None:
    (request,) = {layer.request for layer in requests_from_model(config).layers}
    assert request is not None
    assert request.to_dict() == request_


def test_arguments_reach_every_request() -> None:
    model = requests_from_model(LLAMA, role="draft", dtype="float16", kv_dtype="fp8", block_size=32)
    request = model.layers[3].request
    assert model.dtype == "float16"
    assert request is not None
    assert (request.role, request.dtype, request.kv_dtype, request.block_size) == ("draft", "float16", "fp8", 32)
    with pytest.raises(RequestError, match="block_size is 0; expected at least 1"):
        requests_from_model(LLAMA, block_size=0)


def test_chunks_are_a_matter_of_the_engine() -> None:
    model = requests_from_model({"model_type": "llama4_text"})
    chunked, full = model.groups
    assert (chunked.facts.chunk, chunked.request, full.facts.chunk) == (8192, full.request, None)
    assert model.assumptions[-1].startswith("Chunked layers ask for causal attention: an engine runs each chunk")


def test_layers_without_a_cache_are_not_asked_how_it_is_stored() -> None:
    model = requests_from_model({"model_type": "whisper"}, kv_dtype="fp8", block_size=32)
    asked = {(x.kind, x.request.kv_dtype, x.request.block_size) for x in model.layers if x.request is not None}
    assert asked == {("encoder", "auto", None), ("full", "fp8", 32), ("cross", "fp8", 32)}


def test_cross_attention_follows_each_layer() -> None:
    model = requests_from_model(LLAMA | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True})
    assert [(layer.layer_idx, layer.kind) for layer in model.layers[:3]] == [(0, "full"), (0, "cross"), (1, "full")]
    own, cross = model.groups
    assert (cross.layers, cross.label) == ((0, 1, 2, 3), "8 heads of 64 · cross-attention")
    assert own.request is not None
    assert cross.request is not None
    assert (own.request.attn_type, cross.request.attn_type) == ("decoder", "encoder_decoder")
    assert not cross.request.features


def test_mixers_have_no_request() -> None:
    model = requests_from_model(UNKNOWN | {"layer_types": ["linear_attention", "conv", "mamba", "full_attention"]})
    assert [g.label for g in model.groups] == [
        "linear attention · no softmax attention",
        "convolution · no softmax attention",
        "Mamba · no softmax attention",
        "8 heads of 64",
    ]
    assert [g.request is None for g in model.groups] == [True, True, True, False]


class TestTransformers:
    """The configs that transformers builds, as objects and as the dicts that it would save."""

    # class, arguments, kinds of the first seven layers, (heads, KV heads, head size), window, scale
    ROWS = (
        ("LlamaConfig", {}, "fffffff", (32, 32, 128), None, 128**-0.5),
        ("LlamaConfig", {"num_key_value_heads": 8}, "fffffff", (32, 8, 128), None, 128**-0.5),
        ("Qwen2Config", {}, "fffffff", (32, 32, 128), None, 128**-0.5),
        (
            "Qwen2Config",
            {"use_sliding_window": True, "max_window_layers": 3},
            "fffssss",
            (32, 32, 128),
            4096,
            128**-0.5,
        ),
        ("Qwen3Config", {"num_attention_heads": 64}, "fffffff", (64, 32, 128), None, 128**-0.5),
        (
            "Qwen3Config",
            {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 5},
            "fffffss",
            (32, 32, 128),
            512,
            128**-0.5,
        ),
        ("MistralConfig", {}, "sssssss", (32, 8, 128), 4096, 128**-0.5),
        ("MistralConfig", {"sliding_window": None}, "fffffff", (32, 8, 128), None, 128**-0.5),
        ("GptOssConfig", {}, "sfsfsfs", (64, 8, 64), 128, 0.125),
        ("Gemma2Config", {"query_pre_attn_scalar": 144}, "sfsfsfs", (8, 4, 256), 4096, 1 / 12),
        ("Gemma3TextConfig", {}, "sssssfs", (8, 4, 256), 4096, 0.0625),
        ("Gemma3TextConfig", {"sliding_window_pattern": 3}, "ssfssfs", (8, 4, 256), 4096, 0.0625),
        (
            "Gemma3TextConfig",
            {"use_bidirectional_attention": True, "sliding_window": 512},
            "sssssEs",
            (8, 4, 256),
            256,
            0.0625,
        ),
        (
            "Gemma3Config",
            {"text_config": {"num_attention_heads": 16, "sliding_window": 1024}},
            "sssssfs",
            (16, 4, 256),
            1024,
            0.0625,
        ),
        ("DeepseekV2Config", {}, "fffffff", (32, 32, 192), None, 192**-0.5),
        ("DeepseekV3Config", {}, "fffffff", (128, 128, 192), None, 192**-0.5),
        ("DeepseekV32Config", {}, "fffffff", (128, 128, 192), None, 192**-0.5),
        ("ModernBertConfig", {}, "EssEssE", (12, 12, 64), 64, 0.125),
        (
            "ModernBertConfig",
            {"global_attn_every_n_layers": 2, "local_attention": 256},
            "EsEsEsE",
            (12, 12, 64),
            128,
            0.125,
        ),
        ("BertConfig", {}, "EEEEEEE", (12, 12, 64), None, 0.125),
        ("BertConfig", {"is_decoder": True}, "fffffff", (12, 12, 64), None, 0.125),
    )

    @pytest.mark.parametrize(("name", "options", "kinds", "sizes", "window", "scale"), ROWS)
    def test_config(
        self, name: str, options: dict[str, Any], kinds: str, sizes: tuple[int, ...], window: int | None, scale: float
    ) -> None:
        config = getattr(pytest.importorskip("transformers"), name)(**options)
        model = requests_from_model(config)
        letters = {"full": "f", "sliding": "s", "encoder": "E"}
        layers = [layer for layer in model.layers if layer.kind != "vision"]
        assert "".join(letters[layer.kind] for layer in layers[:7]) == kinds
        assert {(x.num_heads, x.num_kv_heads, x.head_size) for x in layers} == {sizes}
        assert {x.sliding_window for x in layers if x.kind == "sliding"} == ({window} if window else set())
        assert {x.scaling for x in layers} == {scale}
        assert len(layers) == config.get_text_config().num_hidden_layers
        # what is saved reads the same, and so does a file without the layer types that older versions left out
        saved = config.to_dict()
        assert requests_from_model(saved) == model
        assert requests_from_model(json.loads(json.dumps(saved))) == model

    def test_dtype_of_a_config_object(self) -> None:
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        assert requests_from_model(transformers.LlamaConfig(dtype="float16")).dtype == "float16"
        assert requests_from_model(transformers.LlamaConfig(dtype=torch.float16)).dtype == "float16"
        assert requests_from_model(LLAMA | {"dtype": torch.float16}).dtype == "float16"

    def test_yarn_scales_mla(self) -> None:
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        config = transformers.DeepseekV3Config(**json.loads((EXAMPLES / "DeepSeek-V3" / "config.json").read_text()))
        with torch.device("meta"):
            layer = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention(config, 0)
        assert requests_from_model(config).layers[0].scaling == pytest.approx(layer.scaling)
        assert requests_from_model(EXAMPLES / "DeepSeek-V3").layers[0].scaling == pytest.approx(layer.scaling)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt_oss", "head_dim": 64, "layer_types": ["sliding_attention"] * 4, "sliding_window": None},
        {"model_type": "gemma2", "head_dim": 64, "num_key_value_heads": 8, "sliding_window": None},
        # the switch is off, so the window does not hold, whatever the words say
        {"model_type": "qwen2", "num_key_value_heads": 8, "layer_types": ["sliding_attention"] * 4},
    ],
)
def test_layers_that_slide_without_a_window_see_everything(config: dict[str, Any]) -> None:
    model = requests_from_model(LLAMA | config)
    assert {(layer.kind, layer.sliding_window) for layer in model.layers} == {("full", None)}
    assert "there are sliding layers and no window for them; they see everything." in model.assumptions


DTYPE = "The config names no dtype; bfloat16 is assumed."
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


SINKS = LLAMA | {"model_type": "gpt_oss", "head_dim": 64}
WORDS = "known: chunked_attention, conv, full_attention, indexed_attention, linear_attention, mamba, sliding_attention"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, f"config is None; {ACCEPTED}"),
        (3, f"config is 3; {ACCEPTED}"),
        ([3, "x"], f"config is [3, 'x']; {ACCEPTED}"),
        ({}, "num_hidden_layers is missing and has no default (the config has no model_type); add it to the config"),
        (
            {"model_type": "newest", "num_hidden_layers": 4},
            (
                "num_attention_heads is missing and has no default (model_type 'newest' is not a known family); "
                "add it to the config"
            ),
        ),
        (LLAMA | {"model_type": ["llama"]}, "model_type is ['llama']; expected a word"),
        (LLAMA | {"dtype": 16}, "dtype is 16; expected a word"),
        (
            LLAMA | {"num_attention_heads": "32"},
            "num_attention_heads is '32'; expected an integer of at least 1 (write 32, without quotes)",
        ),
        (LLAMA | {"num_attention_heads": "many"}, "num_attention_heads is 'many'; expected an integer of at least 1"),
        (LLAMA | {"num_attention_heads": [8]}, "num_attention_heads is [8]; expected an integer of at least 1"),
        (LLAMA | {"num_attention_heads": True}, "num_attention_heads is True; expected an integer of at least 1"),
        (LLAMA | {"num_attention_heads": 8.0}, "num_attention_heads is 8.0; expected an integer of at least 1"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads is 0; expected at least 1"),
        (LLAMA | {"num_key_value_heads": -8}, "num_key_value_heads is -8; expected at least 1"),
        (LLAMA | {"head_dim": 2**40}, "head_dim is 1099511627776; expected at most 2147483647"),
        (LLAMA | {"head_dim": 10**5000}, "head_dim is a number too long to show; expected at most 2147483647"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers is 0; expected at least 1"),
        (LLAMA | {"num_hidden_layers": 10_001}, "num_hidden_layers is 10001; expected at most 10000"),
        (
            LLAMA | {"num_key_value_heads": 3},
            "num_attention_heads is 8 and num_key_value_heads is 3; the second must divide the first",
        ),
        (
            {"model_type": "qwen3", "num_attention_heads": 16},
            (
                "num_attention_heads is 16 and num_key_value_heads is 32; the second must divide the first; "
                "add num_key_value_heads, which is a default here"
            ),
        ),
        (
            LLAMA | {"hidden_size": 500},
            "hidden_size is 500 and num_attention_heads is 8; the second must divide the first",
        ),
        (
            SINKS | {"layer_types": ["full_attention"] * 3},
            "layer_types has 3 entries and the model has 4 layers; give one entry for each layer",
        ),
        # llama does not look at them, but transformers refuses the file
        (
            LLAMA | {"layer_types": ["full_attention"] * 3},
            (
                "layer_types is ['full_attention', 'full_attention', 'full_attention']; "
                "expected one word for each of the 4 layers"
            ),
        ),
        (
            SINKS | {"layer_types": ["full_attention", "full_attention", "local_attention", "full_attention"]},
            f"layer_types[2] is 'local_attention'; {WORDS}",
        ),
        (SINKS | {"layer_types": [["full_attention"]] * 4}, "layer_types[0] is ['full_attention']; expected a word"),
        (SINKS | {"layer_types": "SSSL"}, f"layer_types[0] is 'S'; {WORDS}"),
        (SINKS | {"layer_types": 4}, "layer_types is 4; expected a list with one entry for each layer"),
        (
            SINKS
            | {"model_type": "llama4_text", "layer_types": ["chunked_attention"] * 4, "attention_chunk_size": None},
            "attention_chunk_size is None; a chunked layer needs the length of a chunk in tokens",
        ),
        (LLAMA | {"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0; expected at least 1"),
        (
            LLAMA | {"model_type": "gemma3_text", "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern is 'LLLG'; expected an integer of at least 1",
        ),
        (
            LLAMA | {"model_type": "gemma2", "attn_logit_softcapping": 0.0},
            "attn_logit_softcapping is 0.0; expected a number above 0 and at most 2147483647",
        ),
        (
            LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": float("nan")},
            "query_pre_attn_scalar is nan; expected a number above 0 and at most 2147483647",
        ),
        (LLAMA | {"is_causal": "no"}, "is_causal is 'no'; expected true or false"),
        (
            LLAMA | {"model_type": "bert", "add_cross_attention": True},
            "add_cross_attention is True; only a decoder has cross-attention; set is_decoder to true",
        ),
        (
            LLAMA | MLA | {"model_type": "deepseek_v3", "qk_nope_head_dim": 0, "qk_rope_head_dim": 0},
            "qk_nope_head_dim is 0; qk_rope_head_dim is 0 as well; one of them must be above 0",
        ),
        (
            LLAMA | MLA | {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}},
            "rope_scaling.factor is None; mscale_all_dim needs it; give the factor by which positions are stretched",
        ),
        (LLAMA | MLA | {"model_type": "deepseek_v3", "rope_scaling": [1]}, "rope_scaling is [1]; expected an object"),
        ({"model_type": "gemma3", "text_config": [1]}, "text_config is [1]; expected an object"),
        (
            {"model_type": "gemma3", "text_config": {"head_dim": "256"}},
            "text_config.head_dim is '256'; expected an integer of at least 1 (write 256, without quotes)",
        ),
    ],
)
def test_bad_configs(config: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        requests_from_model(config)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{path}: not JSON (Expecting value at line 1, column 1); " + ACCEPTED),
        (
            b'{\n "head_dim": 64,,\n}',
            "{path}: not JSON (Expecting property name enclosed in double quotes at line 2, column 17); " + ACCEPTED,
        ),
        (b"[1, 2]", "{path}: the content is [1, 2]; expected an object with fields such as num_hidden_layers"),
        (b"[" * 100_000, "{path}: not JSON (nested too deeply); " + ACCEPTED),
        (b" " * (16 * 2**20 + 1), "{path}: more than 16 MiB, which no config.json has; " + ACCEPTED),
        (
            b'{"num_hidden_layers": "32"}',
            "{path}: num_hidden_layers is '32'; expected an integer of at least 1 (write 32, without quotes)",
        ),
        (
            b'{"text_config": {"num_hidden_layers": -1}}',
            "{path}: text_config.num_hidden_layers is -1; expected at least 1",
        ),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for given_path in (path, str(path), tmp_path):
        with pytest.raises(ConfigError) as caught:
            requests_from_model(given_path)
        assert str(caught.value) == message.format(path=path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'{"head_dim": ' + b"9" * 5000 + b"}"])
def test_undecodable_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        requests_from_model(path)


def test_missing_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    rows = [
        ("nowhere", f"nowhere: no such file; {ACCEPTED}"),
        (".", f"config.json: no such file; {ACCEPTED}"),
        ("pipe", f"pipe: not a regular file; {ACCEPTED}"),
        ("a\0b", f"a\0b: no such file; {ACCEPTED}"),
        ("x" * 5000, f"{'x' * 5000}: File name too long; {ACCEPTED}"),
    ]
    for name, message in rows:
        with pytest.raises(ConfigError) as caught:
            requests_from_model(tmp_path / name)
        assert str(caught.value) == f"{tmp_path}/{message}"


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--openai--gpt-oss-20b" / "snapshots" / "6cee5e8"
    places = {"here": tmp_path / "here", "gpt-oss-20b": snapshot}
    for name, folder in places.items():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        assert requests_from_model(folder).name == requests_from_model(folder / "config.json").name == name
    (tmp_path / "tiny.json").write_text(json.dumps(LLAMA))
    assert requests_from_model(tmp_path / "tiny.json").name == "tiny"
    monkeypatch.chdir(tmp_path / "here")
    assert requests_from_model(".").name == requests_from_model("config.json").name == "here"
    assert requests_from_model(LLAMA).name == "llama"
    assert requests_from_model(LLAMA | {"_name_or_path": "meta-llama/Llama-3.1-8B"}).name == "Llama-3.1-8B"


def test_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert requests_from_model(tmp_path).model_type == "llama"


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([0, 1], "0–1"),
        (range(32), "0–31"),
        (range(0, 36, 2), "0, 2, … 34"),
        ([0, 2, 4], "0, 2, 4"),
        ([4, 2, 0, 2], "0, 2, 4"),
        ([0, 2, 3], "0, 2–3"),
        ([i for i in range(62) if i % 6 != 5], "0–4, 6–10, … 60–61"),
        ([0, 2, 3, 5, 8], "0, 2–3, 5, 8"),
        ([0, 2, 4, 6, 7, 8], "0, 2, 4, 6–8"),
    ],
)
def test_describe_indices(indices: Any, text: str) -> None:
    assert describe_indices(indices) == text


def test_thousands_of_layers() -> None:
    config = {"model_type": "gemma3_text", "num_hidden_layers": 10_000}
    assert described(config) == [
        ("0–4, 6–10, … 9996–9999", "8/4 heads of 256 · sliding window 4096"),
        ("5, 11, … 9995", "8/4 heads of 256"),
    ]


def test_import_is_light() -> None:
    code = "import sys, attnreg.models.reader as m; m.requests_from_model(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES / "gpt-oss-120b")], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "pydantic", "rich"} & set(done.stdout.split())


TYPES = list(bundled_families())
NAMES = [
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "layer_types"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "local_attention"),
    *("global_attn_every_n_layers", "attn_logit_softcapping", "query_pre_attn_scalar", "alibi", "is_causal"),
    *("use_bidirectional_attention", "is_decoder", "add_cross_attention", "is_encoder_decoder", "rope_parameters"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk"),
    *("rope_scaling", "rope_type", "factor", "mscale_all_dim", "dtype", "torch_dtype", "_name_or_path"),
    *("model_type", "text_config", "language_config", "vision_config"),
]
WORD = st.sampled_from(["full_attention", "sliding_attention", "mamba", "bfloat16", "yarn", "32", "", *TYPES])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 8) | st.floats() | WORD | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=6),
    max_leaves=12,
)


def mentioned(name: str) -> list[str]:
    """The fields that a family's entry names, and those that any config may have."""
    entry = "".join(bundled_families().text(member) for member in lineage(name))
    return sorted({*re.findall(r"[a-z]\w*(?:_\w+)+", entry), *NAMES})


def lineage(name: str) -> Iterator[str]:
    while name:
        yield name
        name = bundled_families().like(name)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config of some family with some of its fields changed, in it or in a part of it."""
    name = draw(st.sampled_from([*TYPES, "newest"]))
    names = st.sampled_from(mentioned(name) if name in TYPES else NAMES) | st.text()
    config = draw(st.sampled_from([{}, {"model_type": name}, LLAMA | {"model_type": name}]))
    config = config | draw(st.dictionaries(names, VALUE, max_size=8))
    part = draw(st.sampled_from(["", "", "text_config", "vision_config", "audio_config"]))
    return config | ({part: draw(st.dictionaries(names, VALUE, max_size=6))} if part else {})


@settings(max_examples=500, deadline=None)
@given(configs())
@example(LLAMA | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True, "layer_types": ["mamba"] * 4})
@example(LLAMA | {"model_type": "deepseek_v3", "rope_scaling": {"rope_type": "yarn", "factor": 1e308}})
def test_any_mapping_gives_layers_or_a_config_error(config: dict[str, Any]) -> None:
    try:
        model = requests_from_model(config)
    except ConfigError as error:
        assert str(error)  # noqa: PT017
        return
    assert model.layers
    assert {layer.layer_idx for layer in model.layers} == {i for group in model.groups for i in group.layers}
    assert all(group.label for group in model.groups)
