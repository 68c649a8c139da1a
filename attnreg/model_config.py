"""A model's config.json -> what each of its layers needs, as facts and as AttentionRequests."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnreg.request import AttentionRequest

_MAX_BYTES = 16 * 2**20
_MAX_LAYERS = 10_000
_MAX_COUNT = 2**31 - 1
_ACCEPTED = "give a config.json, a directory that holds one, a dict or a config object (nothing is downloaded)"
_DTYPES = {w: w for w in ("float16", "bfloat16", "float32")} | {"half": "float16", "float": "float32"}
# a word of layer_types -> the kind of layer; the last four are mixers, which are no softmax attention
_WORDS = {
    "full_attention": "full", "attention": "full", "indexed_attention": "full", "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding", "linear_attention": "linear", "mamba": "mamba", "conv": "conv",
}  # fmt: skip
_MIXERS = {"linear": "linear attention", "mamba": "Mamba", "conv": "convolution"}


class ConfigError(ValueError):
    """A config that cannot be read, or that contradicts itself; the message names the field, its value and the cure."""


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
    """What one layer computes. Sizes are in elements per head; for MLA those of the expanded call, one head per query.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How a family's config maps to layers. Strings name fields of the config; None says that the family has no such.

    ``defaults`` are those of the family's class, which published files drop. ``slides`` to ``full_first`` say which
    layers slide where ``layer_types`` is absent: none, or all; of each period all but one; those from an index on.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    known: bool = True
    encoder: bool = False  # bidirectional unless is_decoder is true
    mla: bool | None = False  # None: if the config has kv_lora_rank
    sinks: bool = False
    kv_heads: str | None = "num_key_value_heads"
    softcap: str | None = None
    scale: str | None = None
    alibi: str | None = None
    window: str = "sliding_window"
    two_sided: bool = False  # the window counts both sides
    opens: str | None = None  # a flag that makes the model bidirectional and its window two-sided
    slides: bool = False
    switch: str | None = None
    first: str | None = None
    period: str | int | None = None
    full_first: bool = False


def _dims(layers: int, hidden: int, heads: int, kv_heads: int | None = None, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return sizes | {"num_key_value_heads": kv_heads} | more


_QWEN = _dims(32, 4096, 32, 32, sliding_window=4096, use_sliding_window=False, max_window_layers=28)
_GEMMA = _dims(26, 2304, 8, 4, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096)
_MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_QWEN2 = _Family(defaults=_QWEN, slides=True, switch="use_sliding_window", first="max_window_layers")
_GEMMA2 = _Family(
    defaults=_GEMMA | {"attn_logit_softcapping": 50.0},
    softcap="attn_logit_softcapping", scale="query_pre_attn_scalar", slides=True, period=2,
)  # fmt: skip
_GEMMA3 = replace(
    _GEMMA2,
    defaults=_GEMMA | {"sliding_window_pattern": 6},
    period="sliding_window_pattern", opens="use_bidirectional_attention",
)  # fmt: skip
_DEEPSEEK_V3 = _Family(defaults=_dims(61, 7168, 128, **_MLA), mla=True)
# Source: the configuration and modelling classes of transformers 5.23.0, one directory per name.
_FAMILIES = {
    "bert": _Family(defaults=_dims(12, 768, 12), encoder=True, kv_heads=None),
    "deepseek_v2": _Family(defaults=_dims(32, 4096, 32, **_MLA), mla=True),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": replace(_DEEPSEEK_V3, defaults=_DEEPSEEK_V3.defaults | {"index_topk": 2048}),  # type: ignore[operator]
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": _Family(
        defaults=_dims(36, 2880, 64, 8, head_dim=64, sliding_window=128), sinks=True, slides=True, period=2
    ),
    # the published files of Kimi-K2; transformers has no class of that name, and they run as deepseek_v3
    "kimi_k2": _DEEPSEEK_V3,
    "llama": _Family(defaults=_dims(32, 4096, 32)),
    "mistral": _Family(defaults=_dims(32, 4096, 32, 8, sliding_window=4096), slides=True),
    "modernbert": _Family(
        defaults=_dims(22, 768, 12, local_attention=128, global_attn_every_n_layers=3),
        encoder=True, kv_heads=None, window="local_attention", two_sided=True,
        slides=True, period="global_attn_every_n_layers", full_first=True,
    ),
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, defaults=_QWEN | {"head_dim": 128}),
}  # fmt: skip
_UNKNOWN = replace(
    _GEMMA2,
    defaults={"use_sliding_window": True},
    known=False, mla=None, alibi="alibi", switch="use_sliding_window", period="sliding_window_pattern",
)  # fmt: skip


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
    source, outer = _read(config)
    where = f"{source}: " if source else ""
    top = _Fields(outer, where)
    nested = next((key for key in ("text_config", "language_config", "llm_config") if outer.get(key) is not None), None)
    text = _Fields(_mapping(outer[nested], f"{where}{nested}"), f"{where}{nested}.") if nested else top
    outer_type, text_type = top.word("model_type"), text.word("model_type")
    family = _FAMILIES.get(text_type or outer_type, _FAMILIES.get(outer_type, _UNKNOWN))
    text.defaults = family.defaults
    model_type = outer_type or text_type or "unknown"
    notes = _first_notes(family, text, top, model_type)
    settings = {"role": role, "kv_dtype": kv_dtype, "block_size": block_size, "model": outer_type or text_type or None}
    settings["dtype"] = dtype = dtype or _dtype(text, top, notes)
    layers = _layers(family, text, settings, notes)
    if text.defaulted:
        used = ", ".join(f"{name} {value}" for name, value in text.defaulted.items())
        notes.append(f"Not in the config, so {model_type}'s defaults hold: {used}.")
    named = outer.get("_name_or_path")
    named = named.rstrip("/").rpartition("/")[2] if isinstance(named, str) else ""
    name = _source_name(source) if source else named or model_type
    return ModelLayers(name, model_type, dtype, layers, _groups(layers), tuple(notes))


