"""What a model's layers compute, as facts, as requests, and in groups of those that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from attnreg.models.families import MIXERS
from attnreg.request import AttentionRequest


@dataclass(frozen=True)
class AbsorbedMla:
    """The latent form of MLA: what a decode kernel sees and the KV cache holds, in elements per token."""

    num_kv_heads: int
    head_size: int
    head_size_v: int


@dataclass(frozen=True)
class MlaIndexer:
    """The indexer of sparse MLA; ``own`` is False where the layer takes the tokens that an earlier one chose."""

    own: bool
    index_n_heads: int
    index_head_dim: int
    index_topk: int


@dataclass(frozen=True)
class MlaDims:
    """The dimensions of multi-head latent attention, in elements; ``form`` names one that is not DeepSeek-V3's."""

    kv_lora_rank: int | None
    q_lora_rank: int | None
    qk_nope_head_dim: int | None
    qk_rope_head_dim: int
    v_head_dim: int | None
    absorbed: AbsorbedMla
    indexer: MlaIndexer | None = None
    form: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What one attention call of a layer computes. Sizes are in elements per head; for MLA those of the expanded call.

    ``kind`` is full, sliding, chunked, cross, encoder (bidirectional), vision, or of a layer that is no softmax
    attention linear, mamba or conv; those have no sizes and no ``request``. ``sliding_window`` counts the keys that a
    causal query sees, itself included; where ``causal`` is False it is the distance seen on either side. ``causal`` is
    "prefix" where a prompt's multimodal tokens see each other in both directions. ``chunk`` is the length of the blocks
    within which queries see keys. ``bias`` is an additive score bias. ``kv_shared_from`` is the layer whose keys and
    values this one reads. ``compress`` is how many tokens one key stands for beside those of the window. ``part`` is
    where the layer's config stands in the model's, "" for the whole or the text's.
    """

    layer_idx: int
    kind: str
    attention: str | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    head_size_v: int | None = None
    sliding_window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    causal: bool | Literal["prefix"] = True
    bias: bool = False
    mla: MlaDims | None = None
    scaling: float | None = None
    kv_shared_from: int | None = None
    sparse_blocks: int | None = None
    compress: int | None = None
    part: str = ""
    request: AttentionRequest | None = None


@dataclass(frozen=True)
class LayerGroup:
    """The layers that are alike: their indices, their request, and the facts of the first."""

    label: str
    layers: tuple[int, ...]
    request: AttentionRequest | None
    facts: LayerFacts


@dataclass(frozen=True)
class ModelLayers:
    """A model's layers in order, and in groups by first layer; ``assumptions`` says what the config left open.

    ``max_length`` is the longest request in tokens that the config names, None where it names none.
    """

    name: str
    model_type: str
    dtype: str
    layers: tuple[LayerFacts, ...]
    groups: tuple[LayerGroup, ...]
    assumptions: tuple[str, ...]
    max_length: int | None = None


def request_of(facts: LayerFacts, attn_type: str, given: dict[str, Any]) -> AttentionRequest | None:
    """What a layer asks of a kernel; ``given`` holds the fields that do not come from the model."""
    if facts.head_size is None:
        return None
    asks = {
        "sliding_window": facts.sliding_window is not None,
        "softcap": facts.softcap is not None,
        "sinks": facts.sinks,
        "alibi": facts.alibi,
        "score_bias": facts.bias,
        "mm_prefix": facts.causal == "prefix",
        "sparse_blocks": facts.sparse_blocks is not None,
    }
    fields = {**given, "num_heads": facts.num_heads, "num_kv_heads": facts.num_kv_heads, "head_size": facts.head_size}
    if facts.head_size_v != facts.head_size:
        fields["head_size_v"] = facts.head_size_v
    if facts.kind == "cross":
        attn_type = "encoder_decoder"
    elif facts.causal:
        attn_type = "decoder"
    asks["non_causal"] = attn_type == "decoder" and not facts.causal
    if attn_type in ("encoder", "encoder_only"):
        # it keeps no KV cache: how caches are stored is no matter of its
        fields |= {"kv_dtype": "auto" if fields["kv_dtype"] else None, "block_size": None}
    if facts.kind == "vision":
        fields["role"] = "vision"
    elif attn_type == "encoder" and fields["role"] == "target":
        fields["role"] = "encoder"
    if mla := facts.mla:
        fields |= {name: getattr(mla.absorbed, name) for name in ("num_kv_heads", "head_size", "head_size_v")}
        dimensions = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        fields |= {name: getattr(mla, name) for name in dimensions}
        fields |= {"attention": facts.attention, "index_topk": mla.indexer.index_topk if mla.indexer else None}
    features = frozenset(word for word, asked in asks.items() if asked)
    return AttentionRequest(**fields, attn_type=attn_type, features=features)


def group(layers: Sequence[LayerFacts]) -> tuple[LayerGroup, ...]:
    """The layers in groups, in the order of their first; which layer's KV is shared makes no group of its own."""
    alike: dict[LayerFacts, list[LayerFacts]] = {}
    for layer in layers:
        shared = None if layer.kv_shared_from is None else -1
        alike.setdefault(replace(layer, layer_idx=0, kv_shared_from=shared), []).append(layer)
    return tuple(
        LayerGroup(label(same[0]), tuple(dict.fromkeys(x.layer_idx for x in same)), same[0].request, same[0])
        for same in alike.values()
    )


