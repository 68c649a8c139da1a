"""What transformers' own classes compute, layer by layer, found by running them: the oracle for `registry/models.yaml`.

`observe(config)` builds the model that a config.json describes, without weights, runs it with a probe in the place of
the attention function, and evaluates the mask that every call received. A row per attention or mixer layer comes back:

- `module`, `layer_idx`: the module's name in the model that `AutoModel` builds, and the layer's index.
- `kind`: full, sliding, chunked, cross, encoder (bidirectional self-attention of text or audio), vision, linear, mamba,
  conv. The last three are mixers without softmax attention; every field about attention is null or false there.
- `attention`: mha, mla, mla_sparse; null for a mixer.
- `num_heads`, `num_kv_heads`, `head_size`, `head_size_v`: of the call; for MLA the expanded one.
- `sliding_window`: the keys that a causal query sees, itself included; one-sided distance where `causal` is false.
  `window_left`, `window_right`: keys before and after the query, null for all of them. `chunk`: blocks of this size.
- `sinks`, `softcap`, `alibi`, `bias` (added to the scores), `causal` (true, false, or "prefix": a part of the sequence
  sees itself both ways, given an image or a prefix), `scaling` (as handed over; absent where it cannot be told).
- `mla`: dimensions; `absorbed` is the latent form, `indexer` the one that selects keys (`own` false: reuses another's).
- Where they apply: `kv_shared_from` (the layer whose keys and values it reuses), `sparse_blocks` (block-sparse
  selection), `segments` (lengths that one image is cut into).

Floats are on the meta device; indices and masks keep their values, so that a rule is evaluated and not guessed. A class
that computes attention by hand is handed scores of ones, and its mask, scale and bias are read off what reaches the
softmax. What no call shows (MLA dimensions, KV heads that are broadcast before the product, modules that no run of the
model reached) is read from the module's attributes; `watch` tells whether that happened ("observed+read").

    python tests/transformers_truth/observe.py --config config.json      # print the rows
    python tests/transformers_truth/observe.py --check FILE.jsonl.gz     # observe again, print what differs
                                               --check FILE --every 10   # a tenth of its lines
    python tests/transformers_truth/observe.py --record OUT.jsonl.gz     # observe every family of variants.py
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import multiprocessing
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers_truth.inputs import SOURCE, candidates, field, layer_inputs
from transformers_truth.probe import (
    MASKED,
    META,
    Call,
    Probe,
    Sight,
    looks_like_attention,
    probing,
    sight_of_grid,
    sight_of_rule,
)

Row = dict[str, Any]

FIELDS = ("module", "layer_idx", "kind", "attention", "num_heads", "num_kv_heads", "head_size", "head_size_v",
          "sliding_window", "window_left", "window_right", "chunk", "sinks", "softcap", "alibi", "causal", "bias",
          "mla", "scaling")  # fmt: skip
# stated by a row where they apply
EXTRAS = ("kv_shared_from", "sparse_blocks", "segments")
# a module of this name, less its family's prefix, is a mixer of this kind
_MIXERS = (
    ("mamba", re.compile(r"Mamba2?(Mixer|Layer)$|^Mixer$|SSM$")),
    ("conv", re.compile(r"^(Text|Moe|Vl|Vision)?ShortConv$")),
    ("linear", re.compile(r"(DeltaNet|DeltaAttention|DeltaRule|LinearAttention|LightningAttention|RecurrentBlock|"
                          r"mLSTMLayer|xLSTMLayer|^RwkvSelfAttention)$")),
)  # fmt: skip
# mixers that are named like attention but for the family
_WHOLE = {"RwkvSelfAttention", "xLSTMLayer"}
_CROSS = re.compile(r"cross|encoder_attn|EncDecAttention|encoder_attention|encoder_decoder_attention", re.IGNORECASE)
# queries of their own, that look at what they do not hold
_QUERIES = re.compile(r"resampler|perceiver|qformer|projector|merger|adapter|pool", re.IGNORECASE)
_VISION = re.compile(r"vision|visual|image|video|(^|\.)vit(\.|$)|pixel", re.IGNORECASE)
_AUDIO = re.compile(r"audio|speech|acoustic", re.IGNORECASE)
_TEXT = re.compile(r"language_model|text_model|text_decoder|decoder|lm(\.|$)", re.IGNORECASE)
_SECONDS = 60


class NotObservedError(Exception):
    """The model could not be built, or none of its layers could be reached."""


# ---- building ------------------------------------------------------------------------------------------------------
def read_config(data: dict[str, Any]) -> PreTrainedConfig:
    """The configuration object of a config.json's content."""
    data = PreTrainedConfig._decode_special_floats(copy.deepcopy(data))
    model_type = data.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise NotObservedError(f"model_type {model_type!r} is not in transformers {transformers.__version__}")
    return CONFIG_MAPPING[model_type].from_dict(data)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that AutoModel builds, or the one of the modeling file that takes this configuration."""
    for name in ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"):
        mapping = getattr(modeling_auto, name)
        if name != "MODEL_MAPPING" and _owned(config):
            break
        if type(config) in mapping:
            found = mapping[type(config)]
            first: type[PreTrainedModel] = found[0] if isinstance(found, (tuple, list)) else found
            return first
    owned = _owned(config)
    if not owned:
        raise NotObservedError(f"no model class takes {type(config).__name__}")
    return owned[0]


def _owned(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    modeling = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        module = __import__(modeling, fromlist=["x"])
    except ImportError:
        return []
    models = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, PreTrainedModel)]
    models = [c for c in models if c.__module__ == modeling and "PreTrained" not in c.__name__]
    found = [c for c in models if getattr(c, "config_class", None) is type(config)]
    return sorted(found, key=lambda c: (not c.__name__.endswith("Model"), "For" in c.__name__, len(c.__name__)))


def shrink(config: PreTrainedConfig) -> None:
    """Smaller images, which no layer's geometry depends on."""
    for part in _parts(config):
        size, patch = getattr(part, "image_size", None), getattr(part, "patch_size", None)
        if isinstance(size, int) and isinstance(patch, int) and size > 16 * patch > 0:
            part.image_size = 16 * patch


