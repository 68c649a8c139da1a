"""The KV cache of a request, held against sums done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from attnreg import Registry
from attnreg.models.kv_memory import kv_memory
from attnreg.models.reader import requests_from_model
from attnreg.selection.wording import readable

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
GQA = LLAMA | {"num_key_value_heads": 8, "dtype": "bfloat16"}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 4, "dtype": "bfloat16"}
DEEPSEEK = {"model_type": "deepseek_v3", "dtype": "bfloat16"}


def memory(default: Registry, config: dict[str, Any], kv_dtype: str = "auto") -> Any:
    return kv_memory(requests_from_model(config, kv_dtype=kv_dtype), kv_dtype, default.vocabulary.words)


@pytest.mark.parametrize(
    ("config", "kv_dtype", "size"),
    [
        # 32 layers, keys and values, 8 heads of 128, two bytes
        (GQA, "auto", 32 * 2 * 8 * 128 * 2),
        (GQA | {"dtype": "float32"}, "auto", 32 * 2 * 8 * 128 * 4),
        (GQA, "fp8", 32 * 2 * 8 * 128),
        (GQA, "fp8_per_token_head", 32 * 8 * (2 * 128 + 8)),
        (GQA, "nvfp4", 32 * 8 * (2 * 128 * 4.5 / 8)),
        # codes, a scale of a rotated row, a scale and a zero of another, of two bytes each
        (GQA, "turboquant_k8v4", 32 * 8 * (128 + 64 + 4)),
        (GQA, "turboquant_4bit_nc", 32 * 8 * (64 + 2 + 64 + 4)),
        (GQA, "turboquant_k3v4_nc", 32 * 8 * (48 + 2 + 64 + 4)),
        (GQA, "turboquant_3bit_nc", 32 * 8 * (48 + 2 + 48 + 4)),
        (GQA, "turboquant_4bit_ub", 32 * 8 * (64 + 2 + 64 + 2)),
        # one latent of 512 + 64 a layer; DeepSeek's own fp8 format has 656 bytes
        (DEEPSEEK, "auto", 61 * 576 * 2),
        (DEEPSEEK, "fp8", 61 * 576),
        (DEEPSEEK, "fp8_ds_mla", 61 * 656),
    ],
)
def test_bytes_of_a_token(default: Registry, config: dict[str, Any], kv_dtype: str, size: float) -> None:
    counted = memory(default, config, kv_dtype)
    # the keys of an indexer are stored as an engine's table says
    sparse = config.get("model_type") == "deepseek_v32"
    assert counted.first == (size, not sparse)
    assert counted.at(1000) == (size * 1000, not sparse)


def test_a_window_keeps_its_latest_tokens(default: Registry) -> None:
    counted = memory(default, GPT_OSS)
    sliding, full = counted.groups
    assert (sliding.keeps, full.keeps) == (128, None)
    token = 2 * 8 * 64 * 2
    assert counted.at(100).value == 4 * token * 100
    assert counted.at(8192).value == 2 * token * 128 + 2 * token * 8192


def test_values_may_have_a_size_of_their_own(default: Registry) -> None:
    config = {"model_type": "newest", "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 192}
    assert memory(default, config | {"dtype": "float16"}).first.value == 4 * (192 + 192) * 2


def test_layers_that_keep_nothing_say_why(default: Registry) -> None:
    whisper = memory(default, {"model_type": "whisper", "dtype": "float16"})
    assert [(g.token_bytes, g.what) for g in whisper.groups] == [
        (0, "no KV cache"),
        (4 * 2 * 6 * 64 * 2, ""),
        (0, "6,144 B per token of what is attended to, not counted"),
    ]
    # a cache of what is attended to, and a state, have bytes that no length shows
    assert (whisper.first.known, whisper.at(8).value, whisper.at(8).counted) == (True, None, 8 * 4 * 2 * 6 * 64 * 2)
    hybrid = memory(default, {"model_type": "qwen3_next", "num_hidden_layers": 4, "dtype": "float16"})
    assert (hybrid.first.known, hybrid.at(8).known) == (True, False)
    assert [g.what for g in hybrid.groups] == ["a state of fixed size, not counted", ""]
    # an encoder keeps nothing whichever mask a layer has: a window, or chunks
    encoder = memory(default, {"model_type": "modernbert", "dtype": "float16"})
    assert {g.what for g in encoder.groups} == {"no KV cache"}
    shared = {"model_type": "gemma4_unified_text", "num_hidden_layers": 12, "num_kv_shared_layers": 6}
    groups = memory(default, shared).groups
    assert [g.what for g in groups] == ["", "", "reads an earlier layer's", "reads an earlier layer's"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (150 * 1024, "150 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**43, "8.0 TiB"),
    ],
)
def test_readable(size: int, text: str) -> None:
    assert readable(size) == text
