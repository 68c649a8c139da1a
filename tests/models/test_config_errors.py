"""A typed error for every config that cannot be read, with the field and what it expects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.models.configs import LLAMA, MLA

from attnreg.models.reader import ConfigError, requests_from_model

ACCEPTED = "give a config.json, a directory that holds one, a dict or a config object (nothing is downloaded)"
FILES = "give a config.json, or a directory that holds one (nothing is downloaded)"


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
        (b"", "{path}:1:1: not JSON: Expecting value; " + FILES),
        (
            b'{\n "head_dim": 64,,\n}',
            "{path}:2:17: not JSON: Expecting property name enclosed in double quotes; " + FILES,
        ),
        (b"[1, 2]", "{path}: the content is no object; expected an object with fields such as num_hidden_layers"),
        (b"[" * 100_000, "{path}:1:1: not JSON: nested too deeply; " + FILES),
        (b"\xff\xfe\x00", "{path}:1:1: not UTF-8 text: invalid start byte at byte 0; " + FILES),
        (b'{"head_dim": ' + b"9" * 5000 + b"}", "{path}:1:1: not JSON: a number of too many digits; " + FILES),
        (b" " * (16 * 2**20 + 1), "{path}:1:1: over 16,777,216 bytes: nothing that large is read; " + FILES),
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


def test_missing_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    rows = [
        ("nowhere", f"nowhere: no such file; {FILES}"),
        (".", f"config.json: no such file; {FILES}"),
        ("pipe", f"pipe:1:1: cannot be read: it is a named pipe; {FILES}"),
        ("a\0b", f"a\\x00b: no such file; {FILES}"),
        ("x" * 5000, f"{'x' * 5000}: no such file; {FILES}"),
    ]
    for name, message in rows:
        with pytest.raises(ConfigError) as caught:
            requests_from_model(tmp_path / name)
        assert str(caught.value) == f"{tmp_path}/{message}"