def fill(config: PreTrainedConfig, **values: int) -> None:
    """Values for nulls that a class cannot be built or run with, and that concern no attention."""
    for part in _parts(config):
        for name, value in values.items():
            if getattr(part, name, value) is None:
                setattr(part, name, value)


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [config, *(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))]


class Absent(nn.Module):
    """A part whose own package is not installed."""


def build(config: PreTrainedConfig) -> PreTrainedModel:
    cls = model_class(config)
    shrink(config)
    fill(config, vocab_size=1024, num_experts_per_tok=1)
    plain = AutoModel.from_config

    def from_config(*args: Any, **kwargs: Any) -> nn.Module:
        try:
            return plain(*args, **kwargs)
        except ImportError:
            return Absent()

    AutoModel.from_config = from_config
    try:
        model = cls._from_config(config, attn_implementation="eager", experts_implementation="eager")
    except (TypeError, ValueError):
        fill(config, n_routed_experts=4, n_shared_experts=1, num_experts=4, top_k_experts=1, moe_intermediate_size=64)
        model = cls._from_config(config, attn_implementation="eager", experts_implementation="eager")
    finally:
        AutoModel.from_config = plain
    return model.eval()


# ---- running -------------------------------------------------------------------------------------------------------
def _towers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The models within a model, outer before inner."""
    return [(n, m) for n, m in model.named_modules() if n and isinstance(m, PreTrainedModel)]


def _attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules that look like attention, by name."""
    found = {n: m for n, m in model.named_modules(remove_duplicate=False) if looks_like_attention(m)}
    found = {n: m for n, m in found.items() if any(True for _ in m.parameters())}
    return {n: m for n, m in found.items() if not any(o.startswith(n + ".") for o in found)}


