"""requests_from_model: what it reads from configs, equal to what transformers computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models.configs import EXAMPLES, LLAMA, MLA, UNKNOWN

from attnreg.errors import RequestError
from attnreg.models.groups import describe_indices
from attnreg.models.reader import requests_from_model


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


@pytest.mark.slow(reason="imports transformers and torch")
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
    assert not {"torch", "transformers", "rich"} & set(done.stdout.split())
