"""The state of a layer without softmax attention, held against sums done by hand."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from attnreg.compile.schema.values import StateKind
from attnreg.models.groups import per_rank
from attnreg.models.reader import requests_from_model
from attnreg.models.states import DIMENSIONS, NEEDED, StateArray, StateDims, arrays, state_bytes

BITS = {"bfloat16": 16.0, "float32": 32.0}
MAMBA1 = StateDims("mamba1", channels=8192, state_size=16, kernel=4)
MAMBA2 = StateDims("mamba2", channels=8192, groups=8, heads=128, head_size=64, state_size=128, kernel=4)
GDN = StateDims("gdn", key_heads=16, heads=32, key_size=128, head_size=256, kernel=4)
KDA = StateDims("kda", heads=32, head_size=128, kernel=4)
# without a state: a field is missing, or is no number
QWEN = {"model_type": "qwen3_next", "num_hidden_layers": 4}
SHAPES: dict[str, tuple[StateDims, int, int, list[tuple[int, ...]]]] = {
    "Mamba 1": (MAMBA1, 1, 0, [(3, 8192), (8192, 16)]),
    "Mamba 1 on ranks": (MAMBA1, 4, 0, [(3, 2048), (2048, 16)]),
    # the channels, and a B and a C of each group
    "Mamba 2": (MAMBA2, 1, 0, [(3, 8192 + 2 * 8 * 128), (128, 64, 128)]),
    "Mamba 2 on ranks": (MAMBA2, 8, 0, [(3, 1024 + 2 * 128), (16, 64, 128)]),
    "one group stands on every rank": (MAMBA2._replace(groups=1), 4, 0, [(3, 2048 + 2 * 128), (32, 64, 128)]),
    "a draft's tokens": (MAMBA2, 1, 3, [(6, 8192 + 2 * 8 * 128), (128, 64, 128)]),
    "gated delta net": (GDN, 2, 1, [(4, 128 * 16 + 256 * 16), (16, 256, 128)]),
    "KDA": (KDA, 8, 0, [(3, 3 * 4 * 128), (4, 128, 128)]),
    "linear attention": (StateDims("linear_attention", heads=32, head_size=128), 4, 0, [(8, 128, 128)]),
    "short convolution": (StateDims("short_conv", channels=2048, kernel=3), 2, 0, [(2, 1024)]),
}


@pytest.mark.parametrize("what", SHAPES)
def test_the_shapes_of_a_state(what: str) -> None:
    state, ranks, proposed, shapes = SHAPES[what]
    shared = state.shared_out(ranks)
    assert shared is not None
    assert [part.shape for part in arrays(shared, proposed=proposed)] == shapes


def test_the_dtypes_of_a_state() -> None:
    def of(state: StateDims, **options: Any) -> list[str]:
        return [part.dtype for part in arrays(state, **options)]

    assert of(GDN) == ["bfloat16", "bfloat16"]
    assert of(GDN._replace(model_dtype="float16")) == ["float16", "float16"]
    assert of(GDN, dtype="float32") == ["float32", "float32"]
    assert of(GDN._replace(dtype="float32")) == ["bfloat16", "float32"]
    assert of(GDN._replace(dtype="float32"), named=False) == ["bfloat16", "bfloat16"]
    assert of(KDA) == ["bfloat16", "float32"]


def test_the_bytes_of_a_state() -> None:
    parts = (StateArray("conv", (3, 10), "bfloat16"), StateArray("recurrent", (2, 4, 4), "float32"))
    assert state_bytes(parts, BITS) == 3 * 10 * 2 + 2 * 4 * 4 * 4


@pytest.mark.parametrize(
    ("state", "ranks"),
    [(MAMBA1, 3), (MAMBA2, 16), (MAMBA2._replace(groups=3), 2), (GDN, 64), (KDA, 5), (GDN._replace(heads=30), 4)],
)
def test_a_state_that_does_not_divide_is_not_known(state: StateDims, ranks: int) -> None:
    assert state.shared_out(ranks) is None


def test_every_kind_needs_dimensions_that_there_are() -> None:
    assert set(NEEDED) == set(get_args(StateKind))
    assert {name for names in NEEDED.values() for name in names} <= set(DIMENSIONS)
    assert {*DIMENSIONS, "kind", "dtype", "model_dtype", "ranks"} == set(StateDims._fields)


# of configs -----------------------------------------------------------------------------------------------------------


def states_of(config: dict[str, Any], ranks: int = 1) -> list[StateDims | None]:
    model = per_rank(requests_from_model(config), ranks)
    return [facts.state for facts in model.layers if facts.request is None]


READ: dict[str, tuple[dict[str, Any], StateDims]] = {
    "defaults of a class": (
        QWEN,
        StateDims("gdn", key_heads=16, heads=32, key_size=128, head_size=128, kernel=4),
    ),
    "a dtype of the config": (
        QWEN | {"mamba_ssm_dtype": "float32", "dtype": "float16"},
        StateDims(
            "gdn", key_heads=16, heads=32, key_size=128, head_size=128, kernel=4, dtype="float32", model_dtype="float16"
        ),
    ),
    "auto is no dtype": (
        {"model_type": "nemotron_h", "mamba_ssm_cache_dtype": "auto", "hybrid_override_pattern": "M*"},
        MAMBA2._replace(chunk=128),
    ),
    "Olmo's sizes follow from its heads": (
        {"model_type": "olmo_hybrid", "num_hidden_layers": 4, "num_attention_heads": 30, "hidden_size": 3840},
        StateDims("gdn", key_heads=30, heads=30, key_size=96, head_size=192, kernel=4),
    ),
    "a head of auto": (
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
        StateDims("mamba2", channels=8192, groups=1, heads=128, head_size=64, state_size=256, kernel=4, chunk=256),
    ),
    "a list in the config": (
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 2,
            "linear_attn_config": {
                "kda_layers": [1],
                "full_attn_layers": [2],
                "num_heads": 8,
                "head_dim": 64,
                "short_conv_kernel_size": 3,
            },
        },
        StateDims("kda", heads=8, head_size=64, kernel=3),
    ),
    "channels of its own": (
        {
            "model_type": "falcon_h1",
            "num_hidden_layers": 1,
            "mamba_d_ssm": 3072,
            "mamba_d_head": 128,
            "mamba_n_heads": 24,
        },
        StateDims("mamba2", channels=3072, groups=1, heads=24, head_size=128, state_size=256, kernel=4, chunk=256),
    ),
}


@pytest.mark.parametrize("what", READ)
def test_a_config_has_the_state(what: str) -> None:
    config, state = READ[what]
    assert set(states_of({"dtype": "bfloat16"} | config)) == {state}


@pytest.mark.parametrize(
    "config",
    [
        QWEN | {"linear_num_key_heads": "sixteen"},
        QWEN | {"linear_num_value_heads": None},
        # a family whose state is not described
        {"model_type": "minimax", "num_hidden_layers": 2},
        # vLLM reads conv_dim, which this config lacks
        {"model_type": "lfm2", "num_hidden_layers": 2, "full_attn_idxs": [1]},
    ],
)
def test_a_state_that_the_config_does_not_give_is_not_known(config: dict[str, Any]) -> None:
    assert set(states_of(config)) == {None}


def test_each_rank_has_its_share() -> None:
    (state,) = set(states_of(QWEN | {"dtype": "bfloat16"}, ranks=2))
    assert state is not None
    assert [part.shape for part in arrays(state)] == [(3, 4096), (16, 128, 128)]