def run(model: PreTrainedModel, probe: Probe) -> tuple[list[str], dict[str, nn.Module]]:
    """Runs the model, and what of it that did not reach on its own; the errors met, and the modules never reached."""
    wanted = {n: m for n, m in _attention_modules(model).items() if mixer_kind(m) is None}
    errors: list[str] = []
    if not wanted:
        return errors, {}

    def missing(prefix: str = "") -> dict[str, nn.Module]:
        seen = {c.path for c in probe.calls} | {n for c in probe.calls for n in probe.names.get(id(c.module), [])}
        left = {n: m for n, m in wanted.items() if n not in seen and n.startswith(prefix)}
        return {n: m for n, m in left.items() if not any(n.startswith(s + ".") for s in seen)}

    parts = [("", model, False), *((n, m, False) for n, m in _towers(model)), ("", model, True)]
    for name, part, whole in parts:
        prefix = f"{name}." if name else ""
        left = missing(prefix)
        if not left:
            continue
        composite = any(True for _ in _towers(part))
        crossed = any(_CROSS.search(n.removeprefix(prefix)) or "Cross" in type(m).__name__ for n, m in left.items())
        for kwargs in candidates(part, composite=composite, crossed=crossed, whole=whole):
            probe.stack.clear()
            probe.runs += 1
            try:
                part(**kwargs)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                errors.append(f"{name or 'model'}({', '.join(kwargs)}): {type(error).__name__}: {error} [{where.name}]")
                if missing(prefix):
                    continue
            if not missing(prefix):
                errors = [e for e in errors if not e.startswith(f"{name or 'model'}(")]
                break
    probe.runs += 1
    for name, module in missing().items():
        for kwargs in layer_inputs(module):
            if name not in missing():
                break
            probe.stack[:] = [model.get_submodule(name.rpartition(".")[0])] if "." in name else [model]
            with contextlib.suppress(Exception):
                module(**kwargs)
    probe.alone = probe.runs
    return errors, missing()


# ---- rows ----------------------------------------------------------------------------------------------------------
def mixer_kind(module: nn.Module) -> str | None:
    name = type(module).__name__
    name = name if name in _WHOLE else _bare_name(module)
    for kind, pattern in _MIXERS:
        if pattern.search(name):
            return kind
    return None


def _bare_name(module: nn.Module) -> str:
    """The class's name less the family's: `BambaMixer` is a Mixer."""
    name = type(module).__name__
    config = getattr(module, "config", None)
    folder = type(module).__module__.split(".")[-2:-1] or [""]
    prefixes = [type(config).__name__.removesuffix("Config"), folder[0].replace("_", "")]
    cuts = [len(p) for p in prefixes if p and name.lower().startswith(p.lower()) and len(p) < len(name)]
    return name[max(cuts, default=0) :]


def _role(model: nn.Module, path: str) -> str:
    """vision, audio or text: what the part of the model that holds the module reads."""
    nearest, inside = model, ""
    for name, tower in _towers(model):
        if path.startswith(name + ".") and len(name) > len(inside):
            nearest, inside = tower, name
    words = [(m.end(), role) for role, pattern in (("vision", _VISION), ("audio", _AUDIO), ("text", _TEXT))
             for m in pattern.finditer(path)]  # fmt: skip
    if words:
        return max(words)[1]
    name = type(nearest).__name__
    for role, word in (("text", r"Text"), ("vision", r"Vision|Visual"), ("audio", r"Audio|Speech")):
        if re.search(word, name):
            return role
    modal = getattr(nearest, "input_modalities", "text")
    modal = {modal} if isinstance(modal, str) else set(modal)
    if getattr(nearest, "main_input_name", "") == "input_ids" and modal != {"image"}:
        return "text"
    if modal <= {"image", "video"}:
        return "vision"
    return "audio" if modal <= {"audio"} else "text"


