"""The first and last layers of a model, which some KV dtypes leave alone."""

from __future__ import annotations

from typing import Any

import pytest
from support.configs import EXAMPLES, LLAMA

import attnreg
from attnreg import AttentionRequest, Registry, RegistryError
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.models.reader import requests_from_model

TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
ENDS = {"layers": 2, "ask": {"kv_dtype": "auto"}}


def kv_dtypes(config: dict[str, Any], **more: Any) -> list[str | None]:
    layers = requests_from_model(config, kv_dtype="turboquant_k8v4", ends=ENDS, **more).layers
    return [layer.request.kv_dtype if layer.request else None for layer in layers]


@pytest.mark.parametrize(
    ("layers", "plain"), [(1, []), (2, [0, 1]), (3, [0, 2]), (4, [0, 1, 2, 3]), (5, [0, 1, 3, 4]), (9, [0, 1, 7, 8])]
)
def test_two_layers_at_either_end_and_at_most_half(layers: int, plain: list[int]) -> None:
    found = kv_dtypes({**LLAMA, "num_hidden_layers": layers})
    assert [i for i, kv_dtype in enumerate(found) if kv_dtype == "auto"] == plain
    assert set(found) <= {"auto", "turboquant_k8v4"}


def test_a_hybrid_has_no_ends() -> None:
    config = {"model_type": "qwen3_next", "num_hidden_layers": 8}
    assert kv_dtypes(config) == [None, None, None, "turboquant_k8v4"] * 2


@pytest.mark.parametrize("kv_dtype", TURBOQUANT)
@pytest.mark.parametrize("base", ["default", "vllm-0.33.0"])
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "sm120", "gfx942", "gfx1201"])
def test_a_run_with_turboquant_starts(base: str, arch: str, kv_dtype: str) -> None:
    """The first and last layers find a backend for a plain cache, the others TURBOQUANT, in one layout."""
    registry = attnreg.load_registry(base)
    options = ModelOptions(given={"kv_dtype": kv_dtype})
    questions = model_questions(str(EXAMPLES / "Qwen3-8B"), options, registry).questions
    platform = attnreg.Platform(platform=registry.vocabulary.architectures[arch].platform, arch=arch)
    found = {}
    for question in questions:
        assert isinstance(question.request, AttentionRequest)
        chosen = attnreg.select(question.request, platform, registry).backend
        assert chosen is not None
        found[question.layers] = chosen.name
        assert f" · KV cache {question.request.kv_dtype}" in question.label
    ends, others = found["4 layers (0–1, 34–35)"], found["32 layers (2–33)"]
    assert (ends != "TURBOQUANT", others) == (True, "TURBOQUANT")


def test_the_layout_is_that_of_the_others(default: Registry) -> None:
    options = ModelOptions(given={"kv_dtype": "turboquant_k8v4"}, extra={"cache_layout": "HND"})
    for extra, layouts in ((None, {"NHD", None}), ({"cache_layout": "HND"}, {"HND"})):
        options = ModelOptions(given={"kv_dtype": "turboquant_k8v4"}, extra=extra or ())
        questions = model_questions(str(EXAMPLES / "Qwen3-8B"), options, default).questions
        assert {dict(q.request.extra).get("cache_layout") for q in questions if q.request} == layouts


def test_the_only_layer_that_is_asked_about_has_its_place_in_the_model(default: Registry) -> None:
    for layer, kv_dtype in ((1, "auto"), (2, "turboquant_k8v4"), (34, "auto")):
        options = ModelOptions(given={"kv_dtype": "turboquant_k8v4"}, layer=layer)
        [question] = model_questions(str(EXAMPLES / "Qwen3-8B"), options, default).questions
        assert question.request is not None
        assert question.request.kv_dtype == kv_dtype


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ("{layers: 0, ask: {kv_dtype: auto}}", "expected an integer of at least 1"),
        ("{layers: 2}", "ask"),
        ("{layers: 2, ask: {kv_dtyp: auto}}", "unknown facet `kv_dtyp`"),
        ("{layers: 2, asks: {}}", "unknown key `asks`"),
    ],
)
def test_faults_in_the_data_are_told_with_their_place(ends: str, message: str, tmp_path: Any) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(f"vocabulary:\n  words:\n    kv_dtypes:\n      fp8: {{bits: 8, legend: l, ends: {ends}}}\n")
    with pytest.raises(RegistryError) as e:
        attnreg.load_registry("default", [overlay])
    assert message.lower() in str(e.value).lower()
    assert f"{overlay}:4:" in str(e.value)
