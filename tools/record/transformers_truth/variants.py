"""The configurations that are observed: every model type's default, and files that leave a decision to the class."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

Config = dict[str, Any]

# model type -> what it is -> a configuration
PUBLISHED: dict[str, dict[str, Config]] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text("utf-8"))

# Neither a language model nor an encoder that feeds one: detection, segmentation, depth, codecs, time series, proteins,
# convolutions; and parts that are no model by themselves.
LEFT_OUT = re.compile(
    r"detr|d_fine|deimv2|^sam|edgetam|grounding|omdet|mask2former|maskformer|oneformer|segformer|swin|hiera|levit|^pvt|"
    r"^cvt|glpn|^dpt|^depth|prompt_depth|zoedepth|superglue|lightglue|superpoint|loftr|^vits$|fastspeech|time_series|"
    r"timesfm|autoformer|informer|patchts|esmfold|focalnet|mobilevit|perceiver$|reformer|yoso|nystrom|^mra$|slane|^pp_|"
    r"vitdet|seggpt|clap$|clap_audio|hgnet|convnext|resnet|regnet|efficientnet|mobilenet|poolformer|^bit$|textnet|"
    r"uvdoc|univnet|hifigan|bigvgan|codebook|vqgan|vqmodel|encodec|^dac$|timm_|upernet|dinat|fnet|swiftformer|^table-|"
    r"^tapas|eomt|mgp|vitmatte|prompt_encoder|mask_decoder|^rag$|_dit$|_diffusion$|token2wav|neucodec|xcodec|"
    r"acoustic_tokenizer|pocket_tts_audio|tvp|^jev$|videomt|tipsv2_dpt|chmv2|head$|layoutlmv2|layoutxlm|"
    r"^lilt$|^bros$|groupvit|funnel|"
    r"esmc|^esm$|evolla|align_vision|align$|vitpose|nougat|idefics_vision|idefics_perciever|unified_vision|unified_audio|"
    r"inkling_audio|inkling_vision|molmo2_adapter|decision_transformer|vjepa2|vjepa|sew-d|kosmos-2.5|xlnet|trocr|"
    r"vision-text-dual|speech-encoder-decoder|vision-encoder-decoder|_assistant$|EvollaModel"
)
_BASE = PreTrainedConfig().to_dict()
_SMALL = 8
_PATTERNS = {"sliding_window_pattern": 3, "global_attn_every_n_layers": 2, "full_attention_interval": 3,
             "layer_group_size": 3, "no_rope_layer_interval": 3}  # fmt: skip


def file_form(config: PreTrainedConfig) -> Config:
    """What a config.json of it holds: every field of its class, none of those that every configuration has."""
    data: Config = json.loads(config.to_json_string(use_diff=False))

    def lean(value: Any) -> Any:
        if isinstance(value, dict):
            own = value if "return_dict" not in value else {k: v for k, v in value.items() if _says_more(k, v)}
            return {k: lean(v) for k, v in own.items()}
        return [lean(v) for v in value] if isinstance(value, list) else value

    result: Config = lean(data)
    return result


def _says_more(key: str, value: Any) -> bool:
    base = _BASE.get(key, ...)
    return key in ("model_type", "transformers_version") or value != json.loads(json.dumps(base, default=str))


def default(model_type: str) -> Config:
    return file_form(CONFIG_MAPPING[model_type]())


def _heads(d: Config) -> Config | None:
    """Half the heads over the same width, a quarter of those for KV: what a head size is taken from."""
    for heads, kv in (
        ("num_attention_heads", "num_key_value_heads"), ("n_head", ""), ("num_heads", ""), ("n_heads", ""),
        ("encoder_attention_heads", "decoder_attention_heads"), ("attention_heads", ""),
        ("encoder_num_attention_heads", "decoder_num_attention_heads"), ("num_encoder_attention_heads",
        "num_decoder_attention_heads"),
    ):  # fmt: skip
        count = d.get(heads)
        if not isinstance(count, int) or count < 4 or count % 2:
            continue
        changed = {heads: count // 2}
        if kv.startswith("num_key_value") and isinstance(d.get(kv), int):
            changed[kv] = max(count // 8, 1) if (count // 2) % max(count // 8, 1) == 0 else 1
        elif kv:
            changed[kv] = count // 2
        return changed
    return None


def _layers(d: Config, count: int = _SMALL) -> Config:
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth",
             "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_layers",
             "num_decoder_layers")  # fmt: skip
    return {n: min(count, d[n]) for n in names if isinstance(d.get(n), int)}


def _generic(model_type: str, d: Config) -> Iterator[tuple[str, Config]]:
    """Files with few fields: the class decides on the rest. Not every one of them can be built."""
    few = {"model_type": model_type, **_layers(d)}
    if heads := _heads(d):
        yield "few fields: fewer layers and heads", {**few, **heads}
    elif len(few) > 1:
        yield "few fields: fewer layers", few
    nested = d.get("is_encoder_decoder") or any(isinstance(p, dict) and p.get("model_type") for p in d.values())
    for key in ("text_config", "vision_config", "audio_config", "encoder", "decoder"):
        part = d.get(key)
        if isinstance(part, dict) and (sub := {**_layers(part, 4), **(_heads(part) or {})}):
            typed = {"model_type": part["model_type"], **sub} if part.get("model_type") else sub
            yield f"few fields in {key}", {"model_type": model_type, key: typed}
    sees = re.search(r"vision|image|audio|clip|vit|qformer|wav2vec|hubert|_encoder$", model_type)
    if nested or (sees and not model_type.endswith("_text")):
        return
    short = {"model_type": model_type, **_layers(d, 4)}
    nulls = {k: None for k in ("head_dim", "num_key_value_heads") if d.get(k) is not None}
    for key in nulls:
        yield f"{key} null", {**short, key: None}
    if "head_dim" in d and isinstance(d.get("num_attention_heads"), int):
        yield "no head_dim in the file, other width", {**short, "hidden_size": d["num_attention_heads"] * 96}
    if isinstance(d.get("is_decoder"), bool) and "add_cross_attention" in d:
        yield "is_decoder", {**short, "is_decoder": True}
        yield "is_decoder and add_cross_attention", {**short, "is_decoder": True, "add_cross_attention": True}
    elif not d.get("is_encoder_decoder") and ("num_key_value_heads" in d or "n_head" in d):
        yield "is_causal false in the file", {**short, "is_causal": False}
    yield from _windows(model_type, d)
    if types := d.get("layer_types"):
        yield from _layer_types(model_type, d, types)


def _windows(model_type: str, d: Config) -> Iterator[tuple[str, Config]]:
    few = {"model_type": model_type, **_layers(d)}
    for key in ("sliding_window", "attention_window_size", "sliding_window_size", "local_attention", "window_size",
                "attention_chunk_size"):  # fmt: skip
        if key in d:
            yield f"{key} 1000", {**few, key: 1000}
            if key == "sliding_window":
                yield "sliding_window null", {**few, key: None}
    if "use_sliding_window" in d:
        window = {"sliding_window": 1000, "max_window_layers": 3}
        yield "use_sliding_window true, max_window_layers 3", {**few, **window, "use_sliding_window": True}
        yield "use_sliding_window false with a window", {**few, **window, "use_sliding_window": False}
    elif "max_window_layers" in d:
        yield "max_window_layers 3", {**few, "sliding_window": 1000, "max_window_layers": 3}
    if d.get("layer_types") or "sliding_window_pattern" in d:
        source = inspect.getsource(CONFIG_MAPPING[model_type])
        for key, value in _PATTERNS.items():
            if key in source:
                yield f"{key} {value}", {**few, key: value}
        if ignored := {k: v for k, v in _PATTERNS.items() if k not in source}:
            yield "other families' pattern fields (ignored)", {**few, **ignored}
    # what the mask and is_causal say differs in these two: it depends on the attention function
    if "use_bidirectional_attention" in d and model_type not in ("gemma", "gemma2"):
        for scope in (True, "all", "vision"):
            yield f"use_bidirectional_attention {scope}", {**few, "use_bidirectional_attention": scope}
    for key in ("query_pre_attn_scalar", "attention_multiplier", "attn_logit_softcapping"):
        if key in d:
            yield f"{key} 30", {**few, key: 30.0 if key != "query_pre_attn_scalar" else 30}


def _layer_types(model_type: str, d: Config, types: list[str]) -> Iterator[tuple[str, Config]]:
    """The pattern stated by the file, in another order than the class's own."""
    words = list(dict.fromkeys(types))
    if len(words) < 2:
        words = [words[0], "sliding_attention" if words[0] == "full_attention" else "full_attention"]
    stated = [words[(i // 2) % len(words)] for i in range(6)]
    base = {"model_type": model_type, **_layers(d), "num_hidden_layers": 6}
    yield "layer_types stated, in another order", {**base, "layer_types": stated}
    if d.get("sliding_window", 0) is None and "sliding_attention" in stated:
        yield "layer_types stated, sliding_window 1000", {**base, "layer_types": stated, "sliding_window": 1000}


def variants() -> list[dict[str, Any]]:
    """Every line to observe: family, variant, config; those marked `may_fail` are tried and dropped where they do."""
    lines: list[dict[str, Any]] = []
    seen: set[str] = set()

    def add(family: str, variant: str, config: Config, may_fail: bool) -> None:
        text = json.dumps([family, config], sort_keys=True)
        if text not in seen:
            seen.add(text)
            lines.append({"family": family, "variant": variant, "config": config, "may_fail": may_fail})

    for model_type in sorted(CONFIG_MAPPING_NAMES):
        stated = PUBLISHED.get(model_type, {})
        if LEFT_OUT.search(model_type) and not stated:
            continue
        try:
            data = default(model_type)
        except Exception:
            data = {}
        if data and not LEFT_OUT.search(model_type):
            add(model_type, "default", data, False)
            for variant, config in _generic(model_type, data):
                add(model_type, variant, config, True)
        for variant, config in stated.items():
            add(model_type, variant, {"model_type": model_type, **config}, False)
    return lines
