"""Layers that some KV dtypes leave alone: the first and the last, and those with a short window."""

from __future__ import annotations

from typing import Any

import pytest
from support.models.configs import EXAMPLES, LLAMA

import attnreg
from attnreg import AttentionRequest, Registry, RegistryError
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.models.reader import requests_from_model

TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
PLAIN = {"kv_dtype": "auto"}
ENDS = {"ends": 2, "ask": PLAIN}


def kv_dtypes(config: dict[str, Any], *skip_layers: dict[str, Any]) -> list[str | None]:
    layers = requests_from_model(config, kv_dtype="turboquant_k8v4", skip_layers=skip_layers or (ENDS,)).layers
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


def test_a_short_window_is_left_alone_and_a_long_one_is_not() -> None:
    short = {"window": 1024, "ask": PLAIN}
    # one window of 1,024 in six layers of gemma 3, 4,096 in every second of gemma 2
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 1024, "sliding_window_pattern": 6}
    assert kv_dtypes(gemma, short) == ["auto"] * 5 + ["turboquant_k8v4", "auto"]
    assert kv_dtypes({**gemma, "sliding_window": 1025}, short) == ["turboquant_k8v4"] * 7


def test_the_first_rule_counts_and_a_rule_may_be_about_some_models_or_layers() -> None:
    of_llama = {"layers": [1, 3], "models": ["llama"], "ask": {"kv_dtype": "fp8"}}
    config = {**LLAMA, "num_hidden_layers": 6}
    packed = "turboquant_k8v4"
    assert kv_dtypes(config, of_llama, ENDS) == ["auto", "fp8", packed, "fp8", "auto", "auto"]
    assert kv_dtypes(config, ENDS, of_llama) == ["auto", "auto", packed, "fp8", "auto", "auto"]
    other = {**of_llama, "models": ["qwen3"]}
    assert kv_dtypes(config, other) == [packed] * 6


def test_a_layer_without_keys_of_its_own_asks_for_the_cache_that_it_reads() -> None:
    config = {"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 4}
    layers = requests_from_model(config, kv_dtype="turboquant_k8v4", skip_layers=[ENDS]).layers
    stored = {layer.layer_idx: layer.request.kv_dtype for layer in layers if layer.request}
    shared = {layer.layer_idx: layer.kv_shared_from for layer in layers if layer.kv_shared_from is not None}
    assert set(shared) == {6, 7, 8, 9}
    assert {stored[i] == stored[of] for i, of in shared.items()} == {True}
    assert "turboquant_k8v4" in {stored[i] for i in shared}


def test_notes_say_which_layers_are_left_alone_and_why(default: Registry) -> None:
    options = ModelOptions(given={"kv_dtype": "turboquant_4bit_nc"})
    asked = model_questions(str(EXAMPLES / "gpt-oss-120b"), options, default)
    notes = [note for note in asked.notes if note.startswith("Layers ")]
    plain = "ask for kv_dtype auto and cache_layout NHD"
    assert notes == [
        f"Layers 0–1, 34–35 {plain}: the first and the last layers lose most by compression.",
        f"Layers 2, 4, … 32 {plain}: a short window keeps few tokens, so there is little to compress.",
    ]
    groups = asked.memory.to_dict()["groups"]
    assert {g["kv_dtype"]: g["layers"] for g in groups if g["keeps_tokens"] is None} == {
        "auto": [1, 35],
        "turboquant_4bit_nc": [*range(3, 34, 2)],
    }


@pytest.mark.parametrize("engine", ["vllm-0.20.0", "vllm-0.33.0", "sglang-0.5.23"])
def test_no_engine_knows_the_formats_that_are_attnregs_own(engine: str) -> None:
    registry, request = attnreg.load_registry(engine), AttentionRequest(head_size=128, kv_dtype="turboquant_4bit_ub")
    with pytest.raises(attnreg.RequestError, match="turboquant_4bit_ub"):
        attnreg.select(request, attnreg.Platform(platform="cuda", arch="sm90"), registry)


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
    ("rule", "message", "place"),
    [
        ("{ends: 0, ask: {kv_dtype: auto}}", "expected an integer of at least 1", "4:"),
        ("{ends: 2}", "ask", "4:"),
        ("{ask: {kv_dtype: auto}}", "expected one of `ends`, `window` and `layers`", "4:"),
        ("{ends: 2, window: 8, ask: {kv_dtype: auto}}", "expected one of `ends`, `window` and `layers`", "4:"),
        ("{layers: [-1], ask: {kv_dtype: auto}}", "layers", "4:"),
        ("{ends: 2, ask: {kv_dtyp: auto}}", "unknown facet `kv_dtyp`", "4:63"),
        ("{ends: 2, ask: {kv_dtype: aut}}", "unknown value `aut`", "4:63"),
        ("{ends: 2, asks: {}}", "unknown key `asks`", "4:"),
    ],
)
def test_faults_in_the_data_are_told_with_their_place(rule: str, message: str, place: str, tmp_path: Any) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(
        f"vocabulary:\n  words:\n    kv_dtypes:\n      fp8: {{bits: 8, legend: l, skip_layers: [{rule}]}}\n"
    )
    with pytest.raises(RegistryError) as e:
        attnreg.load_registry("default", [overlay])
    assert message.lower() in str(e.value).lower()
    assert f"{overlay}:{place}" in str(e.value)


def test_a_dropped_word_is_none_and_one_that_is_not_there_is_a_problem(tmp_path: Any) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("vocabulary:\n  drops: {kv_dtypes: [octave_*]}\n")
    with pytest.raises(RegistryError) as e:
        attnreg.load_registry("default", [overlay])
    assert f"{overlay}:2:23: drops.kv_dtypes: no word below is `octave_*`" in str(e.value)
