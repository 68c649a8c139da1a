"""A model's config.json -> what each of its layers needs, as facts and as AttentionRequests."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attnreg.config_fields import ConfigError, ConfigFields, read_config, show
from attnreg.model_families import FAMILIES, UNKNOWN, Family
from attnreg.request import AttentionRequest

__all__ = [
    "ConfigError",
    "LayerFacts",
    "LayerGroup",
    "MlaDims",
    "ModelLayers",
    "describe_indices",
    "requests_from_model",
]

_MAX_LAYERS = 10_000
_DTYPES = {w: w for w in ("float16", "bfloat16", "float32")} | {"half": "float16", "float": "float32"}
# a word of layer_types -> the kind of the layer
_WORDS = dict.fromkeys(("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention"), "full")
_WORDS |= {"sliding_attention": "sliding", "linear_attention": "linear", "mamba": "mamba", "conv": "conv"}
_MIXERS = {"linear": "linear attention", "mamba": "Mamba", "conv": "convolution"}


@dataclass(frozen=True, slots=True)
class MlaDims:
    """The dimensions of multi-head latent attention, in elements; ``index_topk`` is a count of tokens."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What one layer computes. Sizes are in elements per head; for MLA those of the expanded call, a KV head per head.

    ``sliding_window`` counts the keys that a causal query sees, itself included; where ``causal`` is False it is the
    distance seen on either side. ``request`` is None for a layer that is no softmax attention.
    """

    layer_idx: int
    kind: str
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    head_size_v: int | None = None
    sliding_window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    causal: bool = True
    bias: bool = False
    mla: MlaDims | None = None
    scaling: float | None = None
    kv_shared_from: int | None = None
    request: AttentionRequest | None = None


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that are alike: their indices, their request, and the facts of the first."""

    label: str
    layers: tuple[int, ...]
    request: AttentionRequest | None
    facts: LayerFacts


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """A model's layers in order, and in groups by first layer; ``assumptions`` says what the config left open."""

    name: str
    model_type: str
    dtype: str
    layers: tuple[LayerFacts, ...]
    groups: tuple[LayerGroup, ...]
    assumptions: tuple[str, ...]


def requests_from_model(
    config: object,
    *,
    role: str = "target",
    dtype: str | None = None,
    kv_dtype: str | None = "auto",
    block_size: int | None = None,
) -> ModelLayers:
    """What each layer of a Hugging Face model needs.

    ``config`` is the path of a config.json or of a directory that holds one, a mapping, or an object with a
    ``to_dict`` method. ``dtype`` overrides the config's own. Raises `ConfigError` (a ValueError) for a config that
    cannot be read, and `attnreg.RequestError` for an argument that no request can have.
    """
    source, outer = read_config(config)
    top = ConfigFields(outer, f"{source}: " if source else "")
    text = top.nested("text_config") or top.nested("language_config") or top.nested("llm_config") or top
    outer_type, text_type = top.word("model_type"), text.word("model_type")
    family = FAMILIES.get(text_type) or FAMILIES.get(outer_type) or UNKNOWN
    text.defaults = family.defaults
    model_type = outer_type or text_type or "unknown"
    notes = _first_notes(family, text, top)
    dtype = dtype or _dtype(text, top, notes)
    request = {"role": role, "dtype": dtype, "kv_dtype": kv_dtype, "block_size": block_size}
    layers = _layers(family, text, request | {"model": outer_type or text_type or None}, notes)
    used = ", ".join(f"{name} {value}" for name, value in text.defaulted.items() if value is not False)
    if used:
        notes.append(f"Not in the config, so the defaults of {text_type or model_type} hold: {used}.")
    name = _name(source, outer.get("_name_or_path")) or model_type
    return ModelLayers(name, model_type, dtype, layers, _groups(layers), tuple(dict.fromkeys(notes)))


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


