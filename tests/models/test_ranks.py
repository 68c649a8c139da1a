"""A model's layers on one rank of tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from attnreg.models.groups import per_rank
from attnreg.models.reader import ConfigError, requests_from_model

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32}
MLA = {"model_type": "deepseek_v3", "num_hidden_layers": 2}
VISION = {
    "model_type": "qwen2_5_vl",
    "vision_config": {"depth": 1, "hidden_size": 1280, "num_heads": 16},
    "text_config": {"num_hidden_layers": 1, "num_attention_heads": 24, "num_key_value_heads": 24, "hidden_size": 3072},
}


@pytest.mark.parametrize(
    ("config", "ranks", "heads"),
    [
        (LLAMA | {"num_key_value_heads": 8}, 1, (32, 8)),
        (LLAMA | {"num_key_value_heads": 8}, 4, (8, 2)),
        # fewer KV heads than ranks: each is on several of them
        (LLAMA | {"num_key_value_heads": 8}, 16, (2, 1)),
        (LLAMA | {"num_key_value_heads": 1}, 32, (1, 1)),
        # one latent serves all heads, and is on every rank
        (MLA, 8, (16, 1)),
    ],
)
def test_a_ranks_share(config: dict[str, Any], ranks: int, heads: tuple[int, int]) -> None:
    model = per_rank(requests_from_model(config), ranks)
    (group,) = model.groups
    assert group.request is not None
    assert (group.request.num_heads, group.request.num_kv_heads) == heads
    assert f"{heads[0]}" in group.label
    assert group.facts.num_heads == heads[0]


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (
            LLAMA,
            5,
            "layer 0 has 32 query heads, which do not divide over 5 ranks; these do: 2, 4, 8, 16, 32",
        ),
        (
            LLAMA | {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128},
            12,
            "layer 0 has 24 query heads and 8 KV heads, which do not divide over 12 ranks; these do: 2, 4, 8, 24",
        ),
        (LLAMA, 64, "layer 0 has 32 query heads, which do not divide over 64 ranks; these do: 2, 4, 8, 16, 32"),
        (MLA, 3, "layer 0 has 128 query heads, which do not divide over 3 ranks; these do: 2, 4, 8, 16, 32, 64, 128"),
        (
            LLAMA | {"num_attention_heads": 1, "head_dim": 64},
            2,
            "layer 0 has 1 query heads, which do not divide over 2 ranks; keep each rank whole",
        ),
        (LLAMA, 0, "tensor parallelism over 0 ranks; expected at least 1"),
    ],
)
def test_heads_that_do_not_divide(config: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        per_rank(requests_from_model(config), ranks)
    assert str(caught.value).removeprefix(f"{config['model_type']}: ") == message


def test_a_tower_that_does_not_divide_is_whole_on_every_rank() -> None:
    model = per_rank(requests_from_model(VISION), 3)
    assert [layer.num_heads for layer in model.layers] == [16, 8]
    note = "the 16 heads of vision_config do not divide over 3 ranks; each rank is taken to compute all of them."
    assert note in model.assumptions
    assert [layer.num_heads for layer in per_rank(requests_from_model(VISION), 2).layers] == [8, 12]


def test_mixers_stay_as_they_are() -> None:
    model = requests_from_model({"model_type": "qwen3_next", "num_hidden_layers": 4})
    assert [layer.num_heads for layer in per_rank(model, 2).layers] == [None, None, None, 8]
