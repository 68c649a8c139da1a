"""How each known model family's config maps to its layers: data that `attnreg.model_config` interprets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family's config maps to layers. A string names a field of the config; None says that there is no such.

    ``slides`` and what follows say which layers slide where ``layer_types`` is absent: none, or all if ``switch`` is
    on, but for those below ``first`` and for one of each ``period``, its last unless ``full_first``.
    """

    defaults: dict[str, Any] = field(default_factory=dict)  # of the family's class; published files drop them
    encoder: bool = False  # bidirectional unless is_decoder is true, and a KV head per head
    mla: bool | None = False  # None: if the config has kv_lora_rank
    sinks: bool = False
    softcap: str | None = None
    scale: str | None = None
    alibi: str | None = None
    window: str = "sliding_window"
    two_sided: bool = False  # the window counts the keys of both sides
    opens: str | None = None  # a flag that makes the model bidirectional and its window two-sided
    slides: bool = False
    switch: str | None = None
    first: str | None = None
    period: str | int | None = None
    full_first: bool = False


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int | None = None, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return sizes | {"num_key_value_heads": kv_heads} | more


_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK_V3 = Family(defaults=_sizes(61, 7168, 128, **_LATENT), mla=True)
_GEMMA = _sizes(26, 2304, 8, 4, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096)
_GEMMA2 = Family(
    defaults=_GEMMA | {"attn_logit_softcapping": 50.0},
    softcap="attn_logit_softcapping",
    scale="query_pre_attn_scalar",
    slides=True,
    period=2,
)
_GEMMA3 = replace(
    _GEMMA2,
    defaults=_GEMMA | {"sliding_window_pattern": 6},
    period="sliding_window_pattern",
    opens="use_bidirectional_attention",
)
_QWEN2 = Family(
    defaults=_sizes(32, 4096, 32, 32, sliding_window=4096, use_sliding_window=False, max_window_layers=28),
    slides=True,
    switch="use_sliding_window",
    first="max_window_layers",
)
# Source: the configuration and modelling classes of transformers 5.23.0, under models/<name>.
FAMILIES = {
    "bert": Family(defaults=_sizes(12, 768, 12), encoder=True),
    "deepseek_v2": Family(defaults=_sizes(32, 4096, 32, **_LATENT), mla=True),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": replace(_DEEPSEEK_V3, defaults=_DEEPSEEK_V3.defaults | {"index_topk": 2048}),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": Family(
        defaults=_sizes(36, 2880, 64, 8, head_dim=64, sliding_window=128), sinks=True, slides=True, period=2
    ),
    # transformers has no class of this name; its files hold DeepSeek-V3's fields
    "kimi_k2": _DEEPSEEK_V3,
    "llama": Family(defaults=_sizes(32, 4096, 32)),
    "mistral": Family(defaults=_sizes(32, 4096, 32, 8, sliding_window=4096), slides=True),
    "modernbert": Family(
        defaults=_sizes(22, 768, 12, local_attention=128, global_attn_every_n_layers=3),
        encoder=True,
        window="local_attention",
        two_sided=True,
        slides=True,
        period="global_attn_every_n_layers",
        full_first=True,
    ),
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, defaults=_QWEN2.defaults | {"head_dim": 128}),
}
# fields that mean the same wherever they occur
UNKNOWN = replace(_GEMMA3, defaults={}, mla=None, alibi="alibi", opens=None, switch="use_sliding_window")