def _name(source: str, named: object) -> str:
    """The model's name: its directory's, a file's that is not called config.json, or what the config says."""
    if not source:
        return named.rstrip("/").rpartition("/")[2] if isinstance(named, str) else ""
    path = Path(os.path.abspath(source))
    # a download cache: models--openai--gpt-oss-120b/snapshots/<revision>/config.json
    if path.parent.parent.name == "snapshots":
        return path.parents[2].name.rpartition("--")[2]
    return path.parent.name if path.name == "config.json" else path.stem


def _first_notes(family: Family, text: ConfigFields, top: ConfigFields) -> list[str]:
    words = [fields.word("model_type") for fields in (text, top)]
    strange = [f"model_type {show(word)} is not a known family" for word in words if word and word not in FAMILIES]
    notes = []
    if family is UNKNOWN:
        text.stranger = strange[0] if strange else "the config has no model_type"
        notes.append(
            f"{text.stranger}; its layers are read as those of a Llama-like decoder: of one geometry, without "
            "attention sinks or score bias, and causal unless is_causal is false."
        )
    elif strange:
        notes.append(f"{strange[0]}; its text model is read as {next(word for word in words if word in FAMILIES)}.")
    if top.data.get("is_encoder_decoder") is True:
        notes.append("is_encoder_decoder is True; only the decoder's self-attention is given.")
    if not family.opens and (value := text.data.get("use_bidirectional_attention")):
        notes.append(f"use_bidirectional_attention is {show(value)}; the layers are given as causal all the same.")
    towers = [name for name in ("vision_config", "audio_config") if top.data.get(name) is not None]
    sentence = "{} is not read; only the text model's layers are given, for prompts of text alone."
    return notes + [sentence.format(name) for name in towers]


def _dtype(text: ConfigFields, top: ConfigFields, notes: list[str]) -> str:
    for fields, name in ((f, n) for f in (text, top) for n in ("dtype", "torch_dtype")):
        value = fields.data.get(name)
        # a config object may hold a torch.dtype
        word = (str(value) if type(value).__module__ == "torch" else fields.word(name)).removeprefix("torch.")
        if word in _DTYPES:
            return _DTYPES[word]
        if word not in ("", "auto"):
            notes.append(f"{name} {show(word)} is no dtype that attention computes in; bfloat16 is assumed.")
            return "bfloat16"
    notes.append("The config names no dtype; bfloat16 is assumed.")
    return "bfloat16"


def _layers(family: Family, fields: ConfigFields, request: dict[str, Any], notes: list[str]) -> tuple[LayerFacts, ...]:
    kinds = _kinds(family, fields, notes)
    crossed = family.encoder and fields.flag("add_cross_attention") and not _MIXERS.keys() & kinds
    if crossed and not fields.flag("is_decoder"):
        raise fields.error("add_cross_attention", "only a decoder has cross-attention; set is_decoder to true")
    alike: dict[str, list[LayerFacts]] = {}
    for kind in dict.fromkeys(kinds):
        layer = LayerFacts(layer_idx=0, kind=kind) if kind in _MIXERS else _layer(family, fields, kind, notes)
        cross = [replace(layer, kind="cross", causal=False, sliding_window=None)] if crossed else []
        alike[kind] = [replace(x, request=_request(x, family.encoder, request)) for x in (layer, *cross)]
    return tuple(replace(layer, layer_idx=i) for i, kind in enumerate(kinds) for layer in alike[kind])


def _kinds(family: Family, fields: ConfigFields, notes: list[str]) -> list[str]:
    """The kind of each layer: full, sliding, or one of the mixers."""
    count = fields.count("num_hidden_layers", most=_MAX_LAYERS)
    words = fields.data.get("layer_types")
    if words is not None:
        return _worded_kinds(fields, words, count)
    if not family.slides or not fields.flag(family.switch, default=True) or fields.maybe(family.window) is None:
        return ["full"] * count
    period = fields.maybe(family.period) if isinstance(family.period, str) else family.period
    first = fields.count(family.first, least=0) if family.first else 0
    if family is UNKNOWN:
        which = f"every layer but the last of each {period}" if period else "every layer"
        notes.append(f"layer_types is not in the config; {family.window} is taken to hold for {which}.")
    full = 0 if family.full_first or not period else period - 1
    return ["full" if i < first or (period and i % period == full) else "sliding" for i in range(count)]


