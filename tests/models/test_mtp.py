"""The layers of a model that predict further tokens, and so draft for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models.configs import EXAMPLES, LLAMA

from attnreg import Registry
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.models.reader import ConfigError, requests_from_model

DEEPSEEK = str(EXAMPLES / "DeepSeek-V3")


def test_they_stand_behind_the_others_and_are_layers_of_the_model() -> None:
    model, (layer,) = requests_from_model(DEEPSEEK), requests_from_model(DEEPSEEK, role="draft", mtp=True).layers
    assert layer.layer_idx == len(model.layers) == 61
    assert layer.mla == model.layers[-1].mla
    assert layer.request is not None
    assert (layer.request.role, layer.request.attention, layer.request.head_size) == ("draft", "mla", 576)


FAMILIES: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    ({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}, 46, {"num_kv_heads": 8}),
    ({"model_type": "qwen3_next", "num_nextn_predict_layers": 2}, 48, {"head_size": 256, "num_kv_heads": 2}),
    # of a hybrid's layers, one with attention
    ({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}, 32, {"num_kv_heads": 4}),
    ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}}, 32, {}),
    ({"model_type": "deepseek_v32", "num_nextn_predict_layers": 1}, 61, {"index_topk": 2048}),
    ({"model_type": "hy_v3", "num_nextn_predict_layers": 1}, 80, {"head_size": 128, "num_kv_heads": 8}),
]


@pytest.mark.parametrize(("config", "first", "fields"), FAMILIES, ids=[f"{c[0]['model_type']}" for c in FAMILIES])
def test_families_that_have_some(config: dict[str, Any], first: int, fields: dict[str, Any]) -> None:
    layers = requests_from_model(config, mtp=True).layers
    count = config.get("num_nextn_predict_layers", 1)
    assert [layer.layer_idx for layer in layers] == list(range(first, first + count))
    for layer in layers:
        assert layer.kind == "full"
        assert {name: getattr(layer.request, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA, "there are no MTP layers to draft: attnreg describes none of llama"),
        ({"model_type": "deepseek_v3"}, "there are no MTP layers to draft: num_nextn_predict_layers is missing or 0"),
        (
            {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0},
            "there are no MTP layers to draft: num_nextn_predict_layers is missing or 0",
        ),
        (
            {"model_type": "deepseek_v3", "num_nextn_predict_layers": "one"},
            "num_nextn_predict_layers is 'one'; expected an integer of at least 0",
        ),
        (
            {"model_type": "deepseek_v3", "num_nextn_predict_layers": 10**9},
            "num_nextn_predict_layers is 1000000000; expected at most 10000",
        ),
    ],
)
def test_a_model_without_any_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        requests_from_model(config, mtp=True)
    assert str(e.value) == message


@pytest.mark.parametrize("draft", ["mtp", DEEPSEEK, str(Path(DEEPSEEK, "config.json"))])
def test_a_model_drafts_for_itself_by_them(draft: str, default: Registry) -> None:
    model = model_questions(DEEPSEEK, ModelOptions(draft=draft), default)
    drafts = [q for q in model.questions if q.request is not None and q.request.role == "draft"]
    assert {q.layers for q in drafts} == {"draft · 1 layer (61)"}
    assert {q.request.phase for q in drafts if q.request is not None} == {"any", "prefill"}
