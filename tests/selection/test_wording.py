"""What is said of requests, of how a backend was chosen, and of traces: exact texts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.registries import tiny
from support.registries.asking import BASE, at

from attnreg import AttentionRequest, Platform, Registry, Selection, load_registry
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import answer_sentence, how_chosen, trace_lines, verdict_words
from attnreg.selection.wording import feature_words, head_words, layer_words, request_words

HEADS_OF_128 = {name: value for name, value in BASE.items() if name != "block_size"}
LATENT = ["128/1 heads of 576/512", "bfloat16", "KV cache auto", "attention mla"]
MLA = {"attention": "mla", "head_size": 576, "head_size_v": 512, "num_heads": 128, "num_kv_heads": 1}


def timeless(text: str) -> str:
    """A text without the lines of data, which come and go."""
    return re.sub(r"((?:\w+\.yaml|<overlay>)):\d+", r"\1", re.sub(r"@[0-9a-f]{7}\b", "@", text))


HEADS = [
    ((64, 8, 64, None), "64/8 heads of 64"),
    ((64, 64, 64, 64), "64 heads of 64"),
    ((1, 1, 256, None), "1 head of 256"),
    ((4, 1, 256, None), "4/1 heads of 256"),
    ((32, None, 128, None), "32 query heads of 128"),
    ((1, None, 128, None), "1 query head of 128"),
    ((16, 16, 192, 128), "16 heads of 192/128"),
    ((None, None, 128, None), "head size 128"),
    ((None, 8, 192, 128), "8 KV heads of 192/128"),
    ((None, None, 192, 128), "head size 192/128"),
]


@pytest.mark.parametrize(("sizes", "words"), HEADS, ids=[words for _, words in HEADS])
def test_heads(sizes: tuple[int, ...], words: str) -> None:
    assert head_words(*sizes) == words


def test_features_are_said_with_their_numbers_in_the_order_given() -> None:
    asks = {"sinks": True, "sliding_window": 128, "softcap": 50.0, "chunk": 8192, "sparse_blocks": 64, "alibi": False}
    assert feature_words(asks) == ["sinks", "sliding window 128", "softcap 50", "chunks of 8192", "sparse blocks of 64"]
    known = ("sliding_window", "softcap", "sparse_blocks", "alibi", "score_bias", "mm_prefix", "non_causal")
    words = ["sliding window", "softcap", "sparse blocks", "ALiBi", "score bias", "multimodal prefix", "bidirectional"]
    assert feature_words(dict.fromkeys(known, True)) == words
    assert feature_words(dict.fromkeys(known)) == []
    # a registry may know features that this module does not
    assert feature_words({"rotary": True, "levels": 3}) == ["rotary", "levels 3"]


REQUESTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"head_size": 128}, ["head size 128", "bfloat16", "KV cache auto"]),
    ({"head_size": 128, "kv_dtype": None}, ["head size 128", "bfloat16", "KV cache not given"]),
    (
        {**BASE, "dtype": "float16", "kv_dtype": "fp8", "features": {"sinks", "lse", "dcp", "sliding_window"}},
        ["32/8 heads of 128", "float16", "KV cache fp8", "block_size 16", "sliding window", "sinks", "dcp", "lse"],
    ),
    (
        {**MLA, "attn_type": "encoder_decoder", "role": "draft", "phase": "prefill", "kv_lora_rank": 512},
        [
            *("128/1 heads of 576/512", "bfloat16", "KV cache auto", "attention mla", "attn_type encoder_decoder"),
            *("role draft", "phase prefill", "kv_lora_rank 512"),
        ],
    ),
    ({**MLA, "index_topk": 2048, "model": "x y"}, [*LATENT, "index_topk 2048", 'model "x y"']),
    (
        {"head_size": 64, "extra": {"cache_layout": "SPLIT", "paged": True, "ranks": None}},
        ["head size 64", "bfloat16", "KV cache auto", "cache_layout SPLIT", "paged true", "ranks not given"],
    ),
    # an encoder has no cache to speak of
    ({**HEADS_OF_128, "attn_type": "encoder_only"}, ["32/8 heads of 128", "bfloat16", "attn_type encoder_only"]),
    (
        {**HEADS_OF_128, "attn_type": "encoder", "kv_dtype": "fp8"},
        ["32/8 heads of 128", "bfloat16", "KV cache fp8", "attn_type encoder"],
    ),
]


@pytest.mark.parametrize(("fields", "words"), REQUESTS, ids=[" · ".join(words) for _, words in REQUESTS])
def test_requests(fields: dict[str, Any], words: list[str]) -> None:
    assert request_words(AttentionRequest(**fields)) == words


def test_a_number_is_said_of_a_feature_that_is_asked_for() -> None:
    request = AttentionRequest(**HEADS_OF_128, features={"sliding_window", "sinks"})
    words = request_words(request, {"sliding_window": 4, "softcap": 30.0, "sinks": None})
    assert words[3:] == ["sliding window 4", "sinks"]


def test_layers_are_named_by_their_role() -> None:
    request = AttentionRequest(head_size=64, role="draft", features={"non_causal"})
    assert layer_words(request) == "draft layers (head size 64, bfloat16, KV cache auto, bidirectional)"


def asked(
    change: dict[str, Any] | None = None, backend: str | None = None, choices: list[Any] | None = None
) -> Selection:
    registry = load_registry("default", [{"choices": choices}] if choices else [])
    return evaluate(AttentionRequest(**{**BASE, **(change or {})}), at("sm90", registry), registry, backend)


HOW: list[tuple[dict[str, Any], str]] = [
    ({}, "1st choice of 4 (order cuda/hopper-prompts, priorities.yaml)"),
    ({"change": {"kv_dtype": "nvfp4"}}, "2nd choice of 6 (order cuda/mha, priorities.yaml)"),
    ({"backend": "TRITON_ATTN"}, "requested"),
    ({"backend": "ROCM_ATTN"}, "ROCM_ATTN requested"),
    ({"choices": [{"require": "TRITON_ATTN"}]}, "required by <overlay>"),
    ({"choices": [{"prefer": "TRITON_ATTN"}]}, "preferred by <overlay> (order cuda/hopper-prompts, priorities.yaml)"),
    # what is preferred stands first, and then the order
    (
        {"choices": [{"prefer": "FLEX_ATTENTION"}], "change": {"kv_dtype": "nvfp4"}},
        "3rd choice of 6 (order cuda/mha, priorities.yaml)",
    ),
    # nothing is valid
    ({"change": {"kv_dtype": "nvfp4", "head_size": 100}}, "(order cuda/mha, priorities.yaml)"),
]


@pytest.mark.parametrize(("given", "how"), HOW, ids=[f"{h[0]}" for h in HOW])
def test_how_a_backend_was_chosen(given: dict[str, Any], how: str) -> None:
    assert timeless(how_chosen(asked(**given))) == how


def asked_of(registry: Registry) -> Selection:
    return evaluate(AttentionRequest(**BASE), at("sm90", registry), registry)


def test_of_a_platform_without_an_order_nothing_is_known() -> None:
    registry = tiny.load({"A": tiny.row()}, {"gpu": [{"name": "all", "order": ["A"]}]})
    selection = evaluate(AttentionRequest(head_size=8), Platform(platform="npu", arch="n1"), registry)
    assert how_chosen(selection) == f"{registry.name} says nothing of npu"
    assert (selection.unknown, selection.title) == (True, "not known")
    # a name is judged by its row
    assert not evaluate(AttentionRequest(head_size=8), selection.platform, registry, "A").unknown


def test_an_answer_is_one_sentence(default: Registry) -> None:
    layers = "target layers (32/8 heads of 128, bfloat16, KV cache auto, block_size 16)"
    assert timeless(answer_sentence(asked_of(default))) == (
        f"HOPPER_ATTN for {layers}: 1st choice of 4 (order cuda/hopper-prompts, priorities.yaml); default@"
    )
    refused = answer_sentence(asked(backend="ROCM_ATTN"))
    assert refused.startswith(f"no backend for {layers}: ROCM_ATTN requested; ")


def test_a_selection_prints_as_its_answer(default: Registry) -> None:
    request = AttentionRequest(head_size=64, features={"sinks"})
    selection = evaluate(request, at("gfx1201 +aiter", default), default, "ROCM_ATTN")
    answer = (
        "ROCM_ATTN for head size 64, bfloat16, KV cache auto, sinks on ROCm gfx1201 (RX 9070, …), flag aiter, "
        "every package assumed: requested; default@"
    )
    lines = [timeless(line) for line in str(selection).splitlines()]
    assert lines == [
        answer,
        "  ! ROCM_ATTN emulates sinks (slow): sinks are a second pass over the output",
    ]
    assert timeless(repr(selection)) == f"<Selection {answer}>"


def test_a_trace_has_a_line_for_every_reason() -> None:
    selection = asked({"kv_dtype": "nvfp4", "features": {"rswa"}})
    lines = [timeless(line) for line in trace_lines(selection)]
    kv_dtypes = "auto, float16, bfloat16"
    assert lines[0] == f"FLASH_ATTN/FA3     kv_dtype is nvfp4; supported: {kv_dtypes}  [backends.yaml]"
    assert lines[-2:] == [
        "TURBOQUANT/Hopper  kv_dtype is nvfp4; supported: turboquant_*  [backends.yaml]",
        "                   rswa is not supported  [backends.yaml]",
    ]


def test_a_trace_of_some_backends_has_no_other(default: Registry) -> None:
    selection = asked_of(default)
    lines = [timeless(line) for line in trace_lines(selection, {"HOPPER_ATTN", "TRITON_ATTN", "ROCM_ATTN"})]
    assert lines == [
        "HOPPER_ATTN  1st choice of 4 (order cuda/hopper-prompts, priorities.yaml)",
        "TRITON_ATTN  valid too, ranked lower  [priorities.yaml]",
    ]


def test_a_verdict_may_be_said_of_other_values(default: Registry) -> None:
    selection = asked({"kv_dtype": "nvfp4"})
    refused = selection.candidates[0]
    own = verdict_words(selection, refused)
    assert own == [(r.text, r.where) for r in refused.reasons]
    assert verdict_words(selection, refused, refused.reasons[:1]) == own[:1]
    accepted = next(c for c in selection.candidates if c.accepted)
    assert verdict_words(selection, accepted) == [("valid too, ranked lower", accepted.where)]