def _worded_kinds(fields: ConfigFields, words: object, count: int) -> list[str]:
    if not isinstance(words, list | tuple):
        raise fields.error("layer_types", "expected a list with one word for each layer")
    if len(words) != count:
        lengths = f"layer_types has {len(words)} entries and num_hidden_layers is {count}"
        raise ConfigError(f"{fields.where}{lengths}; give one entry for each layer")
    for i, word in enumerate(words):
        if not isinstance(word, str) or word not in _WORDS:
            raise ConfigError(f"{fields.where}layer_types[{i}] is {show(word)}; known: {', '.join(sorted(_WORDS))}")
    return [_WORDS[word] for word in words]


def _layer(family: Family, fields: ConfigFields, kind: str, notes: list[str]) -> LayerFacts:
    heads = fields.count("num_attention_heads")
    mla = _mla(family, fields, notes)
    head_size = mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else _head_size(fields, heads)
    if family.encoder:
        causal = fields.flag("is_decoder")
    else:
        causal = fields.flag("is_causal", default=True) and not fields.flag(family.opens)
    return LayerFacts(
        layer_idx=0,
        kind=kind if causal or kind == "sliding" else "encoder",
        num_heads=heads,
        num_kv_heads=heads if mla or family.encoder else _kv_heads(family, fields, heads, notes),
        head_size=head_size,
        head_size_v=mla.v_head_dim if mla else head_size,
        sliding_window=_window(family, fields) if kind == "sliding" else None,
        sinks=family.sinks,
        softcap=fields.number(family.softcap),
        alibi=fields.flag(family.alibi),
        causal=causal,
        mla=mla,
        scaling=(fields.number(family.scale) or head_size) ** -0.5 * (_yarn(fields) if mla else 1.0),
    )


def _window(family: Family, fields: ConfigFields) -> int:
    if family.switch and not fields.flag(family.switch, default=True):
        raise fields.error(family.switch, "layer_types has sliding_attention, which needs it to be true")
    window = fields.maybe(family.window)
    if window is None:
        raise fields.error(family.window, "layer_types has sliding_attention, which needs a window in tokens")
    return window // 2 if family.two_sided or fields.flag(family.opens) else window


def _head_size(fields: ConfigFields, heads: int) -> int:
    given = fields.maybe("head_dim", null=False)
    hidden = given or fields.count("hidden_size")
    if not given and hidden % heads:
        sizes = f"hidden_size is {hidden} and num_attention_heads is {heads}"
        raise ConfigError(f"{fields.where}{sizes}; the second must divide the first where there is no head_dim")
    return given or hidden // heads


def _kv_heads(family: Family, fields: ConfigFields, heads: int, notes: list[str]) -> int:
    name = "num_key_value_heads"
    kv_heads = fields.maybe(name)
    if kv_heads is None and family is UNKNOWN:
        notes.append(f"{name} is not in the config; as many KV heads as query heads are assumed.")
    if kv_heads and heads % kv_heads:
        cure = f"; add {name}, which is a default here" if name in fields.defaulted else ""
        raise ConfigError(
            f"{fields.where}num_attention_heads is {heads} and {name} is {kv_heads}; "
            f"the second must divide the first{cure}"
        )
    return kv_heads or heads