def label(facts: LayerFacts) -> str:
    """What a layer computes, in one line."""
    if facts.kind in MIXERS:
        return f"{MIXERS[facts.kind]} · no softmax attention"
    heads = f"{facts.num_heads}" if facts.num_heads == facts.num_kv_heads else f"{facts.num_heads}/{facts.num_kv_heads}"
    size = f"{facts.head_size}" if facts.head_size == facts.head_size_v else f"{facts.head_size}/{facts.head_size_v}"
    words = [f"{heads} head{'s' * (heads != '1')} of {size}"]
    if mla := facts.mla:
        latent = f"{mla.absorbed.head_size}"
        if mla.kv_lora_rank and mla.qk_rope_head_dim:
            latent += f" ({mla.kv_lora_rank} + {mla.qk_rope_head_dim})"
        words = [f"{facts.num_heads} heads", f"MLA latent {latent}"]
        if mla.indexer:
            words.append(f"sparse, top {mla.indexer.index_topk}" + ("" if mla.indexer.own else " of an earlier layer"))
        words.append(mla.form or "")
    if facts.sliding_window is not None:
        words.append(f"sliding window {'' if facts.causal else '±'}{facts.sliding_window}")
    words.append(f"chunks of {facts.chunk}" if facts.chunk is not None else "")
    words.append("sinks" if facts.sinks else "")
    words.append(f"softcap {facts.softcap:g}" if facts.softcap is not None else "")
    words.append("ALiBi" if facts.alibi else "")
    words.append("score bias" if facts.bias else "")
    words.append(f"sparse blocks of {facts.sparse_blocks}" if facts.sparse_blocks is not None else "")
    words.append(f"and a key for each {facts.compress} tokens" if facts.compress is not None else "")
    words.append("KV of an earlier layer" if facts.kv_shared_from is not None else "")
    words.append("multimodal prefix" if facts.causal == "prefix" else "")
    words.append("cross-attention" if facts.kind == "cross" else "" if facts.causal else "bidirectional")
    words.append({"vision_config": "vision tower", "audio_config": "audio tower"}.get(facts.part, facts.part))
    if facts.kind == "vision" and not facts.part:
        words.append("vision tower")
    return " · ".join(filter(None, words))


def describe_indices(indices: Sequence[int]) -> str:
    """Layer indices in few words: "0–31" for a run, "0, 2, … 34" and "0–4, 6–10, … 54–58" where runs repeat."""
    runs: list[list[int]] = []
    for i in sorted(set(indices)):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    steps = {b[0] - a[0] for a, b in itertools.pairwise(runs)}
    widths = {b - a for a, b in runs[:-1]}
    # the end of the model may cut the last run short
    if len(runs) > 3 and len(steps) == len(widths) == 1 and runs[-1][1] - runs[-1][0] <= min(widths):
        return f"{texts[0]}, {texts[1]}, … {texts[-1]}"
    return ", ".join(texts)