def _sight(call: Call, role: str, alone: bool, seen: dict[int, Sight | None]) -> Sight:
    mask = call.mask
    if call.how == "softmax":
        mask = call.scores
        if mask is None:
            mask = call.given
    selects = any(getattr(call.module, n, None) is not None for n in ("indexer", "compressor"))
    if isinstance(mask, Tensor) and (mask.device == META or selects):
        # what is selected, or added, depends on numbers: the mask that the selection starts from
        mask = call.given
    if mask is None or not isinstance(mask, Tensor):
        causal = call.kwargs.get("is_causal")
        if alone and role != "text":
            # called by itself: the mask that its model makes was not seen
            causal = False
        if causal is None:
            causal = call.how in ("interface", "read") and getattr(call.module, "is_causal", False)
        window = call.kwargs.get("sliding_window") if causal else None
        return Sight(bool(causal), window - 1 if isinstance(window, int) else None, 0 if causal else None)
    data = mask.as_subclass(Tensor)
    grid = data if data.dtype == torch.bool else data > MASKED
    grid = grid.reshape(-1, *grid.shape[-2:])[0]
    grid = grid.expand(call.query[-2], grid.shape[-1]) if grid.shape[0] == 1 else grid
    if "Merged" in type(call.module).__name__:
        # the decoder's own keys come first, the encoder's after them: the window is over the former
        own = sight_of_grid(grid[:, : grid.shape[0]])
        window = call.kwargs.get("sliding_window", getattr(call.module, "sliding_window", None))
        return Sight(own.causal, window - 1, own.right) if isinstance(window, int) else own
    rule = getattr(mask, "rule", None)
    # a prefix is seen whole, however far back: only the class says how far its window reaches
    local = getattr(mask, "local_size", None) or call.kwargs.get("sliding_window")
    if rule is not None and _agrees(rule, grid):
        if id(rule) not in seen:
            seen[id(rule)] = sight_of_rule(rule)
        if (known := seen[id(rule)]) is not None:
            return known
    return sight_of_grid(grid, local)


def _agrees(rule: Callable[..., Tensor], grid: Tensor) -> bool:
    """Whether the mask is still what its rule says: a class may have masked more."""
    n, m = grid.shape
    if n * m > 1 << 18:
        return True
    q, kv = torch.arange(n, device="cpu")[:, None], torch.arange(m, device="cpu")[None, :]
    try:
        same = rule(q, kv).expand(n, m) == grid
        # some classes negate what they take for a boolean mask
        return bool(same.all()) or not bool(same.any())
    except (RuntimeError, IndexError):
        return True


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.device != META and value.numel() == 1 else None
    return None if value is None else float(value)


def _layer_index(module: nn.Module, path: str) -> int:
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int) and index >= 0:
        return index
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path)
    return int(numbers[0]) if numbers else 0


def mla_dims(module: nn.Module) -> Row | None:
    rank = field(module, "kv_lora_rank")
    if rank is None:
        return None
    nope, rope = field(module, "qk_nope_head_dim"), field(module, "qk_rope_head_dim", default=0)
    value = field(module, "v_head_dim")
    if nope is None or value is None:
        return None
    q_rank = field(module, "q_lora_rank")
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": q_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "absorbed": {"num_kv_heads": 1, "head_size": rank + rope, "head_size_v": rank},
        "indexer": indexer_dims(module),
    }


def indexer_dims(module: nn.Module) -> Row | None:
    config = getattr(module, "config", None)
    indexer = getattr(module, "indexer", None)
    if indexer is None and not _reuses_selection(module):
        return None
    source = indexer if indexer is not None else config
    return {
        "own": indexer is not None,
        "index_n_heads": field(config, "index_n_heads", default=field(source, "n_heads", "num_heads")),
        "index_head_dim": field(config, "index_head_dim", default=field(source, "head_dim")),
        "index_topk": field(config, "index_topk", default=field(source, "index_topk", "topk")),
    }


def _reuses_selection(module: nn.Module) -> bool:
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        return False
    for name in ("indexer_types", "layer_types"):
        types = getattr(config, name, None)
        if types and index < len(types) and types[index] in ("shared", "indexed_attention"):
            return True
    return False