def describe_indices(indices: Sequence[int]) -> str:
    """Layer indices in few words: "0–31" for a run, "0, 2, … 34" and "0–4, 6–10, … 54–58" where runs repeat."""
    runs: list[list[int]] = []
    for i in sorted(set(indices)):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    steps = {b[0] - a[0] for a, b in zip(runs, runs[1:], strict=False)}
    widths = {b - a for a, b in runs[:-1]}
    # the last run may be cut short by the end of the model
    if len(runs) > 3 and len(steps) == len(widths) == 1 and runs[-1][1] - runs[-1][0] <= min(widths):
        return f"{texts[0]}, {texts[1]}, … {texts[-1]}"
    return ", ".join(texts)


class _Fields:
    """The fields of one (sub)config, each checked when it is read; ``defaulted`` keeps those that a class default gave."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where
        self.defaults: Mapping[str, Any] = {}
        self.defaulted: dict[str, Any] = {}

    def error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}{name} is {_show(self.data.get(name))}; {expected}")

    def value(self, name: str, null: bool) -> Any:
        """The field's value, or its default where the field is missing or (unless ``null``) holds null."""
        value = self.data.get(name)
        if value is None and not (null and name in self.data):
            value = self.defaults.get(name)
            if value is not None and not isinstance(value, bool):
                self.defaulted[name] = value
        return value

    def maybe(self, name: str, least: int = 1, most: int = _MAX_COUNT, null: bool = True) -> int | None:
        value = self.value(name, null)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"expected an integer of at least {least}{_unquoted(value)}")
        if value < least or value > most:
            raise self.error(name, f"expected at least {least}" if value < least else f"expected at most {most}")
        return value

    def count(self, name: str, least: int = 1, most: int = _MAX_COUNT) -> int:
        value = self.maybe(name, least, most, null=False)
        if value is None:
            raise ConfigError(f"{self.where}{name} is missing and has no default; add it to the config")
        return value

    def number(self, name: str) -> float | None:
        value = self.value(name, null=True)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"expected a number above 0{_unquoted(value)}")
        if not 0 < value <= _MAX_COUNT:
            raise self.error(name, f"expected a number above 0 and at most {_MAX_COUNT}")
        return value

    def flag(self, name: str | None, default: bool = False) -> bool:
        value = self.value(name, null=False) if name else None
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(str(name), "expected true or false")
        return value

    def word(self, name: str) -> str:
        value = self.data.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "expected a word")
        return value or ""


def _read(config: object) -> tuple[str, Mapping[str, Any]]:
    """The path that the config was read from, if any, and its fields."""
    if isinstance(config, str | os.PathLike):
        path = Path(os.fsdecode(config))
        try:
            path = path / "config.json" if path.is_dir() else path
            return str(path), _mapping(_read_json(path), f"{path}: the file")
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise ConfigError(f"config is {_show(config)}; {_ACCEPTED}")
    return "", _mapping(config, "config")


