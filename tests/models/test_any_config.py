"""Any mapping gives layers or a typed error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from support.models.configs import LLAMA
from support.suite.examples import examples

from attnreg.models.reader import ConfigError, bundled_families, requests_from_model

TYPES = list(bundled_families())
NAMES = [
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "layer_types"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "local_attention"),
    *("global_attn_every_n_layers", "attn_logit_softcapping", "query_pre_attn_scalar", "alibi", "is_causal"),
    *("use_bidirectional_attention", "is_decoder", "add_cross_attention", "is_encoder_decoder", "rope_parameters"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk"),
    *("rope_scaling", "rope_type", "factor", "mscale_all_dim", "dtype", "torch_dtype", "_name_or_path"),
    *("model_type", "text_config", "language_config", "vision_config"),
]
WORD = st.sampled_from(["full_attention", "sliding_attention", "mamba", "bfloat16", "yarn", "32", "", *TYPES])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 8) | st.floats() | WORD | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=6),
    max_leaves=12,
)


def mentioned(name: str) -> list[str]:
    """The fields that a family's entry names, and those that any config may have."""
    entry = "".join(bundled_families().text(member) for member in lineage(name))
    return sorted({*re.findall(r"[a-z]\w*(?:_\w+)+", entry), *NAMES})


def lineage(name: str) -> Iterator[str]:
    while name:
        yield name
        name = bundled_families().like(name)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config of some family with some of its fields changed, in it or in a part of it."""
    name = draw(st.sampled_from([*TYPES, "newest"]))
    names = st.sampled_from(mentioned(name) if name in TYPES else NAMES) | st.text()
    config = draw(st.sampled_from([{}, {"model_type": name}, LLAMA | {"model_type": name}]))
    config = config | draw(st.dictionaries(names, VALUE, max_size=8))
    part = draw(st.sampled_from(["", "", "text_config", "vision_config", "audio_config"]))
    return config | ({part: draw(st.dictionaries(names, VALUE, max_size=6))} if part else {})


@examples(500)
@given(configs())
@example(LLAMA | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True, "layer_types": ["mamba"] * 4})
@example(LLAMA | {"model_type": "deepseek_v3", "rope_scaling": {"rope_type": "yarn", "factor": 1e308}})
def test_any_mapping_gives_layers_or_a_config_error(config: dict[str, Any]) -> None:
    try:
        model = requests_from_model(config)
    except ConfigError as error:
        assert str(error)  # noqa: PT017
        return
    assert model.layers
    assert {layer.layer_idx for layer in model.layers} == {i for group in model.groups for i in group.layers}
    assert all(group.label for group in model.groups)