def _mla(family: Family, fields: ConfigFields, notes: list[str]) -> MlaDims | None:
    if not family.mla and (family.mla is not None or fields.data.get("kv_lora_rank") is None):
        return None
    if family is UNKNOWN:
        notes.append("kv_lora_rank is in the config; its attention is read as MLA, in DeepSeek-V3's form.")
    nope, rope = (fields.count(name, least=0) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if not nope + rope:
        raise fields.error("qk_nope_head_dim", "qk_rope_head_dim is 0 as well; one of them must be above 0")
    rank, q_rank = fields.count("kv_lora_rank"), fields.maybe("q_lora_rank")
    return MlaDims(rank, q_rank, nope, rope, fields.count("v_head_dim"), fields.maybe("index_topk"))


def _yarn(fields: ConfigFields) -> float:
    """The factor of YaRN on the softmax scale, which MLA applies beside the usual one."""
    rope = fields.nested("rope_parameters") or fields.nested("rope_scaling")
    if not rope or (rope.word("rope_type") or rope.word("type") or "default") == "default":
        return 1.0
    if not rope.data.get("mscale_all_dim"):
        return 1.0
    mscale, factor = rope.number("mscale_all_dim") or 0.0, rope.number("factor")
    if factor is None:
        raise rope.error("factor", "mscale_all_dim needs it; give the factor by which positions are stretched")
    return (0.1 * mscale * math.log(max(factor, 1.0)) + 1.0) ** 2


def _request(facts: LayerFacts, encoder: bool, request: dict[str, Any]) -> AttentionRequest | None:
    if facts.head_size is None:
        return None
    asks = {"sliding_window": facts.sliding_window is not None, "softcap": facts.softcap is not None}
    asks |= {"sinks": facts.sinks, "alibi": facts.alibi}
    sizes = {name: getattr(facts, name) for name in ("num_heads", "num_kv_heads", "head_size")}
    if facts.kind == "cross":
        request = request | {"attn_type": "encoder_decoder"}
    elif encoder and not facts.causal:
        request = request | {"attn_type": "encoder_only"}
    else:
        asks["non_causal"] = not facts.causal
    if mla := facts.mla:
        dims = asdict(mla)
        del dims["q_lora_rank"]
        latent = {"head_size": mla.kv_lora_rank + mla.qk_rope_head_dim, "head_size_v": mla.kv_lora_rank}
        sizes |= latent | {"num_kv_heads": 1} | dims
        request = request | {"attention": "mla_sparse" if mla.index_topk else "mla"}
    return AttentionRequest(**sizes, **request, features=frozenset(word for word, asked in asks.items() if asked))


def _groups(layers: Sequence[LayerFacts]) -> tuple[LayerGroup, ...]:
    alike: dict[LayerFacts, list[LayerFacts]] = {}
    for layer in layers:
        alike.setdefault(replace(layer, layer_idx=0), []).append(layer)
    return tuple(
        LayerGroup(_label(same[0]), tuple(x.layer_idx for x in same), same[0].request, same[0])
        for same in alike.values()
    )


def _label(facts: LayerFacts) -> str:
    if facts.kind in _MIXERS:
        return f"{_MIXERS[facts.kind]} · no softmax attention"
    heads = f"{facts.num_heads}" if facts.num_heads == facts.num_kv_heads else f"{facts.num_heads}/{facts.num_kv_heads}"
    words = [f"{heads} head{'s' * (heads != '1')} of {facts.head_size}"]
    if mla := facts.mla:
        latent = f"{mla.kv_lora_rank + mla.qk_rope_head_dim} ({mla.kv_lora_rank} + {mla.qk_rope_head_dim})"
        words = [f"{heads} heads", f"MLA latent {latent}", f"sparse, top {mla.index_topk}" if mla.index_topk else ""]
    if facts.sliding_window is not None:
        words.append(f"sliding window {'' if facts.causal else '±'}{facts.sliding_window}")
    words.append("sinks" if facts.sinks else "")
    words.append(f"softcap {facts.softcap:g}" if facts.softcap is not None else "")
    words.append("ALiBi" if facts.alibi else "")
    words.append("cross-attention" if facts.kind == "cross" else "" if facts.causal else "bidirectional")
    return " · ".join(filter(None, words))