def _read_json(path: Path) -> object:
    if not path.is_file():
        problem = "not a regular file" if path.exists() else "no such file"
        raise ConfigError(f"{path}: {problem}; {_ACCEPTED}")
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path}: more than 16 MiB, which no config.json has; {_ACCEPTED}")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        problem = str(error)
    except RecursionError:
        problem = "nested too deeply"
    raise ConfigError(f"{path}: not JSON ({problem}); {_ACCEPTED}")


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if hasattr(value, "to_dict") and not isinstance(value, type | Mapping):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {_show(value)}; expected an object with fields such as num_hidden_layers")
    return value


def _show(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number too long to show"


def _unquoted(value: object) -> str:
    return f" (write {value}, without quotes)" if isinstance(value, str) and value.isdecimal() else ""


def _source_name(source: str) -> str:
    path = Path(os.path.abspath(source))
    return path.parent.name if path.name == "config.json" else path.stem


def _first_notes(family: _Family, text: _Fields, top: _Fields, model_type: str) -> list[str]:
    notes = []
    if not family.known:
        notes.append(
            f"model_type {model_type!r} is not a known family; its layers are read as those of a Llama-like decoder: "
            "causal, of one geometry, without attention sinks or score bias."
        )
    if top.flag("is_encoder_decoder"):
        notes.append("is_encoder_decoder is true; only the decoder's self-attention is given.")
    if not family.opens and text.flag("use_bidirectional_attention"):
        notes.append("use_bidirectional_attention is true; the layers are given with their causal mask all the same.")
    notes += [
        f"{name} is not read; only the text model's layers are given, for prompts of text alone."
        for name in ("vision_config", "audio_config")
        if top.data.get(name) is not None
    ]
    return notes


def _dtype(text: _Fields, top: _Fields, notes: list[str]) -> str:
    for fields, name in ((f, n) for f in (text, top) for n in ("dtype", "torch_dtype")):
        value = fields.data.get(name)
        # a torch.dtype, which JSON cannot hold but a config object can
        word = str(value) if str(type(value)) == "<class 'torch.dtype'>" else fields.word(name)
        word = word.removeprefix("torch.")
        if word in _DTYPES:
            return _DTYPES[word]
        if word and word != "auto":
            notes.append(f"{name} {word!r} is no dtype that attention computes in; bfloat16 is assumed.")
            return "bfloat16"
    notes.append("The config names no dtype; bfloat16 is assumed.")
    return "bfloat16"


def _layers(family: _Family, fields: _Fields, settings: Mapping[str, Any], notes: list[str]) -> tuple[LayerFacts, ...]:
    kinds = _kinds(family, fields, notes)
    likes = {kind: _layer(family, fields, kind, settings, notes) for kind in dict.fromkeys(kinds)}
    rows = [(likes[kind],) for kind in kinds]
    if family.encoder and fields.flag("add_cross_attention"):
        if not fields.flag("is_decoder"):
            raise fields.error("add_cross_attention", "only a decoder has cross attention; set is_decoder to true")
        rows = [(own, _cross(own)) for (own,) in rows]  # type: ignore[misc]
    return tuple(replace(layer, layer_idx=i) for i, row in enumerate(rows) for layer in row)


def _kinds(family: _Family, fields: _Fields, notes: list[str]) -> list[str]:
    """The kind of each layer: full, sliding, or one of the mixers."""
    count = fields.count("num_hidden_layers", most=_MAX_LAYERS)
    words = fields.data.get("layer_types")
    if words is not None:
        return _worded_kinds(fields, words, count)
    window = fields.maybe(family.window) if family.slides else None
    if window is None or not fields.flag(family.switch, default=True):
        return ["full"] * count
    period = family.period if isinstance(family.period, int) else family.period and fields.maybe(family.period)
    first = fields.count(family.first, least=0) if family.first else 0
    if not family.known:
        which = f"all but every {period}th layer" if period else "every layer"
        notes.append(f"layer_types is not in the config; {family.window} {window} is taken to hold for {which}.")
    full = 0 if family.full_first else (period or 1) - 1
    return ["full" if i < first or (period and i % period == full) else "sliding" for i in range(count)]


def _worded_kinds(fields: _Fields, words: object, count: int) -> list[str]:
    if not isinstance(words, list | tuple):
        raise fields.error("layer_types", "expected a list with one word for each layer")
    if len(words) != count:
        raise ConfigError(
            f"{fields.where}layer_types has {len(words)} entries and num_hidden_layers is {count}; "
            "give one entry for each layer"
        )
    for i, word in enumerate(words):
        if not isinstance(word, str) or word not in _WORDS:
            raise ConfigError(f"{fields.where}layer_types[{i}] is {_show(word)}; known: {', '.join(sorted(_WORDS))}")
    return [_WORDS[word] for word in words]
