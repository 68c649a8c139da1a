"""Layers in groups, and each group in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnreg.models.facts import AbsorbedMla, LayerFacts, MlaDims, MlaIndexer
from attnreg.models.groups import describe_indices, group, label
from attnreg.models.reader import requests_from_model

PLAIN = LayerFacts(layer_idx=0, kind="full", attention="mha", num_heads=8, num_kv_heads=2, head_size=64, head_size_v=64)
LATENT = MlaDims(512, 1536, 128, 64, 128, AbsorbedMla(1, 576, 512))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "8/2 heads of 64"),
        ({"num_kv_heads": 8, "head_size_v": 32}, "8 heads of 64/32"),
        ({"num_heads": 1, "num_kv_heads": 1}, "1 head of 64"),
        ({"kind": "mamba"}, "Mamba · no softmax attention"),
        ({"mla": LATENT}, "8 heads · MLA latent 576 (512 + 64)"),
        (
            {"mla": replace(LATENT, kv_lora_rank=None, indexer=MlaIndexer(False, 64, 128, 2048), form="csa")},
            "8 heads · MLA latent 576 · sparse, top 2048 of an earlier layer · csa",
        ),
        ({"sliding_window": 128, "sinks": True}, "8/2 heads of 64 · sliding window 128 · sinks"),
        ({"softcap": 50.0}, "8/2 heads of 64 · softcap 50"),
        ({"sliding_window": 64, "causal": False}, "8/2 heads of 64 · sliding window ±64 · bidirectional"),
        ({"chunk": 8192, "alibi": True, "bias": True}, "8/2 heads of 64 · chunks of 8192 · ALiBi · score bias"),
        (
            {"sparse_blocks": 64, "compress": 4, "causal": "prefix"},
            "8/2 heads of 64 · sparse blocks of 64 · and a key for each 4 tokens · multimodal prefix",
        ),
        (
            {"sliding_window": 64, "causal": "prefix_in_window"},
            "8/2 heads of 64 · sliding window 64 · multimodal prefix · held in the window",
        ),
        ({"kv_shared_from": 3}, "8/2 heads of 64 · KV of an earlier layer"),
        ({"kind": "cross", "causal": False}, "8/2 heads of 64 · cross-attention"),
        ({"kind": "vision", "causal": False}, "8/2 heads of 64 · bidirectional · vision tower"),
        ({"part": "audio_config"}, "8/2 heads of 64 · audio tower"),
        ({"part": "thinker"}, "8/2 heads of 64 · thinker"),
    ],
)  # fmt: skip
def test_a_layer_in_words(changes: dict[str, Any], text: str) -> None:
    assert label(replace(PLAIN, **changes)) == text


def test_layers_that_are_alike_are_one_group() -> None:
    window = replace(PLAIN, sliding_window=128)
    layers = [replace(x, layer_idx=i) for i, x in enumerate([window, PLAIN, window, PLAIN])]
    assert [(g.layers, g.label) for g in group(layers)] == [
        ((0, 2), "8/2 heads of 64 · sliding window 128"),
        ((1, 3), "8/2 heads of 64"),
    ]
    # a layer that makes several calls alike is counted once; whose keys and values are shared makes no group
    shared = [replace(PLAIN, layer_idx=i, kv_shared_from=i % 2) for i in (2, 2, 3)]
    assert [g.layers for g in group(shared)] == [(2, 3)]


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


def test_layers_that_ask_for_a_facet_of_the_registry_say_so() -> None:
    rule = {"ends": 1, "ask": {"kv_dtype": "auto", "run_kv_dtype": "turboquant_k8v4", "flash_attn_version": 2}}
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    groups = requests_from_model(config, kv_dtype="turboquant_k8v4", skip_layers=[rule]).groups
    outer = "KV cache auto · flash_attn_version 2 · run_kv_dtype turboquant_k8v4"
    assert [(group.layers, group.label.partition(" · ")[2]) for group in groups] == [
        ((0, 3), outer),
        ((1, 2), "KV cache turboquant_k8v4"),
    ]


def test_facts_are_changed_by_their_names_alone() -> None:
    facts = LayerFacts(layer_idx=0, kind="self", head_size=64)
    assert facts.changed(head_size=128) == LayerFacts(layer_idx=0, kind="self", head_size=128)
    assert facts.head_size == 64
    with pytest.raises(TypeError, match="LayerFacts has no head_sise"):
        facts.changed(head_sise=128)