def sparse_blocks(module: nn.Module) -> Row | None:
    indexer = getattr(module, "indexer", None)
    size, budget = field(indexer, "block_size", "compress_ratio"), field(indexer, "token_budget")
    if not isinstance(size, int) or mla_dims(module) is not None:
        return None
    return {
        "block_size": size,
        "topk_blocks": field(indexer, "topk_blocks", default=budget and budget // size),
        "local_blocks": field(indexer, "local_blocks"),
        "index_n_heads": field(indexer, "num_heads", "n_heads", "index_n_heads"),
        "index_head_dim": field(indexer, "head_dim", "index_head_dim"),
    }


def compressed(module: nn.Module) -> Row | None:
    """Keys of DeepSeek V4 that stand for several tokens, beside the raw ones in the window."""
    compressor = getattr(module, "compressor", None)
    rate = getattr(compressor, "compress_rate", None)
    if not isinstance(rate, int):
        return None
    indexer = getattr(compressor, "indexer", None)
    dims = {
        "own": True,
        "index_n_heads": field(indexer, "num_heads", "n_heads"),
        "index_head_dim": field(indexer, "head_dim"),
        "index_topk": field(indexer, "index_topk", "topk"),
    }
    return {"form": "hca" if indexer is None else "csa", "compress": rate, "indexer": dims if indexer else None}


def _heads_of_keys(call: Call) -> tuple[int, bool]:
    """KV heads, and whether they were read: by hand, keys are broadcast to all heads before the product."""
    heads, keys = call.query[1], call.key[1] if len(call.key) == 4 else call.key[0]
    if call.how != "softmax" or keys != heads:
        groups = getattr(call.module, "num_key_value_groups", 1)
        kv = field(call.module, "num_key_value_heads", "num_kv_heads")
        if keys == heads and isinstance(kv, int) and 0 < kv < heads and isinstance(groups, int):
            return kv, True
        return keys, False
    kv = field(call.module, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
    if isinstance(kv, int) and 0 < kv <= heads and heads % kv == 0:
        return kv, kv != heads
    return keys, False


def _added(scores: Tensor) -> str | None:
    """alibi, bias or nothing: what was added to scores that were the same everywhere."""
    rows = scores.reshape(-1, *scores.shape[-2:])
    last = rows[:, -1, :]
    visible = last[:, (last > MASKED).all(0)]
    if visible.shape[-1] < 4 or bool((visible - visible[:, :1]).abs().max() < 1e-6):
        return None
    # a straight line for each head, but for what bfloat16 rounds off
    line = torch.linspace(0, 1, visible.shape[-1], device="cpu")
    span = visible[:, -1:] - visible[:, :1]
    off = (visible - visible[:, :1] - span * line).abs().amax(-1)
    return "alibi" if bool((off <= 0.02 * span.abs()[:, 0]).all()) else "bias"


def attention_row(model: nn.Module, calls: list[Call], alone: bool, seen: dict[int, Sight | None]) -> tuple[Row, bool]:
    """The row of a module's calls, and whether a field of it was read."""
    call = calls[0]
    module, read = call.module, False
    role = _role(model, call.path)
    sight = _sight(call, role, alone, seen)
    row: Row = dict.fromkeys(FIELDS)
    row["module"], row["layer_idx"] = call.path, _layer_index(module, call.path)
    heads = call.query[1] if len(call.query) == 4 else call.query[0]
    row["num_heads"] = heads
    row["num_kv_heads"], read = _heads_of_keys(call)
    row["head_size"], row["head_size_v"] = call.query[-1], call.value[-1]
    row["attention"] = "mha"
    row["sinks"] = call.kwargs.get("s_aux") is not None or isinstance(getattr(module, "sinks", None), Tensor)
    row["softcap"] = _number(call.kwargs.get("softcap"))
    row["bias"] = _has_bias(call)
    row["alibi"] = False
    row["scaling"] = _number(call.kwargs.get("scaling"))
    if call.how == "interface" and row["scaling"] is None:
        # what transformers' attention functions do then
        row["scaling"] = call.query[-1] ** -0.5
    if call.how == "softmax":
        _read_scores(call, row)
        read = True
    cross = bool(_CROSS.search(call.path.rsplit(".", 1)[-1]) or re.search(r"Cross", type(module).__name__))
    cross = cross or getattr(module, "is_cross_attention", False) is True
    cross = cross or (call.key[-2] == SOURCE != call.query[-2] and getattr(module, "compressor", None) is None)
    cross = cross or (call.query[-2] != call.key[-2] and bool(_QUERIES.search(call.path)))
    cross = cross or bool(_CROSS.search(".".join(call.path.split(".")[-2:])))
    if role != "text" and sight.causal == "prefix":
        # what is not seen is padding
        sight = Sight(False)
    row["causal"] = sight.causal
    row["window_left"], row["window_right"], row["chunk"] = sight.left, sight.right, sight.chunk
    if sight.chunk is None and sight.left is not None:
        row["sliding_window"] = sight.left + 1 if sight.causal else sight.left
    if cross:
        row["kind"], row["causal"] = "cross", False
        row["window_left"] = row["window_right"] = row["sliding_window"] = row["chunk"] = None
    elif role == "vision":
        row["kind"] = "vision"
    elif sight.chunk is not None:
        row["kind"] = "chunked"
    elif sight.left is not None:
        row["kind"] = "sliding"
    else:
        row["kind"] = "full" if sight.causal else "encoder"
    if (mla := mla_dims(module) or compressed(module)) is not None:
        row["mla"], read = mla, True
        row["attention"] = "mla_sparse" if mla["indexer"] else "mla"
    if role == "text" and (reach := field(module, "one_sided_attn_window_size", "local_radius")):
        # computed in blocks: no mask over all keys exists
        row.update(kind="sliding", sliding_window=reach, window_left=reach, window_right=reach, causal=False)
        read = True
    lengths = [c.query[-2] for c in calls]
    if role == "vision" and len(lengths) > 1:
        row["segments"] = lengths
    if (blocks := sparse_blocks(module)) is not None:
        row["sparse_blocks"], read = blocks, True
    if row["scaling"] is None:
        del row["scaling"]
    return row, read


def _read_scores(call: Call, row: Row) -> None:
    """ALiBi, bias and scale from the scores of a class that computes attention by hand."""
    if call.scores is None:
        return
    kind = _added(call.scores)
    row["alibi"], row["bias"] = kind == "alibi", row["bias"] or kind == "bias"
    if kind != "alibi":
        # at every third key an unknown bias left nothing
        scale = round(float(call.scores[..., ::3].max()), 12)
        row["scaling"] = scale if 0 < scale <= 1 else None


def _has_bias(call: Call) -> bool:
    bias = call.kwargs.get("position_bias")
    if isinstance(bias, Tensor):
        return bias.device == META or bool((bias.masked_fill(bias <= MASKED, 0) != 0).any())
    return bool(getattr(call.mask, "biased", False))


def mixer_row(path: str, module: nn.Module, kind: str) -> Row:
    row: Row = dict.fromkeys(FIELDS)
    row.update(module=path, layer_idx=_layer_index(module, path), kind=kind, sinks=False, alibi=False, causal=True,
               bias=False)  # fmt: skip
    for name in ("window_left", "window_right", "scaling"):
        del row[name]
    return row


def rows_of(model: PreTrainedModel, probe: Probe) -> tuple[list[Row], bool]:
    grouped: dict[str, list[Call]] = {}
    for call in probe.calls:
        group = grouped.setdefault(call.path, [])
        if not group or call.run == group[0].run:
            group.append(call)
    seen: dict[int, Sight | None] = {}
    rows: dict[str, Row] = {}
    read = False
    for path, calls in grouped.items():
        once = [c for c in calls if c.turn == calls[0].turn]
        alone = calls[0].run == probe.alone or calls[0].how == "read"
        rows[path], was_read = attention_row(model, once, alone, seen)
        read |= was_read or alone
    # the layer whose keys these are
    owners: dict[int, int] = {}
    for path, calls in grouped.items():
        key = calls[0].key_tensor
        if key is None:
            continue
        owner = owners.setdefault(id(key), rows[path]["layer_idx"])
        if owner != rows[path]["layer_idx"]:
            rows[path]["kv_shared_from"] = owner
    read |= _shared_latents(rows, grouped)
    for path, module in model.named_modules(remove_duplicate=False):
        kind = mixer_kind(module)
        if kind is not None and path not in rows and not any(path.startswith(o + ".") for o in rows):
            rows[path] = mixer_row(path, module, kind)
    order = {n: i for i, (n, _) in enumerate(model.named_modules(remove_duplicate=False))}
    rank = {"vision": 0, "audio": 1, "text": 2}
    ordered = sorted(rows.values(), key=lambda r: (rank[_role(model, r["module"])], order.get(r["module"], 0)))
    turns = dict.fromkeys((c.path, c.turn) for c in probe.calls if c.run == grouped[c.path][0].run)
    return _repeated(ordered, list(turns)), read


def _shared_latents(rows: dict[str, Row], grouped: dict[str, list[Call]]) -> bool:
    """Says whose latents a layer reuses, where keys are made of them anew; whether there was one."""
    kept: dict[Any, int] = {}
    found = False
    for path, calls in grouped.items():
        module = calls[0].module
        sort = (getattr(module, "use_rope", None), getattr(module, "layer_type", None))
        if getattr(module, "store_full_length_kv", False):
            kept[sort] = rows[path]["layer_idx"]
        elif getattr(module, "is_kv_shared_layer", False) and "kv_shared_from" not in rows[path] and sort in kept:
            rows[path]["kv_shared_from"] = kept[sort]
            found = True
    return found


def _repeated(rows: list[Row], turns: list[tuple[str, int]]) -> list[Row]:
    """A row for each time that a module ran, where every one of them stands for several layers."""
    by_path = {r["module"]: r for r in rows}
    times = [path for path, _ in turns]
    if not times or set(times) != set(by_path) or min(times.count(p) for p in by_path) < 2:
        return rows
    return [{**by_path[path], "layer_idx": index} for index, path in enumerate(times)]


def read_calls(unseen: dict[str, nn.Module]) -> Iterator[Call]:
    """Calls that were never made, from the attributes of the modules that would have made them."""
    for path, module in unseen.items():
        config = getattr(module, "config", None)
        heads = field(module, "num_heads", "num_attention_heads", "n_heads", "n_head")
        heads = field(config, "num_attention_heads") if heads is None else heads
        width = field(module, "embed_dim", "hidden_size", "all_head_size")
        size = field(module, "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head")
        size = width // heads if size is None and width and heads else size
        if not isinstance(heads, int) or not isinstance(size, int):
            continue
        groups = field(module, "num_key_value_groups", default=1)
        keys = field(module, "num_key_value_heads", "num_kv_heads", default=heads // groups)
        shape = (1, keys, 1, size)
        scale = field(module, "scaling", "scale")
        stated = {"scaling": scale} if isinstance(scale, float) else {}
        yield Call(module, path, "read", (1, heads, 1, size), shape, shape, None, kwargs=stated)


def watch(config: dict[str, Any]) -> tuple[list[Row], str, list[str]]:
    """The rows of a config.json's content, whether any was read ("observed" or "observed+read"), and the errors met."""
    built = read_config(config)
    model_class(built)
    with probing() as probe:
        model = build(built)
        probe.watch(model)
        errors, unseen = run(model, probe)
        probe.calls.extend(read_calls(unseen))
        rows, read = rows_of(model, probe)
    lonely = [c for c in probe.calls if c.run == probe.alone and _role(model, c.path) == "text"]
    if lonely:
        errors.append(f"never reached by its model: {lonely[0].path} ({type(lonely[0].module).__name__})")
    if unseen:
        errors.append("never reached: " + ", ".join(f"{n} ({type(m).__name__})" for n, m in list(unseen.items())[:6]))
    if not rows:
        raise NotObservedError("; ".join(errors) or "no attention and no mixer")
    return rows, "observed+read" if read else "observed", errors


def observe(config: dict[str, Any]) -> list[Row]:
    """A row per attention or mixer layer of the model that the config.json's content describes."""
    return watch(config)[0]


# ---- the command ---------------------------------------------------------------------------------------------------
def read_lines(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_lines(path: Path, lines: Iterable[Row]) -> None:
    """The same bytes for the same lines: no time and no name in the header."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0, compresslevel=9) as packed:
        for line in lines:
            packed.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
    path.write_bytes(buffer.getvalue())


def differences(recorded: list[Row], observed: list[Row], optional: frozenset[str] = frozenset()) -> list[str]:
    """What differs, a line each; `optional` fields count only where the recorded row has them."""
    names, others = [r["module"] for r in recorded], [r["module"] for r in observed]
    if names != others:
        gone = [n for n in names if n not in others]
        new = [n for n in others if n not in names]
        return [f"modules: {len(names)} recorded, {len(others)} observed; gone {gone[:3]}, new {new[:3]}"]
    return [
        f"{was['module']}.{key}: {was.get(key, 'absent')!r} -> {now.get(key, 'absent')!r}"
        for was, now in zip(recorded, observed, strict=True)
        for key in [*was, *(k for k in now if k not in was and k not in optional)]
        if was.get(key, "absent") != now.get(key, "absent")
    ]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _limited(job: Callable[[Any], Any], argument: Any) -> Any:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        return job(argument)
    finally:
        signal.alarm(0)


def _watch_line(line: Row) -> tuple[Row, list[Row], str, list[str]]:
    """The line, its rows, its source, and the errors; no rows where it failed."""
    try:
        rows, source, errors = _limited(watch, line["config"])
    except Exception as error:
        return line, [], "", [f"{type(error).__name__}: {error}"]
    return line, rows, source, errors


def _quiet() -> None:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def _all(lines: list[Row], workers: int) -> Iterator[tuple[Row, list[Row], str, list[str]]]:
    if workers <= 1:
        _quiet()
        yield from map(_watch_line, lines)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_quiet, maxtasksperchild=100) as pool:
        yield from pool.imap(_watch_line, lines, chunksize=2)


def check(path: Path, workers: int, every: int = 1) -> int:
    """The number of lines of a recorded file that are observed differently now."""
    lines = read_lines(path)
    stated = {k for line in lines for row in line["layers"] for k in row}
    lines = lines[::every]
    optional = frozenset(k for k in EXTRAS if k not in stated)
    wrong = 0
    for line, rows, _, errors in _all(lines, workers):
        found = differences(line["layers"], rows, optional) if rows else errors
        if found:
            wrong += 1
            say(f"{line['family']} ({line['variant']}): {len(found)} differences")
            for text in found[:8]:
                say(f"  {text}")
    say(f"{len(lines) - wrong} of {len(lines)} as recorded")
    return wrong


def record(path: Path, lines: list[Row], workers: int) -> int:
    """Writes the lines with their rows; the number of lines that were not observed."""
    done, failed, dropped = [], 0, 0
    for line, rows, source, errors in _all(lines, workers):
        name = f"{line['family']} ({line['variant']})"
        reached = not any(e.startswith("never reached") for e in errors)
        why = " ".join("; ".join(dict.fromkeys(errors)).split())
        if line["may_fail"] and not (rows and reached):
            # the class refuses this file, or fails on it: it says nothing about layers
            dropped += 1
            continue
        if not rows:
            failed += 1
            say(f"not observed: {name}: {why[:400]}")
            continue
        if not reached:
            say(f"partly: {name}: {why[-300:]}")
        done.append({**line, "source": source, "layers": rows})
    write_lines(path, [{k: d[k] for k in ("family", "variant", "source", "config", "layers")} for d in done])
    layers = sum(len(d["layers"]) for d in done)
    families = len({d["family"] for d in done})
    say(f"{families} families, {len(done)} lines, {layers} layers; {failed} not observed, {dropped} tries dropped")
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", type=Path, metavar="FILE", help="observe a file again; exit 1 where it differs")
    what.add_argument("--record", type=Path, metavar="FILE", help="observe every variant and write the file")
    what.add_argument("--config", type=Path, metavar="FILE", help="print the rows of a config.json")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="with --check: each Nth line")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--family", action="append", help="only this family; may be repeated")
    options = parser.parse_args(arguments)
    _quiet()
    if options.config:
        for row in observe(json.loads(options.config.read_text())):
            say(json.dumps(row))
        return 0
    if options.check:
        return int(check(options.check, options.workers, options.every) > 0)
    from transformers_truth.variants import variants

    lines = [v for v in variants() if not options.family or v["family"] in options.family]
    record(options.record, lines, options.workers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
